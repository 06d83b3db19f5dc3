"""Values that are not finite in one rank's shard: the checkpoint before stays, and the same command goes on from it."""

import math
import shlex
import socket
from contextlib import closing
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from checkpoint.manifest import step_folder, steps_in
from checkpoint.store import NotFinite
from configs.errors import UserError
from configs.load import load
from tests.end_to_end.launch import TINY
from tests.torture.resume import curve
from trainer.guards.watchdog import Watchdog
from trainer.lifecycle import StopRequest
from trainer.opening import Runtime
from trainer.report.console import Console
from trainer.report.metrics import TimeLedger
from trainer.step import Learner
from trainer.trainer import Trainer

pytestmark = pytest.mark.slow

WORDS = shlex.split(
    "--mesh.dp_shard 2 --checkpoint.keep_last 2 --training.max_skipped_steps 5 --metrics.tensorboard false"
)
EACH_STEP = ("--checkpoint.interval", "1", "--training.steps", "10")
WEIGHT = "model.layers.0.self_attn.q_proj.weight"


def train(folder: str, words: tuple[str, ...], plant_at: int | None = None, where: str = "") -> str:
    """A launch, in which rank 1's part of a state tensor gets a NaN after step `plant_at`; what ends it."""
    job = load(str(TINY), (*WORDS, *words, "--job.output_dir", folder), dist.get_world_size())
    Path(folder).mkdir(exist_ok=True)
    update = Learner.update

    def update_and_plant(self, *arguments):
        update(self, *arguments)
        if trainer.run.step + 1 == plant_at and dist.get_rank() == 1:
            tensor = self.state()[where]
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            with torch.no_grad():
                local.view(-1)[3] = math.nan

    Learner.update = update_and_plant
    try:
        with (
            Console(rank=1) as console,
            closing(Watchdog(Path(folder), 600, print)) as watchdog,
        ):  # one that says nothing
            trainer = Trainer(Runtime(job, torch.device("cpu"), console, StopRequest(), TimeLedger(), watchdog))
            return trainer.train()
    except UserError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        Learner.update = update


def check(ranks, tmp_path, mode, where):
    run = tmp_path / "run"
    words = ("--checkpoint.mode", mode, *EACH_STEP)
    told = ranks(2, train, str(run), words, 6, where)
    assert told[0] == told[1]
    assert told[0].startswith(f"{NotFinite.__name__}: checkpoint step-00000006 is not written")
    assert f"{where} of rank 1 on {socket.gethostname()}; " in told[0]
    assert (
        f"the newest checkpoint is {step_folder(run / 'checkpoints', 5)}: the same command resumes from it" in told[0]
    )
    assert steps_in(run / "checkpoints") == [4, 5]
    assert [path.name for path in (run / "checkpoints").glob("*.tmp")] == []
    assert ranks(2, train, str(run), words) == ["done", "done"]
    assert steps_in(run / "checkpoints") == [9, 10]
    return run


def test_of_a_weight_before_a_sync_save(ranks, tmp_path):
    run = check(ranks, tmp_path, "sync", WEIGHT)
    undisturbed = tmp_path / "undisturbed"
    ranks(2, train, str(undisturbed), EACH_STEP)
    assert curve(run) == curve(undisturbed)


def test_of_a_moment_before_an_async_save(ranks, tmp_path):
    check(ranks, tmp_path, "async", "optimizer.layers.0.self_attn.q_proj.weight.exp_avg_sq")


@pytest.mark.parametrize(
    ("last_step", "reason"),
    [(20, "of the last 6 steps was not finite"), (10, f"not all values are finite in {WEIGHT} of rank 1 on")],
)
def test_while_steps_are_skipped_nothing_is_saved_or_removed(ranks, tmp_path, last_step, reason):
    """Neither at step 10, when a save is due, nor at the end, if it comes while steps are skipped."""
    run = tmp_path / "run"
    words = ("--checkpoint.interval", "5")
    told = ranks(2, train, str(run), (*words, "--training.steps", str(last_step)), 7, WEIGHT)
    assert reason in told[0]
    assert told[0] == told[1]
    assert steps_in(run / "checkpoints") == [5]
    assert ranks(2, train, str(run), (*words, "--training.steps", "10")) == ["done", "done"]
    assert steps_in(run / "checkpoints") == [5, 10]
