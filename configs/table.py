"""The base of every table of a job file, and the types of its keys."""

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("not a number")
    return value


PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
Seconds = Annotated[int, Field(gt=0, lt=2**31)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Pattern = Annotated[str, Field(min_length=1, max_length=256)]
"""Shell-style. The time of a match grows with a power of the length."""
NotBool = BeforeValidator(_no_bool)
"""A choice among numbers: true equals 1, and so Python takes it for one of them."""


class Table(BaseModel):
    """A TOML table: strict types, no unknown keys, immutable."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)


T = TypeVar("T", bound=Table)


def with_keys(job: T, **tables: Mapping[str, Any]) -> T:
    """A job with other values of some keys, which are not checked: `with_keys(job, mesh={"pp": 1})`."""
    changed = {name: getattr(job, name).model_copy(update=keys) for name, keys in tables.items()}
    return job.model_copy(update=changed)
