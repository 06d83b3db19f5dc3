"""What a checkpoint keeps of a run, and saving it: between two steps, or in the middle of one before it is killed."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from checkpoint.incarnation import Incarnation
from checkpoint.manager import CheckpointManager
from checkpoint.manifest import step_folder
from checkpoint.reader import Description, Log
from checkpoint.storage import FolderStorage
from configs.errors import UserError
from configs.schema import Config
from parallelisms.mesh import Mesh
from trainer.commands import Commands
from trainer.data.loader import DataLoader, merge_state_dicts
from trainer.data.tokenizer import load_tokenizer
from trainer.guards.agreement import on_all_ranks
from trainer.guards.environment import environment
from trainer.guards.grace import Rescue
from trainer.guards.verdict import QueuedStep
from trainer.lifecycle import write_status
from trainer.planning.skeleton import skeleton
from trainer.progress import Progress
from trainer.proof.fingerprints import Fingerprints
from trainer.report.console import Console
from trainer.saved_state import RunState
from trainer.step import Learner
from trainer.teacher import require_same_tokens, teacher_seal
from trainer.validation import Validation


def open_checkpoints(
    config: Config, mesh: Mesh, console: Console, incarnation: Incarnation | None, storage: FolderStorage | None
) -> CheckpointManager:
    """The manager of a run's checkpoints; nothing is read or written yet but the tokenizer."""
    tokenizer = config.tokenizer.path
    spikes = config.fault.spikes
    tokenizer_hash = load_tokenizer(tokenizer, config.model.vocab_size).hash if tokenizer else None
    require_same_tokens(config, tokenizer_hash)
    run = Description(
        config=config.model_dump(mode="json"),
        mesh=mesh.sizes.axes,
        tokenizer_hash=tokenizer_hash,
        teacher=teacher_seal(config),
        environment=environment(mesh.device, config.fsdp.cpu_offload),
        allow_run_change=config.job.allow_run_change,
        rewind_interval=spikes.rewind_interval if spikes.action == "rewind" else 0,
        neutral=skeleton(config.model).balance,
    )
    log = Log(console.line, console.warning)
    return CheckpointManager(config.job.folder / "checkpoints", config.checkpoint, run, log, incarnation, storage)


@dataclass
class Saver:
    """Saves one run; every rank has one, and all make the same calls."""

    folder: Path
    """The run folder."""
    checkpoints: CheckpointManager
    commands: Commands
    learner: Learner
    progress: Progress
    validation: Validation
    fingerprints: Fingerprints
    console: Console
    is_due: bool = False
    """Whether a save is due that has waited, because the last steps were not finite."""
    last: QueuedStep | None = None
    """The last step, if its result had not been read when the present one began."""

    def save(self, loader: DataLoader) -> None:
        """Save the present state, between two steps.

        Args:
            loader: this rank's, of the training data.

        Raises:
            KeelError: the data has changed, or as `CheckpointManager.save`.
        """
        run = self.progress.run
        self._save(run, loader, loader.state_dict(), self.validation.loss_after(run.step))
        self.is_due = False

    def _save(
        self,
        run: RunState,
        loader: DataLoader,
        own_data: dict[str, Any],
        validation_loss: float | None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Save the state after a step, while tensors are unchanged since; `group` holds all ranks.

        It is everything that determines the following steps. This includes no random state, because no step uses one:
        weights and data order are functions of the seed, and there is no dropout. It includes no running metrics
        either: each logged number is of one step or the wall clock.

        Args:
            run: the run's state after that step.
            loader: this rank's.
            own_data: the loader's state after that step.
            validation_loss: None unless it was measured after that step.
        """

        def checked_data() -> dict[str, Any]:
            loader.check_unchanged()
            return own_data

        data = merge_state_dicts(on_all_ranks(checked_data, group))
        self.checkpoints.save(
            run.step,
            self.learner.state(),
            {"tokens": run.tokens, "run": asdict(run), "data": data},
            data_fingerprint={name: state["fingerprint"] for name, state in data["sources"].items()},
            validation_loss=validation_loss,
            prune=not run.skipped_in_a_row,  # skipped steps may end the run, which then needs older checkpoints
        )

    def rescuer(self, last: QueuedStep | None, loader: DataLoader) -> Rescue:
        """What saves the present state while the next step is computed; threads of all ranks call it together.

        During a launch's first step there is nothing to save: the same command starts from the same state.

        Args:
            last: becomes `last`.
            loader: this rank's, of the training data.

        Returns:
            A function for `Grace`, which raises UserError if the ranks hold different results of that step.
        """
        self.last = last
        run = self.progress.run
        own_data = loader.state_dict()

        def rescue(reason: str, group: dist.ProcessGroup) -> Callable[[], None] | None:
            if self.last and self.last.read().is_missing_rows:
                return None  # it has changed only some of what is saved, and is about to be computed again
            after = self._with_result(run, self.last) if self.last else run
            validation_loss = self.validation.loss_after(after.step)
            is_new = after.step > self.progress.first_step
            if is_new:
                self.console.line(
                    f"{reason}: saving the state of step {after.step} while step {after.step + 1} is computed"
                )
                self.checkpoints.wait()
                self.commands.poll(only_queues=True)  # this save may remove the one that was under way
                self._save(after, loader, own_data, validation_loss, group)
            else:
                self.console.line(f"{reason}: there is nothing new to save until the first step of this launch ends")
            return partial(self._report_rescue, reason, after.step, is_new, self.checkpoints.under_way)

        return rescue

    def _report_rescue(self, reason: str, step: int, is_new: bool, under_way: Future[Any] | None) -> None:
        """Report a save in the middle of a step, once it is written."""
        newest = step if is_new else self.checkpoints.latest_step()
        path = None if newest is None else str(step_folder(self.folder / "checkpoints", newest))
        failed = self.checkpoints.latest_step() != step if under_way is None else under_way.exception() is not None
        if dist.get_rank() > 0 or (is_new and failed):  # the main thread reports why it failed
            return
        write = partial(write_status, self.folder, "preempted", step, reason, checkpoint=path)
        self.console.outages.insist(self.folder / "status.json", write)
        if is_new:
            self.console.line(f"{reason}: step {step} is saved")

    def _with_result(self, run: RunState, last: QueuedStep) -> RunState:
        """The state after the last step, whose result is not in `run` yet."""
        result = last.read()
        if result.differs:  # the main threads say which
            raise UserError("the ranks hold different results of the last step")
        self.fingerprints.record(run, result)
        self.fingerprints.flush()
        return self.progress.after(run, result)
