"""Llama 2 and 3.x: RMSNorm, rotary embedding, grouped-query attention, SwiGLU; with options, most of today's families.

Each option is a key of `configs/architectures/llama.py`, and a line or two here. Plain single-device PyTorch: no mesh,
rank or process group is known here. Modules and weights are named and laid out as in Hugging Face's classes (rotary
halves split, not interleaved; names without the leading "model."), so that an export is a rename.

One thing is unusual: `forward` takes the loss as an argument. The head then passes its hidden states and weight to the
loss instead of multiplying them, so that the full logits (2 GiB for 4,096 tokens of a 128K vocabulary in float32)
never have to exist.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from configs.architectures import init_stds, tensor_parallel_roles
from configs.architectures.llama import (
    ATTENTION,
    RopeScaling,
    block_norms,
    embedding_scale,
    is_mixture,
    is_rotated,
    rope_dim,
    window_of,
)
from configs.architectures.parts import head_dim, n_kv_heads
from configs.plan import Plan
from configs.schema import Model
from models.documents import Documents, NumberedDocuments, attend_near, attend_within, has_kernel
from models.feed_forward import FeedForward
from models.moe import Load, MixtureOfExperts, unchanged
from models.norm import OffsetNorm, norm

Loss = Callable[[Tensor, Tensor], Tensor]  # (hidden (batch, seq, dim), head weight (vocab, dim)) -> loss
Mask = NumberedDocuments | Tensor  # which pairs of tokens see each other; a tensor is (batch, 1, seq, seq), bool
Attend = Callable[[Tensor, Tensor, Tensor, Mask | None], Tensor]  # (q, k, v, mask) -> attention output


class RotaryEmbedding(nn.Module):
    """Cosines and sines of the rotary embedding's angles (Su et al. 2021, RoFormer)."""

    inv_freq: Tensor

    def __init__(self, features: int, theta: float, scaling: RopeScaling | None) -> None:
        super().__init__()
        self.features = features
        self.theta = theta
        self.scaling = scaling
        self.register_buffer("inv_freq", self._inverse_frequencies(), persistent=False)

    def init_buffers(self) -> None:
        """Fill the buffer after the model left the meta device; float32, whatever the parameters' dtype."""
        self.inv_freq = self._inverse_frequencies("cpu").to(self.inv_freq.device)

    def _inverse_frequencies(self, device: str | None = None) -> Tensor:
        """Radians per token, (features / 2,), float32."""
        exponents = torch.arange(0, self.features, 2, dtype=torch.float32, device=device) / self.features
        frequencies = 1.0 / self.theta**exponents
        return _STRETCHES[self.scaling.kind](frequencies, self.theta, self.scaling) if self.scaling else frequencies

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions: (1 or batch, seq) -> cos, sin: (1 or batch, seq, 1, features), float32 for exact large angles."""
        angles = positions[..., None].float() * self.inv_freq  # (batch, seq, features / 2)
        angles = torch.cat((angles, angles), dim=-1)[:, :, None]
        factor = _attention_factor(self.scaling)
        if factor == 1.0:
            return angles.cos(), angles.sin()
        return angles.cos() * factor, angles.sin() * factor


def _by_wavelength(frequencies: Tensor, _theta: float, scaling: RopeScaling) -> Tensor:
    """Llama 3.1's RoPE scaling: long wavelengths are stretched by the factor, short ones kept, those between blended.

    Source: Meta's reference implementation of Llama 3.1 (`apply_scaling`), which is `rope_type = "llama3"` in
    Hugging Face.
    """
    wavelengths = 2 * math.pi / frequencies
    low = scaling.low_freq_factor
    high = scaling.high_freq_factor
    kept = ((scaling.original_seq_len / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies


def _by_turns(frequencies: Tensor, theta: float, scaling: RopeScaling) -> Tensor:
    """YaRN (Peng et al. 2023, section 3.2): stretched, kept or blended by the turns within the original length.

    As in its authors' code and in Hugging Face's `rope_type = "yarn"`, the features between which frequencies are
    blended are whole numbers.
    """
    n = len(frequencies)

    def feature(turns: float) -> float:
        """The feature that turns so often."""
        return n * math.log(scaling.original_seq_len / (turns * 2 * math.pi)) / math.log(theta)

    first = max(math.floor(feature(scaling.beta_fast)), 0)
    last = min(math.ceil(feature(scaling.beta_slow)), 2 * n - 1)
    features = torch.arange(n, dtype=torch.float32, device=frequencies.device)
    stretched = ((features - first) / max(last - first, 0.001)).clamp(0, 1)
    return stretched * frequencies / scaling.factor + (1 - stretched) * frequencies


def _all_alike(frequencies: Tensor, _theta: float, scaling: RopeScaling) -> Tensor:
    """Position interpolation (Chen et al. 2023)."""
    return frequencies / scaling.factor


_STRETCHES = {"llama3": _by_wavelength, "yarn": _by_turns, "linear": _all_alike}


def _attention_factor(scaling: RopeScaling | None) -> float:
    """YaRN's factor on queries and keys (section 3.4)."""
    if scaling is None or scaling.kind != "yarn":
        return 1.0
    return scaling.attention_factor or 0.1 * math.log(scaling.factor) + 1.0


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x: (batch, seq, heads, head_dim) by its positions; feature i is paired with i + features / 2.

    If the angles are of fewer features than a head has, the others stay as they are.
    """
    features = cos.shape[-1]
    if features < x.shape[-1]:
        return torch.cat((rotate(x[..., :features], cos, sin), x[..., features:]), dim=-1)
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention with grouped queries (Ainslie et al. 2023)."""

    def __init__(self, config: Model, layer: int) -> None:
        super().__init__()
        self.head_dim = head_dim(config)
        query_dim = config.n_heads * self.head_dim
        kv_dim = n_kv_heads(config) * self.head_dim
        self.q_proj = nn.Linear(config.dim, query_dim, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.dim, kv_dim, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.dim, kv_dim, bias=config.attention_bias)
        self.gate_proj = nn.Linear(config.dim, query_dim, bias=False) if config.attention_gate else None
        # Query-key normalization (Henry et al. 2020), of each head (Qwen3) or of all heads together (OLMo 2).
        self.norms_heads = config.qk_norm == "head"
        self.q_norm = self._norm(config, query_dim)
        self.k_norm = self._norm(config, kv_dim)
        self.o_proj = nn.Linear(query_dim, config.dim, bias=False)
        self.rotates = is_rotated(config, layer)
        self.query_factor = math.sqrt(self.head_dim / (config.query_scale or self.head_dim))
        self.window = window_of(config, layer)
        self.attend: Attend = attend if self.window is None else partial(attend_near, window=self.window)
        """The function that mixes tokens; context parallelism replaces it where the sequence is split over ranks."""

    def _norm(self, config: Model, features: int) -> Callable[[Tensor], Tensor]:
        if config.qk_norm == "none":
            return unchanged
        return norm(config, self.head_dim if self.norms_heads else features)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask | None) -> Tensor:
        """x: (batch, seq, dim) -> the same shape; mask: from the model's `mask`, or None for plain causal attention."""
        heads = (*x.shape[:-1], -1, self.head_dim)  # -1: a tensor-parallel rank holds only some of the heads
        q = self._normed(self.q_proj(x), self.q_norm, heads)
        k = self._normed(self.k_proj(x), self.k_norm, heads)
        v = self.v_proj(x).view(heads)
        if self.rotates:
            q = rotate(q, cos, sin)
            k = rotate(k, cos, sin)
        if self.query_factor != 1.0:
            q = q * self.query_factor  # `attend` divides by the square root of head_dim
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (batch, heads, seq, head_dim)
        out = self.attend(q, k, v, mask).transpose(1, 2).flatten(2)
        return self.o_proj(out if self.gate_proj is None else out * self.gate_proj(x).sigmoid())

    def _normed(self, x: Tensor, norm: Callable[[Tensor], Tensor], heads: tuple[int, ...]) -> Tensor:
        """x: (batch, seq, heads * head_dim) -> (batch, seq, heads, head_dim), normed."""
        return norm(x.view(heads)) if self.norms_heads else norm(x).view(heads)


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
    """Attention and feed-forward, each applied to the residual stream and added to it, with norms around them."""

    def __init__(self, config: Model, layer: int) -> None:
        super().__init__()
        self.norms = block_norms(config)
        before_attention, after_attention, before_mlp, after_mlp = self.norms
        self._add_norm(config, before_attention)
        self.self_attn = Attention(config, layer)
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


def document_mask(document_ids: Tensor) -> Tensor:
    """document_ids: (batch, seq) -> (batch, 1, seq, seq), true where a query (row) may see a key (column).

    Do not use it for 16-bit dtypes on CUDA: there cuDNN would take the mask, and it returns NaN gradients for some
    masks (pytorch issue 196678).
    """
    same = document_ids[:, :, None] == document_ids[:, None, :]
    return same.tril()[:, None]
