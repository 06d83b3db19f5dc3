"""A model as Hugging Face describes it: config.json, and the names and shapes of its tensors.

Only models that Keel can train exactly as they are get translated. A field that would make a model another function (a
bias, another activation, another kind of rotary scaling) is refused by name, never dropped.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from math import log
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from configs.architectures import HF_CLASSES, description_of, stored_tensors
from configs.architectures.llama import FURTHER
from configs.architectures.llama_keys import RopeScaling, n_further
from configs.architectures.mup import folds
from configs.architectures.parts import HfClass, Shape, Weight, head_dim, n_kv_heads
from configs.errors import UserError
from configs.reading.hf_config import QUANTIZED
from configs.schema import Model
from configs.untrusted import shortened

_SCALINGS = {
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_max_position_embeddings": "original_seq_len",
    },
    "yarn": {
        "factor": "factor",
        "original_max_position_embeddings": "original_seq_len",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "attention_factor": "attention_factor",
    },
    "linear": {"factor": "factor"},
}
"""Field of config.json -> key of model.rope_scaling, by the kind of scaling."""
_OPTIONAL = ("beta_fast", "beta_slow", "attention_factor")
_NOT_SCALED_BY = {"mscale": None, "mscale_all_dim": None, "truncate": True, "llama_4_scaling_beta": None}
"""Fields of a scaling that Keel has no keys for -> the only value with which Keel computes the same."""


def tensor_shapes(model: Model) -> dict[str, Shape]:
    """Hugging Face's names and shapes of the model's tensors, from the input to the output; experts are separate."""
    shapes: dict[str, Shape] = {}
    for weight in _written(model):
        for name in weight.hf_names:
            rows, *others = weight.hf_shape
            shapes[name] = (rows + shapes.get(name, (0,))[0], *others)
    return shapes


def _written(model: Model) -> Iterator[Weight]:
    """The tensors that a folder has: without the modules that predict further tokens, if the format has none."""
    has_further = hf_class_of(model).has_further
    return (weight for weight in stored_tensors(model) if has_further or not weight.name.startswith(FURTHER))


def left_out(model: Model) -> str:
    """What a folder does not have of a model that can be exported, as a sentence; "" if it has all."""
    kind = hf_class_of(model)
    if kind.has_further or not n_further(model):
        return ""
    return (
        f"the format of {kind.name} has no modules that predict further tokens, so those of model.multi_token are left "
        "out; the model itself is whole"
    )


def hf_class_of(model: Model) -> HfClass:
    """The class of Hugging Face that computes the model, or the nearest."""
    return description_of(model).hf_class(model)


def as_written(model: Model, own_class: bool) -> Model:
    """The model that a folder has in place of this one, and that computes the same.

    Where the class gates shared experts, a model without a gate gets one of zeros, whose sigmoid is 1/2, and twice the
    weights (`factors`); both are exact. So does one that transformers has no class for, unless that is wanted: with a
    gate, another class computes it.
    """
    kind = hf_class_of(model)
    needs_gate = kind.gates_shared_expert or not (kind.in_transformers or own_class)
    return model.model_copy(update={"shared_expert_gate": True}) if needs_gate and model.n_shared_experts else model


def factors(model: Model, written: Model) -> dict[str, float]:
    """The factors of an export, by the weight's name; written: what the folder has in place of the model."""
    found = folds(model)
    if written != model:
        names = (weight.name for weight in stored_tensors(model))
        found |= {name: 2.0 for name in names if name.endswith("shared_experts.down_proj.weight")}
    return found


def copies(model: Model) -> dict[str, str]:
    """The tensors that a folder has again for each module that predicts further tokens, and the name of the first."""
    if not hf_class_of(model).has_further:
        return {}
    embedding = "model.embed_tokens.weight"
    head = embedding if model.tie_embeddings else "lm_head.weight"
    found: dict[str, str] = {}
    for depth in range(n_further(model)):
        layer = f"model.layers.{model.n_layers + depth}"
        found |= {f"{layer}.embed_tokens.weight": embedding, f"{layer}.shared_head.head.weight": head}
    return found


def checkpoint_shapes(model: Model) -> dict[str, Shape]:
    """Names and shapes of the model's tensors in a checkpoint, in the order of `tensor_shapes`; experts are stacked."""
    return {f"model.{weight.name}": weight.shape for weight in stored_tensors(model)}


class Source(NamedTuple):
    """Where a tensor of a checkpoint is in Hugging Face's format."""

    names: list[str]
    """The tensors there that are stacked here, or the one that has it."""
    hf_shape: Shape
    """Its own shape there."""
    parts: int
    """Number of parts of the tensor there, of each of which it has some rows; 0: it has all."""
    rows: slice
    """These rows."""


def sources(model: Model) -> dict[str, Source]:
    """Where each tensor of a checkpoint is, by its name there; those that share a tensor lie in this order in it."""
    found: dict[str, Source] = {}
    taken: dict[str, int] = {}
    for weight in _written(model):
        parts = weight.joined
        start = taken.get(weight.hf_names[0], 0)
        end = taken[weight.hf_names[0]] = start + (weight.shape[0] // parts if parts else 0)
        found[f"model.{weight.name}"] = Source(weight.hf_names, weight.hf_shape, parts, slice(start, end))
    return found


def to_hf(model: Model, dtype: str, seq_len: int, bos_id: int | None, eos_id: int | None) -> dict[str, Any]:
    """Create the content of config.json, of a model that `configs.exportable` accepts.

    transformers 5 reads `rope_parameters` and `dtype`; earlier versions read `rope_theta`, `rope_scaling` and
    `torch_dtype`.
    """
    kind = hf_class_of(model)
    return {
        "architectures": [kind.name],
        "model_type": kind.model_type,
        **{name: reduce(getattr, key.split("."), model) for name, key in kind.fields.items()},
        "num_key_value_heads": n_kv_heads(model),
        "head_dim": head_dim(model),
        **kind.write(model),
        "max_position_embeddings": longest_sequence(model, seq_len),
        **_rope_to_hf(model, kind),
        **{name: value for name, value in kind.fixed.items() if value is not None},
        "bos_token_id": bos_id,
        "eos_token_id": eos_id,
        "use_cache": True,
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def _rope_to_hf(model: Model, kind: HfClass) -> dict[str, Any]:
    """The newer and the older form of the rotary frequencies."""
    scaling = _scaling_to_hf(model.rope_scaling)
    theta = {"rope_theta": model.rope_theta}
    if scaling and kind.yarn_scales_scores and model.query_scale:
        scaling |= {"mscale_all_dim": _mscale_of(model.query_scale / head_dim(model), scaling["factor"])}
    if kind.rope_fraction is not None:
        theta |= {"partial_rotary_factor": model.rope_fraction}
    whole = (scaling or {"rope_type": "default"}) | theta
    if not kind.rope_by_layer:
        return {**theta, "rope_scaling": scaling, "rope_parameters": whole}
    local = model.window_rope_theta or model.rope_theta
    by_layer = {"full_attention": whole, "sliding_attention": {"rope_type": "default", "rope_theta": local}}
    return {**theta, "rope_scaling": scaling, "rope_local_base_freq": local, "rope_parameters": by_layer}


def _scaling_to_hf(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    values = {name: getattr(scaling, key) for name, key in _SCALINGS[scaling.kind].items()}
    return {"rope_type": scaling.kind, **{name: value for name, value in values.items() if value is not None}}


def _mscale_of(query_share: float, factor: float) -> float:
    """mscale_all_dim, from query_scale / head_dim: scores are multiplied by (0.1 mscale_all_dim ln(factor) + 1)^2."""
    return round((query_share**-0.25 - 1) / (0.1 * log(factor)), 12)


def longest_sequence(model: Model, seq_len: int) -> int:
    """The sequence length that a model is made for, at least its training's."""
    return max(seq_len, model.max_seq_len or _scaled_length(model.rope_scaling))


def _scaled_length(scaling: RopeScaling | None) -> int:
    """The sequence length that the rotary frequencies are scaled to; 0 if they are not, or to none in particular."""
    return int(scaling.factor * scaling.original_seq_len) if scaling and scaling.kind != "linear" else 0


_OF_NO_EFFECT = {
    *("architectures", "model_type", "dtype", "torch_dtype", "transformers_version", "_name_or_path", "auto_map"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "pretraining_tp"),
    *("original_max_position_embeddings", "max_window_layers", "cache_implementation", "output_router_logits"),
    *("router_aux_loss_coef", "aux_loss_alpha", "seq_aux", "ep_size", "num_nextn_predict_layers", "num_mtp_layers"),
    *(
        "qk_head_dim",
        "head_dim",
        "intermediate_size",
        "sliding_window",
        "sliding_window_pattern",
        "_sliding_window_pattern",
    ),
    *("layer_types", "no_rope_layer_interval", "rope_local_base_freq", "rope_scaling", "rope_theta"),
}
"""Fields of config.json that decide nothing of what Keel imports, or repeat others."""

_ROPE_FIELDS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *_NOT_SCALED_BY}
"""Fields of the rotary frequencies that Keel knows, whatever their kind."""


class _Watched(dict[str, Any]):
    """A config.json that knows which of its fields were read."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:  # type: ignore[override]
        """The field's value, or the default."""
        self.read.add(name)
        return super().get(name, default)

    def unknown(self) -> list[str]:
        """The fields that nothing has read."""
        return sorted(self.keys() - self.read - _OF_NO_EFFECT)


def unknown_fields(config: Mapping[str, Any], path: Path) -> list[str]:
    """The fields of the config.json at `path` that Keel does not know, and that change nothing of what it imports.

    Raises:
        UserError: as in `to_keel`.
    """
    watched = _Watched(config)
    to_keel(watched, path)
    return sorted([*watched.unknown(), *_unknown_of_rope(config, HF_CLASSES[config["model_type"]])])


def _unknown_of_rope(config: Mapping[str, Any], kind: HfClass) -> Iterator[str]:
    """The unknown fields inside the newer and the older form of the rotary frequencies."""
    for field in ("rope_parameters", "rope_scaling"):
        rope = config.get(field) or {}
        has_layers = kind.rope_by_layer and isinstance(rope, dict)
        layers = rope.keys() & {"full_attention", "sliding_attention"} if has_layers else set()
        tables = {f"{field}.{layer}": rope[layer] or {} for layer in layers} or {field: rope}
        yield from (f"{field}.{name}" for name in (rope if layers else ()) if name not in layers)
        for place, table in tables.items():
            if not isinstance(table, dict):  # in the form that is not read, anything may stand
                yield place
                continue
            known = _ROPE_FIELDS | {*_SCALINGS.get(str(_rope_type(table)), {})}
            yield from (f"{place}.{name}" for name in table if name not in known)


def to_keel(config: Mapping[str, Any], path: Path) -> Model:
    """Translate the config.json at `path` to [model].

    Raises:
        UserError: Keel can't train the model as it is; the message names the field.
    """
    kind = HF_CLASSES.get(str(config.get("model_type")))
    architectures = config.get("architectures") or []
    if kind is None or architectures not in ([], [kind.name]):
        what = shortened(f"model_type {config.get('model_type')!r}, architectures {architectures!r}", 400)
        supported = ", ".join(f"{each.name} ({each.title})" for each in HF_CLASSES.values())
        raise UserError(
            f"{path}: {what}: not supported; Keel imports {supported}, and with --as-it-is any family of transformers"
        )
    if config.get("quantization_config"):
        raise UserError(f"{path}: {QUANTIZED}")
    for field, value in kind.fixed.items():
        if config.get(field, value) != value:
            raise _unsupported(path, field, config[field], f"Keel's {kind.title} has {value!r}")
    kinds = config.get("layer_types") or []
    are_full = isinstance(kinds, list) and all(each == "full_attention" for each in kinds)
    if {"window", "layers"} <= kind.keys.keys() and not are_full:
        raise _unsupported(path, "layer_types", kinds, f"Keel's {kind.title} has full attention in every layer")
    given = {**kind.defaults} | {name: config[name] for name in kind.fields if config.get(name) is not None}
    values = {key: allowed[0] for key, allowed in kind.keys.items() if allowed[0] != _default(key)}
    values |= {kind.fields[name]: value for name, value in given.items()}
    try:
        values |= {key: value for key, value in kind.read(config).items() if value is not None}
    except ValueError as error:
        raise UserError(f"{path}: {error}: not supported{_AS_IT_IS}") from None
    values["max_seq_len"] = _seq_len_of(config, path)
    values |= _rope_to_keel(config, path, kind, has_window="window" in values, width=values.get("head_dim"))
    try:
        model = Model.model_validate(_nested(values))
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{path}: {_field(kind, first['loc'])}: {first['msg']}") from None
    wrong = [f"{_field(kind, key.split('.')[1:])}: {what}" for key, what in description_of(model).model_rules(model)]
    if wrong:
        raise UserError(f"{path}: {'; '.join(wrong)}")
    return model


def _default(key: str) -> Any:
    """The default of a key of [model]; None for tables, whose keys a class sets."""
    field = Model.model_fields.get(key)
    return field.default if field else None


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by dotted key -> the table."""
    table: dict[str, Any] = {}
    for key, value in values.items():
        name, _, inner = key.partition(".")
        if inner:
            table.setdefault(name, {})[inner] = value
        else:
            table[name] = value
    return table


def _seq_len_of(config: Mapping[str, Any], path: Path) -> int:
    """The sequence length in tokens that the model of the config.json at `path` is made for; default: LlamaConfig's."""
    field = "max_position_embeddings"
    value = config.get(field, 2048)
    if type(value) is not int or value < 1:
        raise _unsupported(path, field, value, "Keel expects a number of tokens")
    return value


def _rope_to_keel(
    config: Mapping[str, Any], path: Path, kind: HfClass, has_window: bool, width: int | None
) -> dict[str, Any]:
    """Translate the rotary frequencies to [model] from their newer or older form; width: head_dim, if it is known."""
    field = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    rope = config.get(field) or {}
    local: Any = {}
    if kind.rope_by_layer and isinstance(rope, dict) and "full_attention" in rope:
        local = rope.get("sliding_attention") or {}
        rope = rope["full_attention"]
        field = f"{field}.full_attention"
    if not isinstance(rope, dict) or not isinstance(local, dict):
        raise _unsupported(path, field, rope, "Keel expects an object")
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", kind.rope_fraction or 1.0))
    if partial != 1.0 and kind.rope_fraction is None:
        raise _unsupported(path, "partial_rotary_factor", partial, f"Keel's {kind.title} rotates whole heads")
    length = "original_max_position_embeddings"
    if length in rope and config.get(length) not in (None, rope[length]):
        raise _unsupported(path, length, config[length], f"{field} has {rope[length]!r}, and Keel takes one of both")
    theta = rope.get("rope_theta", config.get("rope_theta", kind.rope_theta))
    of_scores: dict[str, float] = {}
    if kind.yarn_scales_scores and width:
        rope, of_scores = _without_mscale(rope, width)
    of_scores |= {"rope_fraction": partial} if kind.rope_fraction is not None else {}
    given = {"rope_theta": theta, **of_scores, **_scaling_to_keel(rope, path, field)}
    if not (kind.rope_by_layer and has_window):
        return given
    if local.get("rope_type", "default") != "default":
        raise _unsupported(path, "sliding_attention.rope_type", local["rope_type"], "Keel scales no window layers")
    of_windows = local.get("rope_theta", config.get("rope_local_base_freq", kind.window_rope_theta or theta))
    is_apart = of_windows != theta or "rope_scaling" in given
    return given | ({"window_rope_theta": of_windows} if is_apart else {})


def _without_mscale(rope: Mapping[str, Any], width: int) -> tuple[dict[str, Any], dict[str, float]]:
    """DeepSeek's factors of YaRN: the scaling with attention_factor in place of them, and query_scale."""
    rest = {name: value for name, value in rope.items() if name not in ("mscale", "mscale_all_dim")}
    factor = rope.get("factor")
    all_dim = rope.get("mscale_all_dim")
    is_yarn = _rope_type(rope) == "yarn"
    if not is_yarn or not all_dim or not isinstance(factor, int | float) or factor <= 0:
        has_factors = rope.get("mscale") or (all_dim and not is_yarn)  # which transformers then takes, and Keel refuses
        return dict(rope) if has_factors else rest, {}
    try:
        on_scores = 0.1 * all_dim * log(factor) + 1
        if mscale := rope.get("mscale"):
            rest.setdefault("attention_factor", (0.1 * mscale * log(factor) + 1) / on_scores)
        return rest, {"query_scale": width / on_scores**4}
    except (ArithmeticError, TypeError):  # they are no numbers, or too large: `_scaling_to_keel` refuses them by name
        return dict(rope), {}


def _rope_type(rope: Mapping[str, Any]) -> Any:
    return rope.get("rope_type", rope.get("type", "default"))


def _scaling_to_keel(rope: Mapping[str, Any], path: Path, field: str) -> dict[str, Any]:
    kind = _rope_type(rope)
    if kind == "default":
        return {}
    if not isinstance(kind, str) or kind not in _SCALINGS:
        known = ", ".join(f'"{name}"' for name in ("default", *_SCALINGS))
        raise _unsupported(path, f"{field}.rope_type", kind, f"Keel knows {known}")
    for name, value in _NOT_SCALED_BY.items():
        if rope.get(name, value) != value:
            raise _unsupported(path, f"{field}.{name}", rope[name], "Keel has no key for it")
    names = _SCALINGS[kind]
    missing = [name for name in names if name not in rope and name not in _OPTIONAL]
    if missing:
        raise UserError(f"{path}: {field}.{missing[0]} is missing, which rope_type {kind} needs")
    return {"rope_scaling": {"kind": kind} | {key: rope[name] for name, key in names.items() if name in rope}}


_AS_IT_IS = "; keel import --as-it-is imports transformers' own model instead"


def _unsupported(path: Path, field: str, value: Any, instead: str) -> UserError:
    return UserError(f"{path}: {field} = {shortened(repr(value), 200)} is not supported; {instead}{_AS_IT_IS}")


def _field(kind: HfClass, location: Sequence[str | int]) -> str:
    """The name in config.json of the key of [model] at `location`."""
    names = {key: name for fields in (kind.fields, *_SCALINGS.values()) for name, key in fields.items()}
    whole = ".".join(map(str, location))
    return names[whole] if whole in names else ".".join(names.get(str(part), str(part)) for part in location)
