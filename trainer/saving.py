"""What a checkpoint keeps of a run, and saving it: between two steps, or in the middle of one before it is killed."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from checkpoint.incarnation import Incarnation
from checkpoint.manager import CheckpointManager
from checkpoint.manifest import step_folder
from configs.errors import UserError
from configs.run_change import run_key_diff
from configs.schema import Config
from parallelisms.mesh import Mesh
from trainer.data.loader import merge_state_dicts
from trainer.data.tokenizer import load_tokenizer
from trainer.guards.agreement import on_all_ranks
from trainer.guards.environment import environment
from trainer.guards.verdict import Verdict
from trainer.lifecycle import write_status
from trainer.progress import Progress
from trainer.proof.fingerprints import Fingerprints
from trainer.report.console import Console
from trainer.saved_state import RunState
from trainer.step import Learner


def open_checkpoints(
    config: Config, mesh: Mesh, console: Console, incarnation: Incarnation | None
) -> CheckpointManager:
    """The manager of a run's checkpoints; nothing is read or written yet but the tokenizer."""
    folder = config.job.folder
    tokenizer = config.tokenizer.path
    spikes = config.fault.spikes
    return CheckpointManager(
        folder=folder / "checkpoints",
        settings=config.checkpoint,
        resolved=config.model_dump(mode="json"),
        mesh=mesh.sizes.axes,
        run_key_diff=run_key_diff,
        allow_run_change=config.job.allow_run_change,
        log=console.line,
        warn=console.warning,
        tokenizer_hash=load_tokenizer(tokenizer, config.model.vocab_size).hash if tokenizer else None,
        rewind_interval=spikes.rewind_interval if spikes.action == "rewind" else 0,
        environment=environment(mesh.device, config.fsdp.cpu_offload),
        metrics=folder / "metrics.jsonl",
        incarnation=incarnation,
    )


@dataclass(frozen=True)
class Finished:
    """The state of a run between two steps, without its tensors."""

    run: RunState
    verdict: Verdict | None
    """The verdict on one more step, whose result is not in `run` yet."""
    data: dict[str, Any]
    """State of this rank's loader."""
    check_data: Callable[[], None]
    """Raises UserError if the data has changed since it was opened."""
    validation_loss: float | None
    """None unless it was measured after this step."""


class Saver:
    """Saves one run; every rank has one, and all make the same calls."""

    def __init__(
        self,
        folder: Path,
        checkpoints: CheckpointManager,
        learner: Learner,
        progress: Progress,
        fingerprints: Fingerprints,
        console: Console,
    ) -> None:
        """`folder`: the run folder."""
        self._folder = folder
        self._checkpoints = checkpoints
        self._learner = learner
        self._progress = progress
        self._fingerprints = fingerprints
        self._console = console

    def save(self, finished: Finished, group: dist.ProcessGroup | None = None) -> None:
        """Save the state after a step, while tensors are unchanged since; `group` holds all ranks.

        It is everything that determines the following steps. This includes no random state, because no step uses one:
        weights and data order are functions of the seed, and there is no dropout. It includes no running metrics
        either: each logged number is of one step or the wall clock.

        Raises:
            KeelError: the data has changed, or as `CheckpointManager.save`.
        """

        def own_data() -> dict[str, Any]:
            finished.check_data()
            return finished.data

        data = merge_state_dicts(on_all_ranks(own_data, group))
        run = finished.run
        self._checkpoints.save(
            run.step,
            self._learner.state(),
            {"tokens": run.tokens, "run": asdict(run), "data": data},
            data_fingerprint={name: state["fingerprint"] for name, state in data["sources"].items()},
            validation_loss=finished.validation_loss,
            prune=not run.skipped_in_a_row,  # skipped steps may end the run, which then needs older checkpoints
        )

    def rescue(self, finished: Finished, reason: str, group: dist.ProcessGroup) -> Callable[[], None]:
        """Save the state after the last step while the next one is computed; threads of all ranks call it together.

        During a launch's first step there is nothing to save: the same command starts from the same state.

        Returns:
            A function that reports the save once it is written.

        Raises:
            UserError: the ranks hold different results of that step.
        """
        if finished.verdict:
            finished = self._with_result(finished, finished.verdict)
        step = finished.run.step
        is_new = finished.run.step > self._progress.first_step
        if is_new:
            self._console.line(f"{reason}: saving the state of step {step} while step {step + 1} is computed")
            self.save(finished, group)
        else:
            self._console.line(f"{reason}: there is nothing new to save until the first step of this launch ends")
        under_way = self._checkpoints.under_way
        newest = step if is_new else self._checkpoints.latest_step()
        path = None if newest is None else str(step_folder(self._folder / "checkpoints", newest))

        def report() -> None:
            failed = self._checkpoints.latest_step() != step if under_way is None else under_way.exception() is not None
            if dist.get_rank() > 0 or (is_new and failed):  # the main thread reports why it failed
                return
            write = partial(write_status, self._folder, "preempted", step, reason, checkpoint=path)
            self._console.outages.insist(self._folder / "status.json", write)
            if is_new:
                self._console.line(f"{reason}: step {step} is saved")

        return report

    def _with_result(self, finished: Finished, verdict: Verdict) -> Finished:
        """The state with the result of the last step, which is in `verdict`."""
        result = verdict.read()
        if result.differs:  # the main threads say which
            raise UserError("the ranks hold different results of the last step")
        self._fingerprints.record(finished.run, result)
        self._fingerprints.flush()
        return replace(finished, run=self._progress.after(finished.run, result), verdict=None)
