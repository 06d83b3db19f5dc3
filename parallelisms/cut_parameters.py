"""Owned parameters that other axes of the mesh, those of tensor and expert parallelism, have already sharded.

A rank holds its part of such a parameter. An element-wise optimizer works on the part; an optimizer that needs whole
matrices gathers the parts of its matrices first, and afterwards keeps only its own.
"""

from collections.abc import Container

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor

from parallelisms.ranks import local_part

Cut = tuple[DeviceMesh, list[Placement]]
"""The ranks over which a tensor is sharded, and how."""


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a parameter or gradient, detached; the whole if it is not sharded."""
    return local_part(tensor).detach()


def whole(tensor: Tensor, cut: Cut | None) -> Tensor:
    """Gather a tensor of which this rank has a part; all ranks over which it is sharded must call it."""
    return tensor if cut is None else DTensor.from_local(tensor, *cut, run_check=False).full_tensor()


def placed(tensor: Tensor, cut: Cut | None) -> Tensor:
    """Turn this rank's part of a tensor into a DTensor; the whole stays as it is."""
    return tensor if cut is None else DTensor.from_local(tensor, *cut, run_check=False)


def own_part(tensor: Tensor, cut: Cut | None) -> Tensor:
    """Take this rank's part of a whole tensor; the inverse of `whole`."""
    if cut is None:
        return tensor
    return distribute_tensor(tensor, *cut, src_data_rank=None).to_local()  # every rank has the whole: nothing is sent


def cut_of(parameter: Tensor, dimensions: Container[int]) -> Cut | None:
    """The ranks over which some dimensions of a parameter are sharded, and how; None if they all hold the whole."""
    if not isinstance(parameter, DTensor):
        return None
    mesh = parameter.device_mesh
    names = mesh.mesh_dim_names
    assert names is not None
    axes = {
        name: placement
        for name, placement in zip(names, parameter.placements, strict=True)
        if mesh[name].size() > 1 and isinstance(placement, Shard) and placement.dim in dimensions
    }
    return (mesh[tuple(axes)], list(axes.values())) if axes else None
