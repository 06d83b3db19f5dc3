"""A model as Hugging Face describes it: config.json, and the names and shapes of its tensors.

Only models that Keel can train exactly as they are get translated. A field that would make a model another function (a
bias, another activation, another kind of rotary scaling) is refused by name, never dropped.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from configs.errors import UserError
from configs.layout import head_dim, n_kv_heads
from configs.schema import Model, RopeScaling
from configs.untrusted import shortened

Shape = tuple[int, ...]

ARCHITECTURES = {"llama": "LlamaForCausalLM", "mixtral": "MixtralForCausalLM"}
"""Hugging Face's classes by `model_type`; "mixtral" for models with experts."""

_NAMES = {
    "vocab_size": "vocab_size",
    "hidden_size": "dim",
    "intermediate_size": "ffn_dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "head_dim": "head_dim",
    "rms_norm_eps": "norm_eps",
    "initializer_range": "init_std",
    "tie_word_embeddings": "tie_embeddings",
}
"""Field of config.json -> key of [model]."""

_EXPERT_NAMES = {"num_local_experts": "n_experts", "num_experts_per_tok": "experts_per_token"}
"""Mixtral's additional fields. Its weight of the auxiliary loss is not imported: that loss has another form."""

_DEFAULTS = {"rms_norm_eps": 1e-6, "initializer_range": 0.02, "tie_word_embeddings": False}
"""LlamaConfig's defaults where Keel's differ, or might come to differ."""

_MIXTRAL_DEFAULTS = {
    **_DEFAULTS,
    "rms_norm_eps": 1e-5,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
_THETAS = {"llama": 10000.0, "mixtral": 1000000.0}

_SCALING_NAMES = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_seq_len",
}

_FIXED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "quantization_config": None,
    "sliding_window": None,
    "router_jitter_noise": 0.0,
}
"""Properties that Keel's Llama always has; a config with another value describes another model."""


def tensor_shapes(model: Model) -> dict[str, Shape]:
    """Hugging Face's names and shapes of the model's tensors, from the input to the output."""
    query = model.n_heads * head_dim(model)
    key_value = n_kv_heads(model) * head_dim(model)
    block = {
        "input_layernorm": (model.dim,),
        "self_attn.q_proj": (query, model.dim),
        "self_attn.k_proj": (key_value, model.dim),
        "self_attn.v_proj": (key_value, model.dim),
        "self_attn.o_proj": (model.dim, query),
        "post_attention_layernorm": (model.dim,),
        **(_expert_shapes(model) if model.n_experts else _feed_forward_shapes(model)),
    }
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (model.vocab_size, model.dim)}
    for layer in range(model.n_layers):
        shapes |= {f"model.layers.{layer}.{module}.weight": shape for module, shape in block.items()}
    shapes["model.norm.weight"] = (model.dim,)
    if not model.tie_embeddings:
        shapes["lm_head.weight"] = (model.vocab_size, model.dim)
    return shapes


def _feed_forward_shapes(model: Model) -> dict[str, Shape]:
    inner = (model.ffn_dim, model.dim)
    outer = (model.dim, model.ffn_dim)
    return {"mlp.gate_proj": inner, "mlp.up_proj": inner, "mlp.down_proj": outer}


def _expert_shapes(model: Model) -> dict[str, Shape]:
    """The experts' projections, one after the other, each for all experts, as they are stacked in a checkpoint."""
    assert model.n_experts is not None
    shapes: dict[str, Shape] = {"block_sparse_moe.gate": (model.n_experts, model.dim)}
    for matrix, shape in zip(_EXPERT_MATRICES, _feed_forward_shapes(model).values(), strict=True):
        shapes |= {f"block_sparse_moe.experts.{expert}.{matrix}": shape for expert in range(model.n_experts)}
    return shapes


_EXPERT_MATRICES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
"""Mixtral's names of an expert's matrices -> ours, in the order of a feed-forward's."""


class Place(NamedTuple):
    """Where a checkpoint has one of Hugging Face's tensors."""

    name: str
    """Name of the checkpoint's tensor."""
    expert: int | None = None
    """Index of the part along the first dimension; None: the whole tensor."""


def place_of(name: str) -> Place:
    """The place of the tensor that Hugging Face calls `name`.

    Hugging Face has all tensors except the output head under "model.". Mixtral's experts have separate tensors; in a
    checkpoint they are stacked.
    """
    match = re.fullmatch(r"(model\.layers\.\d+)\.block_sparse_moe\.(?:gate|experts\.(\d+)\.(w[123]))\.weight", name)
    if match is None:
        return Place(f"model.{name.removeprefix('model.')}")
    layer, expert, matrix = match.groups()
    if expert is None:
        return Place(f"{layer}.mlp.router.weight")
    return Place(f"{layer}.mlp.experts.{_EXPERT_MATRICES[matrix]}", int(expert))


def checkpoint_shapes(model: Model) -> dict[str, Shape]:
    """Names and shapes of the model's tensors in a checkpoint, in the order of `tensor_shapes`."""
    shapes: dict[str, Shape] = {}
    for name, shape in tensor_shapes(model).items():
        place = place_of(name)
        shapes[place.name] = shape if place.expert is None else (model.n_experts or 0, *shape)
    return shapes


def to_hf(model: Model, dtype: str, seq_len: int, bos_id: int | None, eos_id: int | None) -> dict[str, Any]:
    """Create the content of config.json, of a model that `configs.exportable` accepts.

    transformers 5 reads `rope_parameters` and `dtype`; earlier versions read `rope_theta`, `rope_scaling` and
    `torch_dtype`.
    """
    kind, names = ("mixtral", _NAMES | _EXPERT_NAMES) if model.n_experts else ("llama", _NAMES)
    values = model.model_dump()
    theta = {"rope_theta": model.rope_theta}
    scaling = _scaling_to_hf(model.rope_scaling)
    return {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        **{name: values[key] for name, key in names.items()},
        "num_key_value_heads": n_kv_heads(model),
        "head_dim": head_dim(model),
        "max_position_embeddings": longest_sequence(model, seq_len),
        **theta,
        "rope_scaling": scaling,
        "rope_parameters": (scaling or {"rope_type": "default"}) | theta,
        **{name: value for name, value in _FIXED.items() if value is not None},
        "bos_token_id": bos_id,
        "eos_token_id": eos_id,
        "use_cache": True,
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def _scaling_to_hf(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    return {"rope_type": "llama3", **{name: getattr(scaling, key) for name, key in _SCALING_NAMES.items()}}


def longest_sequence(model: Model, seq_len: int) -> int:
    """The sequence length that a model is made for: its training's, or the one that its RoPE is scaled to."""
    scaling = model.rope_scaling
    return max(seq_len, int(scaling.factor * scaling.original_seq_len) if scaling else 0)


def to_keel(config: Mapping[str, Any], path: Path) -> Model:
    """Translate the config.json at `path` to [model].

    Raises:
        UserError: Keel can't train the model as it is; the message names the field.
    """
    kind = str(config.get("model_type"))
    architectures = config.get("architectures") or []
    if kind not in ARCHITECTURES or architectures not in ([], [ARCHITECTURES[kind]]):
        what = shortened(f"model_type {config.get('model_type')!r}, architectures {architectures!r}", 400)
        supported = f"{ARCHITECTURES['llama']} (Llama 2 and 3.x) and {ARCHITECTURES['mixtral']}"
        raise UserError(f"{path}: {what}: not supported; Keel imports {supported}")
    for field, value in _FIXED.items():
        if config.get(field, value) != value:
            raise _unsupported(path, field, config[field], f"Keel's Llama has {value!r}")
    names, defaults = (_NAMES, _DEFAULTS) if kind == "llama" else (_NAMES | _EXPERT_NAMES, _MIXTRAL_DEFAULTS)
    given = defaults | {name: config[name] for name in names if config.get(name) is not None}
    values = {names[name]: value for name, value in given.items()}
    try:
        return Model.model_validate(values | _rope_to_keel(config, path, _THETAS[kind]))
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{path}: {_field(first['loc'])}: {first['msg']}") from None


def seq_len_of(config: Mapping[str, Any]) -> int:
    """The sequence length in tokens that a config.json's model is made for; by default LlamaConfig's."""
    value = config.get("max_position_embeddings", 2048)
    if type(value) is not int:
        raise UserError(f"max_position_embeddings = {shortened(repr(value), 200)} is not a length")
    return value


def _rope_to_keel(config: Mapping[str, Any], path: Path, theta: float) -> dict[str, Any]:
    """Translate `rope_theta` and `rope_scaling` to [model] from their newer or older form."""
    field = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    rope = config.get(field) or {}
    if not isinstance(rope, dict):
        raise _unsupported(path, field, rope, "Keel expects an object")
    kind = rope.get("rope_type", rope.get("type", "default"))
    given = {"rope_theta": rope.get("rope_theta", config.get("rope_theta", theta))}
    if kind not in ("default", "llama3"):
        raise _unsupported(path, f"{field}.rope_type", kind, 'Keel knows "default" and "llama3"')
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise _unsupported(path, "partial_rotary_factor", partial, "Keel rotates whole heads")
    if kind == "default":
        return given
    missing = [name for name in _SCALING_NAMES if name not in rope]
    if missing:
        raise UserError(f"{path}: {field}.{missing[0]} is missing, which rope_type llama3 needs")
    return given | {"rope_scaling": {key: rope[name] for name, key in _SCALING_NAMES.items()}}


def _unsupported(path: Path, field: str, value: Any, instead: str) -> UserError:
    return UserError(f"{path}: {field} = {shortened(repr(value), 200)} is not supported; {instead}")


def _field(location: tuple[str | int, ...]) -> str:
    """The name in config.json of the key of [model] at `location`."""
    names = {key: name for name, key in (_NAMES | _EXPERT_NAMES | _SCALING_NAMES).items()}
    return ".".join(names.get(str(part), str(part)) for part in location)
