"""A user's mistake ends in one message with what, where and what to do, and leaves everything as it was."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.end_to_end.launch import TEXT, curve, launch, launch_here, snapshot, status
from trainer.lifecycle import write_status

SAID = {"run/status.json", "run/run.log", "run/.lock"}
"""A launch that got as far as its run folder leaves the reason there, and nothing else."""


def assert_refused(folder: Path, words: str, code: int, *fragments: str, config: Path = TEXT, **more) -> str:
    """Assert that a job ends in one message that has the fragments, and that nothing but the run's log changed."""
    before = snapshot(folder)
    outcome = launch(folder, words, config=config, expect=code, **more)
    message = outcome.err
    for fragment in fragments:
        assert message.count(fragment) == 1, f"{fragment!r} is not once in:\n{message}"
    assert "Traceback" not in message
    after = snapshot(folder)
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    assert changed <= SAID, changed
    if "run/status.json" in changed:
        assert status(folder / "run")["state"] == "failed"
        assert status(folder / "run")["reason"] in message
    return message


# ------------------------------------------------------------------- the job file, and the command line


@pytest.mark.parametrize(
    ("words", "fragments"),
    [
        ("--mesh.dp_shard 2", ["--mesh.dp_shard: 1 rank cannot form the mesh", "= 2, not 1", "--nproc-per-node 2"]),
        ("--training.stpes 9", ["--training.stpes: unknown key", "did you mean training.steps?"]),
        ("--model.n_heads 3", ["dim 32 is not divisible by n_heads 3", "32 / 3"]),
        ("--data.sources.0.path [5]", ["data.sources.0.path must be a string, got [5]"]),
        ("--checkpoint.load 7", ["checkpoint.load = 7: no such step in run/checkpoints"]),
        ("--job.device cuda", ['--job.device: device is "cuda", but torch sees no CUDA device', 'use "auto" or "cpu"']),
    ],
)
def test_a_job_that_cannot_be(corpus: Path, words: str, fragments: list[str]):
    assert_refused(corpus, words, 78, *fragments)


def test_an_unknown_key_in_a_file_is_named_with_its_line(tmp_path: Path):
    job = tmp_path / "job.toml"
    job.write_text(f'base = "{TEXT}"\n\n[optimizer]\nlearning_rate = 1e-3\nbeta = [0.9, 0.99]\n')
    assert_refused(tmp_path, "", 78, "job.toml:4: unknown key", "job.toml:5: unknown key", config=job)


def test_what_a_mesh_cannot_divide_is_said_once_by_all_ranks(corpus: Path):
    words = "--mesh.tp 2 --model.n_kv_heads 1 --training.seq_len 15 --training.global_batch_size 7"
    before = snapshot(corpus)
    outcome = launch(corpus, words, ranks=2, config=TEXT, expect=1)
    message = outcome.said
    for fragment in (
        "does not divide model.n_kv_heads 1",
        "does not divide training.seq_len 15",
        "batch of 7 sequences",
    ):
        assert message.count(fragment) == 1, message
    assert snapshot(corpus) == before


# ------------------------------------------------------------------- data


def _cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 100)


@pytest.mark.parametrize(
    ("damage", "fragments"),
    [
        (lambda file: file.unlink(), ["data/tokens/train: no tokens in this folder", "scripts/prepare_data.py"]),
        (lambda file: file.write_bytes(b""), ["00000.tokens: not a token file of Keel"]),
        (lambda file: file.write_bytes(b"PK" * 5000), ["00000.tokens: not a token file of Keel"]),
        (_cut, ["00000.tokens: truncated, ", "prepare it again"]),
    ],
    ids=["missing", "empty", "foreign", "truncated"],
)
def test_a_token_file_that_is_none(corpus: Path, damage: Callable[[Path], object], fragments: list[str]):
    [file] = (corpus / "data" / "tokens" / "train").iterdir()
    damage(file)
    assert_refused(corpus, "", 78, *fragments)


@pytest.mark.parametrize(
    ("words", "code", "fragments"),
    [
        ("--model.vocab_size 300", 78, ["model.vocab_size is 300", "has 384 tokens", "set model.vocab_size = 384"]),
        ("--training.seq_len 1000000", 78, ["data/tokens/train: too short for one window", "lower training.seq_len"]),
        ("--validation.sequences 1000000", 78, ["validation.sequences asks for 1000000", "lower it"]),
    ],
)
def test_data_that_do_not_fit_the_job(corpus: Path, words: str, code: int, fragments: list[str]):
    assert_refused(corpus, words, code, *fragments)


def test_what_is_missing_is_said_at_once_by_all_ranks_and_before_anything_is_built(corpus: Path):
    """The model would take a petabyte, and the preparation of `other` an hour: neither is begun."""
    words = "--tokenizer.path no.model --tokenizer.train_on [] --data.sources.0.path nowhere "
    words += "--checkpoint.init_from no/step-00000001 --model.ffn_dim 9999999999999 --data.prepare.output other "
    words += '--data.prepare.input \'["text","no/text"]\''
    before = snapshot(corpus)
    outcome = launch(corpus, words, ranks=2, config=TEXT, expect=1)
    for message in (
        '--tokenizer.path: tokenizer.path is "no.model": no such file: {here}/no.model; ',
        '--data.sources.0.path: data.sources.0.path is "nowhere": no such folder of token files: {here}/nowhere; ',
        '--data.prepare.input: data.prepare.input names "no/text": no such file or folder: {here}/no/text',
        '--checkpoint.init_from: checkpoint.init_from is "no/step-00000001": no such folder of a checkpoint or run: ',
    ):
        assert " ".join(outcome.said.split()).count(message.format(here=corpus)) == 1, outcome.err
    assert "SIGKILL" not in outcome.err  # what torchrun does to a rank that waits forever
    assert snapshot(corpus).keys() - before.keys() <= SAID


def test_checkpoints_that_are_missing_are_said_before_anything_is_built(tmp_path: Path, capsys):
    too_large = ("--model.ffn_dim", "9999999999999")
    for words in (("--checkpoint.init_from", "no/where"), ("--checkpoint.load", "no/where")):
        assert launch_here(tmp_path, *words, *too_large) == 78
        assert capsys.readouterr().err.count(f'"{words[1]}"') == 1
    assert launch_here(tmp_path, "--training.steps", "2") == 0
    checkpoint = tmp_path / "run/checkpoints/step-00000002"
    goes_on = ("--checkpoint.init_from", "no/where", "--training.steps", "3")
    assert launch_here(tmp_path, *goes_on) == 0  # where the run began may be gone
    (checkpoint / "MANIFEST.json").unlink()
    elsewhere = ("--job.output_dir", str(tmp_path / "other"))
    for key in ("load", "init_from"):
        capsys.readouterr()
        assert launch_here(tmp_path, *elsewhere, f"--checkpoint.{key}", str(checkpoint), *too_large) == 78
        assert "is not a checkpoint (no MANIFEST.json in it" in capsys.readouterr().err


FITS = ("--model.vocab_size", "384", "--tokenizer.path", "{data}/tokenizer.model")
TRAIN = '[{{name = "a", kind = "tokens", path = "{data}/tokens/train"}}]'


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([*FITS, "--model.vocab_size", "383", "--data.sources", TRAIN], "set model.vocab_size = 384 or more"),
        (["--tokenizer.path", "{data}"], 'tokenizer.path is "{data}": a folder'),
        (["--tokenizer.path", "{data}/tokens/prepare.json"], "prepare.json: not a"),
        (["--data.sources", TRAIN, *FITS, "--training.seq_len", "1000000"], "too short for one window"),
        (
            ["--validation.interval", "1", "--validation.sequences", "99999", "--validation.sources", TRAIN, *FITS],
            "validation.sequences asks for 99999",
        ),
        (["--checkpoint.init_from", "{data}"], "{data} is not a checkpoint (no MANIFEST.json in it"),
        (["--checkpoint.init_from", "{data}/../run/checkpoints/step-00000020"], "choose another checkpoint.init_from"),
        (["--job.output_dir", "{data}/tokenizer.model"], "the run folder {data}/tokenizer.model can't be written"),
    ],
)
def test_a_mistake_is_said_before_a_weight_is_drawn(prepared, tmp_path, monkeypatch, capsys, words, said):
    def draw(*_, **__):
        raise AssertionError("a weight was drawn")

    monkeypatch.setattr("trainer.step.materialize", draw)
    data = prepared / "data"
    assert launch_here(tmp_path, *(word.format(data=data) for word in words)) == 78
    assert said.format(data=data) in capsys.readouterr().err


def test_the_summary_and_what_does_not_fit_come_before_a_weight_is_drawn(tmp_path, monkeypatch, capsys):
    def draw(*_, **__):
        raise MemoryError

    monkeypatch.setattr("trainer.step.materialize", draw)
    assert launch_here(tmp_path, "--model.ffn_dim", str(10**12)) == 1
    told = capsys.readouterr()
    assert "Keel trains tiny" in told.out
    assert re.search(r"\n  memory       about \S+ TiB per rank", told.out)
    assert re.search("warning: the job needs about .* of this host's memory for its 1 rank, and there are", told.err)
    assert "saves will fail" in told.err
    assert "Traceback" not in told.err


@pytest.mark.slow
def test_source_files_that_cannot_be_read_and_a_budget_for_them(tmp_path: Path):
    text = tmp_path / "text"
    text.mkdir()
    for number in range(40):
        (text / f"{number}.txt").write_text(f"Text number {number}: {hash(number) ** 3}\n" * 20)
    (text / "latin.txt").write_bytes("caf\u00e9".encode("latin-1"))
    (text / "link.txt").symlink_to("nowhere")
    assert_refused(
        tmp_path, "--data.prepare.max_bad_files 1", 78, "latin.txt: not UTF-8 at byte 3", "link.txt", "1 allowed"
    )

    small = "--model.vocab_size 290 --training.steps 2 --validation.sequences 2"
    outcome = launch(tmp_path, f"{small} --data.prepare.max_bad_files 2", config=TEXT)
    assert outcome.err.count("skipped, as data.prepare") == 2
    assert "latin.txt: not UTF-8 at byte 3" in outcome.err
    assert len(json.loads((tmp_path / "data" / "tokens" / "prepare.json").read_text())["bad_files"]) == 2
    assert len(curve(tmp_path / "run")) == 2


@pytest.mark.slow
def test_a_package_that_is_missing_is_named_with_its_install_command(corpus: Path):
    (corpus / "stubs").mkdir()
    (corpus / "stubs" / "tokenizers.py").write_text("raise ModuleNotFoundError('No module named tokenizers')")
    (corpus / "tokenizer.json").write_text("{}")
    env = {"PYTHONPATH": str(corpus / "stubs"), "PYTHONDONTWRITEBYTECODE": "1"}
    words = "--tokenizer.path tokenizer.json --tokenizer.train_on []"
    message = ("tokenizer.json needs the package tokenizers", "pip install tokenizers")
    assert_refused(corpus, words, 78, *message, env=env, preloaded=False)


# ------------------------------------------------------------------- the run folder and its checkpoints


@pytest.mark.parametrize("ranks", [0, 2])
def test_a_folder_that_cannot_be_written(tmp_path: Path, ranks: int):
    (tmp_path / "run").write_text("a file in the folder's place")
    outcome = launch(tmp_path, ranks=ranks, expect=1 if ranks else 78)
    assert outcome.said.count("the run folder run can't be written") == 1
    assert outcome.said.count("set job.output_dir to another") == 1
    assert "SIGKILL" not in outcome.err  # what torchrun does to a rank that waits forever
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_folder_whose_name_is_too_long(tmp_path: Path, capsys):
    assert launch_here(tmp_path, "--job.output_dir", str(tmp_path / ("x" * 300))) == 78
    said = capsys.readouterr().err
    assert "can't be written" in said
    assert "Traceback" not in said


def test_a_launch_that_never_had_the_folder_leaves_the_status_of_the_one_that_has_it(tmp_path: Path, monkeypatch):
    (tmp_path / "run").mkdir()
    write_status(tmp_path / "run", "running", 7)
    before = snapshot(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert launch_here(tmp_path, "--job.device", "cuda") == 78
    assert snapshot(tmp_path) == before
    write_status(tmp_path / "run", "preempted", 7)
    assert launch_here(tmp_path, "--job.device", "cuda") == 78
    assert status(tmp_path / "run")["state"] == "failed"


@pytest.mark.slow
def test_a_run_that_was_another(tmp_path: Path):
    tiny = TEXT.with_name("tiny.toml")
    launch(tmp_path, "--training.steps 3")
    changed = "--optimizer.lr 0.5 --model.ffn_dim 128"
    diff = ("the run's settings differ from those of", "model.ffn_dim: 64 -> 128", "optimizer.lr: 0.01 -> 0.5")
    assert_refused(tmp_path, changed, 78, *diff, "--job.allow_run_change true", config=tiny)
    assert status(tmp_path / "run")["step"] == 3

    other = ("is of another model", "model.layers.0.mlp.up_proj.weight: [64, 32]", "job.output_dir")
    assert_refused(tmp_path, f"{changed} --job.allow_run_change true", 78, *other, config=tiny)

    outcome = launch(tmp_path, "--optimizer.lr 0.5 --job.allow_run_change true")
    assert "optimizer.lr: 0.01 -> 0.5" in outcome.out
    manifest = json.loads((tmp_path / "run" / "checkpoints" / "step-00000020" / "MANIFEST.json").read_text())
    assert manifest["run_changes"] == [{"step": 3, "changes": ["optimizer.lr: 0.01 -> 0.5"]}]
    assert [step for step, *_ in curve(tmp_path / "run")] == list(range(1, 21))
