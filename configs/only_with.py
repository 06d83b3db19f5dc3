"""What a key needs in order to have an effect, declared once, on the key in the schema.

    save_ops: Annotated[list[str], only_with("mode", "selective")] = []

The checks, the help text and the JSON schema for editors read it from there. The conditions of a table apply to all
its keys.
"""

import json
from dataclasses import dataclass
from typing import Any

from pydantic.fields import FieldInfo

from configs.own_code import EXAMPLE, is_import_path


@dataclass(frozen=True)
class Condition:
    """Another key, and the values that it must have."""

    key: str
    """The other key: its name in the same table, or its full dotted name."""
    values: tuple[str | int, ...]
    """Values of the other key with which this one has an effect; empty: any except 0, false and not set. The example of
    an import path stands for all of them."""
    reason: str
    """Why this key does nothing otherwise, as a clause that follows the other key's value; "" if that is obvious."""
    of: str | None
    """The only value of this key that needs the other; None: any value except the default."""
    unless: str
    """The full dotted name of a key that gives this one an effect as well, if it is set; "": there is none."""

    def __str__(self) -> str:
        """A sentence such as: Only with mode = "full" | "selective"."""
        values = f" = {' | '.join(map(json.dumps, self.values))}" if self.values else ""
        other = f" or {self.unless}" if self.unless else ""
        return f"{'Only' if self.of is None else f'{json.dumps(self.of)} only'} with {self.key}{values}{other}."

    def is_met_by(self, value: Any) -> bool:
        """Whether this key has an effect with this value of the other key; of a list, with one of its items."""
        if isinstance(value, tuple):
            return any(map(self.is_met_by, value))
        if EXAMPLE in self.values and is_import_path(value):
            return True
        return value in self.values if self.values else bool(value)

    def concerns(self, value: Any, default: Any) -> bool:
        """Whether this value of this key needs the other key."""
        return value != default if self.of is None else value == self.of


def only_with(key: str, *values: str | int, reason: str = "", of: str | None = None, unless: str = "") -> Condition:
    """Declare that a key, which has a default, does nothing unless another key has one of these values."""
    return Condition(key, values, reason, of, unless)


def conditions(field: FieldInfo) -> list[Condition]:
    """The conditions that a field of a table declares."""
    return [item for item in field.metadata if isinstance(item, Condition)]
