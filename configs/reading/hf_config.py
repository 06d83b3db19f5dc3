"""Reads the config.json that `model.hf` names, when a job is loaded.

The job then has the content instead of the path (`model.hf_config`), with `model.hf_overrides` applied. So the run
folder's config.toml, and each checkpoint, hold the whole model, a changed file changes no run, and a resume with
another content is refused with the fields that differ.
"""

import ast
import importlib.util
import json
import re
from collections.abc import Iterator, Mapping, Set
from difflib import get_close_matches
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from configs.architectures.hf import NEEDED
from configs.files import is_folder, whole
from configs.untrusted import MAX_JSON_BYTES, parse_json, read_file, require_64_bits, shortened

CONFIG_NAME = "config.json"
_FIELD = "model.hf_overrides"


class _Unreadable(Exception):
    """What is wrong, as a message."""


def resolve(model: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Replace `hf` and `hf_overrides` in the table [model] by `hf_config`; yields what is wrong, each with its key.

    Nothing changes for another architecture, or if a key has a wrong type, which the schema will report.
    """
    path = model.get("hf")
    text = model.get("hf_config")
    overrides = model.get("hf_overrides", {})
    if model.get("architecture") != "hf" or not isinstance(overrides, dict):
        return
    if path is not None and text is not None:
        yield "model.hf", "hf and hf_config both say what the model is; leave one of them out"
        return
    if path is None and text is None:
        yield "model.architecture", 'architecture "hf" needs hf, a folder with a config.json or such a file'
        return
    given = path if text is None else text
    key = "model.hf" if text is None else "model.hf_config"
    if not isinstance(given, str):
        return
    try:
        fields = _read(Path(given)) if text is None else _parse(given.encode(), "model.hf_config")
    except _Unreadable as error:
        yield key, str(error)
        return
    yield from _unknown_overrides(fields, overrides)
    fields |= {name: _without_none(value) for name, value in overrides.items()}
    if fields.get("model_type") == "mistral" and "layer_types" in fields:
        fields["model_type"] = "ministral"  # as transformers' AutoConfig takes it; Mistral's layers are all alike
    yield from ((key, message) for message in _faults(fields))
    model.pop("hf", None)
    model.pop("hf_overrides", None)
    model["hf_config"] = json.dumps(fields, sort_keys=True)


def _read(path: Path) -> dict[str, Any]:
    file = path / CONFIG_NAME if is_folder(path) else path
    try:
        content = read_file(file, MAX_JSON_BYTES)
    except FileNotFoundError:
        missing = f"no {CONFIG_NAME} in {whole(path)}" if is_folder(path) else f"no such file or folder: {whole(path)}"
        raise _Unreadable(
            f"{missing}; name a folder with the {CONFIG_NAME} of a model of Hugging Face, or that file"
        ) from None
    except OSError as error:
        raise _Unreadable(f"{whole(file)} can't be read: {error.strerror}") from None
    return _parse(content, whole(file))


def _parse(content: bytes, where: str) -> dict[str, Any]:
    try:
        fields = parse_json(content)
        require_64_bits(fields)
    except ValueError as error:
        raise _Unreadable(f"{where} is not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise _Unreadable(f"{where} holds a {type(fields).__name__} instead of an object")
    return fields


def _without_none(value: Any) -> Any:
    """TOML has no null: the string "none" stands for it."""
    if isinstance(value, dict):
        return {name: _without_none(item) for name, item in value.items()}
    return None if value == "none" else value


QUANTIZED = "the weights are quantized (quantization_config), and such weights do not train; take the original ones"


def _faults(fields: Mapping[str, Any]) -> Iterator[str]:
    if "auto_map" in fields:
        yield (
            "the model's code is in its folder (auto_map), and Keel runs code from installed packages only; use a "
            "family that transformers has"
        )
        return
    kind = fields.get("model_type")
    if not isinstance(kind, str):
        yield 'the config.json has no model_type, the name of a family of transformers, such as "qwen3"'
        return
    if fields.get("quantization_config"):
        yield QUANTIZED
    yield from _unknown_family(kind, fields)
    for names in NEEDED:
        name, value = next(((each, fields[each]) for each in names if fields.get(each) is not None), (names[0], None))
        if type(value) is not int or value < 1:
            what = "lacks" if value is None else f"has {shortened(repr(value), 60)} as"
            yield f"the config.json {what} {name}, a whole number of 1 or more; set {_FIELD}.{name}"


def _unknown_family(kind: str, fields: Mapping[str, Any]) -> Iterator[str]:
    families = causal_families()
    if families is None:
        yield f"the package transformers is not installed, which has the model's code: {_INSTALL}"
    elif is_too_old():
        yield f"the installed transformers, {version('transformers')}, is too old to train its models: {_INSTALL}"
    elif kind not in families:
        near = get_close_matches(kind, families, 1)
        hint = f'; did you mean "{near[0]}"?' if near else ""
        writer = fields.get("transformers_version")
        if isinstance(writer, str) and not near:
            hint = f"; transformers {shortened(writer, 30)} wrote this file, so a newer version may have it"
        yield f'the installed transformers has no causal language model of model_type "{shortened(kind, 60)}"{hint}'


LEAST_TRANSFORMERS = (5, 17)
"""The oldest version that the tests pass with. Plans of tensor parallelism of older ones may lack a sum: in 5.0 that of
the gradients of Qwen3's norms of queries and keys, which are wrong although the loss is right."""
_INSTALL = f"pip install 'transformers>={LEAST_TRANSFORMERS[0]}.{LEAST_TRANSFORMERS[1]}'"


def is_too_old() -> bool:
    """Whether the installed transformers is older than `LEAST_TRANSFORMERS`."""
    numbers = re.findall(r"\d+", version("transformers"))[:2]
    return tuple(map(int, numbers)) < LEAST_TRANSFORMERS


def _unknown_overrides(fields: Mapping[str, Any], overrides: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Find names that neither the file nor the family's configuration has."""
    kind = overrides.get("model_type", fields.get("model_type"))
    new = [name for name in overrides if name not in fields and name not in ("model_type", *_ANY_FAMILY)]
    known = words_of(kind) if new else set()
    for name in new if known else ():
        if name not in known:
            near = get_close_matches(name, [*fields, *known], 1, 0.75)
            hint = f"; did you mean {near[0]}?" if near else ""
            yield f"{_FIELD}.{name}", f"the configuration of {kind} has no field {name}{hint}"


def unknown_fields(fields: Mapping[str, Any]) -> list[str]:
    """The fields of a config.json that the family's configuration does not have: transformers keeps them unread."""
    known = words_of(fields["model_type"])
    return sorted(name for name in fields if known and name not in known and name not in _ANY_FAMILY)


@cache
def words_of(kind: object) -> Set[str]:
    """The words of the source of a family's configuration in transformers, its fields among them, old ones included.

    Empty if transformers does not have it. The source is read, since importing transformers takes seconds.
    """
    folder = _package()
    if folder is None or kind not in (causal_families() or ()):
        return frozenset()
    texts = [file.read_text(encoding="utf-8") for file in (folder / "models").glob("*/configuration_*.py")]
    own = [text for text in texts if f'model_type = "{kind}"' in text]
    of_all = [(folder / name).read_text(encoding="utf-8") for name in _OF_ALL_FAMILIES] if own else []
    return frozenset(re.findall(r"\w+", "".join([*own, *of_all])))


_OF_ALL_FAMILIES = ("configuration_utils.py", "modeling_rope_utils.py")
_ANY_FAMILY = ("attn_implementation", "experts_implementation")
"""Arguments that transformers takes for every family."""


def _package() -> Path | None:
    """The folder of the package transformers; None if it is not installed."""
    found = importlib.util.find_spec("transformers")
    return Path(found.submodule_search_locations[0]) if found and found.submodule_search_locations else None


@cache
def causal_families() -> dict[str, str] | None:
    """The class of each family's causal language model, by model_type; None if transformers is not installed.

    They are read from the source of transformers, since importing it takes seconds.
    """
    folder = _package()
    if folder is None:
        return None
    file = folder / "models" / "auto" / "modeling_auto.py"
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        names = [target.id for target in getattr(node, "targets", []) if isinstance(target, ast.Name)]
        if isinstance(node, ast.Assign) and names == ["MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"]:
            pairs = ast.literal_eval(node.value.args[0])  # type: ignore[attr-defined]
            return {kind: name for kind, name in pairs if isinstance(name, str)}
    raise RuntimeError(f"{file} has no MODEL_FOR_CAUSAL_LM_MAPPING_NAMES: Keel does not know this transformers")
