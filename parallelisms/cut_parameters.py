"""Owned parameters that another axis of the mesh, such as tensor parallelism, has already sharded.

A rank holds its part of such a parameter. An element-wise optimizer works on the part; an optimizer that needs whole
matrices gathers the parts first, and afterwards keeps only its own.
"""

from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor

from parallelisms.ranks import local_part


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a parameter or gradient, detached; the whole if it is not sharded."""
    return local_part(tensor).detach()


def whole(tensor: Tensor) -> Tensor:
    """Gather a sharded parameter or gradient; all ranks over which it is sharded must call it."""
    return placed(local(tensor), tensor).full_tensor()


def placed(value: Any, parameter: Tensor) -> Any:
    """Turn an optimizer's tensor for this rank's part of a parameter into a DTensor; a count stays as it is."""
    cut = cut_of(parameter)
    if cut is None or not isinstance(value, Tensor) or value.shape != local(parameter).shape:
        return value
    return DTensor.from_local(value, *cut, run_check=False)


def own_part(value: Any, parameter: Tensor) -> Any:
    """Take this rank's part of an optimizer's tensor for a whole parameter; the inverse of `placed`."""
    cut = cut_of(parameter)
    if cut is None or not isinstance(value, Tensor) or value.shape != parameter.shape:
        return value
    return distribute_tensor(value, *cut, src_data_rank=None).to_local()  # every rank has the whole, so nothing is sent


def cut_of(parameter: Tensor) -> tuple[DeviceMesh, list[Placement]] | None:
    """The ranks over which a parameter is sharded, and how; None if they all hold the whole."""
    if not isinstance(parameter, DTensor):
        return None
    mesh = parameter.device_mesh
    placements = parameter.placements
    axes = [i for i, placement in enumerate(placements) if mesh.size(i) > 1 and not placement.is_replicate()]
    if not axes:
        return None
    [axis] = axes
    assert mesh.mesh_dim_names is not None
    return mesh[mesh.mesh_dim_names[axis]], [placements[axis]]
