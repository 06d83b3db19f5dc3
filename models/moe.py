"""A mixture of experts in place of a feed-forward (Shazeer et al. 2017): each token goes through a few of many experts.

The router scores the experts for each token and chooses the best `experts_per_token`; their outputs are summed,
weighted by their scores. No token is dropped, whatever the load of an expert: the tokens are sorted by expert, and the
experts multiply groups of rows of any size. Each projection's weights are one tensor over all experts, so that a
grouped matmul takes them as they are and a mesh can shard them by expert.

Two methods keep the load even (`[model.router] load_balance`):

* `auxiliary_loss` (Shazeer et al. 2017; Lepikhin et al. 2020, GShard; Fedus et al. 2021, Switch, section 2.2), in the
  form of DeepSeek-V3 (2024, section 2.1.2, eq. 17-20), which treats each sequence of T tokens separately:

      weight * sum_i f_i P_i,   f_i = experts / (experts_per_token * T) * |tokens that chose expert i|,
                                P_i = mean over tokens of expert i's share of the scores

  It is summed over the layers and averaged over the sequences of the global batch. Since each sequence has its own
  loss, the result does not depend on micro-batches or the mesh. Only P carries a gradient. With `auxiliary_loss_over =
  "global_batch"` (Qiu et al. 2025, arXiv:2501.11873; Qwen3), f is that of all tokens, so that a sequence may use few
  experts as long as others use the rest. The f of a step is known when its last micro-batch has been routed, too late
  for the gradients of the first, so f is the step before's: it too depends on no micro-batch and no mesh.
* `bias` (Wang et al. 2024, "Auxiliary-loss-free load balancing", algorithm 1; DeepSeek-V3): each expert's bias is
  added to its score for choosing experts, but not for weighting them. After each step the bias rises by
  `bias_update_rate` for experts with fewer tokens of the global batch than the mean, and falls for those with more.

`bias_and_auxiliary_loss` is both (DeepSeek-V3 has the loss with a weight of 0.0001).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from configs.architectures.llama_keys import Activation, expert_dim, has_gate
from configs.architectures.llama_keys import Router as RouterKeys
from configs.schema import Model
from models.feed_forward import FeedForward, activate
from models.grouped_mm import grouped_mm


class Load(NamedTuple):
    """How many tokens of a micro-batch were routed to each expert of a layer."""

    tokens: Tensor
    """(n_experts,) int64: tokens sent to each expert."""
    entropy: Tensor
    """Entropy of each token's normalized scores, in nats, summed over the tokens; a scalar."""


class Choice(NamedTuple):
    """The experts chosen for every token."""

    experts: Tensor
    """(batch, seq, experts_per_token) int64, best first."""
    weights: Tensor
    """The same shape, in the router's dtype."""
    load: Load


def unchanged(tensor: Tensor) -> Tensor:
    """Return the tensor: the place of a function that techniques or keys put here."""
    return tensor


class Router(nn.Module):
    """Scores the experts for each token and chooses the best."""

    bias: Tensor | None
    frequency: Tensor | None
    tokens_per_expert: Tensor
    entropy: Tensor

    def __init__(self, dim: int, n_experts: int, experts_per_token: int, settings: RouterKeys) -> None:
        super().__init__()
        self.experts_per_token = experts_per_token
        self.settings = settings
        self.weight = nn.Parameter(torch.empty(n_experts, dim))
        self.register_buffer("bias", torch.zeros(n_experts) if settings.has_bias else None)
        even = torch.ones(n_experts, dtype=torch.float64)
        self.register_buffer("frequency", even if settings.balances_global_batch else None, persistent=False)
        counts = torch.zeros(n_experts, dtype=torch.int64)
        self.register_buffer("tokens_per_expert", counts, persistent=False)
        self.register_buffer("entropy", torch.zeros((), dtype=torch.float64), persistent=False)
        self.local: Callable[[Tensor], Tensor] = unchanged
        """Maps the stored weight to the plain tensor to compute with; techniques that shard the weight replace it."""
        self.sum_over_sequence: Callable[[Tensor], Tensor] = unchanged
        """Sums counts over the ranks that hold parts of the same sequences."""
        self.balance_scale = 0.0
        """Factor on a sequence's auxiliary loss, set from outside. It must make the gradient, once reduced as the
        parameters' gradients are, the gradient of the mean over the global batch. 0: no auxiliary loss."""

        self.note: Callable[[Tensor], None] | None = None
        """Called with the tokens of each expert when a load is recorded, while it is set from outside."""

    def init_buffers(self) -> None:
        """Zero the bias and the counts, and take the load for even; their dtypes do not depend on the parameters'."""
        if self.bias is not None:
            self.bias = torch.zeros_like(self.bias, dtype=torch.float32)
        if self.frequency is not None:
            self.frequency = torch.ones_like(self.frequency, dtype=torch.float64)
        self.tokens_per_expert = torch.zeros_like(self.tokens_per_expert, dtype=torch.int64)
        self.entropy = torch.zeros_like(self.entropy, dtype=torch.float64)

    def forward(self, x: Tensor) -> Choice:
        """x: (batch, seq, dim)."""
        weight = self.local(self.weight)
        dtype = torch.promote_types(x.dtype, torch.float32)  # rounded scores would tie, and the choice be arbitrary
        logits = F.linear(x.to(dtype), weight.to(dtype))  # (batch, seq, n_experts)
        scores = logits.softmax(-1) if self.settings.scoring == "softmax" else logits.sigmoid()
        shares = scores if self.settings.scoring == "softmax" else scores / scores.sum(-1, keepdim=True)
        preference = scores.detach() if self.bias is None else scores.detach() + self.bias
        experts = self._in_best_groups(preference).topk(self.experts_per_token, dim=-1).indices
        tokens = count(experts, scores.shape[-1])
        weights = self._weights(logits, scores, experts)
        if self.settings.scaling_factor != 1.0:
            weights = weights * self.settings.scaling_factor
        if self.settings.has_auxiliary_loss and self.balance_scale:
            loss = self._auxiliary_loss(shares, tokens)
            weights = _WithLoss.apply(weights, loss * self.balance_scale)
        settled = shares.detach()
        entropy = -torch.xlogy(settled, settled).sum()  # torch.special.entr is compiled at run time on CUDA
        return Choice(experts, weights, Load(tokens.sum(0), entropy))

    def _weights(self, logits: Tensor, scores: Tensor, experts: Tensor) -> Tensor:
        """(batch, seq, experts_per_token): the scores of the chosen experts, which sum to 1 with `renormalize`."""
        if self.settings.renormalize and self.settings.scoring == "softmax":
            # Equals the quotient below. That would give experts that no token chose gradients of rounding, not zeros,
            # and Lion would take their sign, which differs with the mesh.
            return logits.gather(-1, experts).softmax(-1)
        weights = scores.gather(-1, experts)
        return weights / weights.sum(-1, keepdim=True) if self.settings.renormalize else weights

    def _in_best_groups(self, preference: Tensor) -> Tensor:
        """(batch, seq, n_experts), with -inf for the experts of groups that a token does not choose from."""
        if self.settings.n_groups is None:
            return preference
        groups = preference.unflatten(-1, (self.settings.n_groups, -1))  # (batch, seq, n_groups, experts of each)
        best = groups.topk(2, dim=-1).values.sum(-1).topk(self.settings.groups_per_token, dim=-1).indices
        is_out = torch.ones(groups.shape[:-1], dtype=torch.bool, device=groups.device).scatter(-1, best, False)
        return groups.masked_fill(is_out[..., None], -torch.inf).flatten(-2)

    def _auxiliary_loss(self, shares: Tensor, tokens: Tensor) -> Tensor:
        """Sum over the sequences of the loss in the module docstring.

        Args:
            shares: (batch, seq, n_experts), summing to 1 over the experts.
            tokens: (batch, n_experts), the tokens of each sequence that chose each expert.
        """
        tokens = self.sum_over_sequence(tokens).to(shares.dtype)
        chosen = tokens.sum(-1, keepdim=True)  # experts_per_token * T
        frequency = tokens * (tokens.shape[-1] / chosen) if self.frequency is None else self.frequency.to(shares.dtype)
        mean_share = shares.sum(1) * (self.experts_per_token / chosen)
        return self.settings.auxiliary_loss_weight * (frequency * mean_share).sum()

    def record(self, load: Load) -> None:
        """Add a micro-batch's load to `tokens_per_expert` and `entropy`, which accumulate until they are zeroed."""
        self.tokens_per_expert += load.tokens
        if self.note:
            self.note(load.tokens)
        self.entropy += load.entropy


def count(experts: Tensor, n_experts: int) -> Tensor:
    """experts: (batch, ..., experts_per_token) -> (batch, n_experts) int64: how often each expert was chosen."""
    chosen = experts.flatten(1)
    return torch.zeros(len(chosen), n_experts, dtype=torch.int64, device=chosen.device).scatter_add(
        1, chosen, torch.ones_like(chosen)
    )


class _WithLoss(torch.autograd.Function):
    """Returns a tensor unchanged; its backward also starts the backward pass of a loss, whose value is discarded.

    This lets a layer have its own loss without passing it to the end of the model, for example across pipeline stages.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, loss: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad.new_ones(())


class Experts(nn.Module):
    """Feed-forwards side by side, each applied to its own rows."""

    def __init__(self, n_experts: int, dim: int, inner_dim: int, activation: Activation) -> None:
        super().__init__()
        self.n_experts = n_experts
        self.activation = activation
        has_gates = has_gate(activation)
        self.gate_proj = nn.Parameter(torch.empty(n_experts, inner_dim, dim)) if has_gates else None
        self.up_proj = nn.Parameter(torch.empty(n_experts, inner_dim, dim))
        self.down_proj = nn.Parameter(torch.empty(n_experts, dim, inner_dim))
        self.local: Callable[[Tensor], Tensor] = unchanged
        """Maps a stored weight to this rank's part of it; a technique that shards the weights replaces it."""
        self.products: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {}
        """What multiplies by a projection, by its name, in place of `grouped_mm`; float8 puts it here."""

    def forward(self, rows: Tensor, counts: Tensor, meanwhile: Callable[[], object] | None = None) -> Tensor:
        """Apply to each row its expert.

        Args:
            rows: (n, dim), sorted by expert.
            counts: (experts,) int64, rows of each expert that this rank holds; any may be 0.
            meanwhile: what expert parallelism may call while rows travel; nothing else does.

        Returns:
            (n, dim); one term of a sum over ranks if the weights are sharded by inner width.
        """
        gate = None if self.gate_proj is None else self._product("gate_proj", rows, counts)
        hidden = activate(self.activation, gate, self._product("up_proj", rows, counts))
        return self._product("down_proj", hidden, counts)

    def _product(self, projection: str, rows: Tensor, counts: Tensor) -> Tensor:
        multiply = self.products.get(projection, grouped_mm)
        return multiply(rows, self.local(getattr(self, projection)), counts)


class _Once:
    """Computes a tensor when it is first called, and returns it from then on."""

    def __init__(self, compute: Callable[[], Tensor]) -> None:
        self._compute = compute
        self._result: Tensor | None = None

    def __call__(self) -> Tensor:
        if self._result is None:
            self._result = self._compute()
        return self._result


class MixtureOfExperts(nn.Module):
    """The weighted sum of the chosen experts' outputs, plus the shared experts' output, which see every token."""

    def __init__(self, config: Model) -> None:
        super().__init__()
        assert config.n_experts is not None
        self.router = Router(config.dim, config.n_experts, config.experts_per_token, config.router)
        self.experts = Experts(config.n_experts, config.dim, expert_dim(config), config.activation)
        # Shared experts side by side are one feed-forward of their joint width (Dai et al. 2024, DeepSeekMoE).
        shared = config.n_shared_experts * expert_dim(config)
        self.shared_experts = FeedForward(config, shared) if shared else None
        self.shared_expert_gate = nn.Linear(config.dim, 1, bias=False) if config.shared_expert_gate else None

    def forward(self, x: Tensor) -> tuple[Tensor, Load]:
        """x: (batch, seq, dim) -> the same shape, and the load of each expert."""
        choice = self.router(x)
        if self.shared_experts is None:
            return self._routed(x, choice), choice.load
        shared = _Once(partial(self._shared, self.shared_experts, x))
        return self._routed(x, choice, meanwhile=shared) + shared(), choice.load

    def _routed(self, x: Tensor, choice: Choice, meanwhile: Callable[[], object] | None = None) -> Tensor:
        experts = partial(self.experts, meanwhile=meanwhile)
        outputs = through_experts(experts, x.flatten(0, 1), choice.experts, choice.load.tokens)
        return (outputs * choice.weights.to(x.dtype)[..., None]).sum(2)

    def _shared(self, experts: FeedForward, x: Tensor) -> Tensor:
        out = experts(x)
        return out if self.shared_expert_gate is None else out * self.shared_expert_gate(x).sigmoid()


def through_experts(experts: Callable[[Tensor, Tensor], Tensor], x: Tensor, chosen: Tensor, counts: Tensor) -> Tensor:
    """Apply to each token its experts.

    Args:
        experts: called with the rows sorted by expert (n, dim) and the number of rows of each expert (experts,).
        x: (tokens, dim).
        chosen: (..., k) int64, the experts of each token.
        counts: (experts,) int64, how often each expert was chosen.

    Returns:
        (..., k, dim).
    """
    order = chosen.flatten().argsort(stable=True)  # by expert, then in the order of the tokens
    place = order.argsort()  # position of each token's experts among the sorted rows
    rows = _Take.apply(x, order, place, chosen.shape[-1])
    return _Take.apply(experts(rows, counts), place, order, 1).view(*chosen.shape, -1)


class _Take(torch.autograd.Function):
    """Reorders rows, each repeated `times` times: takes row index // times for each index.

    Backward gathers rows as well. Indexing's own backward would add them with atomics, which is not deterministic.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, inverse: Tensor, times: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.times = times
        return rows[index // times if times > 1 else index]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        return grad[inverse].unflatten(0, (-1, ctx.times)).sum(1), None, None, None
