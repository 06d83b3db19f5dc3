"""The keys of a job that do nothing, as the schema declares (`only_with`)."""

from collections.abc import Iterator, Mapping
from functools import reduce
from typing import Any

from pydantic.fields import FieldInfo

from configs.only_with import Condition, conditions
from configs.own_code import is_import_path
from configs.reading.hf_config import unknown_fields
from configs.reading.keys import KeyPath, dotted
from configs.reading.toml_text import value_text
from configs.schema import Config, HfModel, Model, Pipeline, Table, is_described


def idle_keys(config: Config, origins: Mapping[KeyPath, str]) -> Iterator[tuple[KeyPath, str]]:
    """Yield the keys that were set to another value than the default and do nothing, once for each reason, with it.

    Args:
        config: the job.
        origins: where each key that is not the default was set.
    """
    yield from _idle(config, origins, config, (), [])


def without_effect(config: Config) -> Iterator[str]:
    """Say what a job sets to no effect in this launch; in another, on another mesh, it may have one."""
    schedule = config.pipeline.schedule
    validation = config.validation.interval
    steps = config.training.steps
    meshes = [config.mesh, *config.elastic.meshes]
    if schedule != Pipeline().schedule and max(mesh.pp for mesh in meshes) == 1:
        yield f"pipeline.schedule = {value_text(schedule)} does nothing with mesh.pp = 1"
    if validation > steps:
        yield f"validation.interval = {validation:,} is beyond training.steps = {steps:,}: there is no validation"
    yield from _rounded_away(config)
    if is_described(config.model):
        yield from _beyond_the_layers(config.model)
    if isinstance(config.model, HfModel) and (unknown := unknown_fields(config.model.fields)):
        family = f"the configuration of {config.model.model_type}"
        yield f"fields of the config.json that {family} does not have do nothing: {', '.join(unknown)}"


def _rounded_away(config: Config) -> Iterator[str]:
    """A rule of the user's own may well round in another way."""
    optimizer = config.optimizer
    if config.training.dtype != "bfloat16" or optimizer.rounding == "stochastic" or is_import_path(optimizer.name):
        return
    stochastic = 'optimizer.rounding = "stochastic", or ' if optimizer.name in ("adamw", "muon") else ""
    yield (
        'with training.dtype = "bfloat16", an update that changes a weight by less than 1/512 of it does nothing; set '
        f'{stochastic}training.dtype = "float32" and training.compute_dtype = "bfloat16"'
    )


def _beyond_the_layers(model: Model) -> Iterator[str]:
    """A ladder's shallower rungs, which keep their job's keys, may well have some."""
    said = {"no_rope_every": "all layers are rotated", "window_pattern": "no layer sees all earlier tokens"}
    for key, what in said.items():
        n = getattr(model, key)
        if n and n > model.n_layers:
            yield f"model.{key} = {n:,} is beyond model.n_layers = {model.n_layers:,}: {what}"


Needed = list[tuple[KeyPath, Condition]]
"""The keys that a table needs, with what they must be."""


def _idle(
    root: Config, origins: Mapping[KeyPath, str], table: Table, at: KeyPath, of_table: Needed
) -> Iterator[tuple[KeyPath, str]]:
    for name, field in type(table).model_fields.items():
        path = (*at, name)
        needed = of_table + [(_path_of(condition, at), condition) for condition in conditions(field)]
        value = getattr(table, name)
        if isinstance(value, list) and value and isinstance(value[0], Table):
            for index, item in enumerate(value):
                yield from _idle(root, origins, item, (*path, index), needed)
            continue
        is_whole = not isinstance(value, Table) or field.default is None  # a table that may be missing goes as a whole
        problems = list(_in_vain(root, origins, path, value, field, needed)) if is_whole else []
        yield from ((path, problem) for problem in problems)
        if isinstance(value, Table) and not problems:
            yield from _idle(root, origins, value, path, needed)


def _in_vain(
    root: Config, origins: Mapping[KeyPath, str], path: KeyPath, value: Any, field: FieldInfo, needed: Needed
) -> Iterator[str]:
    """Why a key does nothing, for each condition that is not met."""
    for other, condition in needed:
        if condition.unless and reduce(_inside, condition.unless.split("."), root):
            continue
        there = reduce(_inside, other, root)
        if condition.concerns(value, field.default) and not condition.is_met_by(there):
            yield _message(path, value, condition, other, there, origins.get(other, "the default"))


def _message(path: KeyPath, value: Any, condition: Condition, other: KeyPath, there: Any, where: str) -> str:
    """What does nothing, why, and what to do."""
    key = dotted(path) if condition.of is None else f"{dotted(path)} = {value_text(value)}"
    name = str(other[-1]) if other[:-1] == path[:-1] else dotted(other)
    if there is None:
        return f"{key} does nothing without {name}; leave it out, or set {name}"
    reason = condition.reason or f"only with {' or '.join(map(value_text, condition.values))}"
    return f"{key} does nothing with {name} = {value_text(there)} ({where}), {reason}; leave it out, or change {name}"


def _path_of(condition: Condition, table: KeyPath) -> KeyPath:
    return tuple(condition.key.split(".")) if "." in condition.key else (*table, condition.key)


def _inside(value: Any, part: str | int) -> Any:
    return value[part] if isinstance(part, int) else getattr(value, part)
