"""What a checkpoint keeps of a run beside its tensors; a stranger may have written it, so it is checked first."""

from dataclasses import fields
from typing import Annotated, Any, NotRequired

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from configs.errors import UserError

Count = Annotated[int, Field(ge=0, lt=2**63)]


class SourceState(TypedDict):
    """Of one source of samples; what a text adds, `trainer/data/streaming.py` explains."""

    fingerprint: str
    sizes: NotRequired[list[Count]]
    cursors: NotRequired[dict[str, Annotated[list[Count], Field(min_length=3, max_length=3)]]]


class DataState(TypedDict):
    """Where the run stands in its data."""

    next_sample: Count
    sources: dict[str, SourceState]


class SavedState(TypedDict):
    """The content of trainer.json, as far as it is read; `run` are the fields of `RunState`."""

    __pydantic_config__ = ConfigDict(strict=True, extra="allow")  # type: ignore[misc]

    run: dict[str, Any]
    data: DataState


_SAVED = TypeAdapter(SavedState)


def check_saved_state(saved: dict[str, Any], run_state: type) -> None:
    """Raise UserError unless `saved` has the form of what a run saves, its `run` that of the dataclass `run_state`."""
    try:
        _SAVED.validate_python(saved, strict=True)
        TypeAdapter(run_state).validate_python(saved["run"])
        unknown = sorted(saved["run"].keys() - {field.name for field in fields(run_state)})
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise UserError(
            f"the checkpoint's trainer.json is not of the form that Keel writes: {place}: {first['msg']}"
        ) from None
    if unknown:
        raise UserError(f"the checkpoint's trainer.json has {unknown[0]} in it, which this Keel does not know")
