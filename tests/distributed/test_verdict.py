"""One verdict on a step for all ranks: what a single rank sees decides for all, and is said with its name."""

import io
import math
import socket
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from configs.errors import UserError
from configs.load import load
from parallelisms.passes import OneByOne
from tests.losses import kept_losses
from tests.marked import marked
from tests.torture.resume import JOB
from trainer.guards.verdict import Seen, describe
from trainer.guards.watchdog import Watchdog
from trainer.lifecycle import StopRequest
from trainer.opening import Runtime
from trainer.report.console import Console
from trainer.report.metrics import TimeLedger
from trainer.trainer import Trainer

HOST = socket.gethostname()
MESHES = {
    "DDP": ("--mesh.dp_replicate", "2"),
    "TP": ("--mesh.tp", "2"),
}


@contextmanager
def gradients_changed(rank: int, step: int, change: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Change, on one rank, the reduced gradient of a parameter of which the other rank has a copy, in one step."""
    original, calls = OneByOne.train, []

    def train(self, *arguments):
        total = original(self, *arguments)
        calls.append(1)
        if dist.get_rank() == rank and len(calls) == step:
            gradient = self.model.get_parameter("layers.1.input_layernorm.weight").grad
            change(gradient.to_local() if hasattr(gradient, "to_local") else gradient)
        return total

    OneByOne.train = train
    try:
        yield
    finally:
        OneByOne.train = original


def poison(gradient: torch.Tensor) -> None:
    gradient[3] = math.nan


def enlarge(gradient: torch.Tensor) -> None:
    """As a flipped bit of an exponent does."""
    gradient[3] = 1024.0


def trained(folder: str, words: tuple[str, ...], change: Callable[[torch.Tensor], None]) -> dict:
    """Four steps, in the third of which rank 1's gradient is changed: what was said, and what the weights were."""
    words = (*words, "--metrics.tensorboard", "false", "--training.steps", "4")
    job = load(str(JOB), ("--job.output_dir", folder, *words), dist.get_world_size())
    Path(folder).mkdir(exist_ok=True)
    said, error, weights = io.StringIO(), "", []
    with (
        Console(dist.get_rank(), out=said) as console,
        closing(Watchdog(Path(folder), 600, print)) as watchdog,
        gradients_changed(1, 3, change),
    ):
        trainer = Trainer(Runtime(job, torch.device("cpu"), console, StopRequest(), TimeLedger(), watchdog))
        losses = kept_losses(trainer)
        count = trainer.progress.count

        def counted(result):
            weights.append([p.detach().clone() for p in trainer.learner.parameters.values()])
            count(result)

        trainer.progress.count = counted
        try:
            trainer.train()
        except UserError as fault:
            error = str(fault)
            trainer.loader.close()
    same = [all(map(equal, before, after)) for before, after in pairwise(weights)]
    return {"said": said.getvalue(), "error": error, "same": same, "losses": losses, "step": trainer.run.step}


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    local_a, local_b = (t.to_local() if hasattr(t, "to_local") else t for t in (a, b))
    return torch.equal(local_a, local_b)


@pytest.mark.parametrize("mesh", marked(MESHES, slow=["TP"]))
def test_what_one_rank_sees_skips_the_step_on_all(ranks, tmp_path, mesh):
    first, second = ranks(2, trained, str(tmp_path / "run"), MESHES[mesh], poison)
    assert first["same"] == second["same"] == [False, True, False]
    assert "step 3 skipped: loss 5." in first["said"]
    assert f", gradient norm nan on rank 1 ({HOST}) and " in first["said"]
    assert f" on rank 0 ({HOST}); its samples are 16 to 23" in first["said"]
    assert [math.isnan(loss) for loss in first["losses"]] == [False] * 4
    assert first["losses"] == second["losses"]
    assert first["step"] == second["step"] == 4


@pytest.mark.parametrize("mesh", marked(MESHES, slow=["TP"]))
def test_ranks_with_different_finite_results_end_the_run(ranks, tmp_path, mesh):
    first, second = ranks(2, trained, str(tmp_path / "run"), MESHES[mesh], enlarge)
    assert first["error"] == second["error"]
    assert first["error"].startswith("the ranks hold different results of one step: loss 5.")
    assert f" on rank 0 ({HOST}) and 1024.000" in first["error"]
    assert f" on rank 1 ({HOST}); nothing was updated" in first["error"]
    assert first["same"] == second["same"] == [False], "the third step was not counted"


def test_the_commonest_value_is_that_of_the_others():
    seen = [Seen(rank, f"node-{rank // 4}", 5.5, 1.25 if rank not in (2, 5) else math.nan) for rank in range(8)]
    assert describe(seen) == "loss 5.5, gradient norm nan on ranks 2 (node-0), 5 (node-1) and 1.25 on the others"
    assert describe(seen[:2]) == "loss 5.5, gradient norm 1.25"
