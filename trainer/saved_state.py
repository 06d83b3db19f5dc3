"""What a checkpoint keeps of a run besides its tensors and its position in the data."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.schema import Config, Spikes
from trainer.guards.spikes import loss_limit, remembered

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
    """The losses that `fault.spikes` compares the next one with; empty if it is not in use."""
    incidents: list[dict[str, Any]] = field(default_factory=list)
    """All spikes and repaired replicas of the run so far: each with its `step`, `what` was done, and details."""

    def after(self, result: "StepResult", tokens: int, spikes: Spikes) -> "RunState":
        """The state after one more step, which trained on `tokens` tokens."""
        losses = self.past_losses if result.skipped else remembered(spikes, self.past_losses, result.loss)
        after = replace(
            self,
            step=self.step + 1,
            tokens=self.tokens + tokens,
            skipped_in_a_row=self.skipped_in_a_row + 1 if result.skipped else 0,
            past_losses=losses,
        )
        limit = loss_limit(spikes, self.past_losses)
        return after.with_incident("skip", loss=result.loss, limit=limit) if result.is_spike else after

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
