"""Sums of gradients that have the same bits on every data-parallel mesh.

Floating-point addition is not associative. An all-reduce adds in an order that depends on the number of ranks, and
accumulation adds one micro-batch after the other, so two meshes differ in the last bits, and AdamW amplifies that. Here
every sum follows one binary tree whose leaves are the micro-batches in the order of the global batch, wherever each was
computed: leaves 2i and 2i + 1 are added, then pairs of these sums, and so on; a node without a partner moves up.

The loader deals the micro-batches to the ranks in turn, so those computed at the same time are neighbors in the tree.
After each backward pass, an all-to-all gives every rank its shard of all of them, as many bytes as a reduce-scatter,
and the rank adds them up itself. Over the following micro-batches it keeps a partial sum per set bit of their number,
like a binary counter: at most log2 of the micro-batches of a step, each of the size of its shard of the gradients.
Replicas split each shard further, and gather the result once per step.

FSDP issues the reductions, overlapping them with the backward pass as always. It has a public hook for the first half
(`set_custom_reduce_scatter`) and one that runs afterwards (`set_all_reduce_hook`), where this file does the rest. A
single rank that needs no FSDP adds up the gradient of each parameter as soon as autograd has computed it.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from parallelisms.ranges import NamedStage
from parallelisms.sums.fast import Reduction
from parallelisms.torch_internals import (
    DefaultAllGather,
    DefaultReduceScatter,
    modules_with_groups,
    reduce_gradients,
    reduce_with,
)


class PartialSums:
    """Adds up tensors, given in the order of the leaves, along the tree; holds log2 of their number at most."""

    def __init__(self) -> None:
        self._pending: list[tuple[int, Tensor]] = []
        """The level (leaves are level 0) and value of the nodes whose partner is still missing; levels decrease."""

    def add(self, node: Tensor, level: int = 0) -> None:
        """Add the next node; it may be a part of another tensor, but then that must not be written to meanwhile."""
        while self._pending and self._pending[-1][0] == level:
            _, left = self._pending.pop()
            node = left.add_(node)
            level = level + 1
        is_part = node.untyped_storage().nbytes() > node.nbytes  # keeping it would keep all of that memory
        self._pending.append((level, node.clone() if is_part else node))

    def take(self) -> Tensor:
        """Return the sum of everything added since the last call."""
        _, total = self._pending.pop()
        while self._pending:
            _, left = self._pending.pop()
            total = left.add_(total)
        return total


class TreeReduction(Reduction):
    """The reduction of one model's gradients, in place of FSDP's own; all parameters are in FSDP groups, or none is."""

    def __init__(self, model: nn.Module) -> None:
        """Take over the reductions of a model whose parameters are sharded, as they are between two steps, or whole."""
        self._parameters = list(model.parameters())
        self._groups = []
        self._sums: dict[Tensor, PartialSums] = defaultdict(PartialSums)
        """A step's sums for the parameters that are in no FSDP group."""
        for module in modules_with_groups(model):
            group = _GroupReduction()
            group.replicas = reduce_with(module, group, group.finish)
            self._groups.append(group)
        for parameter in () if self._groups else self._parameters:
            parameter.register_post_accumulate_grad_hook(self._take_gradient)

    @contextmanager
    def of_micro_batch(self, is_last: bool) -> Iterator[None]:
        for group in self._groups:
            group.is_last = is_last
        yield
        for parameter in self._parameters:
            if not is_last:  # what FSDP has set is not the sum yet
                parameter.grad = None
            elif parameter in self._sums:
                parameter.grad = self._sums.pop(parameter).take()

    def pipeline_stage(self, *arguments: Any, **settings: Any) -> PipelineStage:
        return _ReducingStage(self, *arguments, **settings)

    def _take_gradient(self, parameter: Tensor) -> None:
        """Add a micro-batch's gradient, which autograd has just completed, to the parameter's sum."""
        gradient = parameter.grad
        parameter.grad = None
        if gradient is not None:
            self._sums[parameter].add(gradient)


class _ReducingStage(NamedStage):
    """A pipeline's stage that reduces the gradients of each micro-batch, instead of their sum after the last."""

    def __init__(self, reduction: TreeReduction, *arguments: Any, **settings: Any) -> None:
        """
        Args:
            reduction: sums the gradients.
            arguments, settings: of `PipelineStage`.
        """
        super().__init__(*arguments, **settings)
        self._reduction = reduction

    def backward_maybe_with_nosync(
        self, backward_type: Any, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """Run a backward pass; every schedule runs one stage's passes in the order of the micro-batches."""
        if backward_type == "input":  # a pass for the weights follows
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        with self._reduction.of_micro_batch(last_backward):
            result = super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
            reduce_gradients(self.submod)
        return result


class _GroupReduction(DefaultReduceScatter):
    """The reduction of one FSDP group's gradients.

    FSDP calls it with the group's flat gradient if there is more than one shard, then `finish` with this rank's shard.
    """

    def __init__(self) -> None:
        self.sums = PartialSums()
        self.is_last = True
        self.replicas: dist.ProcessGroup | None = None
        """The ranks with the same shard; None: there are no others."""
        self._nodes: Tensor | None = None
        """(nodes, shard): this rank's shard of the sums over the ranks of the last call, and their level."""
        self._level = 0

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        """Send every rank its shard, and add up the received ones; `finish` writes the output."""
        received = torch.empty_like(input_tensor)
        # Every rank gets its shard of every rank's gradients.
        dist.all_to_all_single(received, input_tensor, group=group)
        self._nodes, self._level = _add_pairs(received.view(group.size(), -1), level=0)

    def finish(self, shard: Tensor) -> None:
        """Add this micro-batch's gradients to the sums; the step's last overwrites `shard` with the result.

        Args:
            shard: (n,) this rank's shard; if it is the whole, then also this rank's gradient.
        """
        nodes, level = (shard[None], 0) if self._nodes is None else (self._nodes, self._level)
        self._nodes = None
        _used_here(nodes, shard)
        if self.replicas is not None:
            nodes, level = _add_pairs(_exchange(nodes, self.replicas), level)
        for node in nodes:
            self.sums.add(node, level)
        if self.is_last:
            total = self.sums.take()
            if self.replicas is not None:
                # Replicas have each added up a part of the shard; all get the whole.
                whole = total.new_empty(self.replicas.size() * len(total))
                DefaultAllGather()(whole, total, self.replicas)
                total = whole[: len(shard)]
            shard.copy_(total)


def _add_pairs(nodes: Tensor, level: int) -> tuple[Tensor, int]:
    """Add neighbors in place while their number is even; returns the sums and their level.

    Args:
        nodes: (nodes, n). All ranks' nodes of one time fill whole pairs, because as many come at any other time.
    """
    while len(nodes) % 2 == 0:
        nodes[0::2].add_(nodes[1::2])
        nodes = nodes[0::2]
        level = level + 1
    return nodes, level


def _exchange(nodes: Tensor, ranks: dist.ProcessGroup) -> Tensor:
    """(nodes, n) on each rank -> (ranks * nodes, n / ranks, rounded up): the nodes of all ranks, and a part of each."""
    n_ranks = ranks.size()
    n_nodes = len(nodes)
    part = -(-nodes.shape[1] // n_ranks)
    padded = nn.functional.pad(nodes, (0, n_ranks * part - nodes.shape[1]))
    sent = padded.view(n_nodes, n_ranks, part).transpose(0, 1).contiguous()
    received = torch.empty_like(sent)
    # Every rank gets its part of every rank's nodes.
    dist.all_to_all_single(received, sent, group=ranks)
    return received.view(n_ranks * n_nodes, part)


def _used_here(*tensors: Tensor) -> None:
    """Keep memory that was allocated on another CUDA stream until the current one has used it."""
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream())
