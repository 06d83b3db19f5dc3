"""What a block keeps from its forward to its backward pass, and what its backward pass holds, without torch.compile.

The block runs on fake tensors, and the storages that its operators make are counted while they are alive.
"""

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parallelisms.fake_ranks import is_sharded
from parallelisms.ranks import local_part


@dataclass(frozen=True)
class BlockMemory:
    """What a block takes for one sample on one rank, besides its input and parameters."""

    kept: int
    """Bytes kept from the forward to the backward pass, with its output, which is the next block's input."""
    moments: tuple[tuple[int, int], ...]
    """The moments of the backward pass at which most can be alive: bytes of activations, their gradients included, and
    of the parameters' gradients, which are as large for a sample as for many."""

    def backward(self, samples: int) -> int:
        """The most bytes that are alive in the backward pass of so many samples."""
        return max(samples * activations + gradients for activations, gradients in self.moments)


def worst(moments: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """The moments that are the worst for some number of samples."""
    found: list[tuple[int, int]] = []
    for activations, gradients in sorted(set(moments), reverse=True):
        if not found or gradients > found[-1][1]:
            found.append((activations, gradients))
    return tuple(found)


def measure_eager(block: nn.Module, inputs: tuple, others: Mapping[str, Any] = MappingProxyType({})) -> BlockMemory:
    """Run a block of fake parameters, with its activation checkpointing, on its inputs, by position and by keyword."""
    parameters = [parameter for parameter in block.parameters() if parameter.requires_grad]
    with _Live() as live:
        outputs = block(*inputs, **others)
        kept = live.bytes
        output = next(leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor))
        edge = get_gradient_edge(output)
        gradient = torch.empty_like(output)
        del outputs, output
        before = len(live.events)
        gradients = torch.autograd.grad(edge, [inputs[0], *parameters], gradient)
        of_parameters = {live.numbers[name] for name in _storages([local_part(g) for g in gradients[1:]])}
    activations = sum(n_bytes for _, n_bytes in live.events[:before])
    sums = [(activations, 0)]
    for number, n_bytes in live.events[before:]:
        by_activations, by_parameters = sums[-1]
        is_gradient = number in of_parameters
        sums.append((by_activations + n_bytes * (not is_gradient), by_parameters + n_bytes * is_gradient))
    return BlockMemory(kept, worst(sums))


class _Live(TorchDispatchMode):
    """Records the storages that operators make, and when they are freed."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[int, int]] = []
        """The storages in the order in which they are made and freed: a storage's number, and its bytes or less."""
        self.numbers: dict[int, int] = {}
        """Numbers of those alive, by address."""

    @property
    def bytes(self) -> int:
        """Bytes that are alive."""
        return sum(n_bytes for _, n_bytes in self.events)

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(is_sharded, types)):
            return NotImplemented  # the operators on its shard follow
        given = _storages((args, kwargs))
        outputs = op(*args, **(kwargs or {}))
        for address, storage in _storages(outputs).items():
            if address not in given and address not in self.numbers:
                number = self.numbers[address] = len(self.events)
                self.events.append((number, storage.nbytes()))
                weakref.finalize(storage, self._free, address, number, storage.nbytes())
        return outputs

    def _free(self, address: int, number: int, n_bytes: int) -> None:
        del self.numbers[address]
        self.events.append((number, -n_bytes))


def _storages(values: Any) -> dict[int, torch.UntypedStorage]:
    """The storages of all tensors in a structure, by address."""
    found = (leaf.untyped_storage() for leaf in tree_leaves(values) if isinstance(leaf, Tensor))
    return {storage._cdata: storage for storage in found}


class _FusedNorm(torch.autograd.Function):
    """The shapes of a GPU's RMSNorm, which is one operator: it keeps its input and a number per token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight)


def norm_of_a_gpu(x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """Replaces `rms_norm`, of which a CPU keeps each step."""
    return _FusedNorm.apply(x, weight)
