"""The keys of a job that do nothing, as the schema declares (`only_with`)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from configs.only_with import Condition, conditions
from configs.reading.keys import KeyPath, dotted
from configs.reading.toml_text import value_text
from configs.schema import Config, Pipeline, Table


@dataclass(frozen=True)
class Idle:
    """A key that does nothing, with one reason."""

    path: KeyPath
    value: Any
    condition: Condition
    other: KeyPath
    """The key that the condition is about."""
    other_value: Any

    def message(self, where: str) -> str:
        """The text of the warning.

        Args:
            where: where the other key was set.
        """
        key = dotted(self.path) if self.condition.of is None else f"{dotted(self.path)} = {value_text(self.value)}"
        other = str(self.other[-1]) if self.other[:-1] == self.path[:-1] else dotted(self.other)
        if self.other_value is None:
            return f"{key} does nothing without {other}; leave it out, or set {other}"
        reason = self.condition.reason or f"only with {' or '.join(map(value_text, self.condition.values))}"
        found = f"{other} = {value_text(self.other_value)} ({where})"
        return f"{key} does nothing with {found}, {reason}; leave it out, or change {other}"


def idle_keys(config: Config) -> Iterator[Idle]:
    """Yield the keys that were set to another value than the default and do nothing, once for each reason."""
    yield from _idle(config, config, (), [])


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


def _idle(root: Config, table: Table, at: KeyPath, of_table: list[tuple[KeyPath, Condition]]) -> Iterator[Idle]:
    for name, field in type(table).model_fields.items():
        path = (*at, name)
        needed = of_table + [(_path_of(condition, at), condition) for condition in conditions(field)]
        value = getattr(table, name)
        if isinstance(value, Table):
            yield from _idle(root, value, path, needed)
        elif isinstance(value, list) and value and isinstance(value[0], Table):
            for index, item in enumerate(value):
                yield from _idle(root, item, (*path, index), needed)
        else:
            for other, condition in needed:
                there = _value_at(root, other)
                if condition.concerns(value, field.default) and not condition.is_met_by(there):
                    yield Idle(path, value, condition, other, there)


def _path_of(condition: Condition, table: KeyPath) -> KeyPath:
    return tuple(condition.key.split(".")) if "." in condition.key else (*table, condition.key)


def _value_at(root: Config, path: KeyPath) -> Any:
    value: Any = root
    for part in path:
        value = value[part] if isinstance(part, int) else getattr(value, part)
    return value
