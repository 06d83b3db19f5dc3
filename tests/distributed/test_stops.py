"""A stop that reaches one rank of two at an awkward moment: both end after the same step, soon, with all of it saved.

The moments are exact here, since the signal is recorded from within; tests/end_to_end sends real ones.
"""

import json
import signal
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from checkpoint import store
from checkpoint.manifest import step_folder, steps_in
from configs.load import load
from tests.marked import marked
from tests.torture.resume import JOB, curve
from trainer.guards.watchdog import Watchdog
from trainer.lifecycle import StopRequest
from trainer.opening import Runtime
from trainer.report.console import Console
from trainer.report.metrics import TimeLedger
from trainer.step import Learner
from trainer.trainer import Trainer

VALIDATION = '--validation.sources [{name="held",kind="synthetic"}] --validation.interval 2 --validation.sequences 80'
WORDS = "--metrics.tensorboard false --training.steps 6"


def stop_at(owner: object, name: str, call: int, stop: StopRequest) -> Callable[[], None]:
    """Signal the last rank in the middle of a call of a function; returns what undoes this, with the calls so far."""
    original, calls = getattr(owner, name), []

    def signalled(*arguments, **keywords):
        calls.append(1)
        if len(calls) == call and dist.get_rank() == dist.get_world_size() - 1:
            stop.record(signal.SIGTERM, None)
        return original(*arguments, **keywords)

    setattr(owner, name, signalled)

    def undo() -> int:
        setattr(owner, name, original)
        return len(calls)

    return undo


def train(folder: str, words: tuple[str, ...], moment: tuple[str, str, int] | None = None) -> tuple[str, int, int]:
    """State and step at the end, and the calls of what is named in `moment`."""
    torch._dynamo.reset()
    stop = StopRequest()
    undo = stop_at({"Learner": Learner, "store": store}[moment[0]], *moment[1:], stop) if moment else lambda: 0
    job = load(str(JOB), ("--job.output_dir", folder, *words), dist.get_world_size())
    Path(folder).mkdir(exist_ok=True)
    try:
        with Console(rank=1) as console, closing(Watchdog(Path(folder), 600, print)) as watchdog:
            trainer = Trainer(Runtime(job, torch.device("cpu"), console, stop, TimeLedger(), watchdog))
            return trainer.train(), trainer.run.step, undo()
    finally:
        undo()


MOMENTS = {
    # name: (words, what is under way, steps at which the run may end, each with the calls of it until then)
    "the first step, which compiles": ("--compile.enable true", ("Learner", "gradients", 1), {1: 1}),
    "the third of 10 batches of a validation": (VALIDATION, ("Learner", "evaluate", 3), {2: 3}),
    "a save that holds up training": ("--checkpoint.interval 2 --checkpoint.mode sync", ("store", "write", 1), {2: 1}),
    "a save in the background": (
        "--checkpoint.interval 2 --checkpoint.mode async",
        ("store", "write", 1),
        {2: 1, 3: 2},
    ),
}


@pytest.mark.parametrize(
    "name",
    marked(
        MOMENTS,
        slow=["the first step, which compiles", "a save in the background"],
        long=["the third of 10 batches of a validation", "a save that holds up training"],
    ),
)
def test_a_stop_in(ranks, tmp_path, name):
    words, moment, ends = MOMENTS[name]
    words = (*WORDS.split(), *words.split())
    first, second = ranks(2, train, str(tmp_path / "run"), words, moment)
    assert first == second
    state, step, called = first
    assert state == "preempted"
    assert called == ends[step]
    checkpoints = tmp_path / "run" / "checkpoints"
    assert steps_in(checkpoints)[-1] == step
    assert json.loads((step_folder(checkpoints, step) / "trainer.json").read_text())["run"]["step"] == step
    ranks(2, train, str(tmp_path / "run"), words)
    ranks(2, train, str(tmp_path / "straight"), words)
    assert curve(tmp_path / "run") == curve(tmp_path / "straight")
