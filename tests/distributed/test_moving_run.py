"""One run moved through several meshes, by its checkpoints alone, against the run that stayed where it was."""

from contextlib import closing
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from configs.load import load
from scripts.parity_rows import MOE_BIAS, words
from tests.losses import kept_losses
from trainer.guards.watchdog import Watchdog
from trainer.lifecycle import StopRequest
from trainer.opening import Runtime
from trainer.report.console import Console
from trainer.report.metrics import TimeLedger
from trainer.trainer import Trainer

STEPS = 3  # on each mesh
STAY: tuple[str, ...] = ("--training.micro_batch_size", "1")
MESHES = [
    (4, ("--mesh.dp_shard", "4", "--training.micro_batch_size", "2")),
    (4, ("--mesh.tp", "2", "--activation_checkpoint.mode", "selective", "--training.micro_batch_size", "4")),
    (4, ("--mesh.pp", "2", "--training.micro_batch_size", "2")),
    (4, ("--mesh.cp", "2", "--context.method", "ring", "--fsdp.zero_stage", "2")),
    (1, STAY),
]
TWO_RANKS = [
    (2, ("--mesh.dp_shard", "2", "--training.micro_batch_size", "2")),
    (2, ("--mesh.tp", "2", "--activation_checkpoint.mode", "selective", "--training.micro_batch_size", "8")),
    (1, STAY),
]
EP_MESHES = [
    (4, ("--mesh.ep", "4", "--training.micro_batch_size", "2")),
    (4, ("--mesh.ep", "2", "--activation_checkpoint.mode", "full", "--training.micro_batch_size", "2")),
    (2, ("--mesh.ep", "1", "--training.micro_batch_size", "2")),
    (4, ("--mesh.ep", "4", "--mesh.cp", "2", "--training.micro_batch_size", "2")),
]

TIED = {"model.tie_embeddings": "true"}
OWNER = ("--fsdp.partition", "owner", "--mesh.dp_replicate", "2", "--mesh.dp_shard", "1")
TIED_MESHES = [
    (2, ("--mesh.pp", "2", "--pipeline.schedule", "interleaved_1f1b", "--training.micro_batch_size", "2")),
    (2, (*OWNER, "--training.micro_batch_size", "2")),
    (4, (*OWNER, "--mesh.pp", "2", "--training.micro_batch_size", "2")),
    (1, STAY),
]


def go_on(folder: str, steps: int, overrides: tuple[str, ...]) -> list[float]:
    """Train the run in `folder` up to `steps`, through the trainer; the losses of this launch."""
    words = ("--job.output_dir", folder, "--training.steps", str(steps), "--metrics.tensorboard", "false")
    job = load("parity.toml", (*words, *overrides), dist.get_world_size())
    Path(folder).mkdir(parents=True, exist_ok=True)
    with Console(dist.get_rank()) as console, closing(Watchdog(Path(folder), 600, print)) as watchdog:
        trainer = Trainer(Runtime(job, torch.device("cpu"), console, StopRequest(), TimeLedger(), watchdog))
        losses = kept_losses(trainer)
        assert trainer.train() == "done"
    return losses


@pytest.mark.parametrize(
    ("meshes", "run"),
    [
        pytest.param(TWO_RANKS, {}, marks=pytest.mark.slow),
        # test_exact.py moves through PP, HSDP and an owner partition, with the same bits.
        pytest.param(MESHES, {}, marks=pytest.mark.long),
        pytest.param(EP_MESHES, MOE_BIAS, marks=pytest.mark.long),
        # Both ends of the pipeline hold the matrix and its moments; a checkpoint has them once.
        pytest.param(TIED_MESHES, TIED, marks=pytest.mark.slow),
    ],
    ids=["two ranks", "dense", "experts", "tied"],
)
def test_a_run_moved_through_meshes_learns_the_same(ranks, tmp_path, meshes, run):
    of_run = words(run)
    stayed = ranks(1, go_on, str(tmp_path / "stayed"), STEPS * len(meshes), STAY + of_run)[0]
    moved: list[float] = []
    for n_ranks, overrides in meshes:
        results = ranks(n_ranks, go_on, str(tmp_path / "moved"), len(moved) + STEPS, overrides + of_run)
        assert all(losses == results[0] for losses in results)
        moved += results[0]
    assert len(moved) == len(stayed) == STEPS * len(meshes)
    differences = [abs(m - s) / s for m, s in zip(moved, stayed, strict=True)]
    print(f"largest relative difference of the losses over the meshes: {max(differences):.1e}")
    assert max(differences) <= 1e-10
