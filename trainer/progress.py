"""How far a run has come: its state after each step whose result was read, and what this launch has met on the way."""

from dataclasses import replace
from typing import Any

from configs.layout import tokens_per_step
from configs.schema import Config
from trainer.guards.spikes import loss_limit
from trainer.guards.verdict import StepResult
from trainer.saved_state import RunState


class Progress:
    """The state of a run, which the results of its steps move; the same on all ranks."""

    def __init__(self, config: Config, run: RunState) -> None:
        """`run`: the state that this launch begins with."""
        self.config = config
        """The keys of the present stage of the run."""
        self.run = run
        self.first_step = run.step
        """Steps completed before this launch, or where a spike has sent it back to: these are saved already."""
        self.last_was_finite = True
        """Whether the last step had a finite loss and gradient norm."""
        self.is_stopping = False
        """Whether a rank was told to stop, as far as all ranks know."""
        self.compared_step: int | None = None
        """The step after which replicas were last compared."""
        self.ends: tuple[float, float] | None = None
        """The first and the last loss of this launch; None before a step."""
        self._unlogged: list[dict[str, Any]] = []

    @property
    def loss_limit(self) -> float:
        """The loss above which the next step is a spike."""
        return loss_limit(self.config.fault.spikes, self.run.past_losses)

    def after(self, run: RunState, result: StepResult) -> RunState:
        """The state one step after `run`; changes nothing."""
        return run.after(result, tokens_per_step(self.config), self.config.fault.spikes)

    def count(self, result: StepResult) -> None:
        """Add a step to the run."""
        n_incidents = len(self.run.incidents)
        self.run = self.after(self.run, result)
        self._unlogged += self.run.incidents[n_incidents:]
        self.ends = (self.ends[0] if self.ends else result.loss, result.loss)
        self.last_was_finite = result.is_spike or not result.skipped

    @property
    def has_skipped_too_many(self) -> bool:
        """Whether more steps in a row changed nothing than are allowed, which ends the run."""
        return self.run.skipped_in_a_row > self.config.training.max_skipped_steps

    def record(self, what: str, **details: Any) -> None:
        """Record an incident, for later checkpoints and the next line of metrics."""
        self.run = self.run.with_incident(what, **details)
        self._unlogged.append(self.run.incidents[-1])

    def go_back(self, to: RunState, loss: float, samples: list[int]) -> None:
        """Return to the state of a checkpoint from before a spike, and record that.

        Args:
            to: as the checkpoint has it.
            loss: the spike.
            samples: the first and the last sample that are passed over.
        """
        spike = self.run.step + 1
        limit = self.loss_limit
        self.run = replace(to, incidents=self.run.incidents)
        self.first_step = to.step
        self.last_was_finite = True
        self.compared_step = None
        self.record("rewind", spike_step=spike, to_step=to.step, loss=loss, limit=limit, samples=samples)
        # metrics.jsonl is cut back as well, with the incidents on its lines.
        self._unlogged = self.run.incidents[len(to.incidents) :]

    @property
    def has_unlogged_incidents(self) -> bool:
        """Whether there are incidents that no line of metrics has."""
        return bool(self._unlogged)

    def take_incidents(self) -> list[dict[str, Any]]:
        """The incidents since the last call, for a line of metrics."""
        incidents = self._unlogged
        self._unlogged = []
        return incidents
