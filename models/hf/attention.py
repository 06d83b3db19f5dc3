"""Attention of `transformers`' models by Keel's own function, so that documents stay apart and sequences may be split.

transformers looks up attention, and the mask of each kind of layer, by a name in the family's config. A family that
would compute with torch's `scaled_dot_product_attention` gets Keel's name (`register`). What is computed then:

* Without documents, context parallelism and sinks, exactly what transformers computes under the name "sdpa".
* With documents, layers of plain causal attention, and with sliding windows, get the documents in place of a mask, and
  `attend` keeps them apart by Keel's kernel. Other layers (chunks) get a mask of all pairs, which has the family's own
  pattern inside each document.
* With context parallelism, `attend` is the function that it has put in place. Layers whose mask is neither plain causal
  nor a window take the keys and values of whole sequences (`whole_sequence`) and a mask for their own queries.
* With attention sinks, which torch's function does not have, `attend` takes them.

Families that compute with their own "eager" function, such as those with softcapping, get a mask of all pairs, too.
With context parallelism that function gets the keys and values of whole sequences. It takes fewer queries than keys, as
it does when transformers generates text with a cache.

transformers itself asks the positions in each forward pass whether sequences are packed, which on a GPU makes the host
wait for the device. `reading` answers in its place that they are not: Keel knows its documents.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from configs.schema import HfModel
from models.attention import attend as attend_natively
from models.attention import document_mask
from models.documents import Documents, NumberedDocuments, attend_near, has_kernel

NAME = "keel"
NAME_WITH_SINKS = "keel_with_sinks"
_UNSUPPORTED = ("softcap", "position_bias")
"""What families hand to attention besides queries, keys and values, and `attend` does not compute."""


class Window(NamedTuple):
    """What layers with a sliding window get in place of a mask."""

    size: int
    """Tokens that a token sees, itself included."""
    documents: NumberedDocuments | None


@dataclass
class Seen:
    """What a forward pass asked of attention."""

    modules: list[nn.Module] = field(default_factory=list)
    """Those that called it, in order."""
    kv_heads: int = 0
    """The fewest heads of keys and values that a module has."""
    patterns: set[int] = field(default_factory=set)
    """Tokens up to which layers with other masks are plain causal; 0: with none."""
    is_own: bool = False
    """Whether a module computes attention by a function of its family."""

    def note(self, module: nn.Module, key: Tensor, is_own: bool = False) -> None:
        """Note a module and its keys, (batch, kv_heads, seq, head_dim)."""
        self.is_own |= is_own
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
    has_parts: bool = False
    """Whether context parallelism has replaced attention, so that the model computes on parts of sequences."""
    places: Tensor | None = None
    """(rows, tokens of a part): where the tokens are in whole sequences; rows of a sequence follow each other, and one
    row is for all. None: sequences are whole, or no layer may see more than its `attend` does."""
    length: int = 0
    """Tokens of whole sequences, with `places`."""


_NOW = _Pass()


def register(family: Any, config: HfModel) -> None:
    """Let a family that computes with torch's attention compute with Keel's, and others keep documents apart.

    Args:
        family: the model of transformers.
        config: what it was built of; with `attn_implementation = "eager"`, attention stays the family's own.
    """
    transformers.AttentionMaskInterface.register("eager", partial(_mask, build=masking_utils.eager_mask))
    # Recomputed layers look attention up in the backward pass, so this can't end with a forward pass.
    transformers.AttentionInterface.get_interface = _get_interface  # type: ignore[method-assign,assignment]
    is_torchs = family.config._attn_implementation == "sdpa"
    has_sinks = _has_sinks(family) and config.fields.get("attn_implementation") != "eager"
    if not family._supports_attention_backend or not (is_torchs or has_sinks):
        return
    name = NAME if is_torchs else NAME_WITH_SINKS
    transformers.AttentionInterface.register(name, _attention)
    transformers.AttentionMaskInterface.register(name, partial(_mask, by_keel=True, with_sinks=not is_torchs))
    family.set_attn_implementation(name)


def _has_sinks(family: Any) -> bool:
    """Whether a family's attention is torch's but for sinks: flex attention in transformers computes it, too."""
    return family._supports_flex_attn and any(hasattr(module, "sinks") for module in family.modules())


_chosen = transformers.AttentionInterface.get_interface


def _get_interface(interface: Any, name: str, default: Callable) -> Callable:
    """What transformers asks for the attention of a name; the default is the family's own function."""
    found = _chosen(interface, name, default)
    return partial(_own_attention, default) if found is default else found


@contextmanager
def reading(
    documents: Documents | None = None,
    mask: Any = None,
    has_parts: bool = False,
    places: Tensor | None = None,
    length: int = 0,
) -> Iterator[None]:
    """Let the attention of a family's forward pass know the documents.

    Args:
        documents: those of the batch; None: there are none.
        mask: what layers of plain causal attention get in place of a mask.
        has_parts, places, length: see `_Pass`.
    """
    asked = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = _no_packed_sequences
    _NOW.documents = documents
    _NOW.mask = mask
    _NOW.has_parts = has_parts
    _NOW.places = places
    _NOW.length = length
    try:
        yield
    finally:
        _NOW.documents = None
        _NOW.mask = None
        _NOW.has_parts = False
        _NOW.places = None
        _NOW.length = 0
        masking_utils.find_packed_sequence_indices = asked


def _no_packed_sequences(position_ids: Tensor) -> Tensor | None:
    return None


@contextmanager
def watching() -> Iterator[Seen]:
    """Note what forward passes ask of attention."""
    _NOW.seen = Seen()
    try:
        yield _NOW.seen
    finally:
        _NOW.seen = None


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: NumberedDocuments | Tensor | None,
    window: int = 0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Scaled dot-product attention, as in `models/attention.py`, for all dtypes and widths of heads.

    Args:
        window, sinks: as for `attend_within` of models/documents.py.
    """
    if isinstance(mask, NumberedDocuments) and not has_kernel(q.device.type, q.dtype, q.shape[-1]):
        mask = document_mask(mask.numbers)
    if 0 < window < q.shape[2] or sinks is not None:
        return attend_near(q, k, v, mask, window, sinks)
    return attend_natively(q, k, v, mask)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """What transformers calls: (batch, heads, seq, head_dim) -> (batch, seq, heads, head_dim)."""
    if _NOW.seen:
        _NOW.seen.note(module, key)
    by = getattr(module, "attend", attend)
    has_sinks = options.get("s_aux") is not None
    if by is attend and not has_sinks and not isinstance(attention_mask, (NumberedDocuments, Window)):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    if isinstance(attention_mask, Tensor) and by is not attend:
        if has_sinks:
            raise ValueError("has layers with attention sinks whose mask is neither plain causal nor a window")
        whole = _whole_sequences(module)
        return sdpa_attention_forward(module, query, whole(key), whole(value), attention_mask, **options)
    return _by_attend(by, module, query, key, value, attention_mask, **options), None


def _own_attention(
    own: Callable, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, Any]:
    """Attention by the family's own function; shapes as in `_attention`."""
    if _NOW.seen:
        _NOW.seen.note(module, key, is_own=True)
    if getattr(module, "attend", attend) is attend:
        return own(module, query, key, value, attention_mask, **options)
    whole = _whole_sequences(module)
    return own(module, query, whole(key), whole(value), attention_mask, **options)


def _whole_sequences(module: Any) -> Callable[[Tensor], Tensor]:
    """What gives a module the keys and values of whole sequences.

    Raises:
        ValueError: context parallelism does not.
    """
    if not hasattr(module, "whole_sequence"):
        raise ValueError("has layers whose mask is not plain causal")
    return module.whole_sequence


def _by_attend(
    by: Callable[..., Tensor],
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: NumberedDocuments | Window | Tensor | None,
    scaling: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
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
    more: dict[str, Any] = {} if s_aux is None else {"sinks": s_aux}
    if isinstance(mask, Window):
        more["window"] = mask.size
        mask = mask.documents
    out = by(q, k, F.pad(v, (0, width - v.shape[-1])), mask, **more)[..., : v.shape[-1]]
    return out.transpose(1, 2).contiguous()


def _mask(
    mask_function: Callable,
    allow_is_causal_skip: bool = True,
    local_size: int | None = None,
    build: Callable = masking_utils.sdpa_mask,
    by_keel: bool = False,
    with_sinks: bool = False,
    **options: Any,
) -> Any:
    """What transformers calls for the mask of a kind of layers; other options as in `masking_utils.sdpa_mask`.

    Args:
        by_keel: whether attention is `_attention`, and not the family's own.
        with_sinks: whether the family has sinks.
    """
    window = local_size if allow_is_causal_skip and _slides(options["config"], local_size) else None
    if _NOW.seen and not window and (local_size or not allow_is_causal_skip):
        _NOW.seen.patterns.add(local_size or 0)
    if window and by_keel and (with_sinks or _NOW.has_parts or _NOW.documents is not None):
        return Window(window, _NOW.mask)
    if _NOW.documents is not None:
        ids = _NOW.documents.ids
        is_plain = allow_is_causal_skip and (local_size is None or local_size >= ids.shape[1])
        if is_plain and by_keel:
            return _NOW.mask
        mask_function = _inside(ids, mask_function)
        allow_is_causal_skip = False
    if _NOW.places is not None:
        is_plain = allow_is_causal_skip and (local_size is None or local_size >= _NOW.length)
        if is_plain and by_keel:
            return None
        mask_function = _of_parts(_NOW.places, mask_function)
        allow_is_causal_skip = False
        options["kv_length"] = _NOW.length
    shape = {"allow_is_causal_skip": allow_is_causal_skip, "local_size": local_size}
    return build(mask_function=mask_function, **shape, **options)


def _of_parts(places: Tensor, pattern: Callable) -> Callable:
    """A pattern of pairs of a rank's queries and all keys, from that of whole sequences."""
    n_rows = len(places)

    def allowed(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return pattern(batch, head, places[batch % n_rows, query], key)

    return allowed


def _slides(config: Any, size: int | None) -> bool:
    """Whether a mask of this size is a sliding window, and not of chunks."""
    return getattr(config, "sliding_window", None) == size != getattr(config, "attention_chunk_size", None)


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
