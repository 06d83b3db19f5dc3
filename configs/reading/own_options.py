"""Reads the options of a model of the user's own, when a job is loaded.

The job then has all options with their values: the run folder's config.toml and each checkpoint hold them, and a resume
with another value, or another default, is refused with the option that differs.
"""

import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any, get_type_hints

from pydantic import BaseModel, ValidationError

from configs.architectures.own import NEEDED, fields_of, options_class, parsed
from configs.errors import ConfigError
from configs.own_code import code_of, is_admitted, is_import_path, reason_of
from configs.reading.toml_text import value_text


def resolve(model: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Complete `options` in a table [model] of the user's own; yields what is wrong, each with its key.

    Nothing changes for another architecture, or one whose code is not admitted.
    """
    options = model.get("options", {})
    name = model.get("architecture")
    if not is_import_path(name) or not is_admitted(str(name)) or not isinstance(options, dict):
        return
    try:
        kind = options_class(code_of(str(name)))
        given = parsed(kind, options)
        yield from _faults(given, kind)
        model["options"] = _as_toml({name: getattr(given, name) for name in fields_of(kind)})
    except ValidationError as error:
        yield from (_explained(dict(item), kind) for item in error.errors())
    except ConfigError as error:
        yield "model.architecture", str(error)
    except Exception as error:  # a check of the user's own
        yield "model.options", f"{kind.__name__} refuses these options: {reason_of(error)}"


def _faults(options: Any, kind: type) -> Iterator[tuple[str, str]]:
    for name in NEEDED:
        value = getattr(options, name, None)
        if type(value) is not int or value < 1:
            got = "no" if value is None else f"{value_text(value)} as"
            yield (
                "model.architecture",
                f"{kind.__name__} has {got} {name}, a whole number of 1 or more that Keel's checks and estimates read; "
                "give it such a field or property",
            )


def _as_toml(value: Any) -> Any:
    """A value as a job file holds it, without what is None."""
    if isinstance(value, BaseModel):
        value = value.model_dump()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, Mapping):
        return {name: _as_toml(item) for name, item in value.items() if item is not None}
    return [_as_toml(item) for item in value] if isinstance(value, (list, tuple)) else value


def _table_at(kind: type, path: list[str]) -> type:
    """The class of a table inside of the options, as far as their annotations name one."""
    for name in path:
        inner = get_type_hints(kind).get(name)
        if not inspect.isclass(inner) or not fields_of(inner):
            break
        kind = inner
    return kind


def _explained(item: dict[str, Any], kind: type) -> tuple[str, str]:
    """The key, and a message, of an error of pydantic's."""
    path = [str(part) for part in item["loc"]]
    key = ".".join(["model.options", *path])
    if item["type"] == "extra_forbidden":
        kind = _table_at(kind, path[:-1])
        near = get_close_matches(path[-1], fields_of(kind), 1)
        advice = f"did you mean {near[0]}?" if near else f"{kind.__name__} has {', '.join(fields_of(kind))}"
        return key, f"{kind.__name__} has no option {path[-1]}; {advice}"
    if item["type"] == "missing":
        return key, f"[model.options] lacks {path[-1]}, which {kind.__name__} needs"
    message = item["msg"].replace("Input should be", "must be")
    return key, f"{key} {message}, got {value_text(item['input'])}"
