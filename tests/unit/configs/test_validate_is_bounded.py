"""`--validate` answers at once, whatever number or pattern a key has: refused, or computed in bounded time."""

import time
from collections.abc import Iterator

import pytest
from pydantic import BaseModel

from configs.command_line import answer, parse_command_line
from configs.errors import ConfigError
from configs.reading.keys import tables_in
from configs.schema import Config
from trainer.planning import unknown_names  # noqa: F401  # imports torch, which is not what is measured
from trainer.planning.for_validate import check_names

SECONDS = 2.0
"""Of processor time, so that a busy machine is no error."""
HUGE = (10**7, 10**9, 2**60, 4_600_000_000_000_000_000, 2**63 - 1)


def integer_keys(table: type[BaseModel] = Config, prefix: str = "--") -> Iterator[str]:
    for name, field in table.model_fields.items():
        tables = tables_in(field.annotation)
        if tables:
            yield from integer_keys(tables[0], f"{prefix}{name}.")
        elif "int" in str(field.annotation):
            yield prefix + name


def validate(*words: str, ranks: int | None = None) -> str:
    """The error; "" if the job is valid. It must come in time."""
    began, error = time.process_time(), ""
    try:
        answer(
            parse_command_line([*words, "--validate"]),
            {"WORLD_SIZE": str(ranks)} if ranks else {},
            check_names=check_names,
        )
    except ConfigError as found:
        error = str(found)
    seconds = time.process_time() - began
    assert seconds < SECONDS, f"{seconds:.1f} s for {words}"
    return error


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("parity.toml",),
        ("debug.toml", "--elastic.enable", "true"),
        ("moe_debug.toml", "--validation.interval", "10"),
        ("debug.toml", "--mesh.pp", "2", "--pipeline.schedule", "interleaved_1f1b"),
    ],
    ids=["plain", "elastic", "experts", "pipeline"],
)
def test_any_integer(words):
    keys = list(integer_keys())
    assert len(keys) > 60
    for key in keys:
        for value in HUGE:
            validate("--config", *words, key, str(value))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--training.seq_len 1152921504606846976", "training.seq_len: a sequence of"),
        ("--training.global_batch_size 4600000000000000000", "more than any machine computes"),
        ("--validation.interval 2 --validation.sequences 9223372036854775807", "validation.sequences: 9,223"),
        ("--model.n_layers 5000", "--model.n_layers: model.n_layers must be"),
    ],
)
def test_what_no_machine_can_hold_is_refused(words, said):
    assert said in validate("--config", "parity.toml", *words.split())


def test_a_large_batch_is_valid(capsys):
    assert not validate("--config", "parity.toml", "--training.global_batch_size", "10000000")
    assert "1, 2, 4, 5, 8, 10, 16, 20, 25, 32 or up to" in capsys.readouterr().out


def test_any_number_of_ranks():
    elastic = ("--config", "debug.toml", "--elastic.enable", "true")
    for ranks in (10**6, 10**9, 2**62):
        assert not validate(*elastic, ranks=ranks)


def test_layers_on_many_stages():
    pipeline = "--mesh.pp 2048 --training.global_batch_size 4096 --training.micro_batch_size 1 --model.n_layers"
    words = ("--config", "debug.toml", *pipeline.split())
    assert not validate(*words, "4096", ranks=2048)
    assert "2048 stages are more than n_layers 2047" in validate(*words, "2047", ranks=2048)


@pytest.mark.parametrize("repeated", ["*a", "*", "*?", "*[a-z]", "a*"])
@pytest.mark.parametrize("times", [60, 3000])
def test_any_pattern(repeated, times):
    pattern = repeated * times
    said = validate("--config", "debug.toml", "--optimizer.groups", f'[{{pattern = "{pattern}", lr_scale = 0.5}}]')
    assert ("of 1 to 256 characters" in said) == (len(pattern) > 256), said
