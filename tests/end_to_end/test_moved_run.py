"""A run folder that was copied elsewhere, without what the run was made from: commands find all they need in it."""

import os
import shutil
from pathlib import Path

import pytest
import torch.distributed as dist

from checkpoint.find import kept_tokenizer
from configs.load import load
from scripts import checkpoint as checkpoint_script
from scripts import data, export_hf, import_hf, sample, score
from tests.end_to_end.launch import TEXT, curve, keel
from trainer.lifecycle import StopRequest
from trainer.run import run

STEPS = ("--training.steps", "4", "--checkpoint.interval", "2", "--validation.interval", "0")


def train(*words: str) -> int:
    """Run the text job as one process, in this one and the current folder; returns its exit code."""
    try:
        return run(load(str(TEXT), [*STEPS, "--metrics.tensorboard", "false", *words], 1), StopRequest())
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a copied run, the token files of its job, and an empty folder; where it was trained is gone."""
    home, before = tmp_path_factory.mktemp("home"), Path.cwd()
    here = home / "trained here"
    (here / "text").mkdir(parents=True)
    for module in sorted(Path(os.__file__).parent.glob("[a-b]*.py")):
        shutil.copy(module, here / "text")
    os.chdir(here)
    try:
        assert train("--metrics.fingerprint", "true") == 0
        assert sample.main(["run", "import os", "--max-tokens", "5", "--temperature", "0"]) == 0
        shutil.copytree("run", home / "copied")
        (home / "with data" / "data").mkdir(parents=True)
        shutil.copytree("data/tokens", home / "with data/data/tokens")
        (home / "empty").mkdir()
    finally:
        os.chdir(before)
        shutil.rmtree(here)
    return home


@pytest.fixture
def empty(home, monkeypatch):
    """The empty folder, as the current one."""
    monkeypatch.chdir(home / "empty")


def text_of(capsys, model, *words):
    assert sample.main([str(model), "import os", "--max-tokens", "5", "--temperature", "0", *words]) == 0
    return capsys.readouterr().out


def test_a_text_is_continued_and_the_model_exported_and_imported(home, empty, tmp_path, capsys):
    copied = Path("../copied")
    text = text_of(capsys, copied)
    assert text_of(capsys, home / "copied/checkpoints/step-00000004") == text
    assert export_hf.main([str(copied), str(tmp_path / "exported")]) == 0
    assert f"taking {copied}/checkpoints/step-00000004, the newest checkpoint of {copied}" in capsys.readouterr().out
    assert text_of(capsys, tmp_path / "exported") == text
    assert import_hf.main([str(tmp_path / "exported"), str(tmp_path / "imported")]) == 0
    job = load(str(tmp_path / "imported/model.toml"), ["--job.name", "x", *_needed()]).config
    assert Path(job.tokenizer.path) == tmp_path / "imported/tokenizer.model"
    assert Path(job.tokenizer.path).is_file()
    (tmp_path / "imported").rename(tmp_path / "moved")
    capsys.readouterr()
    assert text_of(capsys, tmp_path / "moved") == text


def _needed() -> list[str]:
    """The keys that a job needs besides its model."""
    keys = {
        "data.sources": '[{name = "a", kind = "synthetic"}]',
        "training.steps": "1",
        "training.seq_len": "8",
        "training.global_batch_size": "1",
        "optimizer.lr": "1e-3",
        "lr_schedule.total_steps": "1",
    }
    return [word for key, value in keys.items() for word in (f"--{key}", value)]


def test_the_run_is_described_and_scored_with_its_own_tokenizer(home, monkeypatch, capsys):
    monkeypatch.chdir(home / "with data")
    assert checkpoint_script.main(["show", "../copied"]) == 0
    assert "../copied/checkpoints/step-00000004" in capsys.readouterr().out
    assert checkpoint_script.main(["diff", "../copied", "../copied/checkpoints/step-00000002"]) == 1
    assert data.main(["step", "../copied", "1"]) == 0
    assert "document" in capsys.readouterr().out
    assert score.main(["../copied"]) == 0
    assert "13 validation sequences" in capsys.readouterr().out


@pytest.mark.slow
def test_a_step_is_replayed_with_the_runs_own_tokenizer(home):
    done = keel(home / "with data", "replay", "../copied", "--step", "3")
    assert done.code == 0, done.err
    assert "equal in bits: step 3" in done.out


def test_a_moved_tokenizer_is_no_other_run_and_another_one_is(home, monkeypatch, capsys):
    """Their content decides. A tokenizer that is missing comes back from the run's copy."""
    monkeypatch.chdir(home / "with data")
    shutil.copytree("../copied", "run")
    more = ("--training.steps", "5", "--tokenizer.train_on", '["text"]')
    assert train(*more) == 0
    assert "data/tokenizer.model: was missing, and is copied from run/tokenizer.model" in capsys.readouterr().out
    Path("data/tokenizer.model").rename("elsewhere.model")
    assert train(*more, "--training.steps", "6", "--tokenizer.path", "elsewhere.model") == 0
    assert [step for step, *_ in curve(Path("run"))] == [1, 2, 3, 4, 5, 6]
    kept = kept_tokenizer(Path("run")).read_bytes()
    Path("other.model").write_bytes(kept + b"\x5a\x00")
    assert train(*more, "--tokenizer.path", "other.model", "--data.sources.0.path", "data/tokens/train") == 78
    assert kept_tokenizer(Path("run")).read_bytes() == kept
