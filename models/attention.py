"""Causal self-attention: with grouped queries, and through compressed keys and values."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from configs.architectures.llama_keys import is_rotated, window_of
from configs.architectures.mup import query_factor
from configs.architectures.parts import head_dim, n_kv_heads
from configs.schema import Model
from models.documents import NumberedDocuments, attend_near, attend_within
from models.moe import unchanged
from models.norm import norm
from models.rotary import rotate

Mask = NumberedDocuments | Tensor  # which pairs of tokens see each other; a tensor is (batch, 1, seq, seq), bool
Attend = Callable[[Tensor, Tensor, Tensor, Mask | None], Tensor]  # (q, k, v, mask) -> attention output


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
        self.query_factor = query_factor(config)
        self.window = window_of(config, layer)
        self.attend = _attend_of(self.window)

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
            q = q * self.query_factor
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (batch, heads, seq, head_dim)
        out = self.attend(q, k, v, mask).transpose(1, 2).flatten(2)
        return self.o_proj(out if self.gate_proj is None else out * self.gate_proj(x).sigmoid())

    def row_factors(self, factors: Tensor) -> dict[str, Tensor]:
        """What the rows of parameters are multiplied by so that each head's logits are multiplied by `factors`.

        Queries and keys take a root each. Keys that several heads share stay as they are.

        Args:
            factors: (n_heads,).

        Returns:
            (rows,) by the parameter's name.
        """
        is_shared = self.k_proj.out_features < self.q_proj.out_features
        rows = (factors if is_shared else factors.sqrt()).repeat_interleave(self.head_dim)
        of_queries = {f"q_proj.{name}": rows for name, _ in self.q_proj.named_parameters()}
        return of_queries if is_shared else of_queries | {name.replace("q_", "k_"): rows for name in of_queries}

    def _normed(self, x: Tensor, norm: Callable[[Tensor], Tensor], heads: tuple[int, ...]) -> Tensor:
        """x: (batch, seq, heads * head_dim) -> (batch, seq, heads, head_dim), normed."""
        return norm(x.view(heads)) if self.norms_heads else norm(x).view(heads)


class LatentAttention(nn.Module):
    """Causal self-attention through compressed queries, keys and values (DeepSeek-V2, 2024, section 2.1).

    A token's keys and values are products of one short vector, its latent; queries may have one, too. Positions are in
    further features of queries and keys, and those of the keys are the same for all heads. In training, keys and values
    are multiplied out, so that `attend` is any attention's. Values are padded to the width of the keys, since kernels
    take one width; the zeros change nothing. Weights have Hugging Face's names and layout: rotated features lie in
    pairs, next to each other.
    """

    def __init__(self, config: Model, layer: int) -> None:
        super().__init__()
        self.latent = latent = config.latent
        self.head_dim = head_dim(config)
        self.plain_dim = self.head_dim - latent.rope_head_dim
        query_dim = config.n_heads * self.head_dim
        compressed = latent.key_value_rank + latent.rope_head_dim
        if latent.query_rank:
            self.q_a_proj = nn.Linear(config.dim, latent.query_rank, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(config.dim, compressed, bias=False)
        if latent.query_rank:
            self.q_a_layernorm = norm(config, latent.query_rank, _LATENT_EPS)
        self.kv_a_layernorm = norm(config, latent.key_value_rank, _LATENT_EPS)
        if latent.query_rank:
            self.q_b_proj = nn.Linear(latent.query_rank, query_dim, bias=False)
        else:
            self.q_proj = nn.Linear(config.dim, query_dim, bias=False)
        keys_values = config.n_heads * (self.plain_dim + latent.value_head_dim)
        self.kv_b_proj = nn.Linear(latent.key_value_rank, keys_values, bias=False)
        self.o_proj = nn.Linear(config.n_heads * latent.value_head_dim, config.dim, bias=False)
        self.shared_keys = nn.Identity()
        """What keys that all heads share pass; with tensor parallelism, each rank's heads use them all."""
        self.rotates = is_rotated(config, layer)
        self.query_factor = query_factor(config)
        self.window = window_of(config, layer)
        self.attend = _attend_of(self.window)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask | None) -> Tensor:
        """x: (batch, seq, dim) of the tensor-parallel rank's part of the sequence; else as `Attention.forward`."""
        latent = self.latent
        q = self._queries(x).unflatten(-1, (-1, self.head_dim))  # (batch, seq, heads, head_dim)
        compressed, shared = self.kv_a_proj_with_mqa(x).split((latent.key_value_rank, latent.rope_head_dim), -1)
        shared = self.shared_keys(shared)[:, :, None]  # one head
        keys_values = self.kv_b_proj(self.kv_a_layernorm(compressed))
        k, v = keys_values.unflatten(-1, (q.shape[2], -1)).split((self.plain_dim, latent.value_head_dim), -1)
        if self.rotates:
            plain, rotated = q.split((self.plain_dim, latent.rope_head_dim), -1)
            q = torch.cat((plain, rotate(_apart(rotated), cos, sin)), -1)
            shared = rotate(_apart(shared), cos, sin)
        if self.query_factor != 1.0:
            q = q * self.query_factor
        k = torch.cat((k, shared.expand(*k.shape[:-1], -1)), -1)
        v = F.pad(v, (0, self.head_dim - latent.value_head_dim))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (batch, heads, seq, head_dim)
        out = self.attend(q, k, v, mask)[..., : latent.value_head_dim]
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def row_factors(self, factors: Tensor) -> dict[str, Tensor]:
        """Factors like `Attention.row_factors`; rotated features of keys, which all heads share, stay as they are."""
        latent = self.latent
        root = factors.sqrt()[:, None]
        n_values = latent.value_head_dim
        plain = root.expand(-1, self.plain_dim)
        queries = torch.cat((plain, factors[:, None].expand(-1, latent.rope_head_dim)), 1)
        keys_values = torch.cat((plain, torch.ones_like(root).expand(-1, n_values)), 1)
        of_queries = "q_b_proj.weight" if latent.query_rank else "q_proj.weight"
        return {of_queries: queries.flatten(), "kv_b_proj.weight": keys_values.flatten()}

    def _queries(self, x: Tensor) -> Tensor:
        return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))) if self.latent.query_rank else self.q_proj(x)


_LATENT_EPS = 1e-6
"""Epsilon of the norms of latents, whatever the others' is: so in DeepSeek's code and in Hugging Face's."""


def _apart(x: Tensor) -> Tensor:
    """Pairs of neighbors (a0, b0, a1, b1, ...) -> the first ones, then the second ones, as `rotate` takes them."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def _attend_of(window: int | None) -> Attend:
    """The function that mixes tokens; context parallelism replaces it where the sequence is split over ranks."""
    return attend if window is None else partial(attend_near, window=window)


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


def document_mask(document_ids: Tensor) -> Tensor:
    """document_ids: (batch, seq) -> (batch, 1, seq, seq), true where a query (row) may see a key (column).

    Do not use it for 16-bit dtypes on CUDA: there cuDNN would take the mask, and it returns NaN gradients for some
    masks (pytorch issue 196678).
    """
    same = document_ids[:, :, None] == document_ids[:, None, :]
    return same.tril()[:, None]
