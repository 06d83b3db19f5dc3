"""One layer of a model: attention and feed-forward, with norms around them."""

from torch import Tensor, nn

from configs.architectures.llama import block_norms, mixer
from configs.architectures.llama_keys import is_delta, is_mixture, window_of
from configs.schema import Model
from models.attention import Attention, LatentAttention, Mask
from models.delta import DeltaNet
from models.feed_forward import FeedForward
from models.moe import Load, MixtureOfExperts
from models.norm import norm


def _mixer(config: Model, layer: int) -> nn.Module:
    """The module that mixes tokens."""
    if is_delta(config, layer):
        return DeltaNet(config)
    return (LatentAttention if config.attention == "latent" else Attention)(config, layer)


class Block(nn.Module):
    """Attention and feed-forward, each applied to the residual stream and added to it, with norms around them."""

    def __init__(self, config: Model, layer: int) -> None:
        super().__init__()
        self.norms = block_norms(config)
        before_attention, after_attention, before_mlp, after_mlp = self.norms
        self._add_norm(config, before_attention)
        self.is_delta = is_delta(config, layer)
        self.window = None if self.is_delta else window_of(config, layer)
        self.mixer = mixer(config, layer)
        self.add_module(self.mixer, _mixer(config, layer))
        self._add_norm(config, after_attention)
        self._add_norm(config, before_mlp)
        self.mlp = MixtureOfExperts(config) if is_mixture(config, layer) else FeedForward(config, config.ffn_dim)
        self._add_norm(config, after_mlp)

    def _add_norm(self, config: Model, name: str) -> None:
        if name:
            self.add_module(name, norm(config, config.dim))

    def _normed(self, x: Tensor, name: str) -> Tensor:
        return getattr(self, name)(x) if name else x

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask | None = None) -> tuple[Tensor, Load | None]:
        """x: (batch, seq, dim) -> the same shape, and the load of the experts (None in a dense layer).

        mask: what the mixer takes: of a layer of kind delta, the numbers of the documents.
        """
        before_attention, after_attention, before_mlp, after_mlp = self.norms
        mixed = getattr(self, self.mixer)(self._normed(x, before_attention), cos, sin, mask)
        x = x + self._normed(mixed, after_attention)
        normed = self._normed(x, before_mlp)
        if isinstance(self.mlp, MixtureOfExperts):
            out, load = self.mlp(normed)
            return x + self._normed(out, after_mlp), load
        return x + self._normed(self.mlp(normed), after_mlp), None
