"""torchrun is killed alone (kill -9): nobody would end its ranks, so they save, and end by themselves."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.end_to_end.launch import curve, launch, start, status
from tests.end_to_end.signals import ranks_of, signal_at_step, wait_until
from tests.end_to_end.test_signals import LONG, assert_preempted

SECONDS = 100
"""On a busy machine, where torch is still being imported; idle, it takes two."""


def kill_alone(launcher, ranks: list[int]) -> None:
    """Kill the launcher, which may not be their store's server any more, and wait until its ranks have ended."""
    launcher.kill()
    launcher.wait()
    deadline = time.monotonic() + SECONDS
    while left := [pid for pid in ranks if Path(f"/proc/{pid}").exists()]:
        if time.monotonic() > deadline:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            pytest.fail(f"{len(left)} ranks are left {SECONDS} s after their launcher's death")
        time.sleep(0.1)


@pytest.mark.slow
def test_ranks_whose_torchrun_is_killed_save_and_end(tmp_path: Path):
    run, launcher = tmp_path / "run", start(tmp_path, LONG, ranks=2)
    signal_at_step(launcher, run, 3, 0)
    kill_alone(launcher, ranks_of(launcher))
    assert launcher.stdout is not None
    step = assert_preempted(run, by="the end of its launcher")
    said = launcher.stdout.read()
    assert f"after step {step}, with everything saved" in said
    launch(tmp_path, f"--training.steps {step + 2}", ranks=2)
    assert [step for step, *_ in curve(run)] == list(range(1, step + 3))


@pytest.mark.parametrize(
    ("moment", "words"),
    [
        pytest.param("it has begun", "", marks=pytest.mark.slow),
        pytest.param("libtorch is loaded", "", marks=pytest.mark.long),
        pytest.param("the folder is taken", "", marks=pytest.mark.long),
        pytest.param("the folder is taken", "--elastic.enable true", marks=pytest.mark.slow),
    ],
)
def test_ranks_whose_torchrun_is_killed_before_training_end(tmp_path: Path, moment: str, words: str):
    launcher = start(tmp_path, f"{LONG} {words}", ranks=2)
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
    wait_until(launcher, lambda: len(children.read_text().split()) == 2)
    ranks = list(map(int, children.read_text().split()))
    maps, state = Path(f"/proc/{ranks[0]}/maps"), tmp_path / "run" / "status.json"
    if moment != "it has begun":
        wait_until(launcher, state.exists if "folder" in moment else lambda: "libtorch" in maps.read_text())
    kill_alone(launcher, ranks)
    if "folder" in moment:
        assert status(tmp_path / "run")["state"] == "preempted"
    assert launcher.stderr is not None
    assert "Traceback" not in launcher.stderr.read()
    launch(tmp_path, words)
