"""Llama 2 and 3.x: RMSNorm, rotary embedding, grouped-query attention, SwiGLU; with options, most of today's families.

Each option is a key of `configs/architectures/llama.py`, and a line or two here. Plain single-device PyTorch: no mesh,
rank or process group is known here. Modules and weights are named and laid out as in Hugging Face's classes (rotary
halves split, not interleaved; names without the leading "model."), so that an export is a rename.

One thing is unusual: `forward` takes the loss as an argument. The head then passes its hidden states and weight to the
loss instead of multiplying them, so that the full logits (2 GiB for 4,096 tokens of a 128K vocabulary in float32)
never have to exist.
"""

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from configs.architectures import init_stds, tensor_parallel_roles
from configs.architectures.llama import ATTENTION, block_norms, embedding_scale, is_mixture, rope_dim
from configs.architectures.parts import head_dim
from configs.plan import Plan
from configs.schema import Model
from models.attention import Attention, LatentAttention, Mask, document_mask
from models.documents import Documents, has_kernel
from models.feed_forward import FeedForward
from models.moe import Load, MixtureOfExperts
from models.norm import OffsetNorm, norm
from models.rotary import RotaryEmbedding

Loss = Callable[[Tensor, Tensor], Tensor]  # (hidden (batch, seq, dim), head weight (vocab, dim)) -> loss


class Block(nn.Module):
    """Attention and feed-forward, each applied to the residual stream and added to it, with norms around them."""

    def __init__(self, config: Model, layer: int) -> None:
        super().__init__()
        self.norms = block_norms(config)
        before_attention, after_attention, before_mlp, after_mlp = self.norms
        self._add_norm(config, before_attention)
        self.self_attn = (LatentAttention if config.attention == "latent" else Attention)(config, layer)
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
        """x: (batch, seq, dim) -> the same shape, and the load of the experts (None in a dense layer)."""
        before_attention, after_attention, before_mlp, after_mlp = self.norms
        x = x + self._normed(self.self_attn(self._normed(x, before_attention), cos, sin, mask), after_attention)
        normed = self._normed(x, before_mlp)
        if isinstance(self.mlp, MixtureOfExperts):
            out, load = self.mlp(normed)
            return x + self._normed(out, after_mlp), load
        return x + self._normed(self.mlp(normed), after_mlp), None


class Head(nn.Linear):
    """The output projection; if it is given a loss, it leaves the multiplication to the loss."""

    def forward(self, hidden: Tensor, loss: Loss | None = None) -> Tensor:
        """hidden: (batch, seq, dim) -> logits: (batch, seq, vocab), or the loss's return value."""
        return F.linear(hidden, self.weight) if loss is None else loss(hidden, self.weight)


_PRODUCTS = ("aten.mm", "aten._scaled_mm")
_SAVE_OPS = (*_PRODUCTS, "*._scaled_dot_product_*attention*", "_c10d_functional.reduce_scatter_tensor")
# The choice of experts (topk) is saved, not recomputed: a recomputed score may differ in its last bit if it was
# compiled differently, and a different choice would then read another expert's rows out of the saved outputs.
_SAVE_OPS_OF_EXPERTS = ("keel.grouped_mm", "aten.topk")


class Llama(nn.Module):
    """The model; `config` is the job file's `[model]`.

    A pipeline stage is this model with some layers removed. `embed_tokens` is None unless it is the first stage, or the
    last one and tied to the head; `norm` and `lm_head` are None unless it is the last. Everything else keeps its name.
    """

    embed_tokens: nn.Embedding | None
    norm: nn.RMSNorm | OffsetNorm | None
    lm_head: Head | None

    def __init__(self, config: Model) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleDict({str(i): Block(config, i) for i in range(config.n_layers)})
        self.norm = norm(config, config.dim)
        self.lm_head = Head(config.dim, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self.embedding_scale = embedding_scale(config)
        self.rotary = RotaryEmbedding(rope_dim(config), config.rope_theta, config.rope_scaling)
        near = config.window_rope_theta
        self.window_rotary = RotaryEmbedding(rope_dim(config), near, None) if near else None
        self.mask: Callable[[Documents, torch.dtype], Mask] = self._mask
        """Maps documents and the activations' dtype to the mask that each block's `attend` takes; replaced with it."""

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        documents: Documents | None = None,
        loss: Loss | None = None,
    ) -> Tensor:
        """Compute the logits or the loss.

        Args:
            tokens: (batch, seq) ids; for a later pipeline stage, the previous stage's output, (batch, seq, dim).
            positions: (1 or batch, seq). Default: 0, 1, 2, ...
            documents: restricts attention to earlier tokens of the same document. Default: all earlier tokens.
            loss: called with the normed hidden states and the head's weight.

        Returns:
            Logits (batch, seq, vocab), or the loss if `loss` is given. A pipeline stage other than the last returns its
            last layer's output, (batch, seq, dim).
        """
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        angles = self.rotary(positions)
        angles_near = angles if self.window_rotary is None else self.window_rotary(positions)
        x = tokens if tokens.is_floating_point() else self._embedded(tokens)
        mask = None if documents is None else self.mask(documents, x.dtype)
        for block in self.layers.values():
            x, load = block(x, *(angles_near if cast(Block, block).self_attn.window else angles), mask)
            # Recorded outside the block, which activation checkpointing runs twice. Validation is not counted.
            if load is not None and torch.is_grad_enabled():
                cast(MixtureOfExperts, block.mlp).router.record(load)
        return x if self.norm is None or self.lm_head is None else self.lm_head(self.norm(x), loss)

    def _embedded(self, tokens: Tensor) -> Tensor:
        assert self.embed_tokens is not None
        x = self.embed_tokens(tokens)
        return x if self.embedding_scale == 1.0 else x * self.embedding_scale

    def _mask(self, documents: Documents, dtype: torch.dtype) -> Mask:
        if has_kernel(documents.ids.device.type, dtype, head_dim(self.config)):
            return documents.numbered()
        return document_mask(documents.ids)

    def set_rope(self, config: Model) -> None:
        """Turn positions by the rope_theta and rope_scaling of another stage of the run from now on."""
        self.rotary.theta = config.rope_theta
        self.rotary.scaling = config.rope_scaling
        self.rotary.init_buffers()

    @property
    def plan(self) -> Plan:
        """How techniques may split the model; see `Plan`."""
        there = dict(self.named_children())
        blocks = tuple(f"layers.{name}" for name in self.layers)
        before = tuple(name for name in ("embed_tokens",) if name in there)
        after = tuple(name for name in ("norm", "lm_head") if name in there)
        # A tied matrix is needed at both ends of the forward pass. It stays in the root's group, gathered throughout.
        groups = tuple((block,) for block in blocks)
        mixtures = [
            f"layers.{name}.mlp" for name, block in self.layers.items() if isinstance(block.mlp, MixtureOfExperts)
        ]
        return Plan(
            blocks=blocks,
            first_block=int(next(iter(self.layers))),
            n_blocks=self.config.n_layers,
            can_be_cut=True,
            before_blocks=before,
            after_blocks=after,
            fsdp_groups=groups if self.config.tie_embeddings else tuple(filter(None, (before, *groups, after))),
            attention=tuple(f"{block}.{ATTENTION}" for block in blocks),
            mixers=tuple(f"{block}.{ATTENTION}" for block in blocks),
            experts=tuple(f"{mixture}.experts" for mixture in mixtures),
            routers=tuple(f"{mixture}.router" for mixture in mixtures),
            tensor_parallel={
                name: role
                for name, role in tensor_parallel_roles(self.config).items()
                if ".".join(name.split(".")[:2]) in (*before, *blocks, *after)
            },
            tied=before if self.config.tie_embeddings else (),
            save_ops=_SAVE_OPS + (_SAVE_OPS_OF_EXPERTS if mixtures else ()),
            can_cache=self.config.window is None,
        )

    def init_std(self, name: str) -> float | None:
        """Standard deviation of a parameter's initial values; None for those that start at one."""
        return init_stds(self.config)[name]
