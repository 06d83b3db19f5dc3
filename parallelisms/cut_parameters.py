"""Parameters that another axis of the mesh has cut, as tensor parallelism does, before they get owners.

A rank holds its part of such a parameter. An optimizer that updates element by element works on the part; one that
needs whole matrices puts the parts together first, and keeps its own afterwards.
"""

from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor

from parallelisms.ranks import local_part


def local(tensor: Tensor) -> Tensor:
    """The memory behind a parameter or gradient: the whole, or this rank's part of it."""
    return local_part(tensor).detach()


def whole(tensor: Tensor) -> Tensor:
    """A parameter or gradient that is cut, put together; all ranks over which it is cut must call it."""
    return placed(local(tensor), tensor).full_tensor()


def placed(value: Any, parameter: Tensor) -> Any:
    """An optimizer's tensor for this rank's part of a parameter, with its place in the whole; a count as it is."""
    cut = cut_of(parameter)
    if cut is None or not isinstance(value, Tensor) or value.shape != local(parameter).shape:
        return value
    return DTensor.from_local(value, *cut, run_check=False)


def own_part(value: Any, parameter: Tensor) -> Any:
    """The reverse: what this rank keeps of an optimizer's tensor for a whole parameter."""
    cut = cut_of(parameter)
    if cut is None or not isinstance(value, Tensor) or value.shape != parameter.shape:
        return value
    return distribute_tensor(value, *cut, src_data_rank=None).to_local()  # every rank has the whole: none is sent


def cut_of(parameter: Tensor) -> tuple[DeviceMesh, list[Placement]] | None:
    """Over which ranks a parameter is cut, and how; None if they all hold the whole."""
    if not isinstance(parameter, DTensor):
        return None
    mesh, placements = parameter.device_mesh, parameter.placements
    axes = [i for i, placement in enumerate(placements) if mesh.size(i) > 1 and not placement.is_replicate()]
    if not axes:
        return None
    [axis] = axes
    assert mesh.mesh_dim_names is not None
    return mesh[mesh.mesh_dim_names[axis]], [placements[axis]]
