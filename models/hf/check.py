"""Whether a family of `transformers` keeps documents apart, and computes on parts of sequences, as Keel asks it to.

Families differ in more than their attention: some mix tokens by convolutions or recurrences, count positions themselves
or change their attention by what they find in the batch. None of it is listed here. A model of the same structure, made
small, with random weights, computes on a CPU in float64 what the job asks for, and what plain transformers computes of
each document alone, or of whole sequences. Logits and the gradients of all parameters must agree.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from configs.architectures.hf import POSITIONS, small
from configs.errors import ConfigError
from configs.schema import Config, HfModel
from models.documents import Documents
from models.hf.family import built
from models.hf.model import HfCausalLm, cuts_of

BOUND = 1e-5
"""Largest difference, relative to the largest value: families that cast to float32 themselves differ by 1e-7."""
_LENGTHS = ((11, 1, 20), (5, 27))
"""Tokens of the documents in each sequence. Some are longer than the windows of small models, some are not."""
Split = Literal["none", "gather", "ring", "all_to_all"]
"""Whether sequences are whole, or by which method of context parallelism each rank has a part of them."""
_N_PARTS = 2
_MOST_PARAMETERS = 1 << 25
"""The most parameters of a small model, which each rank holds in memory for a moment: 256 MB."""
_LIMIT = "attention_chunk_size"
_LONG = 64
_FEW_POSITIONS = 16


def require_attention(config: Config) -> None:
    """Check what a job with documents or context parallelism needs of a model of Hugging Face.

    Raises:
        ConfigError: the family can't do it; the message says why.
    """
    model = config.model
    assert isinstance(model, HfModel)
    if reason := _why_not_split(config, model) if config.mesh.cp > 1 else "":
        raise ConfigError(f"mesh.cp is {config.mesh.cp}, but {reason}; set cp = 1, and dp_shard or tp for the ranks")
    documents = config.data.document_mask
    if documents and (reason := _why_not(model, config.training.seq_len, True, "none")):
        raise ConfigError(f"data.document_mask is true, but {reason}; leave it out")
    if config.mesh.cp > 1 and (reason := _why_not(model, config.training.seq_len, documents, config.context.method)):
        raise ConfigError(f"mesh.cp is {config.mesh.cp}, but {reason}; set cp = 1")


def require_positions(config: Config) -> None:
    """Check that a model of Hugging Face has a position for each token of a sequence.

    Where positions are in a table (GPT-2, GPT-J), there are as many as config.json declares; elsewhere they go on.

    Raises:
        ConfigError: the table is too short.
    """
    model = config.model
    assert isinstance(model, HfModel)
    seq_len = config.training.seq_len
    limit = model.declared_length
    if limit and seq_len > limit and _ends_at_limit(model):
        raise ConfigError(
            f"training.seq_len is {seq_len}, but {model.model_type} has positions for {limit} tokens only; set "
            f"training.seq_len = {limit} or less"
        )


def depends_on_longest(model: nn.Module) -> bool:
    """Whether a sequence's logits depend on the longest sequence of its batch, by its rotary frequencies."""
    return isinstance(model, HfCausalLm) and (bool(model.rotations) or _limit_of_positions(model.family) > 0)


def _why_not_split(config: Config, model: HfModel) -> str:
    """Why context parallelism can't replace the family's attention; "" if it can."""
    kind = model.model_type
    found = cuts_of(model)
    if not found.has_ended:
        return found.why_not
    if not found.attention:
        return f"no layer of {kind} computes attention by transformers' attention interface"
    seq_len = config.training.seq_len
    if config.context.method == "gather":
        return ""
    offer = '; context.method "gather" offers that'
    by_heads = config.context.method == "all_to_all"
    if found.has_own_attention:
        return f"layers of {kind} compute attention by a function of their own{offer}"
    if any(size < seq_len for size in found.patterns):
        return f"layers of {kind} have a mask that is neither plain causal nor a sliding window{offer}"
    parts = config.mesh.cp * config.mesh.tp
    if by_heads and found.kv_heads % parts:
        return f'"all_to_all" splits the {found.kv_heads} heads of keys and values of {kind} over {parts} ranks'
    return ""


def _why_not(model: HfModel, seq_len: int, documents: bool, split: Split) -> str:
    kind = model.model_type
    with torch.device("meta"):
        family = built(model)
    limit = _limit_of_positions(family)
    if limit and seq_len > limit:
        return (
            f"the rotary frequencies of {kind} depend on the largest position in a batch above {limit} positions, "
            f"and training.seq_len is {seq_len}"
        )
    difference, failure = _difference(model, documents, split)
    if failure:
        return f"{kind} {failure}"
    if difference > BOUND:
        what = "each document alone" if documents else "whole sequences"
        mixers = sorted({type(each).__name__ for each in _without_attention(model)})
        named = f" (perhaps in {', '.join(mixers)})" if mixers else ""
        return (
            f"{kind} mixes tokens or counts positions outside of the attention that Keel replaces{named}: a small "
            f"model of it differs by {difference:.0e} from {what}"
        )
    return ""


def _limit_of_positions(family: Any) -> int:
    """The positions above which rotary frequencies depend on the batch; 0: they never do."""
    kinds: list[str] = []
    for module in family.modules():
        rope = getattr(module, "rope_type", "")
        kinds += rope.values() if isinstance(rope, dict) else [rope]
    if not any("dynamic" in kind or kind == "longrope" for kind in kinds if isinstance(kind, str)):
        return 0
    fields = family.config.get_text_config().to_dict()
    rope = fields.get("rope_parameters") or {}
    scopes = [fields, rope, *(each for each in rope.values() if isinstance(each, dict))]
    names = ("original_max_position_embeddings", "max_position_embeddings")
    found = [scope[name] for scope in scopes for name in names if scope.get(name)]
    return min(found, default=1)


def _without_attention(model: HfModel) -> Iterator[nn.Module]:
    """The mixers of blocks in which no module computes with Keel's attention."""
    with torch.device("meta"):
        found = HfCausalLm(model)
    attention = cuts_of(model).attention
    for block, mixer in zip(found.names.blocks, found.names.mixers, strict=True):
        if not any(name == block or name.startswith(f"{block}.") for name in attention):
            yield found.get_submodule(mixer)


# --------------------------------------------------------------------------- the small model


@cache
def _difference(model: HfModel, documents: bool, split: Split) -> tuple[float, str]:
    """Compute with a small model what the job asks for, and the same by plain transformers.

    Args:
        model: the job's.
        documents: whether documents are packed.
        split: how sequences are; with "ring" no chunk is shorter.

    Returns:
        The largest difference, and how it fails; "" if it does not.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            family = _small_family(model, split)
            tokens = torch.randint(3, family.config.get_text_config().vocab_size, (len(_LENGTHS), sum(_LENGTHS[0])))
            weights = torch.randn(*tokens.shape, family.config.get_text_config().vocab_size, dtype=torch.float64)
            expected = _results(family, _plainly(family, tokens, documents), weights)
        except Exception as error:  # whatever the family's code makes of it
            return 0.0, f"can't be tried with a small model of it ({_in_words(error)})"
    try:
        found = _results(family, _as_asked(family, model, tokens, documents, split), weights)
    except Exception as error:
        return 0.0, f"can't compute it ({_in_words(error)})"
    differences = [_relative(mine, theirs) for mine, theirs in zip(found, expected, strict=True)]
    return max(differences), ""


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


@cache
def _ends_at_limit(model: HfModel) -> bool:
    """Whether a family computes sequences of the length that its config.json declares, and no longer ones."""
    few = dict.fromkeys(set(POSITIONS) & model.fields.keys(), _FEW_POSITIONS)
    with torch.random.fork_rng(devices=[]):
        try:
            family = _small_family(model, "none", few)
            _logits(family, input_ids=torch.zeros(1, _FEW_POSITIONS, dtype=torch.int64))
        except Exception:  # it can't be tried
            return False
    try:
        _logits(family, input_ids=torch.zeros(1, _FEW_POSITIONS + 1, dtype=torch.int64))
    except Exception:
        return True
    return False


def _small_family(model: HfModel, split: Split, changed: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """A small model of plain transformers in float64, in which every weight and bias matters.

    Args:
        model: the job's.
        split: with "ring" no chunk is shorter than the sequences.
        changed: fields of its config.json that replace its own.
    """
    # By default transformers computes experts with grouped products, which a CPU does not have in float64.
    fields = json.loads(small(model, _N_PARTS)["hf_config"]) | {"experts_implementation": "batched_mm"} | changed
    if split == "ring" and isinstance(fields.get(_LIMIT), int):
        fields[_LIMIT] = _LONG
    config = HfModel.model_validate({"architecture": "hf", "hf_config": json.dumps(fields)})
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in built(config).parameters())
    if size > _MOST_PARAMETERS:
        raise ConfigError(f"it still has {size:,} parameters")
    with torch.device("cpu"):
        family = built(config).double()
    with torch.no_grad():
        for parameter in family.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
            else:
                parameter.uniform_(0.5, 1.5)
    return family


def _plainly(family: Any, tokens: Tensor, documents: bool) -> Tensor:
    """The logits of transformers itself: of each document alone, or of whole sequences."""
    if not documents:
        return _logits(family, input_ids=tokens)
    rows = [
        torch.cat([_logits(family, input_ids=document[None]) for document in row.split(lengths)], dim=1)
        for row, lengths in zip(tokens, map(list, _LENGTHS), strict=True)
    ]
    return torch.cat(rows)


def _as_asked(family: Any, model: HfModel, tokens: Tensor, documents: bool, split: Split) -> Tensor:
    """The logits by Keel's attention: of packed documents; with the parts of sequences as rows of the batch."""
    from models.hf.attention import reading, register

    register(family, model)
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    packed = None
    if documents:
        numbers = [torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)) for lengths in _LENGTHS]
        packed = Documents.find(torch.stack(numbers))
        positions = torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in _LENGTHS])
    mask = None if packed is None else packed.numbered()
    places = None
    if split == "gather":  # the parts are rows, each of which has its own mask
        places = torch.arange(tokens.shape[1]).view(_N_PARTS, -1)
        packed = None if packed is None else Documents.find(packed.ids.repeat_interleave(_N_PARTS, 0))
    with reading(packed, mask, split != "none", places, tokens.shape[1]):
        if split == "none":
            return _logits(family, input_ids=tokens, position_ids=positions)
        parts = (len(tokens) * _N_PARTS, -1)
        with _joined(family, split):
            logits = _logits(family, input_ids=tokens.reshape(parts), position_ids=positions.reshape(parts))
    return logits.reshape(*tokens.shape, -1)


@contextmanager
def _joined(family: Any, split: Split) -> Iterator[None]:
    """Let attention see whole sequences, of which the rows of the batch are parts."""
    from models.hf.attention import attend

    for module in family.modules():
        vars(module)["attend"] = _attend_whole(attend)
        if split == "gather":
            vars(module)["whole_sequence"] = _whole_sequence
    yield


def _whole_sequence(parts: Tensor) -> Tensor:
    """Keys or values of whole sequences for each part: (rows, heads, part, width) -> (rows, heads, seq, width)."""
    whole = parts.unflatten(0, (-1, _N_PARTS)).transpose(1, 2).flatten(2, 3)
    return whole.repeat_interleave(_N_PARTS, 0)


def _attend_whole(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def on_parts(q: Tensor, k: Tensor, v: Tensor, mask: Any, **more: Any) -> Tensor:
        whole = (each.unflatten(0, (-1, _N_PARTS)).transpose(1, 2).flatten(2, 3) for each in (q, k, v))
        return attend(*whole, mask, **more).unflatten(2, (_N_PARTS, -1)).transpose(1, 2).flatten(0, 1)

    return on_parts


def _logits(family: Any, **given: Tensor) -> Tensor:
    return family.forward(**given, use_cache=False, return_dict=True).logits


def _results(family: Any, logits: Tensor, weights: Tensor) -> list[Tensor]:
    """The logits, and the gradients of a weighted sum of them with respect to all parameters."""
    parameters = [parameter for parameter in family.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad((logits * weights).sum(), parameters, allow_unused=True)
    of_unused = torch.zeros(())
    return [logits.detach(), *(of_unused if gradient is None else gradient for gradient in gradients)]


def _relative(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest value; infinite if one of them is not finite."""
    scale = expected.abs().max().clamp(min=1e-12)
    return float(torch.nan_to_num((found - expected).abs().max() / scale, nan=torch.inf))
