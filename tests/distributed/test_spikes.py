"""Spikes of the loss, skipped and rewound, by the job file: every mesh decides alike, and a resume decides the same.

The data are a constant, which the model soon knows, but for some samples of noise: their loss is a spike.
"""

import errno
import json
import math
import signal
import time
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from checkpoint.manifest import TRAINER_NAME, step_folder, steps_in
from configs.errors import UserError
from configs.load import load
from tests.end_to_end.launch import (
    ROOT,
    TINY,
    assert_same_tensors,
    curve,
    launch,
    records,
    tensors,
)
from tests.losses import kept_losses
from trainer import opening
from trainer.data.sources import SyntheticSource
from trainer.guards.watchdog import Watchdog
from trainer.lifecycle import StopRequest
from trainer.opening import Runtime
from trainer.proof import fingerprints
from trainer.report import metrics
from trainer.report.console import Console
from trainer.report.metrics import MetricsLog, TimeLedger
from trainer.saving import Saver
from trainer.step import Learner
from trainer.trainer import Trainer
from trainer.watch import Watch

BATCH = 8
JOB = ("--metrics.tensorboard", "false", "--training.micro_batch_size", "4")
RULE = ("--fault.spikes.window", "8", "--fault.spikes.threshold", "8", "--lr_schedule.total_steps", "60")
SKIP = (*RULE, "--fault.spikes.action", "skip")
REWIND = (*RULE, "--fault.spikes.action", "rewind", "--fault.spikes.rewind_interval", "10")
NOISE = (27, 33)
"""Batches, counted from one, with noise in one of their samples."""
_read = SyntheticSource.read


def plant(noise):
    """Make all samples alike but for one in each of the batches `noise`."""
    samples = {BATCH * (batch - 1) + 5 for batch in noise}

    def read(self, address, tokens, starts):
        _read(self, address, tokens, starts)
        if address not in samples:
            tokens[:] = np.arange(len(tokens)) % 7

    SyntheticSource.read = read


def train(folder, words, stop_after=0, noise=NOISE, steps=40):
    """A launch of the job; returns its losses, its state at the end and its error's message."""
    plant(noise)
    original, stop, calls = Learner.gradients, StopRequest(), []

    def gradients(learner, *arguments):
        calls.append(1)
        if len(calls) == stop_after:
            stop.record(signal.SIGTERM, None)
        return original(learner, *arguments)

    Learner.gradients = gradients
    Path(folder).mkdir(exist_ok=True)
    quiet = (*JOB, "--job.output_dir", str(folder), "--training.steps", str(steps))
    try:
        with Console(rank=1) as console, closing(Watchdog(Path(folder), 600, print)) as watchdog:
            job = load(str(TINY), (*quiet, *words), dist.get_world_size())
            trainer = Trainer(Runtime(job, torch.device("cpu"), console, stop, TimeLedger(), watchdog))
            losses = kept_losses(trainer)
            try:
                trainer.train()
                message = ""
            except UserError as error:
                message = str(error)
            return losses, trainer.run, message
    finally:
        Learner.gradients, SyntheticSource.read = original, _read


def decisions(incidents):
    """What was done, without losses and limits, which differ by round-off between meshes."""
    return [{key: value for key, value in each.items() if key not in ("loss", "limit")} for each in incidents]


MESHES = {
    "1 process": (1, ()),
    "FSDP 2": (2, ()),
    "TP 2": (2, ("--mesh.tp", "2", "--training.micro_batch_size", "8")),
    "PP 2 x DDP 2": (4, ("--mesh.pp", "2", "--mesh.dp_replicate", "2", "--training.micro_batch_size", "2")),
}


@pytest.mark.long  # going back skips as well
def test_every_mesh_skips_the_same_steps(ranks, tmp_path):
    for name, (n, words) in MESHES.items():
        folder = tmp_path / name
        for losses, run, message in ranks(n, train, str(folder), (*SKIP, *words)):
            assert not message
            assert (run.step, run.tokens, len(losses)) == (40, 40 * 8 * 16, 40)
            assert decisions(run.incidents) == [{"step": step, "what": "skip"} for step in NOISE]
        found = {record["step"]: record["incidents"] for record in records(folder) if "incidents" in record}
        assert found.keys() == set(NOISE)
        for step, [incident] in found.items():
            assert incident["loss"] == losses[step - 1] > incident["limit"] > losses[step - 2]


def test_a_skipped_step_changes_no_tensor(ranks, tmp_path):
    ranks(1, train, str(tmp_path / "run"), (*SKIP, "--checkpoint.interval", "1"), 0, NOISE, 27)
    assert_same_tensors(tensors(tmp_path / "run", 26), tensors(tmp_path / "run", 27))


@pytest.mark.long
def test_every_mesh_goes_back_alike_and_passes_the_samples_over(ranks, tmp_path):
    """Batch 27 is a spike at step 27: steps 21 to 40 are then made of batches 28 on, with noise in step 26 again."""
    for name, (n, words) in MESHES.items():
        folder = tmp_path / name
        for _, run, message in ranks(n, train, str(folder), (*REWIND, *words)):
            assert not message
            assert (run.step, run.tokens) == (40, 40 * 8 * 16)
            passed = {"step": 20, "what": "rewind", "to_step": 20}
            assert decisions(run.incidents) == [
                {**passed, "spike_step": 27, "samples": [160, 215]},
                {**passed, "spike_step": 26, "samples": [160, 263]},
            ]
        assert [record["step"] for record in records(folder)] == list(range(1, 41))
        [logged] = [record["incidents"] for record in records(folder) if "incidents" in record]
        assert [incident["spike_step"] for incident in logged] == [27, 26]


def test_a_run_that_went_back_is_the_run_without_those_samples(ranks, tmp_path):
    """The reference: batches 21 to 27 are never shown, by a loader that jumps; losses are equal, bit for bit."""
    losses, _, _ = ranks(1, train, str(tmp_path / "run"), REWIND, 0, (27,))[0]
    jumped, _, _ = ranks(1, jump, str(tmp_path / "jumped"))[0]
    assert losses[:20] + losses[26:] == jumped  # the spike itself is no step of the run


@pytest.mark.slow
@pytest.mark.parametrize("kind", [("--average.decay", "0.5"), ("--average.last", "3")])
def test_an_average_that_is_newer_than_the_checkpoint_begins_anew(ranks, tmp_path, kind):
    """The run goes back to its last checkpoint without one: what it has left is not part of the average."""
    run = tmp_path / "run"
    each = ("--checkpoint.interval", "1", "--checkpoint.keep_last", "0", "--job.allow_run_change", "true")
    ranks(1, train, str(run), (*REWIND, *each), 0, (27,), 20)
    [(_, state, message)] = ranks(1, train, str(run), (*REWIND, *each, "--average.interval", "1", *kind), 0, (27,), 28)
    assert not message
    assert [incident["to_step"] for incident in state.incidents] == [20]
    updates = {step: tensors(run, step)["average_updates"].tolist() for step in (21, 22)}
    assert updates == ({21: 1, 22: 2} if "--average.decay" in kind else {21: [21, 0, 0], 22: [21, 22, 0]})


def jump(folder):
    words = (*RULE, "--fault.spikes.action", "skip")
    train(folder, words, noise=(), steps=20)
    original = opening.open_loader

    def jumped(config, mesh, position):
        return original(config, mesh, {**position, "next_sample": position["next_sample"] + 7 * BATCH})

    opening.open_loader = jumped
    try:
        before = [loss for _, loss, _ in curve(Path(folder))]
        first, run, message = train(folder, words, noise=())
        assert (run.step, message) == (40, "")
        return before + first, None, None
    finally:
        opening.open_loader = original


@pytest.mark.parametrize(
    "words",
    [pytest.param(SKIP, marks=pytest.mark.long), pytest.param(REWIND, marks=pytest.mark.slow)],
    ids=["skip", "rewind"],
)
def test_a_stop_anywhere_changes_nothing(ranks, tmp_path, words):
    """Stopped with a window half full, between a checkpoint and a spike, and in the second step after going back."""
    undisturbed = tmp_path / "undisturbed"
    ranks(2, train, str(undisturbed), words)
    for stops in ((5, 19), (29,)):
        folder = tmp_path / f"stopped-{stops[0]}"
        for stop_after in (*stops, 0):
            ranks(2, train, str(folder), words, stop_after)
        assert_same_end(folder, undisturbed)


@pytest.mark.slow
def test_a_stop_after_a_step_that_is_not_finite_changes_nothing(ranks, tmp_path):
    """A stop saves after such a step, too, and a spike may then return there; so an undisturbed run saves as well."""
    for folder, stops in (("undisturbed", (0,)), ("stopped", (20, 0))):
        for stop_after in stops:
            [(_, run, _)] = ranks(1, not_finite, str(tmp_path / folder), REWIND, stop_after)
        assert [(each["what"], each["step"]) for each in run.incidents] == [("rewind", 20)]
    assert curve(tmp_path / "undisturbed") == curve(tmp_path / "stopped")


def not_finite(folder, words, stop_after):
    """As `train`, but the gradient norm of batch 20 is not finite."""
    original = Learner.gradients

    def gradients(learner, batch, *arguments):
        loss, norm = original(learner, batch, *arguments)
        return loss, norm * (math.nan if 19 * BATCH in batch[0].samples else 1.0)

    Learner.gradients = gradients
    try:
        return train(folder, words, stop_after, noise=(27,), steps=28)
    finally:
        Learner.gradients = original


@pytest.fixture(scope="module")
def gone_back(ranks, tmp_path_factory):
    """The folder of a run, and its second launch as `watched` returns it.

    The first ends with step 24. The second begins with two steps that are not finite, for which a save at step 25
    waits; step 27 is a spike, and sends it back to step 20, where the first has been.
    """
    folder = tmp_path_factory.mktemp("gone_back")
    words = (*REWIND, "--fault.spikes.threshold", "4", "--checkpoint.interval", "5")
    ranks(1, train, str(folder), words, 24)
    [found] = ranks(1, watched, str(folder), words)
    return folder, *found


def watched(folder, words):
    """A launch: its steps with whether they may compile, the steps it saves after, and its incidents."""
    gradients, step, save, write = Learner.gradients, Watch.step, Saver.save, MetricsLog._write
    steps, saved = [], []

    def not_finite(learner, batch, *arguments):
        loss, norm = gradients(learner, batch, *arguments)
        return loss, norm * (math.nan if batch[0].samples[0] // BATCH in (24, 25) else 1.0)

    def counted(watch, number):
        steps.append((number, watch.is_typical(number)))
        return step(watch, number)

    def noted(saver, loader):
        saved.append(saver.progress.run.step)
        save(saver, loader)

    def slow(log, metrics, *arguments):
        time.sleep(2.0 if metrics.step == 26 else 0.0)
        write(log, metrics, *arguments)

    Learner.gradients, Watch.step, Saver.save, MetricsLog._write = not_finite, counted, noted, slow
    try:
        _, run, message = train(folder, words, noise=(27,), steps=28)
        assert not message
        return steps, saved, decisions(run.incidents)
    finally:
        Learner.gradients, Watch.step, Saver.save, MetricsLog._write = gradients, step, save, write


def test_steps_below_the_first_of_a_launch_that_has_gone_back_do_not_compile(gone_back):
    _, steps, _, incidents = gone_back
    assert [each["to_step"] for each in incidents] == [20]
    assert steps == [(25, False), (26, False), (27, True), *((number, True) for number in range(21, 29))]


def test_a_save_that_waited_for_a_finite_step_is_no_longer_due_after_going_back(gone_back):
    _, _, saved, _ = gone_back
    assert saved == [25, 28]


def test_the_metrics_of_the_steps_that_a_run_goes_back_from_are_kept_to_the_last(gone_back):
    folder, *_ = gone_back
    [aside] = (folder / "checkpoints").glob("abandoned-*/metrics.jsonl")
    assert [json.loads(line)["step"] for line in aside.read_text().splitlines()] == list(range(1, 27))


KILLED = f"""
import os, sys, time
sys.path.insert(0, {str(ROOT)!r})
import train
import trainer.run  # the spikes are planted in what this has imported
from tests.distributed.test_spikes import NOISE, Learner, plant

plant(NOISE)
gradients, calls = Learner.gradients, []

def killed(*arguments):
    calls.append(1)
    if len(calls) == 29:
        time.sleep(2)  # the record of the last step is written by a thread
        os.kill(os.getpid(), 9)
    return gradients(*arguments)

Learner.gradients = killed
train.main()
"""


@pytest.mark.slow
def test_a_kill_after_going_back_changes_nothing(ranks, tmp_path):
    """No checkpoint knows of the rewind yet; the run meets the same spike again, and decides the same."""
    program = tmp_path / "killed.py"
    program.write_text(KILLED)
    words = f"--training.steps 40 {' '.join((*JOB, *REWIND))}"
    launch(tmp_path, words, program=program, expect=-9)
    assert [record["step"] for record in records(tmp_path / "run")] == list(range(1, 22))
    assert records(tmp_path / "run")[-1]["incidents"][0]["what"] == "rewind"
    assert steps_in(tmp_path / "run" / "checkpoints") == [10, 20]
    ranks(1, train, str(tmp_path / "run"), REWIND)
    ranks(1, train, str(tmp_path / "undisturbed"), REWIND)
    assert_same_end(tmp_path / "run", tmp_path / "undisturbed")


def assert_same_end(one, other):
    """The same curve, tensors and trainer state (incidents and past losses among it), bit for bit."""
    assert curve(one) == curve(other)
    assert_same_tensors(tensors(one, 40), tensors(other, 40))
    state, expected = (
        json.loads((step_folder(run / "checkpoints", 40) / TRAINER_NAME).read_text()) for run in (one, other)
    )
    assert state == expected
    assert state["run"]["incidents"]


def refused_once(folder, words):
    """As `train`, on a disk that refuses once each file of the run's records that is opened after going back."""
    with pytest.MonkeyPatch.context() as patch:
        refused = []
        for module in (metrics, fingerprints):
            patch.setattr(module, "cut_back", partial(_refuse_once, module.cut_back, refused))
        return train(folder, words, noise=(27,), steps=28), refused


def _refuse_once(function, refused, path, step):
    if step == 20 and path not in refused:
        refused.append(path)
        raise OSError(errno.EIO, "Input/output error", str(path))
    return function(path, step)


def test_a_disk_that_refuses_once_does_not_end_a_run_that_goes_back(ranks, tmp_path):
    words = (*REWIND, "--metrics.fingerprint", "true")
    [((_, run, message), refused)] = ranks(1, refused_once, str(tmp_path), words)
    assert (message, [path.name for path in refused]) == ("", ["metrics.jsonl", "fingerprints.jsonl"])
    assert [each["to_step"] for each in run.incidents] == [20]
    assert [record["step"] for record in records(tmp_path)] == [*range(1, 29)]


@pytest.mark.slow
def test_a_run_that_goes_back_too_often_ends(ranks, tmp_path):
    """Noise without end from batch 35 on."""
    words = (*REWIND, "--checkpoint.interval", "3", "--checkpoint.keep_last", "1")
    [(_, run, message)] = ranks(1, train, str(tmp_path / "run"), words, 0, tuple(range(35, 200)))
    assert "the loss of step 31 is a spike" in message
    assert "has returned to step 30 3 times already" in message
    assert run.step == 30
    assert steps_in(tmp_path / "run" / "checkpoints") == [30]  # kept for it, beside the newest, 33, moved aside
    assert (tmp_path / "run" / "checkpoints" / "abandoned-001" / "step-00000033").is_dir()


def test_before_there_is_a_checkpoint_a_spike_is_skipped(ranks, tmp_path):
    words = (*RULE, "--fault.spikes.action", "rewind", "--fault.spikes.rewind_interval", "30")
    [(_, run, _)] = ranks(1, train, str(tmp_path / "run"), words)
    first, second = decisions(run.incidents)
    assert first == {"step": 27, "what": "skip"}
    assert second == {"step": 30, "what": "rewind", "to_step": 30, "spike_step": 33, "samples": [240, 263]}
