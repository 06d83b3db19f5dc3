"""Every number in a plan's JSON is said to be counted, modelled or measured, and by one pattern alone."""

import json
from fnmatch import fnmatchcase

import pytest

from scripts import plan
from scripts.plan_figures import ORIGINS, figures

TEXT = {"job", "device", "counted", "modelled", "measured"}

BY_MEMORY = ("--activation_checkpoint.memory_limit_gib", "device", "--training.micro_batch_size", "auto")
BY_MEMORY += ("--fsdp.zero_stage", "auto")


def planned(capsys, *words):
    assert plan.main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_paths_leave_out_places_in_lists_and_what_is_no_number():
    nested = {"a": [{"b": 1, "c": "x"}, {"b": 2.5, "d": {"e f": 3}}], "g": True, "h": None}
    assert [*figures(nested)] == ["a.b", "a.b", "a.d.e f"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("llama_405b.toml", "--ranks", "512"),
        ("llama_7b.toml", "--ranks", "8", "--device", "h100", "--mesh.pp", "4", "--price", "2"),
        ("llama_8b.toml", "--ranks", "16", "--device", "h200", "--mesh.tp", "2", "--mesh.cp", "2"),
        ("mixtral_8x7b.toml", "--ranks", "64", "--device", "h100", "--mesh.ep", "8"),
        ("llama_1b.toml", "--ranks", "1", "--device", "h100", "--checkpoint.interval", "0"),
        ("olmo3_7b_stages.toml", "--ranks", "64", "--device", "h100"),
        ("llama_1b.toml", "--ranks", "8", "--memory-gib", "80", *BY_MEMORY),
        pytest.param(
            ("debug.toml", "--ranks", "2", "--training.compute_dtype", "bfloat16", "--device", "h100", "--prove"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_each_figure_of_a_plan_has_one_origin(capsys, words):
    found = planned(capsys, *words)
    stated = [pattern for origin in ORIGINS for pattern in found[origin]]
    paths = {*figures({key: value for key, value in found.items() if key not in TEXT})}
    assert "memory_by_kind.peak_bytes" in paths
    assert ("time.step_seconds" in paths) == ("--device" in words)
    for path in paths:
        assert len([pattern for pattern in stated if fnmatchcase(path, pattern)]) == 1, path
    for pattern in stated:
        assert any(fnmatchcase(path, pattern) for path in paths), pattern


def test_what_memory_has_chosen_are_keys_that_make_the_same_job(capsys):
    chosen = planned(capsys, "llama_1b.toml", "--ranks", "8", "--memory-gib", "80", *BY_MEMORY)
    keys = chosen["chosen"]
    assert {"training.micro_batch_size", "fsdp.zero_stage", "activation_checkpoint.mode"} <= keys.keys()
    by_hand = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
    found = planned(capsys, "llama_1b.toml", "--ranks", "8", *by_hand)
    assert "chosen" not in found
    assert found["memory_by_kind"] == chosen["memory_by_kind"]
