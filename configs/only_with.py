"""What a key needs in order to do something: said once, on the key, in the schema.

    save_ops: Annotated[list[str], only_with("mode", "selective")] = []

The check of a job, the help text and the editors' schema read it from there. The conditions of a table are those of
all its keys.
"""

import json
from dataclasses import dataclass
from typing import Any

from pydantic.fields import FieldInfo


@dataclass(frozen=True)
class Condition:
    """Another key, and what it must be."""

    key: str
    """Its name in the same table, or its dotted name from the top."""
    values: tuple[str | int, ...]
    """Its values with which this key does something; empty: any but 0, false and not set."""
    reason: str
    """Why this key does nothing otherwise, in words that follow the other's value; "" if that says it."""
    of: str | None
    """The one value of this key that needs it; None: any but its default."""

    def __str__(self) -> str:
        """A sentence, such as: Only with mode = "full" | "selective"."""
        values = f" = {' | '.join(map(json.dumps, self.values))}" if self.values else ""
        return f"{'Only' if self.of is None else f'{json.dumps(self.of)} only'} with {self.key}{values}."

    def is_met_by(self, value: Any) -> bool:
        """Whether this value of the other key lets this one do something."""
        return value in self.values if self.values else bool(value)

    def concerns(self, value: Any, default: Any) -> bool:
        """Whether this value of this key needs it."""
        return value != default if self.of is None else value == self.of


def only_with(key: str, *values: str | int, reason: str = "", of: str | None = None) -> Condition:
    """Say of a key, one that has a default, that it does nothing unless another has one of these values."""
    return Condition(key, values, reason, of)


def conditions(field: FieldInfo) -> list[Condition]:
    """What is said so of a field of a table."""
    return [item for item in field.metadata if isinstance(item, Condition)]
