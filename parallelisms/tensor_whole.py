"""Tensor parallelism whose activations are whole between the matrices (Shoeybi et al. 2019, Megatron-LM, section 3).

It is for models that Keel has no modules for: their plan says which matrices are split, and everything else computes
the same on all ranks of the axis, on the whole sequence. Three operations on a rank's tensors make that exact. Each is
the other's backward pass, or its own:

    same     nothing forward, a sum over the ranks backward: before a matrix that is split by its output features, and
             for a weight that each rank uses for its heads only
    total    a sum forward, nothing backward: after a matrix that is split by its input features
    joined   the ranks' features side by side forward, the own part backward; `own_part` is the inverse

Experts may store two matrices one after the other in one parameter, a gate and an up projection. A rank keeps a
contiguous part of it, as of any parameter, so that initial values, FSDP, optimizers and checkpoints need not know. To
compute, the ranks exchange rows, so that each has its part of both matrices, and exchange the gradients back. So each
rank's part of the parameter moves once per pass; to compute with the stored rows would move products, which are larger
where tokens are many.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from configs.plan import TENSOR_PARALLEL_DIM
from parallelisms.torch_internals import group_named

# Its name since torch 2.13, where the old one warns.
_all_gather = funcol.all_gather_single if hasattr(funcol, "all_gather_single") else funcol.all_gather_tensor


class _Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _sum(gradients[0], ctx.mesh), None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        return _sum(x, mesh)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0], None


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        return _side_by_side(x, mesh)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _own(gradients[0], ctx.mesh), None


class _OwnPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        return _own(x, mesh)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _side_by_side(gradients[0], ctx.mesh), None


def sum_of_parts(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """The sum over the ranks of `mesh`, each of which goes on with it: a gradient is the sum of theirs."""
    return _Same.apply(_Total.apply(x, mesh), mesh)


# An op hides the numbers of segments, which differ between ranks: their compiled graphs must issue collectives alike.
@torch.library.custom_op("keel::repacked", mutates_args=())
def _repacked(x: Tensor, dim: int, n_packed: int, is_inverse: bool, group: str) -> Tensor:
    """Exchange a contiguous part of several matrices, one after the other along `dim`, for this rank's part of each.

    The whole has n_packed x ranks segments. Rank r stores those from r x n_packed on, and computes with the number r of
    each matrix, which are all whose number has the remainder r.
    """
    n_ranks = group_named(group).size()
    rank = group_named(group).rank()
    users = [number % n_ranks for number in range(rank * n_packed, (rank + 1) * n_packed)]
    owners = [(matrix * n_ranks + rank) // n_packed for matrix in range(n_packed)]
    by_user = sorted(range(n_packed), key=users.__getitem__)
    leaving = [users.count(other) for other in range(n_ranks)]
    arriving = [owners.count(other) for other in range(n_ranks)]
    segments = x.chunk(n_packed, dim)
    if is_inverse:
        taken = _exchange(torch.stack(segments), leaving, arriving, group)
        return torch.cat([taken[by_user.index(place)] for place in range(n_packed)], dim)
    taken = _exchange(torch.stack([segments[place] for place in by_user]), arriving, leaving, group)
    return torch.cat(taken.unbind(), dim)


@_repacked.register_fake
def _(x: Tensor, dim: int, n_packed: int, is_inverse: bool, group: str) -> Tensor:
    return x.new_empty(x.shape)


def _keep_packing(ctx: Any, inputs: tuple, output: Tensor) -> None:
    _, ctx.dim, ctx.n_packed, ctx.is_inverse, ctx.group = inputs


def _repack_gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return _repacked(gradient, ctx.dim, ctx.n_packed, not ctx.is_inverse, ctx.group), None, None, None, None


_repacked.register_autograd(_repack_gradient, setup_context=_keep_packing)


def _exchange(x: Tensor, arriving: list[int], leaving: list[int], group: str) -> Tensor:
    # With the ranks that hold the other rows of the same matrices.
    return funcol.wait_tensor(funcol.all_to_all_single(x.contiguous(), arriving, leaving, group_named(group)))


def _sum(x: Tensor, mesh: DeviceMesh) -> Tensor:
    # Over the ranks that hold the other parts of the matrices.
    return funcol.wait_tensor(funcol.all_reduce(x.contiguous(), "sum", mesh))


def _side_by_side(x: Tensor, mesh: DeviceMesh) -> Tensor:
    # From the ranks that hold the other features.
    parts = funcol.wait_tensor(_all_gather(x.contiguous(), 0, mesh))
    return torch.cat(parts.chunk(mesh.size(), 0), -1)


def _own(x: Tensor, mesh: DeviceMesh) -> Tensor:
    return x.chunk(mesh.size(), -1)[mesh.get_local_rank()].contiguous()


def _local(parameter: Any) -> Any:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _distribute(module: nn.Module, attribute: str, mesh: DeviceMesh, dim: int) -> None:
    whole = module.get_parameter(attribute)
    setattr(module, attribute, nn.Parameter(distribute_tensor(whole, mesh, [Shard(dim)], src_data_rank=None)))


def _column(module: Any, mesh: DeviceMesh, joined: bool = False) -> None:
    """Split a matrix, and its bias, by output features; a rank's output is its own features, or all of them."""
    for attribute in [name for name, _ in module.named_parameters(recurse=False)]:
        _distribute(module, attribute, mesh, 0)

    def forward(x: Tensor) -> Tensor:
        out = F.linear(_Same.apply(x, mesh), _local(module.weight), _local(module.bias))
        return _Joined.apply(out, mesh) if joined else out

    module.forward = forward


def _row(module: Any, mesh: DeviceMesh, is_whole: bool = False) -> None:
    """Split a matrix by input features; its input is split already, unless it `is_whole`. The bias is added once."""
    _distribute(module, "weight", mesh, 1)

    def forward(x: Tensor) -> Tensor:
        out = _Total.apply(F.linear(_OwnPart.apply(x, mesh) if is_whole else x, _local(module.weight)), mesh)
        return out if module.bias is None else out + module.bias

    module.forward = forward


def _embedding(module: Any, mesh: DeviceMesh) -> None:
    """Split an embedding by rows of the vocabulary; what a family does after the look-up is linear, so it is kept."""
    _distribute(module, "weight", mesh, 0)
    padding = module.padding_idx
    module.padding_idx = None  # it would be taken for a row of this rank
    rows = module.weight.to_local().shape[0]
    first = rows * mesh.get_local_rank()
    original = module.forward

    def forward(tokens: Tensor) -> Tensor:
        places = tokens - first
        is_here = (places >= 0) & (places < rows)
        # The embedding is not compiled, so its parameter may be replaced; some families' call their base's forward.
        held = module._parameters
        whole = held["weight"]
        held["weight"] = _local(whole)
        try:
            found = original(places.clamp(0, rows - 1))
        finally:
            held["weight"] = whole
        found = found.masked_fill(~is_here[..., None], 0)
        if padding is not None:  # its row never trains
            found = torch.where((tokens == padding)[..., None], found.detach(), found)
        return _Total.apply(found, mesh)

    module.forward = forward


def _head(module: Any, mesh: DeviceMesh) -> None:
    """Split the head, and its bias, by rows of the vocabulary; the loss is called with this rank's and the group."""
    for attribute in [name for name, _ in module.named_parameters(recurse=False)]:
        _distribute(module, attribute, mesh, 0)

    def split(hidden: Tensor, loss: Callable | None = None) -> Tensor:
        hidden = _Same.apply(hidden, mesh)
        bias = _local(getattr(module, "bias", None))
        if loss is None:
            return _Joined.apply(F.linear(hidden, _local(module.weight), bias), mesh)
        return loss(hidden, _local(module.weight), bias=bias, group=mesh.get_group())

    # A head that calls `compute` does more around it; others are called with the loss themselves.
    setattr(module, "compute" if hasattr(module, "compute") else "forward", split)


def _experts(module: Any, mesh: DeviceMesh) -> None:
    """Let each rank compute a term of the experts' weighted sum, with its part of every expert's inner features."""
    dims = {name: TENSOR_PARALLEL_DIM[role] for name, role in module.tensor_parallel.items()}
    term = module.forward

    def of_rank(name: str, part: Tensor) -> Tensor:
        if name in module.packed:
            return _repacked(part, dims[name], module.packed[name], False, mesh.get_group().group_name)
        if name in dims:
            return part
        return _Same.apply(part, mesh) / mesh.size()  # a bias, which the sum must have once

    def forward(hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        # Some routers compute in float32, whatever the model's type: the gradient is rounded once it is a sum.
        weights = weights.to(torch.promote_types(weights.dtype, hidden.dtype))
        return _Total.apply(term(_Same.apply(hidden, mesh), chosen, _Same.apply(weights, mesh)), mesh)

    module.of_rank = of_rank
    module.forward = forward


def sum_gradients(module: nn.Module, mesh: DeviceMesh) -> None:
    """Keep a module's parameters whole, and sum their gradients: each rank uses them for its part of the features."""
    _substitute(module, {name: None for name, _ in module.named_parameters(recurse=False)}, mesh)


def share_tail(module: Any, mesh: DeviceMesh) -> None:
    """Keep a matrix whole, and sum the gradients of its last output features, which each rank uses for its heads."""
    original = module.forward

    def forward(x: Tensor) -> Tensor:
        out = original(x)
        head, tail = out.split([out.shape[-1] - module.tail, module.tail], -1)
        return torch.cat([head, _Same.apply(tail, mesh)], -1)

    module.forward = forward


def cut_vector(owner: nn.Module, attribute: str, mesh: DeviceMesh) -> None:
    """Split a parameter that its module uses head by head along its only dimension."""
    _distribute(owner, attribute, mesh, 0)
    _substitute(owner, {attribute: 0}, mesh)


def _substitute(module: Any, attributes: dict[str, int | None], mesh: DeviceMesh) -> None:
    """Let a module's forward pass see, in place of parameters, their parts, or copies whose gradients are summed."""
    original = type(module).forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        seen = {
            name: _Same.apply(getattr(module, name), mesh) if dim is None else _local(getattr(module, name))
            for name, dim in attributes.items()
        }
        return original(_Seen(module, seen), *args, **kwargs)

    module.forward = forward


class _Seen:
    """A module as its forward pass sees it: with tensors in the places of parameters.

    Replacing the parameters in the module itself would be a side effect, which a compiled block that is recomputed
    must not have.
    """

    def __init__(self, module: nn.Module, tensors: dict[str, Tensor]) -> None:
        self.module = module
        self.tensors = tensors

    def __getattr__(self, name: str) -> Any:
        return self.tensors[name] if name in self.tensors else getattr(self.module, name)


STYLES: dict[str, Callable[[nn.Module, DeviceMesh], None]] = {
    "whole_column": _column,
    "whole_column_joined": lambda module, mesh: _column(module, mesh, joined=True),
    "whole_row": _row,
    "whole_row_own_part": lambda module, mesh: _row(module, mesh, is_whole=True),
    "whole_embedding": _embedding,
    "whole_head": _head,
    "whole_sum_gradients": sum_gradients,
    "whole_tail_shared": share_tail,
    "whole_experts": _experts,
}
"""What applies each role (`Plan.tensor_parallel`); the activations between them are whole."""
