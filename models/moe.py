"""A mixture of experts in the place of a feed-forward (Shazeer et al. 2017): each token goes through few of many.

The router scores the experts for each token and chooses the best `experts_per_token`; their outputs are added up,
weighted by their scores. No token is dropped, whatever the load of an expert: the tokens are sorted by expert, and the
experts multiply groups of rows of any size. Weights of all experts stand in one tensor a projection, so that a
grouped matmul takes them as they are and a mesh can cut them by expert.

What keeps the load even (`[model.router] load_balance`):

* `auxiliary_loss` (Shazeer et al. 2017; Lepikhin et al. 2020, GShard; Fedus et al. 2021, Switch, section 2.2), in the
  form that DeepSeek-V3 (2024, section 2.1.2, eq. 17-20) takes over each sequence of T tokens alone:

      weight * sum_i f_i P_i,   f_i = experts / (experts_per_token * T) * |tokens that chose expert i|,
                                P_i = mean over tokens of expert i's share of the scores

  It is added up over the layers and averaged over the sequences of the global batch. As each sequence stands for
  itself, it does not depend on micro-batches or the mesh. Only P carries a gradient.
* `bias` (Wang et al. 2024, "Auxiliary-loss-free load balancing", algorithm 1; DeepSeek-V3): a number for each expert
  is added to its score where experts are chosen, not where they are weighted. After each step it goes up by
  `bias_update_rate` for experts with fewer tokens of the global batch than the mean, and down for those with more.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from configs.layout import expert_dim
from configs.schema import Model
from models.feed_forward import FeedForward
from models.grouped_mm import grouped_mm


class Load(NamedTuple):
    """What the tokens of a micro-batch asked of one layer's experts."""

    tokens: Tensor
    """(n_experts,) int64: tokens sent to each expert."""
    entropy: Tensor
    """Sum over the tokens of the entropy of the scores' shares, in nats; a scalar."""


class Choice(NamedTuple):
    """The experts of every token."""

    experts: Tensor
    """(batch, seq, experts_per_token) int64, the best first."""
    weights: Tensor
    """The same shape; of the router's type."""
    load: Load


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


class Router(nn.Module):
    """Scores the experts for each token and chooses the best."""

    bias: Tensor | None
    tokens_per_expert: Tensor
    entropy: Tensor

    def __init__(self, config: Model) -> None:
        super().__init__()
        assert config.n_experts is not None
        self.config, self.settings = config, config.router
        self.weight = nn.Parameter(torch.empty(config.n_experts, config.dim))
        self.register_buffer("bias", torch.zeros(config.n_experts) if self.settings.load_balance == "bias" else None)
        counts = torch.zeros(config.n_experts, dtype=torch.int64)
        self.register_buffer("tokens_per_expert", counts, persistent=False)
        self.register_buffer("entropy", torch.zeros((), dtype=torch.float64), persistent=False)
        self.local: Callable[[Tensor], Tensor] = _unchanged
        """What a technique that keeps the weight in another form puts here: the weight to compute with."""
        self.sum_over_sequence: Callable[[Tensor], Tensor] = _unchanged
        """Adds up counts over the ranks that hold parts of the same sequences."""
        self.balance_scale = 0.0
        """Factor on the auxiliary loss of a sequence that makes its gradient, as the parameters' gradients are reduced,
        that of the mean over the global batch; 0: there is none. Whoever trains the model sets it."""

    def init_buffers(self) -> None:
        """Start the bias at zero, and counting; in types of their own, whatever the parameters'."""
        if self.bias is not None:
            self.bias = torch.zeros_like(self.bias, dtype=torch.float32)
        self.tokens_per_expert = torch.zeros_like(self.tokens_per_expert, dtype=torch.int64)
        self.entropy = torch.zeros_like(self.entropy, dtype=torch.float64)

    def forward(self, x: Tensor) -> Choice:
        """x: (batch, seq, dim)."""
        weight = self.local(self.weight)
        dtype = torch.promote_types(x.dtype, torch.float32)  # a rounded score would choose at random among near ones
        logits = F.linear(x.to(dtype), weight.to(dtype))  # (batch, seq, n_experts)
        scores = logits.softmax(-1) if self.settings.scoring == "softmax" else logits.sigmoid()
        shares = scores if self.settings.scoring == "softmax" else scores / scores.sum(-1, keepdim=True)
        preference = scores.detach() if self.bias is None else scores.detach() + self.bias
        experts = preference.topk(self.config.experts_per_token, dim=-1).indices
        tokens = _count(experts, scores.shape[-1])
        weights = scores.gather(-1, experts)
        if self.settings.renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        if self.settings.load_balance == "auxiliary_loss" and self.balance_scale:
            loss = self._auxiliary_loss(shares, tokens)
            weights = _WithLoss.apply(weights, loss * self.balance_scale)
        settled = shares.detach()
        entropy = -torch.xlogy(settled, settled).sum()  # torch.special.entr is compiled at run time on CUDA
        return Choice(experts, weights, Load(tokens.sum(0), entropy))

    def _auxiliary_loss(self, shares: Tensor, tokens: Tensor) -> Tensor:
        """Sum over the sequences of the loss at the top of this file.

        Args:
            shares: (batch, seq, n_experts), adding up to 1.
            tokens: (batch, n_experts), tokens of each sequence that chose an expert.
        """
        tokens = self.sum_over_sequence(tokens).to(shares.dtype)
        chosen = tokens.sum(-1, keepdim=True)  # experts_per_token * T
        frequency = tokens * (tokens.shape[-1] / chosen)
        mean_share = shares.sum(1) * (self.config.experts_per_token / chosen)
        return self.settings.auxiliary_loss_weight * (frequency * mean_share).sum()

    def record(self, load: Load) -> None:
        """Count a micro-batch's load; `tokens_per_expert` and `entropy` hold the sums since they were zeroed."""
        self.tokens_per_expert += load.tokens
        self.entropy += load.entropy


def _count(experts: Tensor, n_experts: int) -> Tensor:
    """experts: (batch, seq, experts_per_token) -> (batch, n_experts): how often each is there, int64."""
    chosen = experts.flatten(1)
    return torch.zeros(len(chosen), n_experts, dtype=torch.int64, device=chosen.device).scatter_add(
        1, chosen, torch.ones_like(chosen)
    )


class _WithLoss(torch.autograd.Function):
    """A tensor as it is; backward through it also is backward of a loss, whose value goes nowhere.

    So a layer has a loss of its own that needs no way to the end of the model, over pipeline stages for example.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, loss: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad.new_ones(())


class Experts(nn.Module):
    """SwiGLU feed-forwards side by side, each for its own rows."""

    def __init__(self, config: Model) -> None:
        super().__init__()
        assert config.n_experts is not None
        inner = expert_dim(config)
        self.gate_proj = nn.Parameter(torch.empty(config.n_experts, inner, config.dim))
        self.up_proj = nn.Parameter(torch.empty(config.n_experts, inner, config.dim))
        self.down_proj = nn.Parameter(torch.empty(config.n_experts, config.dim, inner))
        self.local: Callable[[Tensor], Tensor] = _unchanged
        """What a technique that cuts the weights puts here: a weight to this rank's part of it."""

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """What each row's expert makes of it.

        Args:
            rows: (n, dim), those of the first expert first.
            counts: (experts,) int64, rows of each expert that this rank holds; any may be 0.

        Returns:
            (n, dim); of weights cut by their inner width a part of a sum.
        """
        gate, up, down = map(self.local, (self.gate_proj, self.up_proj, self.down_proj))
        hidden = F.silu(grouped_mm(rows, gate, counts)) * grouped_mm(rows, up, counts)
        return grouped_mm(hidden, down, counts)


class MixtureOfExperts(nn.Module):
    """The chosen experts' outputs, weighted and added up, and those of the shared experts, which see every token."""

    def __init__(self, config: Model) -> None:
        super().__init__()
        self.router = Router(config)
        self.experts = Experts(config)
        # Shared experts side by side are one feed-forward of their joint width (Dai et al. 2024, DeepSeekMoE).
        shared = config.n_shared_experts * expert_dim(config)
        self.shared_experts = FeedForward(config.dim, shared) if shared else None

    def forward(self, x: Tensor) -> tuple[Tensor, Load]:
        """x: (batch, seq, dim) -> the same shape, and what the tokens asked of the experts."""
        choice = self.router(x)
        order = choice.experts.flatten().argsort(stable=True)  # by expert, then as the tokens came
        place = order.argsort()  # of each token's experts among the sorted rows
        k = choice.experts.shape[-1]
        rows = _Take.apply(x.flatten(0, 1), order, place, k)
        outputs = _Take.apply(self.experts(rows, choice.load.tokens), place, order, 1)
        weights = choice.weights.to(x.dtype)
        out = (outputs.view(*choice.experts.shape, -1) * weights[..., None]).sum(2)
        return (out if self.shared_experts is None else out + self.shared_experts(x)), choice.load


class _Take(torch.autograd.Function):
    """Rows in another order, each `times` times: row index // times for each index.

    Backward takes rows, too, where indexing's own would add them up by atomics: the same bits on every run.
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
