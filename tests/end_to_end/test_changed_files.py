"""Token files that somebody writes to while a run reads them."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.end_to_end.launch import curve, finish, launch_here, start, status
from tests.end_to_end.web import make_web, typed, web_words
from trainer.guards.grace import Rescue
from trainer.watch import Watch

STEP = 4


@pytest.fixture
def during(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """`during(action)`: have it done when a run has made STEP steps."""

    def install(action: Callable[[], object]) -> None:
        begin = Watch.begin

        def with_action(watch: Watch, number: int, rescue: Rescue) -> None:
            if number == STEP + 1:
                action()
            begin(watch, number, rescue)

        monkeypatch.setattr(Watch, "begin", with_action)

    return install


def overwrite(file: Path, content: bytes) -> None:
    """Write into a file, not in its place."""
    with file.open("r+b") as opened:
        opened.write(content)


def said(folder: Path) -> str:
    return (folder / "run" / "run.log").read_text()


def steps_saved(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "run" / "checkpoints").iterdir())


@pytest.mark.slow
def test_a_file_cut_short_is_an_error_and_no_bus_error(tmp_path: Path):
    file = make_web(tmp_path)
    process = start(tmp_path, f"{typed(web_words())} --training.steps 1000000 --metrics.tensorboard false")
    metrics = tmp_path / "run" / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.05)
    size = file.stat().st_size
    os.truncate(file, 4096)
    outcome = finish(process)
    assert outcome.code == 1, outcome.err
    assert "Traceback" not in outcome.err
    assert "error: web/0.tokens, at byte " in outcome.err
    assert f"beyond the end of the file, which should have {size} bytes. The file has changed" in outcome.err
    assert f"has changed during the run: it had {size} bytes written at " in outcome.err
    assert "and now has 4096 bytes written at " in outcome.err
    assert "resumes from its newest checkpoint" in outcome.err
    end = status(tmp_path / "run")
    assert end["state"] == "failed"
    assert end["reason"] in outcome.err


def test_ids_beyond_the_vocabulary_are_named_by_file_and_place(tmp_path: Path, during: Callable):
    file = make_web(tmp_path)
    wrong = make_web(tmp_path, vocab_size=60_000).read_bytes()
    make_web(tmp_path)
    during(lambda: overwrite(file, wrong))
    assert launch_here(tmp_path, *web_words(tmp_path), "--training.steps", "5000", "--checkpoint.interval", "0") == 1
    error = said(tmp_path).partition("error: ")[2]
    assert error.startswith(f"{file}, at byte ")
    assert " is beyond the vocabulary of 300 (token " in error
    byte, token = (int(error.partition(before)[2].split()[0].strip(":")) for before in ("at byte ", "(token "))
    assert byte == 80 + 2 * token
    written = int.from_bytes(file.read_bytes()[byte : byte + 2], "little")
    assert f"token id {written} is beyond" in error
    assert "The file has changed during the run" in error


@pytest.mark.parametrize(
    "interval", [6, pytest.param(0, marks=pytest.mark.slow)], ids=["at the next save", "at the next epoch"]
)
def test_other_valid_ids_are_noticed(tmp_path: Path, during: Callable, interval: int):
    file = make_web(tmp_path, n_tokens=2000)
    other = make_web(tmp_path, seed=1, n_tokens=2000).read_bytes()
    make_web(tmp_path, n_tokens=2000)
    during(lambda: overwrite(file, other))
    # An epoch has 124 windows, 15.5 steps.
    words = ["--training.steps", "200", "--checkpoint.interval", str(interval), "--checkpoint.mode", "sync"]
    assert launch_here(tmp_path, *web_words(tmp_path), *words) == 1
    assert f"{file}, at byte 0: it is another file. The file has changed during the run" in said(tmp_path)
    assert status(tmp_path / "run")["step"] < 200
    assert steps_saved(tmp_path) == []


@pytest.mark.slow
def test_what_changes_nothing_for_the_run_does_not_end_it(tmp_path: Path, during: Callable):
    file = make_web(tmp_path, n_tokens=2000)
    words = [*web_words(tmp_path), "--checkpoint.interval", "5", "--lr_schedule.total_steps", "60"]
    undisturbed = tmp_path / "undisturbed"
    undisturbed.mkdir()
    assert launch_here(undisturbed, *words, "--training.steps", "40") == 0

    def touch_and_replace() -> None:
        os.utime(file, ns=(0, 0))
        os.rename(file, tmp_path / "old.tokens")
        make_web(tmp_path, seed=1, n_tokens=2000)

    during(touch_and_replace)
    assert launch_here(tmp_path, *words, "--training.steps", "40") == 0
    assert curve(tmp_path / "run") == curve(undisturbed / "run")

    # The next launch finds the other file.
    assert launch_here(tmp_path, *words, "--training.steps", "60") == 78
    assert "the data of the source 'web' has changed since the checkpoint" in said(tmp_path)
    os.rename(tmp_path / "old.tokens", file)
    assert launch_here(tmp_path, *words, "--training.steps", "60") == 0
    manifest = json.loads((tmp_path / "run" / "checkpoints" / "step-00000060" / "MANIFEST.json").read_text())
    assert manifest["data_fingerprint"].keys() == {"web"}


def test_text_that_was_replaced_between_two_launches(tmp_path: Path, capsys: pytest.CaptureFixture):
    """By text of the same size, with the same time of writing: a copy that keeps times does that."""
    make_web(tmp_path)
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": f"Document {i}, and {i**9}."}) + "\n" for i in range(200)))
    source = f'[{{name = "notes", kind = "text", path = "{text}"}}]'
    words = ("--data.sources", source, *web_words(tmp_path)[2:])
    assert launch_here(tmp_path, *words, "--training.steps", "3") == 0
    times, content = text.stat(), text.read_text()
    text.write_text(content.replace("Document 150", "document 150"))
    os.utime(text, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert text.stat().st_size == times.st_size
    assert launch_here(tmp_path, *words, "--training.steps", "5") == 78
    assert "the data of the source 'notes' has changed since the checkpoint" in capsys.readouterr().err
    text.write_text(content)
    assert launch_here(tmp_path, *words, "--training.steps", "5") == 0
