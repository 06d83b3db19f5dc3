"""A stop in the middle of a step that does not end in time: the last finished step is saved while it is computed."""

import io
import json
import signal
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from checkpoint import store
from checkpoint.compare import compare
from checkpoint.manifest import read_manifest, step_folder, steps_in
from configs.load import load
from tests.marked import marked
from tests.torture.resume import JOB, MESHES, curve, go_on
from trainer.guards.grace import Grace
from trainer.guards.watchdog import Watchdog
from trainer.lifecycle import StopRequest, write_status
from trainer.loss import CrossEntropy
from trainer.opening import Runtime
from trainer.report.console import Console
from trainer.report.metrics import TimeLedger
from trainer.step import Learner
from trainer.trainer import Trainer

WORDS = "--metrics.tensorboard false --lr_schedule.total_steps 6 --checkpoint.keep_last 0"
SOON = "--job.grace_seconds 2"
SAFETY_SECONDS = 90
AFTER_FORWARD, AFTER_BACKWARD = (CrossEntropy, "__call__"), (Learner, "grad_norm")


class Stopped:
    """A run whose last rank is told to stop in the middle of a step, and goes on when the threads have done their part.

    The other ranks wait for it in a collective.
    """

    def __init__(self, folder: str, words: str, step: int, moment: tuple[type, str]) -> None:
        self.step, self.moment = step, moment
        self.stop, self.seen = StopRequest(), dict[str, Any]()
        job = load(str(JOB), ("--job.output_dir", folder, *WORDS.split(), *words.split()), dist.get_world_size())
        self.folder = Path(folder)
        self.folder.mkdir(exist_ok=True)
        if dist.get_rank() == 0:
            write_status(self.folder, "running", 0)
        with Console(rank=1) as console, closing(Watchdog(self.folder, 600, print)) as watchdog:
            self.trainer = Trainer(Runtime(job, torch.device("cpu"), console, self.stop, TimeLedger(), watchdog))
            owner, name = moment
            original = getattr(owner, name)
            setattr(owner, name, self._held(original))
            try:
                self.state = self.trainer.train()
            finally:
                setattr(owner, name, original)

    def _held(self, original: Any) -> Any:
        def held(*arguments: Any, **keywords: Any) -> Any:
            is_last = dist.get_rank() == dist.get_world_size() - 1
            if is_last and self.trainer.run.step + 1 == self.step and not self.seen:
                self.stop.record(signal.SIGTERM, None)
                self.trainer.watch.grace._thread.join(SAFETY_SECONDS)
                self.seen = {"status": self._final_status(), "steps": steps_in(self.folder / "checkpoints")}
            return original(*arguments, **keywords)

        return held

    def _final_status(self) -> dict[str, Any]:
        """What rank 0 says, in a moment, of what was saved."""
        deadline = time.monotonic() + SAFETY_SECONDS
        while (status := json.loads((self.folder / "status.json").read_text()))["state"] == "running":
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return status


def stop_in(folder: str, words: str, step: int, moment: tuple[type, str]) -> tuple[str, int, dict]:
    """State and step at the end, and what was seen in the middle of the step."""
    torch._dynamo.reset()
    run = Stopped(folder, words, step, moment)
    return run.state, run.trainer.run.step, run.seen


def assert_same_checkpoint(a: Path, b: Path) -> None:
    assert not list(compare(a, b))
    assert (a / "trainer.json").read_text() == (b / "trainer.json").read_text()
    [one, other] = [read_manifest(folder) for folder in (a, b)]
    assert one.files == other.files
    assert (one.tokens, one.mesh, one.data_fingerprint) == (other.tokens, other.mesh, other.data_fingerprint)


MIXED_OWNER = f"{MESHES['owner 2']} --fsdp.owner_broadcast_dtype bfloat16 --optimizer.name muon"
ZERO_BUBBLE = "--mesh.pp 2 --pipeline.schedule zero_bubble_v --model.n_layers 4 --activation_checkpoint.mode none"
CASES = {
    **{f"{name}, eager": (f"{words} --compile.enable false", AFTER_FORWARD) for name, words in MESHES.items()},
    "FSDP 2, after the backward pass": (f"{MESHES['FSDP 2']} --compile.enable false", AFTER_BACKWARD),
    "FSDP 2, sync": (f"{MESHES['FSDP 2']} --compile.enable false --checkpoint.mode sync", AFTER_FORWARD),
    "owner 2, Muon, masters": (f"{MIXED_OWNER} --compile.enable false", AFTER_FORWARD),
    "zero bubble": (f"{ZERO_BUBBLE} --compile.enable false", AFTER_BACKWARD),  # the first rank computes the loss
    "FSDP 2, compiled": (f"{MESHES['FSDP 2']} --compile.enable true", AFTER_BACKWARD),
}


@pytest.mark.parametrize(
    "name",
    marked(
        CASES,
        slow=["FSDP 2, eager", "TP 2, eager", "PP 2, eager", "owner 2, eager", "experts, EP 2, eager"],
        long=[
            "CP 2, eager",
            "experts, FSDP 2, eager",
            "FSDP 2, after the backward pass",
            "FSDP 2, sync",
            "owner 2, Muon, masters",
            "zero bubble",
            "FSDP 2, compiled",
        ],
    ),
)
def test_the_last_finished_step_is_saved_as_an_undisturbed_run_saves_it(ranks, tmp_path, name):
    words, moment = CASES[name]
    stopped, straight = tmp_path / "stopped", tmp_path / "straight"
    results = ranks(2, stop_in, str(stopped), f"{words} {SOON} --training.steps 6", 3, moment)
    assert [(state, step) for state, step, _ in results] == [("preempted", 3)] * 2
    seen = results[1][2]
    said = seen["status"]
    assert (said["state"], said["step"], said["reason"]) == ("preempted", 2, "a signal to another rank")
    assert seen["steps"] == [2]
    assert Path(said["checkpoint"]) == step_folder(stopped / "checkpoints", 2)
    ranks(2, go_on, str(straight), 3, (*WORDS.split(), *words.split(), "--checkpoint.interval", "1"))
    for step in (2, 3):
        assert_same_checkpoint(*(step_folder(run / "checkpoints", step) for run in (stopped, straight)))


@pytest.mark.slow
def test_a_run_goes_on_from_it_bit_for_bit(ranks, tmp_path):
    stopped, straight, quiet = tmp_path / "stopped", tmp_path / "straight", tuple(WORDS.split())
    ranks(2, stop_in, str(stopped), f"{SOON} --training.steps 6", 4, AFTER_FORWARD)
    newer = step_folder(stopped / "checkpoints", 4)
    newer.rename(tmp_path / newer.name)  # as if the step that was under way had never ended
    ranks(2, go_on, str(stopped), 6, quiet)
    ranks(2, go_on, str(straight), 6, quiet)
    assert curve(stopped) == curve(straight)
    assert_same_checkpoint(*(step_folder(run / "checkpoints", 6) for run in (stopped, straight)))


def stop_while_saving(folder: str) -> tuple[list[str], dict]:
    """Stop in step 3, with the save of step 2 under way until then; returns what was written, and what was seen."""
    written, original, heard = [], store.write, threading.Event()
    agree = Grace._agree

    def write(storage: Any, unfinished: Path, *arguments: Any) -> Any:
        written.append(unfinished.name)
        assert heard.wait(SAFETY_SECONDS)
        return original(storage, unfinished, *arguments)

    def heard_of_it(grace: Grace, value: float) -> tuple[float, float]:
        heard.set()
        return agree(grace, value)

    store.write, Grace._agree = write, heard_of_it
    try:
        _, _, seen = stop_in(folder, f"{SOON} --checkpoint.interval 2", 3, AFTER_FORWARD)
    finally:
        store.write, Grace._agree = original, agree
    return written, seen


@pytest.mark.slow
def test_a_save_that_is_under_way_is_let_end(ranks, tmp_path):
    results = ranks(2, stop_while_saving, str(tmp_path / "run"))
    for written, _ in results:
        assert [name[:13] for name in written] == ["step-00000002", "step-00000003"]
    seen = results[1][1]
    assert (seen["status"]["state"], seen["status"]["step"], seen["steps"]) == ("preempted", 2, [2])


def test_a_checkpoint_whose_commands_are_not_queued_yet_is_kept_for_the_next_launch(ranks, tmp_path):
    """Its save is under way until the stop's, with which only one is kept by checkpoint.keep_last."""
    command = '{name="task",command="true",every=4}'
    words = f"--checkpoint.interval 2 --checkpoint.keep_last 1 --checkpoint.after_save [{command}]"
    results = ranks(2, stop_in, str(tmp_path / "run"), f"{SOON} {words}", 6, AFTER_FORWARD)
    assert [(state, step) for state, step, _ in results] == [("preempted", 6)] * 2
    assert results[1][2]["steps"] == [4, 5]


@pytest.mark.slow
def test_a_launchs_first_step_has_nothing_to_save(ranks, tmp_path):
    results = ranks(2, stop_in, str(tmp_path / "run"), SOON, 1, AFTER_FORWARD)
    assert [(state, step) for state, step, _ in results] == [("preempted", 1)] * 2
    seen = results[1][2]
    assert (seen["status"]["state"], seen["status"]["step"], seen["steps"]) == ("preempted", 0, [])


# --------------------------------------------------------------------------- the agreement, without a trainer


def one_rank_is_ahead() -> tuple[list[int], list[float]]:
    """Rank 1 is in the update after step 5, for which it needs rank 0, whose thread holds it up: both save step 6."""
    rank, stop, rescued, said = dist.get_rank(), StopRequest(), [], []

    def rescue(step: int) -> Any:
        return lambda reason, group: (rescued.append(step), dist.barrier(group), lambda: None)[-1]

    class Watched(Grace):
        def _agree(self, value: float) -> tuple[float, float]:
            said.append(value)
            if value == 5:
                is_held_up.set()
            return super()._agree(value)

    is_held_up = threading.Event()
    grace = Watched(stop, 0.4, Console(rank=1), torch.device("cpu"), SAFETY_SECONDS)
    with grace:
        grace.computing(5, rescue(5))
        if rank == 1:
            grace.updating()
        dist.barrier()
        stop.record(signal.SIGTERM, None)
        if rank == 0:
            assert is_held_up.wait(SAFETY_SECONDS)
            grace.updating()
        dist.barrier()  # the update's own collective
        grace.computing(6, rescue(6))
        grace._thread.join(SAFETY_SECONDS)
        assert grace.has_begun
    return rescued, said


def one_rank_has_computed_again() -> tuple[list[float], bool]:
    """The last step lacks rows: it is computed again on rank 0, then on rank 1. Returns what was asked of `rescue`."""
    rank, stop, asked, was_asked = dist.get_rank(), StopRequest(), [], threading.Event()

    def rescue(reason: str, group: Any) -> Any:
        dist.barrier(group)
        asked.append(grace._finished.step)
        was_asked.set()
        return None if asked[-1] == 5 else lambda: None

    grace = Grace(stop, 0.4, Console(rank=1), torch.device("cpu"), SAFETY_SECONDS)
    with grace:
        grace.computing(5, rescue)
        stop.record(signal.SIGTERM, None)
        assert was_asked.wait(SAFETY_SECONDS)
        if rank == 1:
            dist.barrier()
        with grace.changing():
            pass
        if rank == 0:
            dist.barrier()
        grace._thread.join(SAFETY_SECONDS)
        grace.updating()
        with grace.changing():  # in the update, too, as between two steps
            pass
    return asked, grace.has_begun


def test_a_state_that_is_about_to_change_is_not_saved(ranks):
    for asked, has_begun in ranks(2, one_rank_has_computed_again):
        assert asked[-1] == 5.5
        assert set(asked[:-1]) == {5}
        assert has_begun


def test_a_rank_that_is_an_update_behind_is_let_through(ranks):
    for rank, (rescued, said) in enumerate(ranks(2, one_rank_is_ahead)):
        assert rescued == [6]
        assert said[-1] == 6
        assert (5 in said) == (rank == 0)


def stop_as_training_ends(closes_first: int) -> bool:
    """Whether a rank whose thread knows of a stop, and one that does not, part without having saved."""
    stop = StopRequest()
    grace = Grace(stop, 1e6, Console(rank=1), torch.device("cpu"), SAFETY_SECONDS)
    with grace:
        grace.computing(1, lambda reason, group: pytest.fail("there was time"))
        grace.updating()
        if dist.get_rank() == closes_first:
            stop.record(signal.SIGTERM, None)
    return grace.has_begun or grace._thread.is_alive()


@pytest.mark.parametrize("closes_first", [0, 1])
def test_training_that_ends_in_time_ends_the_threads(ranks, closes_first):
    assert ranks(2, stop_as_training_ends, closes_first) == [False, False]


class LostStore:
    """The store of a torchrun that was killed."""

    def set(self, *_: Any) -> None:
        raise dist.DistNetworkError("Broken pipe")

    check = set


def train_without_a_store(told: int) -> tuple[bool, int]:
    """Training ends; one rank was told to stop, and all ranks but one have asked the store in vain.

    Returns whether the thread is left or has saved, and how often it has agreed with those of the other ranks.
    """
    stop, rank, said = StopRequest(), dist.get_rank(), []

    class Watched(Grace):
        def _agree(self, value: float) -> tuple[float, float]:
            said.append(value)
            return super()._agree(value)

    grace = Watched(stop, 1e6, Console(rank=1), torch.device("cpu"), SAFETY_SECONDS)
    if rank != 1 - told:
        grace._store = LostStore()
    with grace:
        grace.computing(1, lambda reason, group: pytest.fail("there was time"))
        if rank == told:
            stop.record(signal.SIGTERM, None)
        time.sleep(3)  # each of them asks the store by then
        grace.updating()
    return grace.has_begun or grace._thread.is_alive(), len(said)


@pytest.mark.parametrize("told", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_threads_end_together_without_a_store(ranks, told):
    """One that ended alone would leave the others in a collective until its time-out."""
    assert ranks(3, train_without_a_store, told) == [(False, 1)] * 3


def what_is_said(seconds: float, times: list[tuple[float, float | None, bool]]) -> str:
    out = io.StringIO()
    with Console(rank=0, out=out) as console:
        grace = Grace(StopRequest(), seconds, console, torch.device("cpu"), SAFETY_SECONDS)
        for grace._step_seconds, save, may_judge_step in times:
            grace.check(save, may_judge_step)
    return out.getvalue()


@pytest.mark.parametrize(
    ("times", "told"),
    [
        ([(20.0, 9.0, True)], []),
        ([(60.0, None, False)], []),  # it compiled
        ([(60.0, None, True), (60.0, None, True)], ["a step and a save take 1 min 00 s", "--shutdown-timeout 80 "]),
        ([(20.0, 12.0, True)], ["a step and a save take 32 s", "--shutdown-timeout 60 "]),
        ([(1.0, 45.0, True), (1.0, 50.0, True)], ["a save takes 45 s", "--shutdown-timeout 120 "]),
    ],
)
def test_what_does_not_fit_is_said_once(ranks, times, told):
    [said] = ranks(1, what_is_said, 30.0, times)
    said = " ".join(said.split())
    assert said.count("30 s after a stop signal") == (1 if told else 0)
    assert all(text in said for text in told), said
