"""A causal language model of the package `transformers`, trained as it is: the keys, and what its config.json says.

Keel has no description of its weights. `models/hf/` builds the family's own class and reads the plan from it. What
the checks of a job need is in config.json, under names that most families share. Nothing here imports `transformers`:
it takes seconds, and needs torch.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from itertools import islice
from typing import Annotated, Any, Literal

from pydantic import Field

from configs.architectures.parts import small_size
from configs.only_with import only_with
from configs.table import Table

WIDTH = ("hidden_size", "n_embd", "d_model", "dim")
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads", "attention_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
VOCABULARY = ("vocab_size",)
POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "model_max_length", "context_length")
NEEDED = (WIDTH, LAYERS, VOCABULARY)
"""The fields that the checks and the estimates read, each with the names that families have for it. A family without
heads, such as Mamba, has no attention."""


class HfKeys(Table):
    """The keys of [model] for a model of Hugging Face."""

    architecture: Literal["hf"]
    """hf: a model of the package transformers, as it is (docs/hugging_face.md)."""
    hf: Annotated[str | None, only_with("architecture", "hf")] = None
    """A folder with a config.json, or such a file. The run folder's config.toml keeps its content as hf_config."""
    hf_overrides: Annotated[dict[str, Any], only_with("architecture", "hf")] = Field(
        default={}, json_schema_extra={"additionalProperties": True}
    )
    """Fields that replace those of the config.json; the string "none" stands for JSON's null."""
    hf_config: Annotated[str | None, only_with("architecture", "hf")] = None
    """Instead of hf: the content of a config.json as one string, with hf_overrides applied."""

    def __hash__(self) -> int:
        return hash(self.hf_config)

    @property
    def fields(self) -> Mapping[str, Any]:
        """The content of config.json."""
        return parsed(self.hf_config or "{}")

    @property
    def model_type(self) -> str:
        """The family's name in transformers."""
        return str(self.fields["model_type"])

    @property
    def dim(self) -> int:
        """Width of the residual stream."""
        return self._number(WIDTH)

    @property
    def n_layers(self) -> int:
        """Number of decoder layers."""
        return self._number(LAYERS)

    @property
    def n_heads(self) -> int:
        """Number of query heads; 0: the family has no attention."""
        return first_of(self.fields, HEADS) or 0

    @property
    def n_kv_heads(self) -> int | None:
        """Number of key and value heads; None: as many as query heads."""
        return first_of(self.fields, KV_HEADS)

    @property
    def head_dim(self) -> int | None:
        """Width of one head; None: dim / n_heads."""
        return first_of(self.fields, ("head_dim",)) if self.n_heads else 1

    @property
    def vocab_size(self) -> int:
        """Number of tokens in the vocabulary."""
        return self._number(VOCABULARY)

    @property
    def declared_length(self) -> int | None:
        """Tokens of the longest sequence that config.json declares; None: it declares none."""
        value = first_of(self.fields, POSITIONS)
        return value if type(value) is int and value > 0 else None

    @property
    def n_experts(self) -> None:
        """None: the family's experts are its own, and its modules say how many there are; Keel doesn't balance them."""
        return None

    @property
    def experts_per_token(self) -> int | None:
        """Number of experts that a token is sent to; None: the family has none, or says so by another name."""
        return first_of(self.fields, ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts"))

    def _number(self, names: tuple[str, ...]) -> int:
        value = first_of(self.fields, names)
        assert value is not None, names  # `configs.reading.hf_config` requires it
        return value


def first_of(fields: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    """The value of the first of `names` that is set; None if none is."""
    return next((fields[name] for name in names if fields.get(name) is not None), None)


@lru_cache
def parsed(text: str) -> Mapping[str, Any]:
    """The object that a JSON text holds."""
    return json.loads(text)


def shape(model: HfKeys) -> str:
    """The sizes that config.json says, for people."""
    kv = f", {model.n_kv_heads} of keys and values" if model.n_kv_heads not in (None, model.n_heads) else ""
    return (
        f"{model.model_type} of transformers: {model.n_layers} layers, dim {model.dim}, {model.n_heads} heads{kv}, "
        f"vocabulary {model.vocab_size:,}"
    )


def split_sizes(model: HfKeys) -> dict[str, int]:
    """The sizes that tensor parallelism splits, by the field of config.json."""
    heads = {HEADS[0]: model.n_heads, KV_HEADS[0]: model.n_kv_heads or model.n_heads} if model.n_heads else {}
    return {**heads, "vocab_size": model.vocab_size}


def computed(model: HfKeys) -> dict[str, Any]:
    """The fields that decide the model's output for given weights."""
    return {f"hf_config.{name}": value for name, value in model.fields.items() if name not in _NOT_COMPUTED}


_NOT_COMPUTED = {
    *("_name_or_path", "architectures", "dtype", "initializer_range", "torch_dtype", "transformers_version"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "use_cache"),
}
"""Fields that have no effect on the output for given weights."""


def rules(config: Any) -> Iterator[tuple[str, str]]:
    """What a job asks for that models of Hugging Face can't do yet: the key to blame, and a message."""
    for key, (needs, what, remedy) in _REFUSED.items():
        value = config
        for part in key.split("."):
            value = getattr(value, part)
        if needs(value):
            yield key, f'{what}, which architecture "hf" does not offer; {remedy}'


_REFUSED: dict[str, tuple[Callable[[Any], bool], str, str]] = {
    "float8.recipe": (lambda recipe: recipe != "none", "float8 matmuls replace Keel's own matrices", "leave it out"),
    "attention.backend": (
        lambda backend: backend != "auto",
        "the kernel is chosen in Keel's own attention",
        'leave it out, and set model.hf_overrides.attn_implementation = "sdpa" or "eager"',
    ),
}


# --------------------------------------------------------------------------- the small model of a proof

_SMALL_HEAD = 16
_LEAST: dict[str, int] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 128),
    "hidden_size_per_layer_input": _SMALL_HEAD,
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "intermediate_size_mlp"), 64),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_dim"), 32),
    **dict.fromkeys(("expert_ffn_hidden_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size"), 32),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "v_head_dim", "qk_nope_head_dim"), _SMALL_HEAD),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "head_dim", "linear_head_dim"), _SMALL_HEAD),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "linear_num_heads"), 2),
    **dict.fromkeys(("state_size", "mamba_d_state", "ssm_state_size"), 8),
    **{"qk_rope_head_dim": 8, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4},
}
"""Least sizes, of fields that have any of these names."""
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts", "moe_k")
_AT_MOST = {
    **{"sliding_window": 8, "attention_chunk_size": 16, "max_position_embeddings": 256, "n_positions": 256},
    "rotary_dim": 8,
}
_GROUPS = ("n_group", "topk_group", "num_expert_group", "n_groups", "mamba_n_groups")
_STATE_HEADS = {
    "mamba_n_heads": "mamba_d_head",
    "mamba_num_heads": "mamba_head_dim",
    "num_heads": "head_dim",
}
"""Field with the number of heads of a state space layer -> that with the width of one; together expand * hidden_size
features."""
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def small(model: HfKeys, ranks: int) -> dict[str, Any]:
    """The content of a config.json with the same structure and small sizes (`Family.small`).

    Fields that are not known here keep their values.
    """
    fields = dict(model.fields)
    layers = _layers_of_each_kind(fields, model.n_layers)
    for name, value in fields.items():
        if isinstance(value, list) and len(value) == model.n_layers:
            fields[name] = [value[layer] for layer in layers]
    by_layer = fields.get("per_layer_config")
    if isinstance(by_layer, dict):  # its keys are numbers of layers, some with two digits
        kept = {place: by_layer.get(str(layer), by_layer.get(f"{layer:02}")) for place, layer in enumerate(layers)}
        fields["per_layer_config"] = {str(place): value for place, value in kept.items() if value}
    kv_heads = small_size(model.n_kv_heads or model.n_heads, 1, ranks)
    heads = kv_heads * min(model.n_heads // (model.n_kv_heads or model.n_heads or 1), 3)
    if model.n_kv_heads in (None, model.n_heads):
        heads = small_size(model.n_heads or ranks, 2, ranks)
        kv_heads = heads
    sizes: dict[str, Any] = dict.fromkeys(LAYERS, len(layers))
    sizes |= dict.fromkeys(HEADS, heads) | dict.fromkeys(KV_HEADS, kv_heads)
    sizes |= dict.fromkeys(WIDTH, heads * _SMALL_HEAD)
    sizes |= dict.fromkeys(_GROUPS, 1)
    sizes |= {name: small_size(fields[name], least, ranks) for name, least in _LEAST.items() if _is_size(fields, name)}
    sizes |= {name: min(fields[name], 2) for name in _CHOSEN if _is_size(fields, name)}
    sizes |= {name: min(fields[name], most) for name, most in _AT_MOST.items() if _is_size(fields, name)}
    changed = {name: value for name, value in sizes.items() if _is_size(fields, name)}
    changed |= dict(_dependent(fields, changed, kv_heads))
    tokens = {name: value for name, value in _TOKENS.items() if fields.get(name) is not None}
    return {"hf_config": json.dumps(fields | changed | tokens, sort_keys=True)}


def _dependent(fields: Mapping[str, Any], small: Mapping[str, int], kv_heads: int) -> Iterator[tuple[str, Any]]:
    """The fields that follow from others, or that a default configuration leaves open where its modules need them."""
    if "head_dim" in fields:
        is_rotated = fields["head_dim"] == fields.get("qk_rope_head_dim", 0)  # then it is the rotated part's
        yield "head_dim", small["qk_rope_head_dim"] if is_rotated else small.get("head_dim", _SMALL_HEAD)
    if "qk_head_dim" in fields:
        yield "qk_head_dim", small["qk_nope_head_dim"] + small["qk_rope_head_dim"]
    if "num_key_value_heads" in fields and fields["num_key_value_heads"] is None:
        yield "num_key_value_heads", kv_heads
    for name in _CHOSEN:
        if name in fields and fields[name] is None:
            yield name, 2
    for heads, width in _STATE_HEADS.items():
        inner = fields.get("expand", fields.get("mamba_expand"))
        if inner and _is_size(fields, heads) and _is_size(fields, width):
            features = inner * next(small[name] for name in WIDTH if name in small)
            yield heads, features // _SMALL_HEAD
            yield width, _SMALL_HEAD
            if "mamba_d_ssm" in fields:
                yield "mamba_d_ssm", features


def _is_size(fields: Mapping[str, Any], name: str) -> bool:
    return type(fields.get(name)) is int and fields[name] > 0


def _layers_of_each_kind(fields: Mapping[str, Any], n_layers: int) -> list[int]:
    """Up to four layers, with one of each kind if there are four kinds at most, by the lists with an item a layer."""
    lists = [value for value in fields.values() if isinstance(value, list) and len(value) == n_layers]
    kinds: dict[str, int] = {}
    for layer in range(n_layers):
        kinds.setdefault(repr([value[layer] for value in lists]), layer)
    chosen = list(kinds.values())[:4]
    others = (layer for layer in range(n_layers) if layer not in chosen)
    return sorted([*chosen, *islice(others, max(0, 4 - len(chosen)))])
