"""What a checkpoint keeps of a run besides tensors; validated before use, since a stranger may have written it."""

from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NotRequired

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from configs.errors import UserError
from configs.schema import Config, Spikes
from trainer.guards.spikes import remembered

if TYPE_CHECKING:
    from trainer.guards.verdict import StepResult


@dataclass(frozen=True)
class RunState:
    """The state of a run besides its tensors and data position; a checkpoint keeps it as JSON."""

    step: int = 0
    """Optimizer steps completed since the start of the run."""
    tokens: int = 0
    """Tokens trained on since the start of the run."""
    skipped_in_a_row: int = 0
    """How many of the last steps changed nothing."""
    past_losses: list[float] = field(default_factory=list)
    """The losses with which `fault.spikes` compares the next one; empty if it is not in use."""
    incidents: list[dict[str, Any]] = field(default_factory=list)
    """All spikes and repaired copies of the run so far: each with its `step`, `what` was done, and details."""

    def after(self, result: "StepResult", tokens: int, spikes: Spikes) -> "RunState":
        """The state after one more step, which trained on `tokens` tokens."""
        losses = self.past_losses if result.skipped else remembered(spikes, self.past_losses, result.loss)
        return replace(
            self,
            step=self.step + 1,
            tokens=self.tokens + tokens,
            skipped_in_a_row=self.skipped_in_a_row + 1 if result.skipped else 0,
            past_losses=losses,
        )

    def with_incident(self, what: str, **details: Any) -> "RunState":
        """The state with one more incident, at the current step."""
        return replace(self, incidents=[*self.incidents, {"step": self.step, "what": what, **details}])


def too_many_skipped(config: Config, run: RunState, folder: Path) -> str:
    """The message if more steps in a row changed nothing than `training.max_skipped_steps` allows."""
    or_spike = "" if config.fault.spikes.action == "none" else ", or the loss a spike"
    return (
        f"the loss or gradient norm of the last {run.skipped_in_a_row} steps was not finite{or_spike}, and "
        f"training.max_skipped_steps is {config.training.max_skipped_steps}; lower optimizer.lr or training.max_norm, "
        f"or look at the samples that {folder / 'run.log'} names"
    )


Count = Annotated[int, Field(ge=0, lt=2**63)]


class SourceState(TypedDict):
    """The state of one source of samples; `trainer/data/streaming.py` explains what a text source adds."""

    fingerprint: str
    path: NotRequired[str]
    sizes: NotRequired[list[Count]]
    cursors: NotRequired[dict[str, Annotated[list[Count], Field(min_length=3, max_length=3)]]]


class DataState(TypedDict):
    """The run's position in its data."""

    next_sample: Count
    order: NotRequired[dict[str, Any]]
    """Everything that decides which sample has which number; see `DataLoader.state_dict`."""
    sources: dict[str, SourceState]


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
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise UserError(
            f"the checkpoint's trainer.json is not in the form that Keel writes: {place}: {first['msg']}"
        ) from None
    if unknown:
        raise UserError(
            f"the checkpoint's trainer.json has the key {unknown[0]}, which this Keel does not know; "
            "use the Keel that wrote it"
        )
