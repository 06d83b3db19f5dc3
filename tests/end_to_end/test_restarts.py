"""`torchrun --max-restarts`: a dead rank's job is started again, on the same store, and goes on from its checkpoint."""

import os
import signal
from pathlib import Path

import pytest

from tests.end_to_end.launch import curve, finish, launch, start, status
from tests.end_to_end.signals import ranks_of, signal_at_step, wait_until

pytestmark = pytest.mark.slow

RESTARTS = {"PET_MAX_RESTARTS": "2"}  # as --max-restarts
WORDS = "--checkpoint.interval 10 --training.steps 200 --metrics.tensorboard false"


def test_a_killed_rank_and_then_a_signalled_one_cost_nothing(tmp_path: Path):
    """kill -9 of a rank, and in the second attempt SIGUSR1 to one: torchrun takes the exit code 75 for a failure."""
    run = tmp_path / "run"
    process = start(tmp_path, WORDS, ranks=2, env=RESTARTS)
    signal_at_step(process, run, 12, 0)
    first = ranks_of(process)
    os.kill(first[1], signal.SIGKILL)
    wait_until(process, lambda: status(run)["pid"] not in first)
    wait_until(process, lambda: (status(run)["step"] > 12) and len(ranks_of(process)) == 2)
    second = ranks_of(process)
    assert not set(first) & set(second)
    os.kill(second[0], signal.SIGUSR1)
    wait_until(process, lambda: status(run)["pid"] not in first + second)
    outcome = finish(process)
    assert outcome.code == 0, outcome.err
    log = (run / "run.log").read_text()
    assert f"rank 1 on host {os.uname().nodename} (process {first[1]}) was killed" in log
    assert "Stopped by SIGUSR1" in log
    launch(tmp_path, f"{WORDS} --job.output_dir undisturbed", ranks=2)
    assert curve(run) == curve(tmp_path / "undisturbed")
