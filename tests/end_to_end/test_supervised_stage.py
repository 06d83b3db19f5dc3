"""A supervised stage: conversations of which only the answers are learned, as one more stage of a run."""

import json
from pathlib import Path

import numpy as np
import pytest

from scripts import data, score
from scripts.prepare_data import main as prepare_data
from tests.end_to_end.launch import TINY, assert_same_tensors, curve, launch, launch_here, records, tensors
from trainer.data.text.token_writer import TokenFileWriter
from trainer.data.tokenizer import load_tokenizer, train_sentencepiece

JOB = f"""
base = "{TINY}"
[model]
vocab_size = 300
[tokenizer]
path = "t.model"
[[data.sources]]
name = "web"
kind = "tokens"
path = "web/train"
[validation]
interval = 10
sequences = 8
[[validation.sources]]
name = "answers"
kind = "tokens"
path = "chats/validation"
[checkpoint]
mode = "sync"

[[stages]]
at_step = 10
training.seq_len = 32
data.document_mask = true
data.sources = [{{name = "chats", kind = "tokens", path = "chats/train"}}]
"""
FLOAT64 = "--training.dtype float64 --training.compute_dtype float64 --training.reduce_dtype float64"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("supervised")
    dice = np.random.default_rng(0)
    words = ["".join(map(chr, dice.integers(97, 123, 4))) for _ in range(50)]
    texts = [" ".join(dice.choice(words, 12)) for _ in range(200)]
    train_sentencepiece(iter(texts), root / "t.model", 300)
    for name, lines in (("web", texts), ("chats", [text[:19].replace(" ", "?", 1) + "." for text in texts])):
        (root / f"{name}.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    common = ["--tokenizer", str(root / "t.model"), "--processes", "1", "--output"]
    assert prepare_data([str(root / "web.jsonl"), *common, str(root / "web")]) == 0
    chats = [str(root / "chats.jsonl"), *common, str(root / "chats"), "--validation-fraction", "0.2"]
    assert prepare_data([*chats, "--mask-until", "?"]) == 0
    (root / "job.toml").write_text(JOB)
    launch(root, "--job.output_dir straight", config=root / "job.toml")
    return root


@pytest.mark.slow
def test_a_stop_within_the_stage_leaves_no_trace(folder: Path):
    for steps in (14, 20):
        launch(folder, f"--job.output_dir stopped --training.steps {steps}", config=folder / "job.toml")
    assert curve(folder / "stopped") == curve(folder / "straight")
    assert_same_tensors(tensors(folder / "stopped"), tensors(folder / "straight"))
    assert all(record["validation_loss"] > 0 for record in records(folder / "straight") if record["step"] % 10 == 0)


@pytest.mark.slow
def test_another_mesh_goes_on_with_the_same_curve(folder: Path):
    launch(folder, f"{FLOAT64} --job.output_dir straight64", config=folder / "job.toml")
    for steps, ranks, mesh in ((12, 2, ""), (16, 2, "--mesh.pp 2"), (20, 2, "--mesh.cp 2")):
        words = f"{FLOAT64} {mesh} --job.output_dir moved --training.steps {steps}"
        launch(folder, words, ranks, config=folder / "job.toml")
    for one, other in zip(curve(folder / "straight64"), curve(folder / "moved"), strict=True):
        assert one == pytest.approx(other, rel=1e-10)


def test_a_run_without_any_target_has_loss_0_and_no_validation_loss(folder: Path, tmp_path, capsys):
    (tmp_path / "none").mkdir()
    with TokenFileWriter(tmp_path / "none/a.tokens", 300, load_tokenizer(folder / "t.model").hash, True) as writer:
        writer.append(2 * np.arange(200) + 1)
    source = f'[{{name = "none", kind = "tokens", path = "{tmp_path / "none"}"}}]'
    words = ("--data.sources", source, "--validation.sources", source, "--validation.interval", "2")
    words += ("--validation.sequences", "4", "--tokenizer.path", str(folder / "t.model"), "--model.vocab_size", "300")
    assert launch_here(tmp_path, *words, "--training.steps", "2") == 0
    first, second = records(tmp_path / "run")
    assert (first["loss"], first["grad_norm"], second["validation_loss"]) == (0.0, 0.0, None)
    assert score.main([str(tmp_path / "run")]) == 78
    assert "no target of the validation sequences gives loss" in " ".join(capsys.readouterr().err.split())


def test_the_data_command_shows_what_gives_loss(folder: Path, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    run = "straight"
    assert data.main(["step", run, "15", "--json"]) == 0
    parts = [part for line in capsys.readouterr().out.splitlines() for part in json.loads(line)["documents"]]
    for part in parts:
        assert 0 <= part["with_loss"] <= part["tokens"]
        before, _, after = part["text"].partition("]")
        if part["tokens"] == part["of"]:
            assert before.startswith("[no loss: ")
            assert before.endswith("?")
            assert after.endswith(".")
    assert data.main(["step", run, "15"]) == 0
    assert f"{parts[0]['with_loss']} with loss" in capsys.readouterr().out
    asked = next(part["text"] for part in parts if part["tokens"] == part["of"]).partition("?")[0]
    assert data.main(["find", run, asked.removeprefix("[no loss: ") + "?", "--json"]) == 0
    assert all(json.loads(line)["with_loss"] == 0 for line in capsys.readouterr().out.splitlines())
    assert data.main(["step", run, "5", "--json"]) == 0  # before the stage, without a mask
    assert "with_loss" not in capsys.readouterr().out
