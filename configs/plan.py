"""The interface between models and techniques: a model's plan, and the attributes that techniques read and replace.

The techniques in `parallelisms/` know no model; each reads the part of the plan that it needs, which names modules, and
sets the attributes of these modules that the protocols below list. A new model is its modules and their plan; no
technique changes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

TensorRole = Literal[
    "embedding",
    "norm",
    "gather",
    "column",
    "gather_column",
    "gather_parts",
    "row",
    "head",
    "parts",
    "part_column",
    "part_row",
    "part_vector",
    "replicated_partial_grad",
    "norm_of_parts",
    "whole_column",
    "whole_column_joined",
    "whole_row",
    "whole_row_own_part",
    "whole_embedding",
    "whole_head",
    "whole_sum_gradients",
    "whole_tail_shared",
    "whole_vector",
    "whole_experts",
]
PARAMETER_ROLES = ("part_column", "part_row", "part_vector", "replicated_partial_grad", "whole_vector")
"""Roles of single parameters; the others are of modules."""
TENSOR_PARALLEL_DIM = {
    **{"embedding": -2, "head": -2, "column": -2, "gather_column": -2, "row": -1},
    **{"part_column": -2, "part_row": -1, "part_vector": -1, "norm_of_parts": -1},
    **{"whole_column": -2, "whole_column_joined": -2, "whole_embedding": -2, "whole_head": -2},
    **{"whole_row": -1, "whole_row_own_part": -1, "whole_vector": -1},
}
"""The dimension along which tensor parallelism shards the matrices of a role; other roles are not sharded."""


@dataclass(frozen=True)
class Plan:
    """Names are as in `model.named_modules()` and, of parameters, `model.named_parameters()`."""

    blocks: tuple[str, ...]
    """The repeated blocks in forward order: the units of activation checkpointing and compilation."""

    first_block: int
    """Index of the first of `blocks` in the whole model; above 0 on a pipeline's later stages."""

    n_blocks: int
    """Number of blocks in the whole model. A pipeline may split between any two of them."""

    can_be_cut: bool
    """Whether the forward pass takes a model without some of its blocks, as a pipeline's stage is."""

    before_blocks: tuple[str, ...]
    """Modules before the first block, which belong to a pipeline's first stage."""

    after_blocks: tuple[str, ...]
    """Modules after the last block, which belong to a pipeline's last stage."""

    fsdp_groups: tuple[tuple[str, ...], ...]
    """Modules that are gathered together, in forward order; the root's group has all other modules."""

    attention: tuple[str, ...]
    """Modules that mix tokens, each an `Attention`; empty if the model's own cannot be replaced."""

    mixers: tuple[str, ...]
    """The module of each block that mixes tokens: of `attention`, of `recurrent`, or one that cannot be replaced."""

    experts: tuple[str, ...]
    """Modules that hold the weights of the experts, with the expert as the first dimension of each parameter; each an
    `Experts`."""

    routers: tuple[str, ...]
    """Modules that choose among experts, each a `Router`."""

    tensor_parallel: dict[str, TensorRole]
    """Name of a module or parameter -> role. embedding: rows of the vocabulary; norm: works on a shard of the
    sequence; gather: its input is gathered from the sequence's shards; column, row: the weight is split by output or
    input features; gather_column: both gather and column; gather_parts: a module without parameters whose input is
    gathered, and of whose output's gradient each rank computes one term of a sum; norm_of_parts: an RMSNorm of features
    of which each rank has a part; head: rows of the vocabulary,
    including the loss.

    parts: the module's input is gathered, each rank computes a partial sum, and the sum is split by sequence again.
    For parameters (not modules): part_column, part_row: split by output or input features, the second to last and the
    last dimension; part_vector: of one dimension, split; replicated_partial_grad: whole on each rank, which computes
    only a part of what it is used for (its heads, its share of the experts), so that its gradient is a sum over the
    ranks.

    whole_...: for models whose activations are whole on each rank between the matrices
    (`parallelisms/tensor_whole.py`): whole_column: split by output features, its output stays split, or is joined;
    whole_row: split by input features, its input is split, or whole, so that the rank takes its own part;
    whole_embedding, whole_head: rows of the vocabulary; whole_sum_gradients: a module that each rank uses for its part
    of the features; whole_tail_shared: a matrix of which each rank uses the last `module.tail` output features for its
    heads; whole_vector: a parameter of one dimension that is split like them; whole_experts: stacked experts, each a
    `StackedExperts`, of which part_column and part_row split parameters, so that each rank computes a term of a sum."""

    save_ops: tuple[str, ...]
    """Costly ops, whose outputs selective activation checkpointing keeps unless the config names others."""

    cannot_split: str = ""
    """Why tensor parallelism can't split the model; empty if it can."""

    counters: tuple[str, ...] = ()
    """Modules that count the tokens of their experts, each a `Counter`, in a model whose routers don't: one for each
    router, or there are none."""

    n_counted: int = 0
    """Experts whose tokens each router or counter counts, in any part of the model; 0: there are none."""

    has_losses_of_layers: bool = False
    """Whether layers have losses of their own, as those that balance experts."""

    why_no_pipeline: str = ""
    """Why a pipeline can't cut the model; empty if it can."""

    why_not_distributed: str = ""
    """Why expert parallelism can't distribute the experts; empty if it can."""

    tied: tuple[str, ...] = ()
    """Modules of `before_blocks` that the model uses after the last block as well, or whose parameters a module there
    shares; a pipeline's last stage holds them, too."""

    further_blocks: tuple[str, ...] = ()
    """Modules of `after_blocks` that are checkpointed and compiled like `blocks`, after which they run in training."""

    recurrent: tuple[str, ...] = ()
    """Modules that mix tokens by a state that passes from each token to the next, each a `Recurrent`."""

    can_cache: bool = True
    """Whether each `attend` may be given new tokens only, with keys and values that were kept."""

    @property
    def keeps_sequences_whole(self) -> bool:
        """Whether tensor-parallel ranks hold whole sequences between the matrices, and not slices of them."""
        return any(role.startswith("whole_") for role in self.tensor_parallel.values())


def plan_of(model: Any) -> Plan:
    """Return the attribute `plan` of a model (an `nn.Module`)."""
    return model.plan


# --------------------------------------------------------------------------- what techniques read and replace


Initial = float | None | Literal["log_of_uniform"]
"""How a parameter starts: the standard deviation of its values, 0 for zeros; None: all ones; log_of_uniform: logarithms
of numbers that are drawn evenly from 0.01 to 16, as Gated DeltaNet's rates (Yang et al. 2024; Qwen3-Next)."""


class PlannedModel(Protocol):
    """What a model has besides its modules. Tensors are `Any`, since nothing here imports torch."""

    plan: Plan
    mask: Callable[[Any, Any], Any]
    """(documents, dtype of the activations) -> the mask that each `attend` takes. Replaced by: context parallelism."""

    def init_std(self, name: str, /) -> Initial:
        """How a parameter starts."""

    # A model may have a method `leave_out(names)`, by which it removes the modules that a pipeline stage does not have.
    # They are set to None in other models.


class Attention(Protocol):
    """A module of `Plan.attention`."""

    attend: Callable[[Any, Any, Any, Any], Any]
    """(q, k, v, mask) -> output, all but the mask (batch, heads, seq, head_dim): the only place that reads other
    tokens. Replaced by: context parallelism, a backend of attention, the cache of sampling. Context parallelism's also
    takes `window` and `sinks` (models/documents.py)."""
    # Context parallelism by "gather" adds `whole_sequence`: keys or values (batch, heads, part of seq, head_dim) ->
    # (batch, heads, seq, head_dim), for modules that compute more than `attend` does. To the model it adds `places`:
    # (number of tokens of a part, device) -> where these are in whole sequences, (1, tokens), and the length of those.

    # A module whose `attend` sees only the last tokens has their number in its attribute `window`.


class Recurrent(Protocol):
    """A module of `Plan.recurrent`. Heads are the third dimension of each tensor, and the first of each weight."""

    mix: Callable[[Any, Any, Any, Any], Any]
    """(rows (batch, seq, heads, n), gates (batch, seq, heads, n), a named tuple of the heads' weights, (heads, ...)
    each, number of each token's document (batch, seq) or None) -> (batch, seq, heads, n): the only place that reads
    other tokens. Replaced by: context parallelism, sampling."""
    reach: int
    """Tokens before a token that its convolution takes."""
    mix_after: Callable[[Any, Any, Any, Any, int, Any], Any]
    """`mix` with two more arguments, of tokens that follow others: how many of the first ones are given for the
    convolution only, and how the state before the rest is found (`models.delta.Before`)."""
    rule: Callable[[Any, Any, Any, Any, Any, Any, Any], Any]
    """The part of `mix` that is `models.delta.Rule`. Replaced by: kernels for it."""
    continued: Callable[[Any, Any, Any, Any], tuple[Any, Any]]
    """(rows, gates, weights, state after the tokens before them, or None) -> what `mix` returns, the state after them;
    states are named tuples of tensors whose first dimension is the batch."""


class LocalWeights(Protocol):
    """A module with a parameter of a role of `PARAMETER_ROLES`, and a module of `Plan.experts`.

    `nn.Linear` and `nn.RMSNorm` need no `local`: their forward pass is replaced.
    """

    local: Callable[[Any], Any]
    """Parameter -> the plain tensor to compute with. Replaced by: tensor parallelism, expert parallelism."""


class Experts(LocalWeights, Protocol):
    """A module of `Plan.experts`. A module that does more around it has the attribute `compute`; others are called with
    these arguments themselves."""

    compute: Callable[[Any, Any], Any]
    """(rows sorted by expert (n, dim), number of rows of each expert (experts,)) -> (n, dim). Replaced by: expert
    parallelism."""


class StackedExperts(Experts, Protocol):
    """A module of the role "whole_experts", called with (hidden (tokens, dim), chosen experts, their weights)."""

    of_rank: Callable[[str, Any], Any]
    """(name of a parameter, what `local` returns) -> what a rank computes with. Replaced by: tensor parallelism."""
    packed: Mapping[str, int]
    """How many matrices lie one after the other along the dimension by which a parameter is split: a gate and an up
    projection. Of each of them a rank computes with its own part. Others have one."""
    tensor_parallel: Mapping[str, TensorRole]
    """The roles of the parameters that are split. Each rank has all of the others, which are added once to a sum."""


class Counter(Protocol):
    """A module of `Plan.counters`."""

    tokens_per_expert: Any
    """(experts,) int64: tokens sent to each expert since the last step. Read and zeroed by: load balancing."""


class Router(LocalWeights, Protocol):
    """A module of `Plan.routers`."""

    tokens_per_expert: Any
    """(experts,) int64: tokens sent to each expert since the last step. Read and zeroed by: load balancing."""
    entropy: Any
    """Sum over these tokens of the entropy of their shares, a scalar; as above."""
    experts_per_token: int
    """How many experts each token is sent to."""
    settings: Any
    """Its keys (`configs.architectures.llama_keys.Router`)."""
    bias: Any
    """(experts,), added to the scores for the choice; None without load_balance = "bias". Moved by: load balancing."""
    frequency: Any
    """(experts,) float64: the tokens of the step before that chose each expert, over their mean; None unless a loss
    evens out the load of the global batch. Set by: load balancing."""
    sum_over_sequence: Callable[[Any], Any]
    """Sums counts over the ranks that hold parts of the same sequences. Replaced by: load balancing."""
    balance_scale: float
    """Factor on a sequence's auxiliary loss. Set by: load balancing."""


def attention_of(model: Any) -> list[Attention]:
    """The modules of `Plan.attention`, in forward order."""
    return [model.get_submodule(name) for name in plan_of(model).attention]


def recurrent_of(model: Any) -> list[Recurrent]:
    """The modules of `Plan.recurrent`, in forward order."""
    return [model.get_submodule(name) for name in plan_of(model).recurrent]


def routers_of(model: Any) -> dict[str, Router]:
    """The modules of `Plan.routers`, by name."""
    return {name: model.get_submodule(name) for name in plan_of(model).routers}


def counters_of(model: Any) -> dict[str, Counter]:
    """The modules that count tokens of experts, by name: those of `Plan.counters`, or routers."""
    plan = plan_of(model)
    return {name: model.get_submodule(name) for name in plan.counters or plan.routers}


class Buffers(Protocol):
    """A module that has buffers; found by its method, in any place of the model."""

    def init_buffers(self) -> None:
        """Fill the buffers after the model left the meta device."""
