"""Computes a row of the parity table: trains like the trainer on a mesh, and compares with the reference."""

import hashlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch._functorch.config
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from configs.layout import mesh_sizes
from configs.load import load
from configs.schema import Config
from parallelisms.mesh import build_mesh
from parallelisms.ranks import gather
from scripts.parity_reference import Trajectory, batches
from scripts.parity_rows import Difference
from trainer.lr_schedule import learning_rate
from trainer.step import build_learner


def compare(config_name: str, overrides: tuple[str, ...], path: str) -> Difference | None:
    """Train like the trainer, on this rank of the mesh; rank 0 returns the difference from the reference."""
    with attention_that_compiles():
        found = _train(load(config_name, overrides, world_size=dist.get_world_size()).config)
    if dist.get_rank() > 0:
        return None
    expected = Trajectory(**torch.load(path))
    return Difference(
        loss=_largest_ratio(found.losses, expected.losses),
        norm=_largest_ratio(found.norms, expected.norms),
        gradient=_largest(found.gradients, expected.gradients),
        weight=_largest(found.weights, expected.weights),
        sha=_sha(found),
    )


def bits(config_name: str, overrides: tuple[str, ...]) -> str:
    """Train on this rank of the mesh; returns the digest of all losses and norms and of the final weights."""
    with attention_that_compiles():
        return _sha(_train(load(config_name, overrides, world_size=dist.get_world_size()).config))


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


def _train(config: Config) -> Trajectory:
    mesh = build_mesh(mesh_sizes(config, dist.get_world_size()), torch.device("cpu"))
    learner = build_learner(config, mesh)
    found = Trajectory()

    def keep_first_gradients(_optimizer: object, _arguments: object, given: dict[str, Any]) -> None:
        if not found.losses:
            divisor = given.get("divisor")  # clips in the optimizer's kernel
            clipped = 1.0 if divisor is None else divisor
            grads = {name: whole(p.grad) for name, p in learner.parameters.items() if p.grad is not None}
            found.gradients = {name: grad / clipped for name, grad in grads.items()}

    learner.optimizer.register_step_pre_hook(keep_first_gradients)
    for step, micro_batches in enumerate(batches(config, mesh.dp_rank, mesh.sizes.dp)):
        learner.freeze(step)
        result = learner.step(micro_batches, learning_rate(config.lr_schedule, config.optimizer.lr, step)).result()
        found.losses.append(result.loss)
        found.norms.append(result.grad_norm)
    learner.finish_update()
    found.weights = {name: whole(p) for name, p in learner.parameters.items()}
    found.gradients, found.weights = _of_all_stages(found.gradients), _of_all_stages(found.weights)
    return found


def _of_all_stages(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Collect the tensors of all ranks, since a pipeline rank has only those of its own stages."""
    return dict(item for of_rank in gather(tensors) for item in of_rank.items())


def whole(tensor: Tensor) -> Tensor:
    # torch warns that gathering FSDP x TP shards takes two collectives; speed does not matter here.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def _sha(found: Trajectory) -> str:
    """Digest of the bits of a trajectory, except the first gradients."""
    digest = hashlib.sha256(repr((found.losses, found.norms)).encode())
    for name, weight in sorted(found.weights.items()):
        digest.update(name.encode())
        digest.update(weight.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _largest_ratio(found: list[float], expected: list[float]) -> float:
    return max(abs(f - e) / abs(e) for f, e in zip(found, expected, strict=True))


def _largest(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    return max(_relative(found[name], expected[name]) for name in expected)


def _relative(found: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest expected value."""
    return ((found - expected).abs().max() / expected.abs().max()).item()
