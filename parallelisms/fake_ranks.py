"""What estimates need of a mesh without its ranks: one process acts as one of them, with tensors without memory."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from configs.layout import MeshSizes, buffer_factor
from configs.plan import plan_of
from configs.schema import Config
from parallelisms.attention.context import apply_context_parallel
from parallelisms.expert import apply_expert_parallel
from parallelisms.mesh import Mesh, build_mesh
from parallelisms.tensor import apply_tensor_parallel
from parallelisms.torch_internals import forget_process_groups


@contextmanager
def fake_ranks(world_size: int, rank: int = 0) -> Iterator[None]:
    """Act as one rank of a process group whose other ranks do not exist: collectives return at once."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        forget_process_groups()  # what is left has no threads, and may wait for the collector of garbage


@contextmanager
def mesh_of_a_block(part: MeshSizes, mesh: Mesh | None) -> Iterator[Mesh | None]:
    """The mesh that splits a block: `mesh` if there is one, or one of fake ranks; None if nothing splits it."""
    if part.world_size == 1:
        yield None
    elif mesh:
        yield mesh
    else:
        with fake_ranks(part.world_size):
            yield build_mesh(part, torch.device("cpu"))


def split_blocks(model: nn.Module, config: Config, mesh: Mesh | None) -> None:
    """Leave this rank's part of the blocks of a model on the meta device, which will compute in CPU memory."""
    if mesh is None:
        return
    if mesh.sizes.tp > 1:
        apply_tensor_parallel(model, _on_cpu(mesh.tp))
    if mesh.sizes.ep > 1:
        factor = buffer_factor(config.expert)
        apply_expert_parallel(model, _on_cpu(mesh.ep), factor)
        for name in plan_of(model).experts:
            model.get_submodule(name).in_buffers = factor is not None  # type: ignore[assignment]
    if mesh.sizes.cp > 1:
        apply_context_parallel(model, mesh.cp, config.context.method, config.attention.backend)


def _on_cpu(mesh: DeviceMesh) -> DeviceMesh:
    """The same ranks, for tensors in CPU memory."""
    names = mesh.mesh_dim_names
    if mesh.device_type == "cpu" or names is None:
        return mesh
    groups = [mesh.get_group(name) for name in names]
    return DeviceMesh.from_group(groups, "cpu", mesh=mesh.mesh, mesh_dim_names=names)


def is_sharded(kind: type) -> bool:
    """Whether tensors of a type are distributed, so that operators on their shards follow."""
    return issubclass(kind, DTensor)
