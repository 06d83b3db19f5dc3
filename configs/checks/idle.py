"""The keys of a job that do nothing, as the schema declares (`only_with`)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from configs.only_with import Condition, conditions
from configs.reading.keys import KeyPath, dotted
from configs.reading.toml_text import value_text
from configs.schema import Config, MissingKey, Table


@dataclass(frozen=True)
class Idle:
    """A key that does nothing, with one reason."""

    path: KeyPath
    value: Any
    is_set: bool
    """False: the value is the default."""
    condition: Condition
    other: KeyPath
    """The key that the condition is about."""
    other_value: Any

    @property
    def fault(self) -> str:
        """A clause such as: does nothing with mode = "full"."""
        if self.other_value is None:
            return f"does nothing without {self._other}"
        return f"does nothing with {self._other} = {value_text(self.other_value)}"

    def message(self, where: str) -> str:
        """The error message.

        Args:
            where: where the other key was set.
        """
        key = dotted(self.path) if self.condition.of is None else f"{dotted(self.path)} = {value_text(self.value)}"
        if self.other_value is None:
            return f"{key} {self.fault}; leave it out, or set {self._other}"
        wanted = f"only with {' or '.join(map(value_text, self.condition.values))}"
        return f"{key} {self.fault} ({where}), {self.condition.reason or wanted}; leave it out, or change {self._other}"

    @property
    def _other(self) -> str:
        return str(self.other[-1]) if self.other[:-1] == self.path[:-1] else dotted(self.other)


def idle_keys(config: Config) -> Iterator[Idle]:
    """Yield the keys that do nothing, once for each reason.

    Keys that `config` lacks are left out, and so are keys whose condition is about a key that it lacks.
    """
    yield from _idle(config, config, (), [])


def _idle(root: Config, table: Table, at: KeyPath, of_table: list[tuple[KeyPath, Condition]]) -> Iterator[Idle]:
    for name, field in type(table).model_fields.items():
        path = (*at, name)
        needed = of_table + [(_path_of(condition, at), condition) for condition in conditions(field)]
        try:
            value = getattr(table, name)
            if isinstance(value, Table):
                yield from _idle(root, value, path, needed)
            elif isinstance(value, list) and value and isinstance(value[0], Table):
                for index, item in enumerate(value):
                    yield from _idle(root, item, (*path, index), needed)
            else:
                is_set = name in table.model_fields_set
                for other, condition in needed:
                    there = _value_at(root, other)
                    if condition.concerns(value, field.default) and not condition.is_met_by(there):
                        yield Idle(path, value, is_set, condition, other, there)
        except MissingKey:
            continue


def _path_of(condition: Condition, table: KeyPath) -> KeyPath:
    return tuple(condition.key.split(".")) if "." in condition.key else (*table, condition.key)


def _value_at(root: Config, path: KeyPath) -> Any:
    value: Any = root
    for part in path:
        value = value[part] if isinstance(part, int) else getattr(value, part)
    return value
