"""A step's result that is read while the next one is computed, as on a GPU, changes nothing but when it is read."""

import io
import json
import math
import shutil
import signal
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from checkpoint.manifest import step_folder, steps_in
from configs.errors import UserError
from configs.load import load
from tests.distributed.test_verdict import enlarge, poison
from tests.end_to_end.launch import TINY, assert_same_tensors, curve, records, tensors
from trainer.guards.verdict import QueuedStep
from trainer.guards.watchdog import Watchdog
from trainer.lifecycle import StopRequest
from trainer.opening import Runtime
from trainer.report.console import Console
from trainer.report.metrics import TimeLedger
from trainer.step import Learner
from trainer.trainer import Trainer

WORDS = (
    *("--metrics.tensorboard", "false", "--training.steps", "12", "--metrics.interval", "2"),
    *("--checkpoint.interval", "4", "--checkpoint.keep_last", "5", "--fault.compare_interval", "6"),
    *("--validation.interval", "5", "--validation.sources", '[{name = "held", kind = "synthetic"}]'),
    *("--mesh.dp_replicate", "2"),  # of which a copy of a gradient can differ
)


def train(folder: str, is_late: bool, changes: dict[int, str], words: tuple[str, ...] = (), rescue_in: int = 0) -> dict:
    """A launch, with changes of rank 1's gradients or a signal to it in some steps, and a rescue in the middle of one.

    Returns what was said, how it ended, and the steps that the trainer had counted when each step was judged.
    """
    job = load(str(TINY), (*WORDS, *words, "--job.output_dir", folder), dist.get_world_size())
    Path(folder).mkdir(exist_ok=True)
    said, stop, counted, error = io.StringIO(), StopRequest(), [], ""
    norm, steps = Learner.grad_norm, []

    def grad_norm(learner: Learner) -> torch.Tensor:
        counted.append(trainer.run.step)
        steps.append(trainer.step + 1)
        change = changes.get(steps[-1]) if dist.get_rank() == 1 and steps.count(steps[-1]) == 1 else None
        if change == "stop":
            stop.record(signal.SIGTERM, None)
        elif change:
            gradient = learner.parameters["layers.1.input_layernorm.weight"].grad
            {"poison": poison, "enlarge": enlarge}[change](
                gradient.to_local() if hasattr(gradient, "to_local") else gradient
            )
        return norm(learner)

    Learner.grad_norm = grad_norm
    try:
        with (
            Console(dist.get_rank(), out=said) as console,
            closing(Watchdog(Path(folder), 600, print)) as watchdog,
        ):
            trainer = Trainer(Runtime(job, torch.device("cpu"), console, stop, TimeLedger(), watchdog))
            trainer.reads_late = is_late
            computing, judge, left = trainer.watch.grace.computing, trainer._judge, []

            def rescued(rescue):
                finish = rescue("SIGTERM", dist.group.WORLD)
                if finish:
                    finish()
                else:  # once the last step is computed again
                    left.append(rescue)

            def computing_and_rescued(step, rescue):
                if step == rescue_in:
                    rescued(rescue)
                computing(step, rescue)

            def rescued_and_judge(number, *arguments):
                if left and number == rescue_in + 1:
                    rescued(left.pop())
                return judge(number, *arguments)

            trainer.watch.grace.computing = computing_and_rescued
            trainer._judge = rescued_and_judge
            try:
                error = trainer.train()
            except UserError as fault:
                error = str(fault)
                trainer.loader.close()
    finally:
        Learner.grad_norm = norm
    weights = [p.detach().to_local().clone() for p in trainer.learner.parameters.values()]
    lines = [line for line in said.getvalue().splitlines() if " skipped: " in line or ": computed again" in line]
    return {"said": lines, "end": error, "counted": counted, "step": trainer.run.step, "weights": weights}


def same_run(a: Path, b: Path) -> None:
    assert curve(a) == curve(b)
    keys = ("step", "lr", "tokens", "validation_loss", "incidents", "skipped")
    lines = [[[record.get(key) for key in keys] for record in records(run)] for run in (a, b)]
    assert lines[0] == lines[1]
    assert steps_in(a / "checkpoints") == steps_in(b / "checkpoints") != []
    for step in steps_in(a / "checkpoints"):
        assert_same_tensors(tensors(a, step), tensors(b, step))
        folders = [step_folder(run / "checkpoints", step) for run in (a, b)]
        said = [json.loads((folder / "trainer.json").read_text()) for folder in folders]
        assert (said[0]["run"], said[0]["data"]) == (said[1]["run"], said[1]["data"])


def both(ranks, tmp_path, changes, *words, rescue_in=0):
    late, soon = (ranks(2, train, str(tmp_path / n), n == "late", changes, words, rescue_in) for n in ("late", "soon"))
    assert late[0]["end"] == late[1]["end"]
    assert late[0]["counted"] == late[1]["counted"]
    return late[0], soon[0]


@pytest.mark.long
def test_steps_that_are_not_finite(ranks, tmp_path):
    """In step 3, whose result is read in step 4, and in step 8, whose save waits for step 9."""
    late, soon = both(ranks, tmp_path, {3: "poison", 8: "poison"})
    assert late["end"] == soon["end"] == "done"
    assert late["said"] == soon["said"]
    assert "step 3 skipped: loss 5." in late["said"][0]
    assert "step 3: computed again, the step is finite" in "".join(late["said"])
    assert steps_in(tmp_path / "late" / "checkpoints") == [4, 9, 12]
    same_run(tmp_path / "late", tmp_path / "soon")
    assert late["counted"][:3] == [0, 0, 1]
    assert soon["counted"][:3] == [0, 1, 2]


@pytest.mark.slow
def test_spikes_that_are_skipped(ranks, tmp_path):
    spikes = ("--fault.spikes.action", "skip", "--fault.spikes.window", "3", "--fault.spikes.threshold", "1e-3")
    late, soon = both(ranks, tmp_path, {}, *spikes, "--training.max_skipped_steps", "12")
    assert late["end"] == soon["end"]
    assert late["said"] == soon["said"] != []
    same_run(tmp_path / "late", tmp_path / "soon")


@pytest.mark.slow
def test_ranks_that_differ_end_the_run_before_another_update(ranks, tmp_path):
    late, soon = both(ranks, tmp_path, {3: "enlarge"})
    assert late["end"].startswith("the ranks hold different results of one step: loss 5.")
    assert late["end"] == soon["end"]
    assert late["step"] == soon["step"] == 2
    for one, other in zip(late["weights"], soon["weights"], strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
def test_a_stop_is_learned_with_the_result(ranks, tmp_path):
    late, soon = both(ranks, tmp_path, {7: "stop"})
    assert (late["end"], late["step"]) == ("preempted", 8)
    assert (soon["end"], soon["step"]) == ("preempted", 7)
    assert ranks(2, train, str(tmp_path / "late"), True, {})[0]["end"] == "done"
    ranks(2, train, str(tmp_path / "straight"), False, {})
    assert curve(tmp_path / "late") == curve(tmp_path / "straight")


@pytest.mark.parametrize(
    "changes",
    [pytest.param({}, marks=pytest.mark.long), pytest.param({3: "poison"}, marks=pytest.mark.slow)],
    ids=["finite", "skipped"],
)
def test_a_save_in_the_middle_of_a_step_knows_the_last_result(ranks, tmp_path, changes):
    """The last step's result is not counted yet when a grace period ends."""
    both(ranks, tmp_path, changes, "--training.steps", "4", rescue_in=3)
    assert steps_in(tmp_path / "late" / "checkpoints") == [3, 4]
    same_run(tmp_path / "late", tmp_path / "soon")


@pytest.mark.slow
def test_a_result_that_differs_is_not_saved_in_the_middle_of_a_step(ranks, tmp_path):
    late, _ = both(ranks, tmp_path, {3: "enlarge"}, rescue_in=3)
    assert "hold different results" in late["end"]
    assert not steps_in(tmp_path / "late" / "checkpoints")
    assert not math.isnan(late["step"])


EXPERTS = (
    *("--mesh.dp_replicate", "1", "--mesh.dp_shard", "2", "--mesh.ep", "2", "--model.n_experts", "4"),
    *("--model.experts_per_token", "2", "--average.interval", "3", "--optimizer.groups"),
    '[{pattern = "layers.0.*", freeze_until_step = 2}]',
)
SMALL = ("--expert.exchange", "buffers", "--expert.buffer_factor", "1.0")


def repeated(run: Path) -> list[int]:
    return [record["repeated_steps"] for record in records(run) if "repeated_steps" in record]


@pytest.mark.parametrize(
    "factor",
    [
        pytest.param("1.0", marks=pytest.mark.slow),
        pytest.param("1.1", marks=pytest.mark.slow),
        pytest.param("2.0", marks=pytest.mark.long),
    ],
)
def test_buffers_of_experts_change_nothing(ranks, tmp_path, factor):
    """A buffer of 1.0 times an even load is too small in all steps, one of 1.1 in some, and one of 2.0 in none."""
    late, soon = both(ranks, tmp_path, {}, *EXPERTS, *SMALL[:2], "--expert.buffer_factor", factor)
    ranks(2, train, str(tmp_path / "uneven"), True, {}, EXPERTS)
    assert late["end"] == soon["end"] == "done"
    same_run(tmp_path / "late", tmp_path / "soon")
    same_run(tmp_path / "late", tmp_path / "uneven")
    of_factor = {"1.0": range(12, 13), "1.1": range(1, 12), "2.0": range(1)}[factor]
    assert repeated(tmp_path / "late") == repeated(tmp_path / "soon")
    assert repeated(tmp_path / "late")[-1] in of_factor
    assert not repeated(tmp_path / "uneven")


@pytest.mark.slow
def test_a_save_in_the_middle_of_a_step_waits_for_a_step_that_lacks_rows(ranks, tmp_path):
    """The state saved in step 4 is that after step 3, computed again, with its average; the run goes on from there."""
    words = (*EXPERTS, *SMALL, "--checkpoint.interval", "1000")
    ranks(2, train, str(tmp_path / "late"), True, {}, (*words, "--training.steps", "4"), 3)
    assert steps_in(tmp_path / "late" / "checkpoints") == [3, 4]
    ranks(2, train, str(tmp_path / "straight"), True, {}, (*EXPERTS, "--checkpoint.interval", "3"))
    assert_same_tensors(tensors(tmp_path / "late", 3), tensors(tmp_path / "straight", 3))
    shutil.rmtree(step_folder(tmp_path / "late" / "checkpoints", 4))
    assert ranks(2, train, str(tmp_path / "late"), True, {}, words)[0]["end"] == "done"
    assert curve(tmp_path / "late") == curve(tmp_path / "straight")


@pytest.mark.slow
def test_what_is_measured_of_experts_is_the_steps(ranks, tmp_path):
    """The next step's small batch, whose gradient gives the noise scale, is not counted."""
    words = ("--training.steps", "4", "--metrics.interval", "1", "--metrics.details_interval", "1")
    both(ranks, tmp_path, {}, *EXPERTS, "--model.router.load_balance", "none", *words)
    keys = ("tokens_per_expert", "load_imbalance", "router_entropies", "grad_noise_trace")
    late, soon = ([[record.get(key) for key in keys] for record in records(tmp_path / n)] for n in ("late", "soon"))
    assert late == soon
    assert all(any(line) for line in late)


SECONDS = 0.2


def train_on_a_slow_device(folder: str) -> dict:
    """A launch whose steps are queued at once, and take `SECONDS` until their results can be read."""
    result = QueuedStep.result

    def slow_result(step):
        time.sleep(SECONDS)
        return result(step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(QueuedStep, "result", slow_result)
        return train(folder, True, {}, ("--metrics.interval", "1"))


@pytest.mark.slow
def test_a_step_before_a_save_or_a_validation_takes_as_long_as_others(ranks, tmp_path):
    ranks(2, train_on_a_slow_device, str(tmp_path / "run"))
    seconds = {record["step"]: record["step_seconds"] for record in records(tmp_path / "run")}
    assert seconds.keys() == set(range(1, 13))
    assert min(seconds.values()) > 0.9 * SECONDS, seconds
