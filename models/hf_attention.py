"""Attention of `transformers`' models by Keel's own function, so that documents stay apart and sequences may be split.

transformers looks up attention, and the mask of each kind of layer, by a name in the family's config. A family that
would compute with torch's `scaled_dot_product_attention` gets Keel's name (`register`). What is computed then:

* Without documents and without context parallelism, exactly what transformers computes under the name "sdpa".
* With documents, layers of plain causal attention get the documents in place of a mask, and `attend` keeps them apart
  by Keel's kernel. Other layers (sliding windows, chunks) get a mask of all pairs, which has the family's own pattern
  inside each document.
* With context parallelism, `attend` is the function that it has put in place.

Families that compute with their own "eager" function, such as those with attention sinks, get a mask of all pairs, too.

transformers itself asks the positions in each forward pass whether sequences are packed, which on a GPU makes the host
wait for the device. `reading` answers in its place that they are not: Keel knows its documents.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from models.documents import Documents, NumberedDocuments, has_kernel
from models.llama import attend as attend_natively
from models.llama import document_mask

NAME = "keel"
_UNSUPPORTED = ("softcap", "s_aux", "position_bias")
"""What families hand to attention besides queries, keys and values, and `attend` does not compute."""


@dataclass
class Seen:
    """What a forward pass asked of attention."""

    modules: list[nn.Module] = field(default_factory=list)
    """Those that called it, in order."""
    kv_heads: int = 0
    """The fewest heads of keys and values that a module has."""
    windows: set[int] = field(default_factory=set)
    """Tokens to which layers limit their attention; 0: a pattern of another kind."""

    def note(self, module: nn.Module, key: Tensor) -> None:
        """Note a module and its keys, (batch, kv_heads, seq, head_dim)."""
        if module not in self.modules:
            self.modules.append(module)
        self.kv_heads = min(self.kv_heads or key.shape[1], key.shape[1])


@dataclass
class _Pass:
    """The forward pass that runs; transformers calls functions by name, which get nothing from Keel's model."""

    seen: Seen | None = None
    documents: Documents | None = None
    mask: Any = None
    """What layers of plain causal attention get."""


_NOW = _Pass()


def register(family: Any) -> None:
    """Let a family that computes with torch's attention compute with Keel's, and others keep documents apart."""
    transformers.AttentionMaskInterface.register("eager", partial(_mask, build=masking_utils.eager_mask))
    if family.config._attn_implementation != "sdpa" or not family._supports_attention_backend:
        return
    transformers.AttentionInterface.register(NAME, _attention)
    transformers.AttentionMaskInterface.register(NAME, _mask)
    family.set_attn_implementation(NAME)


@contextmanager
def reading(documents: Documents | None, mask: Any) -> Iterator[None]:
    """Let the attention of a family's forward pass know the documents.

    Args:
        documents: those of the batch; None: there are none.
        mask: what layers of plain causal attention get in place of a mask.
    """
    asked = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda _positions: None
    _NOW.documents = documents
    _NOW.mask = mask
    try:
        yield
    finally:
        _NOW.documents = None
        _NOW.mask = None
        masking_utils.find_packed_sequence_indices = asked


@contextmanager
def watching() -> Iterator[Seen]:
    """Note what forward passes ask of attention."""
    _NOW.seen = Seen()
    try:
        yield _NOW.seen
    finally:
        _NOW.seen = None


def attend(q: Tensor, k: Tensor, v: Tensor, mask: NumberedDocuments | Tensor | None) -> Tensor:
    """Scaled dot-product attention, as in `models/llama.py`, for all dtypes and widths of heads."""
    if isinstance(mask, NumberedDocuments) and not has_kernel(q.device.type, q.dtype, q.shape[-1]):
        mask = document_mask(mask.numbers)
    return attend_natively(q, k, v, mask)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """What transformers calls: (batch, heads, seq, head_dim) -> (batch, seq, heads, head_dim)."""
    if _NOW.seen:
        _NOW.seen.note(module, key)
    by = getattr(module, "attend", attend)
    if by is attend and not isinstance(attention_mask, NumberedDocuments):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    if isinstance(attention_mask, Tensor):
        raise ValueError("has layers whose mask is not plain causal")
    return _by_attend(by, module, query, key, value, attention_mask, **options), None


def _by_attend(
    by: Callable[..., Tensor],
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: NumberedDocuments | None,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> Tensor:
    """Attention by an `attend`, whose scale is that of the width of its heads, and whose heads have one width."""
    for name in _UNSUPPORTED:
        if options.get(name) is not None:
            raise ValueError(f"computes attention with {name}")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise ValueError(f"has attention that is not causal ({type(module).__name__})")
    width = q.shape[-1]
    if scaling is not None and not math.isclose(scaling, width**-0.5, rel_tol=1e-12):
        q = q * (scaling * width**0.5)
    out = by(q, k, F.pad(v, (0, width - v.shape[-1])), mask)[..., : v.shape[-1]]
    return out.transpose(1, 2).contiguous()


def _mask(
    mask_function: Callable,
    allow_is_causal_skip: bool = True,
    local_size: int | None = None,
    build: Callable = masking_utils.sdpa_mask,
    **options: Any,
) -> Any:
    """What transformers calls for the mask of a kind of layers; other options as in `masking_utils.sdpa_mask`."""
    if _NOW.seen and (local_size or not allow_is_causal_skip):
        _NOW.seen.windows.add(local_size or 0)
    if _NOW.documents is not None:
        ids = _NOW.documents.ids
        is_plain = allow_is_causal_skip and (local_size is None or local_size >= ids.shape[1])
        if is_plain and build is masking_utils.sdpa_mask:
            return _NOW.mask
        mask_function = _inside(ids, mask_function)
        allow_is_causal_skip = False
    shape = {"allow_is_causal_skip": allow_is_causal_skip, "local_size": local_size}
    return build(mask_function=mask_function, **shape, **options)


def _inside(ids: Tensor, pattern: Callable) -> Callable:
    """A pattern of pairs, as transformers writes it, that counts tokens in each document from 0."""
    begins = torch.ones_like(ids, dtype=torch.bool)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    places = torch.arange(ids.shape[1], device=ids.device)
    counted = places - torch.where(begins, places, 0).cummax(1).values

    def allowed(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        inside = pattern(batch, head, counted[batch, query], counted[batch, key])
        return inside & (ids[batch, query] == ids[batch, key])

    return allowed
