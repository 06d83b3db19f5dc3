"""SIGTERM in a step that outlasts torchrun's patience: it kills the ranks, and the last finished step is not lost."""

import signal
from pathlib import Path

import pytest

from checkpoint.manifest import content_damage, read_manifest, step_folder, steps_in
from tests.end_to_end.launch import ROOT, curve, finish, start, status
from tests.end_to_end.signals import wait_until
from tests.torture.resume import go_on

QUIET = ("--metrics.tensorboard", "false", "--lr_schedule.total_steps", "6")
GRACE_SECONDS = "10"

PROGRAM = f"""
import os, sys, time
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from trainer.step import Learner

grad_norm, calls = Learner.grad_norm, []

def without_end(learner):
    calls.append(1)
    if len(calls) == 3 and os.environ["RANK"] in os.environ["SLOW_RANKS"]:
        Path("is_slow").touch()
        while True:
            time.sleep(1)
    return grad_norm(learner)

Learner.grad_norm = without_end
import train
code = train.main()
sys.stderr.flush()
os._exit(code)
"""


@pytest.mark.parametrize(
    "slow", [pytest.param("1", marks=pytest.mark.slow), pytest.param("01", marks=pytest.mark.long)]
)
def test_torchrun_kills_in_the_middle_of_a_step(ranks, tmp_path: Path, slow: str):
    """If only rank 1 is slow, rank 0 waits for it in a collective, where Python's signal handlers do not run."""
    program, run = tmp_path / "program.py", tmp_path / "run"
    program.write_text(PROGRAM)
    words = f"--training.steps 6 --job.grace_seconds {GRACE_SECONDS} {' '.join(QUIET)}"
    env = {"SLOW_RANKS": slow, "PET_SHUTDOWN_TIMEOUT": GRACE_SECONDS}  # torchrun's --shutdown-timeout
    process = start(tmp_path, words, ranks=2, env=env, program=program)
    wait_until(process, (tmp_path / "is_slow").exists)
    process.send_signal(signal.SIGTERM)
    outcome = finish(process)
    assert outcome.code != 0
    assert "SIGTERM: saving the state of step 2 while step 3 is computed" in outcome.out
    said = status(run)
    assert (said["state"], said["step"], said["reason"]) == ("preempted", 2, "SIGTERM")
    checkpoint = step_folder(run / "checkpoints", 2)
    assert (steps_in(run / "checkpoints"), tmp_path / said["checkpoint"]) == ([2], checkpoint)
    files = read_manifest(checkpoint).files
    assert not [damage for name, entry in files.items() if (damage := content_damage(checkpoint, name, entry))]
    ranks(2, go_on, str(run), 6, QUIET)
    ranks(2, go_on, str(tmp_path / "straight"), 6, QUIET)
    assert curve(run) == curve(tmp_path / "straight")
