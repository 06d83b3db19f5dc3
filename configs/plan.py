"""What a model tells the parallelisms about itself, by the names of its modules.

The techniques in `parallelisms/` know no model; each reads the part of the plan that it needs. A new model is a module
and its plan; no technique changes.
"""

from dataclasses import dataclass
from typing import Any, Literal

TensorRole = Literal[
    "embedding", "norm", "gather", "column", "row", "head", "parts", "part_whole", "part_column", "part_row"
]


@dataclass(frozen=True)
class Plan:
    """Names are as in `model.named_modules()`; `*` in a pattern matches one level (a layer's number)."""

    blocks: tuple[str, ...]
    """The repeated blocks in forward order: the units of activation checkpointing and compilation."""

    first_block: int
    """Index of the first of `blocks` in the whole model; above 0 on a pipeline's later stages."""

    n_blocks: int
    """Number of blocks in the whole model. A pipeline may split between any two of them."""

    before_blocks: tuple[str, ...]
    """Modules before the first block, which belong to a pipeline's first stage."""

    after_blocks: tuple[str, ...]
    """Modules after the last block, which belong to a pipeline's last stage."""

    fsdp_groups: tuple[tuple[str, ...], ...]
    """Modules that are gathered together, in forward order; the root's group has all other modules."""

    attention: tuple[str, ...]
    """Modules whose `attend(q, k, v, mask)` is the only place that reads other tokens; the model's `mask` makes the
    last argument. Context parallelism replaces both."""

    experts: tuple[str, ...]
    """Modules that hold the weights of the experts, with the expert as the first dimension of each parameter. They are
    called with the rows sorted by expert (n, dim) and the number of rows of each expert (experts,). Their attribute
    `local` turns a parameter into the tensor to compute with."""

    routers: tuple[str, ...]
    """Modules that choose among experts. They count tokens in `tokens_per_expert` and the sum of `entropy`, may have a
    `bias` for load balancing, and take `sum_over_sequence` and `balance_scale` from the code that splits the batch."""

    tensor_parallel: dict[str, TensorRole]
    """Pattern -> role. embedding: rows of the vocabulary; norm: works on a shard of the sequence; gather: its input is
    gathered from the sequence's shards; column, row: the weight is split by output or input features; head: rows of
    the vocabulary, including the loss.

    parts: the module's input is gathered, each rank computes a partial sum, and the sum is split by sequence again.
    For parameters (not modules) inside: part_column, part_row: split by output or input features, the second to last
    and the last dimension; part_whole: whole on each rank, where its gradient is also a partial sum."""

    save_ops: tuple[str, ...]
    """Costly ops, whose outputs selective activation checkpointing keeps unless the config names others."""


def plan_of(model: Any) -> Plan:
    """Return the attribute `plan` of a model (an `nn.Module`)."""
    return model.plan
