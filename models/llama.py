"""Llama 2 and 3.x: RMSNorm, rotary embedding, grouped-query attention, SwiGLU; with experts, Mixtral.

Plain single-device PyTorch: no mesh, rank or process group is known here. Modules and weights are named and laid out
as in Hugging Face's `LlamaForCausalLM` (rotary halves split, not interleaved; names without the leading "model."), so
that an export is a rename.

One thing is unusual: `forward` takes the loss as an argument. The head then passes its hidden states and weight to the
loss instead of multiplying them, so that the full logits (2 GiB for 4,096 tokens of a 128K vocabulary in float32)
never have to exist.
"""

import math
from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from configs.architectures import init_stds, tensor_parallel_roles
from configs.architectures.llama import ATTENTION, RopeScaling, is_mixture
from configs.architectures.parts import head_dim, n_kv_heads
from configs.plan import Plan
from configs.schema import Model
from models.documents import Documents, NumberedDocuments, attend_within, has_kernel
from models.feed_forward import FeedForward
from models.moe import Load, MixtureOfExperts, unchanged

Loss = Callable[[Tensor, Tensor], Tensor]  # (hidden (batch, seq, dim), head weight (vocab, dim)) -> loss
Mask = NumberedDocuments | Tensor  # which pairs of tokens see each other; a tensor is (batch, 1, seq, seq), bool
Attend = Callable[[Tensor, Tensor, Tensor, Mask | None], Tensor]  # (q, k, v, mask) -> attention output


class RotaryEmbedding(nn.Module):
    """Cosines and sines of the rotary embedding's angles (Su et al. 2021, RoFormer)."""

    inv_freq: Tensor

    def __init__(self, head_dim: int, theta: float, scaling: RopeScaling | None) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.theta = theta
        self.scaling = scaling
        self.register_buffer("inv_freq", self._inverse_frequencies(), persistent=False)

    def init_buffers(self) -> None:
        """Fill the buffer after the model left the meta device; float32, whatever the parameters' dtype."""
        self.inv_freq = self._inverse_frequencies("cpu").to(self.inv_freq.device)

    def _inverse_frequencies(self, device: str | None = None) -> Tensor:
        """Radians per token, (head_dim / 2,), float32."""
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float32, device=device) / self.head_dim
        frequencies = 1.0 / self.theta**exponents
        return _stretch(frequencies, self.scaling) if self.scaling else frequencies

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions: (1 or batch, seq) -> cos, sin: (1 or batch, seq, 1, head_dim), float32 for exact large angles."""
        angles = positions[..., None].float() * self.inv_freq  # (batch, seq, head_dim / 2)
        angles = torch.cat((angles, angles), dim=-1)[:, :, None]
        return angles.cos(), angles.sin()


def _stretch(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1's RoPE scaling: long wavelengths are stretched by the factor, short ones kept, those between blended.

    Source: Meta's reference implementation of Llama 3.1 (`apply_scaling`), which is `rope_type = "llama3"` in
    Hugging Face.
    """
    wavelengths = 2 * math.pi / frequencies
    low = scaling.low_freq_factor
    high = scaling.high_freq_factor
    kept = ((scaling.original_seq_len / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x: (batch, seq, heads, head_dim) by its positions; feature i is paired with i + head_dim / 2."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention with grouped queries (Ainslie et al. 2023)."""

    def __init__(self, config: Model) -> None:
        super().__init__()
        self.head_dim = head_dim(config)
        query_dim = config.n_heads * self.head_dim
        kv_dim = n_kv_heads(config) * self.head_dim
        self.q_proj = nn.Linear(config.dim, query_dim, bias=False)
        self.k_proj = nn.Linear(config.dim, kv_dim, bias=False)
        self.v_proj = nn.Linear(config.dim, kv_dim, bias=False)
        self.q_norm = self._norm_of_heads(config)
        self.k_norm = self._norm_of_heads(config)
        self.o_proj = nn.Linear(query_dim, config.dim, bias=False)
        self.attend: Attend = attend
        """The function that mixes tokens; context parallelism replaces it where the sequence is split over ranks."""

    def _norm_of_heads(self, config: Model) -> Callable[[Tensor], Tensor]:
        """Query-key normalization (Henry et al. 2020), with RMSNorm (Qwen3); or nothing."""
        return nn.RMSNorm(self.head_dim, eps=config.norm_eps) if config.qk_norm == "head" else unchanged

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask | None) -> Tensor:
        """x: (batch, seq, dim) -> the same shape; mask: from the model's `mask`, or None for plain causal attention."""
        heads = (*x.shape[:-1], -1, self.head_dim)  # -1: a tensor-parallel rank holds only some of the heads
        q = rotate(self.q_norm(self.q_proj(x).view(heads)), cos, sin)
        k = rotate(self.k_norm(self.k_proj(x).view(heads)), cos, sin)
        v = self.v_proj(x).view(heads)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (batch, heads, seq, head_dim)
        return self.o_proj(self.attend(q, k, v, mask).transpose(1, 2).flatten(2))


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask | None) -> Tensor:
    """Scaled dot-product attention.

    Args:
        q: (batch, heads, seq, head_dim).
        k, v: the same shape, with as many heads or fewer (grouped queries).
        mask: documents, or (batch, 1, seq, seq) bool, true for allowed pairs; None for plain causal attention.
    """
    if isinstance(mask, NumberedDocuments):
        return attend_within(q, k, v, mask)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1]
    )


class Block(nn.Module):
    """Attention and feed-forward, each applied to the normed residual stream and added to it."""

    def __init__(self, config: Model, layer: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.mlp = MixtureOfExperts(config) if is_mixture(config, layer) else FeedForward(config.dim, config.ffn_dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask | None = None) -> tuple[Tensor, Load | None]:
        """x: (batch, seq, dim) -> the same shape, and the load of the experts (None in a dense layer)."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        normed = self.post_attention_layernorm(x)
        if isinstance(self.mlp, MixtureOfExperts):
            out, load = self.mlp(normed)
            return x + out, load
        return x + self.mlp(normed), None


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

    A pipeline stage is this model with some layers removed. `embed_tokens` is None unless it is the first stage, and
    `norm` and `lm_head` are None unless it is the last. Everything else keeps its name.
    """

    embed_tokens: nn.Embedding | None
    norm: nn.RMSNorm | None
    lm_head: Head | None

    def __init__(self, config: Model) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleDict({str(i): Block(config, i) for i in range(config.n_layers)})
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.lm_head = Head(config.dim, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self.rotary = RotaryEmbedding(head_dim(config), config.rope_theta, config.rope_scaling)
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
        cos, sin = self.rotary(positions)
        x = tokens if self.embed_tokens is None else self.embed_tokens(tokens)
        mask = None if documents is None else self.mask(documents, x.dtype)
        for block in self.layers.values():
            x, load = block(x, cos, sin, mask)
            # Recorded outside the block, which activation checkpointing runs twice. Validation is not counted.
            if load is not None and torch.is_grad_enabled():
                cast(MixtureOfExperts, block.mlp).router.record(load)
        return x if self.norm is None or self.lm_head is None else self.lm_head(self.norm(x), loss)

    def _mask(self, documents: Documents, dtype: torch.dtype) -> Mask:
        if has_kernel(documents.ids.device.type, dtype, head_dim(self.config)):
            return documents.numbered()
        return document_mask(documents.ids)

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
            save_ops=_SAVE_OPS + (_SAVE_OPS_OF_EXPERTS if mixtures else ()),
        )

    def init_std(self, name: str) -> float | None:
        """Standard deviation of a parameter's initial values; None for those that start at one."""
        return init_stds(self.config)[name]


def document_mask(document_ids: Tensor) -> Tensor:
    """document_ids: (batch, seq) -> (batch, 1, seq, seq), true where a query (row) may see a key (column).

    Do not use it for 16-bit dtypes on CUDA: there cuDNN would take the mask, and it returns NaN gradients for some
    masks (pytorch issue 196678).
    """
    same = document_ids[:, :, None] == document_ids[:, None, :]
    return same.tril()[:, None]
