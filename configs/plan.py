"""What a model tells the parallelisms about itself, in names of its modules.

The techniques in `parallelisms/` know no model: each asks for the part of the plan it needs. A new model is a module
and its plan; no technique changes.
"""

from dataclasses import dataclass
from typing import Any, Literal

TensorRole = Literal[
    "embedding", "norm", "gather", "column", "row", "head", "parts", "part_whole", "part_column", "part_row"
]


@dataclass(frozen=True)
class Plan:
    """Names are those of `model.named_modules()`; `*` in a pattern stands for one level (a layer's number)."""

    blocks: tuple[str, ...]
    """The repeated blocks in forward order: the units of activation checkpointing and compilation."""

    first_block: int
    """Number of the first of `blocks` in the whole model; above 0 on a pipeline's later stages."""

    n_blocks: int
    """Blocks of the whole model. A pipeline may cut it between any two of them."""

    before_blocks: tuple[str, ...]
    """Modules that come before the first block, and so belong to a pipeline's first stage."""

    after_blocks: tuple[str, ...]
    """Modules that come after the last block, and so belong to a pipeline's last stage."""

    fsdp_groups: tuple[tuple[str, ...], ...]
    """Modules gathered together, in forward order; what no group names belongs to the root's."""

    attention: tuple[str, ...]
    """Modules whose `attend(q, k, v, mask)` alone looks at other tokens; the model's `mask` makes its
    last argument. Where each rank has a part of the sequence, both are replaced."""

    experts: tuple[str, ...]
    """Modules that hold the weights of a mixture's experts, the expert as the first dimension of each parameter, and
    are called with (rows sorted by expert (n, dim), rows of each expert (experts,)). Their attribute `local` makes of
    a parameter what is computed with."""

    routers: tuple[str, ...]
    """Modules that choose among experts. They count tokens in `tokens_per_expert` and the sum of `entropy`, may have a
    `bias` that balances, and take `sum_over_sequence` and `balance_scale` from whoever cuts the batch."""

    tensor_parallel: dict[str, TensorRole]
    """Pattern -> role. embedding: rows of the vocabulary; norm: works on a shard of the sequence; gather: its input is
    gathered from the sequence's shards; column, row: the weight is cut by output or input features; head: rows of
    the vocabulary, and the loss with them.

    parts: the module's input is gathered, each rank computes a part of a sum, and the sum is cut by the sequence
    again. The parameters (not modules) inside: part_column, part_row: cut by output or input features, the last but
    one and the last dimension; part_whole: whole on each rank, its gradient a part of a sum, too."""

    save_ops: tuple[str, ...]
    """Ops whose outputs selective activation checkpointing keeps unless the config names others: the costly ones."""


def plan_of(model: Any) -> Plan:
    """The plan of a model, an `nn.Module` that has one as its attribute `plan`."""
    return model.plan
