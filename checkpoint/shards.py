"""A rank's parts of tensors, each with its position in the whole and the ranks over which the whole is spread."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

State = Mapping[str, Tensor]


@dataclass(frozen=True)
class Spread:
    """The ranks over which a tensor is spread, and how."""

    ranks: tuple[int, ...] = field(compare=False, repr=False)
    """The ranks of the mesh, in row-major order."""
    digest: int
    """The hash of `ranks`, which is compared in their place."""
    mesh: tuple[int, ...]
    """Sizes of the mesh."""
    cut: tuple[bool, ...]
    """Whether each dimension of the mesh cuts the tensor; along the others, ranks hold copies."""
    placements: str


@dataclass(frozen=True)
class Shard:
    """This rank's part of a tensor. DCP finds the methods by their names (protocol `_Checkpointable`)."""

    local: Tensor
    shape: torch.Size
    """Shape of the whole tensor."""
    offsets: torch.Size
    """Where `local` begins in the whole tensor, one number per dimension."""
    spread: Spread | None = None
    """None: a plain tensor, the same on all ranks that have it."""

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """The box for DCP to fill or write; empty if this rank's part is empty."""
        if self.local.numel() == 0:
            return []
        return [ChunkStorageMetadata(offsets=self.offsets, sizes=self.local.shape)]

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.local.dtype)
        return [
            WriteItem(
                index=MetadataIndex(name, self.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]


def shards_of(state: State) -> dict[str, Shard]:
    """This rank's parts of the tensors in `state`. They share its memory: loading into them loads `state`."""
    places = _Places()
    shards = {}
    for name, tensor in state.items():
        if not isinstance(tensor, DTensor):
            shards[name] = Shard(tensor.detach(), tensor.shape, torch.Size([0] * tensor.dim()))
        elif tensor.device_mesh.get_coordinate() is not None:
            shards[name] = Shard(tensor.to_local().detach(), tensor.shape, *places.of(tensor))
    return shards


class _Places:
    """Where DTensors are; those of one shape, mesh and placements are computed once."""

    def __init__(self) -> None:
        self._known: dict[Any, tuple[torch.Size, Spread]] = {}
        self._meshes: dict[DeviceMesh, tuple[tuple[int, ...], int]] = {}

    def of(self, tensor: DTensor) -> tuple[torch.Size, Spread]:
        mesh = tensor.device_mesh
        key = (mesh, tensor.placements, tensor.shape)
        if key not in self._known:
            [chunk] = tensor.__create_chunk_list__()
            if mesh not in self._meshes:
                ranks = mesh.mesh.flatten()
                self._meshes[mesh] = (tuple(ranks.tolist()), xxhash.xxh3_64_intdigest(ranks.numpy().tobytes()))
            cut = tuple(not placement.is_replicate() for placement in tensor.placements)
            spread = Spread(*self._meshes[mesh], tuple(mesh.shape), cut, repr(tensor.placements))
            self._known[key] = (chunk.offsets, spread)
        return self._known[key]
