"""The form of what a checkpoint keeps besides tensors: checked before use, since a stranger may have written it."""

from dataclasses import fields
from typing import Annotated, Any, NotRequired

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from checkpoint.manifest import Count
from configs.errors import UserError
from configs.untrusted import first_fault
from trainer.saved_state import RunState

Positive = Annotated[int, Field(gt=0, lt=2**63)]


class SourceState(TypedDict):
    """The state of one source of samples; `trainer/data/text/streaming.py` explains what a text source adds."""

    fingerprint: str
    path: NotRequired[str]
    sizes: NotRequired[list[Count]]
    cursors: NotRequired[dict[str, Annotated[list[Count], Field(min_length=3, max_length=3)]]]


class StartState(TypedDict):
    """The fields of `trainer.data.order.Start`."""

    sample: Count
    read: dict[str, Count]
    lengths: NotRequired[dict[str, list[Annotated[list[Positive], Field(min_length=2, max_length=2)]]]]


class DataState(TypedDict):
    """The run's position in its data."""

    next_sample: Count
    order: NotRequired[dict[str, Any]]
    """Everything that decides which sample has which number; see `DataLoader.state_dict`."""
    sources: dict[str, SourceState]
    start: NotRequired[StartState]
    """Where the mixture starts, in a run that had another one before."""


class SavedState(TypedDict):
    """The content of trainer.json that is read; `run` has the fields of `RunState`."""

    __pydantic_config__ = ConfigDict(strict=True, extra="allow")  # type: ignore[misc]

    run: dict[str, Any]
    data: DataState


_SAVED = TypeAdapter(SavedState)


def check_saved_state(saved: dict[str, Any]) -> None:
    """Raise UserError unless `saved` has the form in which a run saves it."""
    try:
        _SAVED.validate_python(saved, strict=True)
        TypeAdapter(RunState).validate_python(saved["run"])
        unknown = sorted(saved["run"].keys() - {each.name for each in fields(RunState)})
    except ValidationError as error:
        form = "the checkpoint's trainer.json is not in the form that Keel writes"
        raise UserError(f"{form}: {first_fault(error)}") from None
    if unknown:
        raise UserError(
            f"the checkpoint's trainer.json has the key {unknown[0]}, which this Keel does not know; "
            "use the Keel that wrote it"
        )
