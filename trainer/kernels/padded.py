"""The tensors of an update, cut so that torch's fused AdamW computes every element in a vector, on a CPU.

That kernel computes a tensor's last elements, those that do not fill a vector, one by one, by instructions that round
differently. Which elements these are depends on where a shard ends. Here they are copied to a vector that is filled up
with zeros, which the kernel updates as one more tensor. Most tensors have no such elements and are passed as they are.
Threads divide a tensor into units of 64 bytes, which are whole vectors on any processor: their number changes nothing.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.functional import pad

UNIT_BYTES = 64
"""Bytes that the kernel gives to a thread at least (FusedAdamKernel.cpp, `cache_line_aligned_task_unit`)."""


@contextmanager
def whole_vectors(columns: Sequence[list[Tensor]]) -> Iterator[Sequence[list[Tensor]]]:
    """Columns with the same elements to update; when the context ends, `columns` have what was written there.

    Args:
        columns: parameters, gradients, first moments, second moments, and numbers of updates, in the same order; the
            tensors of a parameter have the same size and type, without gaps.
    """
    rows = []
    ends = []
    vectors = []
    for *tensors, step in zip(*columns, strict=True):
        size = tensors[0].numel()
        unit = UNIT_BYTES // tensors[0].element_size()
        rest = size % unit
        if rest == 0:
            rows.append((*tensors, step))
            continue
        parts = [tensor.view(-1).split((size - rest, rest)) for tensor in tensors]
        filled = [pad(end, (0, unit - rest)) for _, end in parts]
        rows += [(*(begin for begin, _ in parts), step), (*filled, step.clone())]
        ends += [end for _, end in parts]
        vectors += [vector[:rest] for vector in filled]
    yield [list(column) for column in zip(*rows, strict=True)]
    if ends:
        torch._foreach_copy_(ends, vectors)
