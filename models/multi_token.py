"""Prediction of further tokens while the model is trained (DeepSeek-V3, 2024, arXiv:2412.19437, section 2.2).

Module k of D sees at position i the embedding of token i + k and what the module before it (for the first, the model)
computed there, and predicts token i + k + 1. So all of them are causal, and keep the order of the tokens. Embedding and
head are the model's own. The order within is that of the published weights, as vLLM's deepseek_mtp.py runs them: the
first module takes the model's output after the final norm, a later one the block's output before its norm; the
embedding comes first in the matrix that joins both.

The modules' losses are in the gradients alone, so that the loss stays the cross-entropy of the next token:

    loss_weight / D * sum over k of L_k,   L_k = sum over the valid targets of depth k / valid targets of the model

That is the paper's equation 24, which divides by the tokens of the sequence and not by the few less that depth k has.
The divisor is therefore the main loss's, and the sum does not depend on micro-batches or the mesh.
"""

import torch
from torch import Tensor, nn

from configs.schema import Model
from models.attention import Mask
from models.block import Block
from models.moe import Load
from models.norm import norm


class MultiToken(nn.Module):
    """Predicts one token further than the module before; a unit of checkpointing, compilation and sharding."""

    loss: Tensor

    def __init__(self, config: Model, depth: int) -> None:
        """depth: counts from 0; the block is of the kind that the layer after the last one would have."""
        super().__init__()
        self.enorm = norm(config, config.dim)
        self.hnorm = norm(config, config.dim)
        self.eh_proj = nn.Linear(2 * config.dim, config.dim, bias=False)
        self.block = Block(config, config.n_layers + depth)
        self.norm = norm(config, config.dim)
        self.register_buffer("loss", torch.zeros(2, dtype=torch.float64), persistent=False)

    def init_buffers(self) -> None:
        """Zero the sums."""
        self.loss = torch.zeros_like(self.loss, dtype=torch.float64)

    def forward(
        self, hidden: Tensor, embedded: Tensor, cos: Tensor, sin: Tensor, mask: Mask | None
    ) -> tuple[Tensor, Tensor, Load | None]:
        """The module's own states, and what the head multiplies.

        Args:
            hidden: (batch, seq, dim), of the module before.
            embedded: (batch, seq, dim), of the token that this module sees.
            cos, sin, mask: as for the block.

        Returns:
            The block's output, the same normed, both (batch, seq, dim), and the load of the experts.
        """
        joined = torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1)
        hidden, load = self.block(self.eh_proj(joined), cos, sin, mask)
        # A clone, because FSDP warns of outputs that are views, and a norm under tensor parallelism returns one.
        return hidden, self.norm(hidden).clone(), load

    @torch.no_grad()
    def record(self, loss: Tensor, targets: Tensor) -> None:
        """Add a micro-batch's loss, a sum over its valid targets, and their number, for the metrics."""
        self.loss += torch.stack((loss.detach().double(), (targets >= 0).sum().double()))
