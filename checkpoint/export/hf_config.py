"""A model as Hugging Face describes it: config.json, and the names and shapes of its tensors.

Only models that Keel can train exactly as they are get translated. A field that would make a model another function (a
bias, another activation, another kind of rotary scaling) is refused by name, never dropped.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from configs.architectures import HF_CLASSES, description_of, own_weights
from configs.architectures.llama import RopeScaling
from configs.architectures.parts import HfClass, Shape, head_dim, n_kv_heads
from configs.errors import UserError
from configs.schema import Model
from configs.untrusted import shortened

_SCALING_NAMES = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_seq_len",
}


def tensor_shapes(model: Model) -> dict[str, Shape]:
    """Hugging Face's names and shapes of the model's tensors, from the input to the output; experts are separate."""
    return {name: weight.shape[-2:] for weight in own_weights(model) for name in weight.hf_names}


def checkpoint_shapes(model: Model) -> dict[str, Shape]:
    """Names and shapes of the model's tensors in a checkpoint, in the order of `tensor_shapes`; experts are stacked."""
    return {f"model.{weight.name}": weight.shape for weight in own_weights(model)}


def sources(model: Model) -> dict[str, list[str]]:
    """The names of Hugging Face's tensors that a checkpoint stores as one, by its name there: several are stacked."""
    return {f"model.{weight.name}": weight.hf_names for weight in own_weights(model)}


def to_hf(model: Model, dtype: str, seq_len: int, bos_id: int | None, eos_id: int | None) -> dict[str, Any]:
    """Create the content of config.json, of a model that `configs.exportable` accepts.

    transformers 5 reads `rope_parameters` and `dtype`; earlier versions read `rope_theta`, `rope_scaling` and
    `torch_dtype`.
    """
    kind = description_of(model).hf_class(model)
    values = model.model_dump()
    theta = {"rope_theta": model.rope_theta}
    scaling = _scaling_to_hf(model.rope_scaling)
    return {
        "architectures": [kind.name],
        "model_type": kind.model_type,
        **{name: values[key] for name, key in kind.fields.items()},
        "num_key_value_heads": n_kv_heads(model),
        "head_dim": head_dim(model),
        "max_position_embeddings": longest_sequence(model, seq_len),
        **theta,
        "rope_scaling": scaling,
        "rope_parameters": (scaling or {"rope_type": "default"}) | theta,
        **{name: value for name, value in kind.fixed.items() if value is not None},
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
    kind = HF_CLASSES.get(str(config.get("model_type")))
    architectures = config.get("architectures") or []
    if kind is None or architectures not in ([], [kind.name]):
        what = shortened(f"model_type {config.get('model_type')!r}, architectures {architectures!r}", 400)
        supported = ", ".join(f"{each.name} ({each.title})" for each in HF_CLASSES.values())
        raise UserError(
            f"{path}: {what}: not supported; Keel imports {supported}, and with --as-it-is any family of transformers"
        )
    for field, value in kind.fixed.items():
        if config.get(field, value) != value:
            raise _unsupported(path, field, config[field], f"Keel's {kind.title} has {value!r}")
    given = {**kind.defaults} | {name: config[name] for name in kind.fields if config.get(name) is not None}
    values = {key: allowed[0] for key, allowed in kind.keys.items() if "." not in key}
    values |= {kind.fields[name]: value for name, value in given.items()}
    try:
        return Model.model_validate(values | _rope_to_keel(config, path, kind.rope_theta))
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{path}: {_field(kind, first['loc'])}: {first['msg']}") from None


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


def _field(kind: HfClass, location: tuple[str | int, ...]) -> str:
    """The name in config.json of the key of [model] at `location`."""
    names = {key: name for name, key in (*kind.fields.items(), *_SCALING_NAMES.items())}
    return ".".join(names.get(str(part), str(part)) for part in location)
