"""Which samples each step of a run trains on, including past changes of the batch size and rewinds after spikes."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from checkpoint.manifest import read_manifest, read_trainer_state, step_folder, steps_in
from configs.errors import UserError
from configs.run_stages import RunStage
from trainer.data.order import Start
from trainer.guards.saved_state import check_saved_state
from trainer.saved_state import RunState

_BATCH_CHANGE = re.compile(r"training\.global_batch_size: (\d+) -> (\d+)")


@dataclass(frozen=True)
class Stretch:
    """Consecutive steps that train on consecutive samples."""

    first_step: int
    first_sample: int
    batch: int
    """Samples per step."""

    def samples(self, step: int) -> range:
        """The samples of a step of this stretch."""
        first = self.first_sample + (step - self.first_step) * self.batch
        return range(first, first + self.batch)


class History:
    """A run's steps and samples, as its newest checkpoint records them; steps after it continue in the same way."""

    def __init__(self, stretches: Iterable[Stretch], last_step: int, start: Start | None = None) -> None:
        """Combine stretches, in order; the last one has no end.

        Args:
            stretches: as said.
            last_step: of the newest checkpoint.
            start: where the run's mixture starts.
        """
        self.stretches = list(stretches)
        self.last_step = last_step
        self.start = start or Start()

    def samples(self, step: int) -> range:
        """The samples of a step, numbered from 1."""
        return next(each for each in reversed(self.stretches) if each.first_step <= step).samples(step)

    def step_of(self, sample: int) -> int | None:
        """The step that trains on a sample; None if the run passed it over, going back after a spike."""
        place = max((index for index, each in enumerate(self.stretches) if each.first_sample <= sample), default=None)
        if place is None:
            return None
        stretch = self.stretches[place]
        step = stretch.first_step + (sample - stretch.first_sample) // stretch.batch
        return None if place + 1 < len(self.stretches) and step >= self.stretches[place + 1].first_step else step

    def trained(self, step: int) -> list[range]:
        """The samples that the steps up to `step` have trained on, as disjoint ranges in ascending order."""
        begun = [each for each in self.stretches if each.first_step <= step]
        ends = [each.first_step - 1 for each in begun[1:]] + [step] * bool(begun)
        return [range(a.first_sample, a.samples(end).stop) for a, end in zip(begun, ends, strict=True)]


def read_history(folder: Path, stages: Sequence[RunStage]) -> History:
    """Read the history of the run in `folder`; before its first checkpoint, it follows from its stages.

    Raises:
        UserError: the newest checkpoint can't be read, or its history is not complete.
    """
    batch = stages[0].config.training.global_batch_size
    borders = [(stage.first_step, stage.config.training.global_batch_size, None) for stage in stages[1:]]
    steps = steps_in(folder / "checkpoints")
    if not steps:
        return History(_continued([Stretch(1, 0, batch)], borders), 0)
    checkpoint = step_folder(folder / "checkpoints", steps[-1])
    manifest = read_manifest(checkpoint)
    saved = read_trainer_state(checkpoint)
    check_saved_state(saved)
    run = RunState(**saved["run"])
    next_sample = saved["data"]["next_sample"]
    lines = [(change.step, line) for change in manifest.run_changes for line in change.changes]
    sizes = [(step, int(found[1]), int(found[2])) for step, line in lines if (found := _BATCH_CHANGE.fullmatch(line))]
    events: list[_Event] = [*borders, *((step + 1, now, None) for step, _, now in sizes)]
    rewinds = [incident for incident in run.incidents if incident["what"] == "rewind"]
    events += [(each["to_step"] + 1, None, each["samples"][1] + 1) for each in rewinds]
    stretches = _continued([Stretch(1, 0, sizes[0][1] if sizes else batch)], events)
    history = History(stretches, run.step, Start(**saved["data"].get("start", {})))
    if history.samples(run.step + 1).start != next_sample:
        raise UserError(
            f"{checkpoint}: its history does not lead to its position in the data, sample {next_sample}; "
            "which samples its steps trained on can't be told"
        )
    return history


_Event = tuple[int, int | None, int | None]
"""A step, and the batch from it on; or the step that follows on going back after a spike, and its first sample."""


def _continued(stretches: list[Stretch], events: Iterable[_Event]) -> list[Stretch]:
    """The stretches after some events, of which a change of the batch comes first at the same step.

    The order of their steps is that in which they happened: going back to a step undoes what was changed behind it.
    """
    for first_step, batch, sample in sorted(events, key=lambda event: event[0]):
        last = stretches[-1]
        first_sample = last.samples(first_step).start if sample is None else sample
        stretches = [each for each in stretches if each.first_step < first_step]
        stretches.append(Stretch(first_step, first_sample, batch or last.batch))
    return stretches
