"""Computes a row of the parity table: trains like the trainer on a mesh, and compares with the reference."""

import hashlib
import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
import torch._functorch.config
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from checkpoint.manager import CheckpointManager
from checkpoint.reader import Description, Log
from configs.errors import UserError
from configs.layout import mesh_sizes
from configs.load import LoadedConfig, load
from configs.run_stages import largest_first
from configs.schema import Checkpoint
from parallelisms.mesh import build_mesh
from parallelisms.ranks import Json, gather
from parallelisms.torch_internals import forget_process_groups
from scripts.parity_reference import Trajectory, buffers_of, copied, steps_through
from scripts.parity_rows import Difference
from scripts.proving.equal import (
    GRADIENT_FLOOR,
    WEIGHT_FLOOR,
    differences,
    merged_over_ranks,
    ratio,
    whole_tensor,
    worst,
)
from trainer.data.loader import MicroBatch
from trainer.guards.verdict import QueuedStep
from trainer.lr_schedule import learning_rate_of
from trainer.planning.by_memory import choice_by_memory, with_choice
from trainer.planning.skeleton import skeleton
from trainer.step import Learner, build_learner


class Detour(NamedTuple):
    """What a run does on its way that must not change what it learns."""

    evaluate_at: tuple[int, ...] = ()
    """Numbers of steps after which the next step's batch is evaluated without gradients."""
    move_at: int = 0
    """Number of steps after which the state is saved, and loaded into a new learner; 0: never."""
    overrides: tuple[str, ...] = ()
    """The new learner's overrides, in place of the run's."""
    folder: str = ""
    """Where the state is saved: an empty folder."""


STRAIGHT = Detour()


def compare(config_name: str, overrides: tuple[str, ...], path: str, detour: Detour = STRAIGHT) -> Difference | None:
    """Train like the trainer, on this rank of the mesh; rank 0 returns the difference from the reference."""
    found = trajectory(config_name, overrides, detour)
    expected = Trajectory(**torch.load(path))
    difference = difference_of(found, expected)
    return difference if dist.get_rank() == 0 else None


def difference_of(found: Trajectory, expected: Trajectory) -> Difference:
    """Compare two trajectories; all ranks must call it, each with what it holds of the found one."""
    evaluated = [expected.evaluations[step] for step in found.evaluations]
    steps = len(found.losses)
    scalars = {
        "loss": _largest_ratio(found.losses + [*found.evaluations.values()], expected.losses[:steps] + evaluated),
        "norm": _largest_ratio(found.norms, expected.norms[:steps]),
        "first_loss": ratio(found.losses[0], expected.losses[0]),
        "first_norm": ratio(found.norms[0], expected.norms[0]),
    }
    return Difference(
        **merged_over_ranks(scalars),
        initial=_over_ranks(found.initial, expected.initial, WEIGHT_FLOOR),
        gradients=_over_ranks(found.gradients, expected.gradients, GRADIENT_FLOOR),
        weights=_over_ranks(found.weights, expected.weights, WEIGHT_FLOOR),
        buffers=_over_ranks(found.buffers, expected.buffers, WEIGHT_FLOOR),
        sha=_sha(found),
        stopped=found.stopped,
    )


def _over_ranks(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], floor: float) -> dict[str, float]:
    """The largest difference of each tensor on the ranks that have it, in the order of the expected ones.

    Each rank compares what it holds, so that replicas that differ are found, too. One that no rank has is infinitely
    far, as is one that is not expected.
    """
    merged = merged_over_ranks(differences(found, expected, floor, names=found))
    return {name: merged.get(name, math.inf) for name in {**expected, **merged}}


def bits(config_name: str, overrides: tuple[str, ...], detour: Detour = STRAIGHT) -> str:
    """Train on this rank of the mesh; returns the digest of all losses and norms and of the final weights."""
    return _sha(trajectory(config_name, overrides, detour))


def trajectory(config_name: str, overrides: tuple[str, ...], detour: Detour) -> Trajectory:
    """Train like the trainer, on this rank of the mesh."""
    with attention_that_compiles():
        job = load(config_name, overrides, world_size=dist.get_world_size())
        later = load(config_name, detour.overrides, world_size=dist.get_world_size()) if detour.move_at else job
        return _train(job, detour, later)


@contextmanager
def attention_that_compiles() -> Iterator[None]:
    """Use the math backend of attention on torch 2.11, whose compiled float64 CPU kernel fails in backward.

    The kernel's logsumexp is float64, but torch 2.11 traces it as float32. The autograd cache is disabled, because its
    entries on disk do not distinguish the two kernels.
    """
    with FakeTensorMode():
        q = torch.empty(1, 1, 8, 8, dtype=torch.float64)
        _, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q)
    if logsumexp.dtype == q.dtype:
        yield
    else:
        with sdpa_kernel(SDPBackend.MATH), torch._functorch.config.patch(enable_autograd_cache=False):
            yield


def _train(job: LoadedConfig, detour: Detour, later: LoadedConfig) -> Trajectory:
    found = Trajectory()
    job, learner = _learner(job)
    found.initial = _weights(learner) | copied(buffers_of(learner.stages.values()))
    end = detour.move_at or job.config.training.steps
    _go_on(learner, job, 0, end, detour, found)
    if detour.move_at:
        later, learner = _moved(learner, later, detour)
        _go_on(learner, later, end, job.config.training.steps, detour, found)
    learner.finish_update()
    found.weights = _weights(learner)
    if learner.average and learner.average.has_begun:
        with learner.averaged():
            found.weights |= {f"average of {name}": weight for name, weight in _weights(learner).items()}
    found.buffers = buffers_of(learner.stages.values())
    return found


def _weights(learner: Learner) -> dict[str, Tensor]:
    return {name: whole(parameter) for name, parameter in learner.parameters.items()}


def _learner(job: LoadedConfig) -> tuple[LoadedConfig, Learner]:
    """The job with what its limit of memory chooses on the mesh, and the learner."""
    mesh = build_mesh(mesh_sizes(job.config, dist.get_world_size()), torch.device("cpu"))
    most, *others = [stage.config for stage in largest_first(job.stages, job.config.training.steps)]
    job = with_choice(job, choice_by_memory(most, mesh, others))
    return job, build_learner(job.config, mesh, [stage.config for stage in job.later_stages])


def _go_on(learner: Learner, job: LoadedConfig, first: int, end: int, detour: Detour, found: Trajectory) -> None:
    """Take the steps after `first` steps, up to `end` steps; the learner is new, or has taken the steps before."""
    mesh = learner.mesh
    present = job.stages[0]
    taken = steps_through(job.stages, mesh.dp_rank, mesh.sizes.dp, first)
    for step, (stage, micro_batches) in zip(range(first, end), taken, strict=False):
        if stage != present:
            learner.begin_stage(stage.config)
            present = stage
        learner.freeze(step)
        if step in detour.evaluate_at:
            loss, tokens, _ = mesh.sum_over_tokens(learner.evaluate(micro_batches, None)).tolist()
            found.evaluations[step] = loss / tokens
            if learner.average and learner.average.has_begun:
                with learner.averaged():
                    learner.evaluate(micro_batches, None)
        gradients, last = _judged(learner, micro_batches)
        if step == 0:
            held = {name: p.grad for name, p in learner.parameters.items() if p.grad is not None}
            found.gradients = {name: whole(grad) for name, grad in held.items()}
        loss, norm = (each.item() for each in gradients)
        found.losses.append(loss)
        found.norms.append(norm)
        try:
            learner.update(last, learning_rate_of(stage, step + 1))
            learner.update_average(step + 1, last.skip)
            last.result()
        except UserError as error:  # the ranks hold different results
            found.stopped = str(error)
            return


def _judged(learner: Learner, micro_batches: list[MicroBatch]) -> tuple[tuple[Tensor, Tensor], QueuedStep]:
    """A step's gradients and its verdict; in the buffers of experts, if they are large enough."""
    for in_buffers in (True, False):
        gradients = learner.gradients(micro_batches, in_buffers)
        step = learner.judge(micro_batches, gradients)
        if not step.read().is_missing_rows:
            break
        learner.finish(step.skip)
    return gradients, step


def _moved(learner: Learner, job: LoadedConfig, detour: Detour) -> tuple[LoadedConfig, Learner]:
    """Save a learner's state by a checkpoint, and load it into a new learner, perhaps on another mesh."""
    manager = _checkpoints(detour.folder, job)
    manager.resume(learner.state())
    manager.begin_lineage()
    manager.save(detour.move_at, learner.state(), {"tokens": 0})
    manager.close()
    forget_process_groups()  # or DTensor would use groups of the mesh that is left
    job, learner = _learner(job)
    manager = _checkpoints(detour.folder, job)
    assert manager.resume(learner.state()) is not None, "the checkpoint that was just saved is not found"
    manager.close()
    learner.was_loaded()
    return job, learner


def write_teacher(config_name: str, overrides: tuple[str, ...], folder: str) -> None:
    """Write a checkpoint of a job's initial weights, alone, in `folder`."""
    job, learner = _learner(load(config_name, overrides, world_size=1))
    run = Description(job.config.model_dump(mode="json"), learner.mesh.sizes.axes)
    with closing(CheckpointManager(Path(folder), Checkpoint(mode="sync"), run, Log())) as manager:
        manager.resume(learner.state())
        manager.begin_lineage()
        manager.save(1, learner.state(), {"tokens": 1})


def _checkpoints(folder: str, job: LoadedConfig) -> CheckpointManager:
    run = Description({}, {}, neutral=skeleton(job.config.model).balance)
    return CheckpointManager(Path(folder), Checkpoint(), run, Log())


def _of_all_stages(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Collect the tensors of all ranks, since a pipeline rank has only those of its own stages."""
    shapes: Json = [
        [name, list(tensor.shape), str(tensor.dtype).removeprefix("torch.")] for name, tensor in tensors.items()
    ]
    found: dict[str, Tensor] = {}
    for rank, described in enumerate(gather(shapes)):
        for name, shape, dtype in described:
            if name in found:  # all stages have it
                continue
            own = rank == dist.get_rank()
            found[name] = tensors[name].contiguous() if own else torch.empty(shape, dtype=getattr(torch, dtype))
            dist.broadcast(found[name], src=rank)
    return found


def whole(tensor: Tensor) -> Tensor:
    # torch warns that gathering FSDP x TP shards takes two collectives; speed does not matter here.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    return whole_tensor(tensor).detach().clone()


def _sha(found: Trajectory) -> str:
    """Digest of the bits of a trajectory, except the first gradients; all ranks must call it."""
    digest = hashlib.sha256(repr((found.losses, found.norms)).encode())
    for name, weight in sorted(_of_all_stages(found.weights).items()):
        digest.update(name.encode())
        digest.update(weight.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _largest_ratio(found: list[float], expected: list[float]) -> float:
    return worst(ratio(f, e) for f, e in zip(found, expected, strict=True))
