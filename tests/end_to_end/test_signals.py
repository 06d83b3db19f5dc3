"""However a job is asked to stop, it saves, says so in status.json, and goes on where it stopped."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from checkpoint.manifest import steps_in
from configs.errors import OutageError
from configs.load import load
from scripts import checkpoint
from tests.end_to_end.launch import TEXT, TINY, curve, finish, launch, launch_here, records, start, status
from tests.end_to_end.signals import ranks_of, signal_at_import, signal_at_step, taking_interrupts, wait_until
from trainer.lifecycle import StopRequest, write_status
from trainer.run import run
from trainer.trainer import Trainer

LONG = "--training.steps 100000"


def assert_preempted(run: Path, by: str) -> int:
    """Assert that status.json tells of a stop with everything saved; returns its step."""
    found = status(run)
    assert (found["state"], found["reason"]) == ("preempted", by)
    assert Path(found["checkpoint"]).name == f"step-{found['step']:08d}"
    assert (run.parent / found["checkpoint"] / "MANIFEST.json").is_file()
    assert curve(run)[-1:] == curve(run)[found["step"] - 1 : found["step"]]
    return found["step"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGUSR1])
def test_one_process(tmp_path: Path, number: signal.Signals):
    process = start(tmp_path, LONG)
    signal_at_step(process, tmp_path / "run", 3, number)
    assert finish(process).code == 75
    assert assert_preempted(tmp_path / "run", by=number.name) >= 3


@pytest.mark.slow
def test_while_torch_is_imported(tmp_path: Path):
    process = start(tmp_path)
    signal_at_import(process, signal.SIGTERM)
    outcome = finish(process)
    assert outcome.code == 75, outcome.err
    assert assert_preempted(tmp_path / "run", by="SIGTERM") == 0
    assert "Stopped by SIGTERM after step 0" in outcome.out
    launch(tmp_path)
    assert [step for step, *_ in curve(tmp_path / "run")] == list(range(1, 21))


@pytest.mark.parametrize(
    "target", [pytest.param("one rank", marks=pytest.mark.slow), pytest.param("torchrun", marks=pytest.mark.long)]
)
def test_under_torchrun(tmp_path: Path, target: str):
    process = start(tmp_path, LONG, ranks=2)
    signal_at_step(process, tmp_path / "run", 3, 0)
    last_rank = ranks_of(process)[1]
    os.kill(last_rank if target == "one rank" else process.pid, signal.SIGTERM)
    outcome = finish(process)
    assert outcome.code != 0
    assert "SIGKILL" not in outcome.err  # what torchrun does to a rank that waits forever
    by = "SIGTERM" if target == "torchrun" else "a signal to another rank"
    step = assert_preempted(tmp_path / "run", by)
    launch(tmp_path, f"--training.steps {step + 2}", ranks=2)
    assert [step for step, *_ in curve(tmp_path / "run")] == list(range(1, step + 3))


@pytest.mark.slow
def test_an_interrupt_in_the_first_moments_says_nothing_of_python(tmp_path: Path):
    with taking_interrupts():
        process = start(tmp_path)
    maps = Path(f"/proc/{process.pid}/maps")
    wait_until(process, lambda: "pydantic_core" in maps.read_text())
    process.send_signal(signal.SIGINT)
    outcome = finish(process)
    assert (outcome.code in (75, -signal.SIGINT), "Traceback" in outcome.err) == (True, False), outcome


@pytest.mark.slow
def test_while_data_is_prepared(tmp_path: Path):
    (tmp_path / "text").mkdir()
    for number in range(20):
        (tmp_path / "text" / f"{number}.txt").write_text(f"Text number {number}, of its own. " * 40)
    process = start(tmp_path, config=TEXT)
    signal_at_import(process, signal.SIGTERM)
    outcome = finish(process)
    assert outcome.code == 75
    assert "stopped by SIGTERM while preparing data; the same command resumes" in outcome.err
    assert status(tmp_path / "run")["state"] == "preempted"
    assert not (tmp_path / "data").exists()


def test_a_signal_that_kills_the_compiler_as_well(tmp_path: Path):
    """`timeout`, scancel and a terminal signal the whole process group, while a stage of longer sequences compiles."""
    stop = StopRequest()
    folder = tmp_path / "run"

    def build(runtime, before_build):
        trainer = Trainer(runtime, before_build)
        compute = trainer.learner.gradients

        def gradients(*arguments):
            if trainer.step < 3:
                return compute(*arguments)
            stop.record(signal.SIGTERM, None)
            raise OutageError("this host could not compile layers.0")

        trainer.learner.gradients = gradients
        return trainer

    words = ("--job.output_dir", str(folder), "--metrics.tensorboard", "false", "--job.grace_seconds", "2")
    try:
        assert run(load(str(TINY), words, 1), stop, build) == 75
    finally:
        dist.destroy_process_group()
    assert assert_preempted(folder, by="SIGTERM") == 3
    assert "this host could not compile layers.0" in (folder / "run.log").read_text()


def stopped_in_validation(step: int, stop: StopRequest) -> Callable[..., Trainer]:
    """What builds a trainer that is stopped in the validation after a step."""

    def build(runtime, before_build):
        trainer = Trainer(runtime, before_build)
        measure = trainer.validation.measure

        def stopped(learner, at, is_over):
            if at == step:
                stop.record(signal.SIGTERM, None)
            return measure(learner, at, is_over)

        trainer.validation.measure = stopped
        return trainer

    return build


@pytest.mark.slow
def test_a_checkpoint_whose_validation_was_repeated_may_be_the_best(tmp_path: Path):
    """It was saved before, so its manifest has no loss."""
    data = ["--validation.interval", "4", "--validation.sources", '[{name = "held out", kind = "synthetic"}]']
    keys = [*data, "--checkpoint.interval", "4", "--checkpoint.keep_last", "1", "--checkpoint.keep_best", "1"]
    assert launch_here(tmp_path / "undisturbed", *keys) == 0
    folder = tmp_path / "run"
    lines = records(tmp_path / "undisturbed" / "run")
    losses = {line["step"]: line["validation_loss"] for line in lines if "validation_loss" in line}
    best = min(losses, key=losses.__getitem__)
    assert steps_in(tmp_path / "undisturbed" / "run" / "checkpoints") == [best, 20]
    stop = StopRequest()
    words = ("--job.output_dir", str(folder), "--metrics.tensorboard", "false", *keys)
    assert run(load(str(TINY), words, 1), stop, stopped_in_validation(best, stop)) == 75
    assert launch_here(tmp_path, *keys, "--training.steps", "16") == 0
    assert launch_here(tmp_path, *keys) == 0
    assert steps_in(folder / "checkpoints") == [best, 20]
    assert checkpoint.main(["prune", str(folder), "--keep-last", "1", "--keep-best", "1"]) == 0
    assert steps_in(folder / "checkpoints") == [best, 20]


@pytest.mark.parametrize("step", [10, 20])
def test_a_validation_that_a_stop_ends_is_repeated(tmp_path: Path, step: int):
    """Also the last one of a run, which is not done before."""
    data = ["--validation.interval", "10", "--validation.sources", '[{name = "held out", kind = "synthetic"}]']
    average = ["--average.interval", "1"]
    assert launch_here(tmp_path / "undisturbed", *data, *average) == 0
    stop = StopRequest()
    folder = tmp_path / "run"
    words = ("--job.output_dir", str(folder), "--metrics.tensorboard", "false", *data, *average)
    assert run(load(str(TINY), words, 1), stop, stopped_in_validation(step, stop)) == 75
    assert assert_preempted(folder, by="SIGTERM") == step
    for _ in ("repeats it", "has nothing to do"):
        assert launch_here(tmp_path, *data, *average) == 0
    undisturbed = records(tmp_path / "undisturbed" / "run")
    lines = records(folder)
    steps = [line for line in lines if "loss" in line]
    assert [(line["step"], line["loss"]) for line in steps] == [(line["step"], line["loss"]) for line in undisturbed]
    assert [line["step"] for line in lines if "validation_stopped" in line] == [step]
    [repeated] = [line for line in lines if "loss" not in line]
    assert repeated["step"] == step
    for key in ("validation_loss", "validation_average_loss", "validation_by_source"):
        found = {line["step"]: line[key] for line in lines if key in line}
        assert found == {line["step"]: line[key] for line in undisturbed if key in line}
        assert list(found) == [10, 20]


@pytest.mark.parametrize(("is_saved", "code"), [(True, 75), (False, 1)])
def test_data_that_do_not_come_after_a_save_for_a_signal(tmp_path: Path, is_saved: bool, code: int):
    """The save in the middle of a step has written the end of the run; what then fails is no failure of it."""
    stop = StopRequest()
    folder = tmp_path / "run"

    def build(runtime, before_build):
        def train():
            stop.record(signal.SIGTERM, None)
            if is_saved:
                write_status(folder, "preempted", 3, "SIGTERM")
            raise OutageError("s3://bucket/data: no answer")

        return SimpleNamespace(train=train, run=SimpleNamespace(step=3))

    words = ("--job.output_dir", str(folder), "--metrics.tensorboard", "false")
    try:
        assert run(load(str(TINY), words, 1), stop, build) == code
    finally:
        dist.destroy_process_group()
    assert status(folder)["state"] == ("preempted" if is_saved else "failed")
    assert "s3://bucket/data: no answer" in (folder / "run.log").read_text()
