"""Decides when a checkpoint is written, and which one it continues.

The manager owns a run's folder `checkpoints/`. A save takes a snapshot of the state (in CPU memory if asynchronous, so
that training continues), which the writer (`writer.py`) turns into a checkpoint. The reader (`reader.py`) chooses the
checkpoint that the run begins from, checks it and loads it; the manager then moves aside what the run does not
continue. All methods are collective: every rank calls them at the same step, and if one rank fails, all raise the same
error, so that none is left waiting.
"""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist

from checkpoint import folder as folders
from checkpoint import manifest as manifests
from checkpoint import store
from checkpoint.incarnation import Alone, Incarnation
from checkpoint.manifest import Manifest, Origin, RunChange
from checkpoint.reader import Description, Found, Reader, TrainerState
from checkpoint.room import too_little_room
from checkpoint.store import SaveFailed, State
from checkpoint.votes import SaveClock, Vote
from checkpoint.writer import Save, Saved, Writer
from configs.errors import UserError
from configs.schema import Checkpoint
from parallelisms.ranks import on_rank_zero

GRACE_SECONDS = 10.0


class CheckpointManager:
    """Saves, loads and prunes the checkpoints of one run.

    Call `find` (if mistakes are to show before the state exists), `resume`, `begin_line` and `check_room`, then `poll`
    and perhaps `save` for each step, and `close` at the end.
    """

    def __init__(
        self,
        folder: Path,
        settings: Checkpoint,
        resolved: Mapping[str, Any],
        mesh: Mapping[str, int],
        run_key_diff: Callable[[dict[str, Any], dict[str, Any]], list[str]],
        allow_run_change: bool,
        log: Callable[[str], None],
        warn: Callable[[str], None],
        tokenizer_hash: str | None = None,
        rewind_interval: int = 0,
        environment: Mapping[str, str] | None = None,
        metrics: Path | None = None,
        incarnation: Incarnation | None = None,
    ) -> None:
        """Set up the manager; nothing is read or written yet.

        Args:
            folder: the run's `checkpoints/`; created if missing.
            settings: the table `[checkpoint]`.
            resolved: the complete config as JSON-able tables; stored in each checkpoint and compared on resuming.
            mesh: sizes of the mesh by name; stored for information.
            run_key_diff: returns a line for each run key that differs between an old and a new resolved config
                (configs.run_change).
            allow_run_change: resume although run keys or the tokenizer have changed; later checkpoints record it.
            log: called on rank 0 with one line for the user.
            warn: like `log`, for warnings.
            tokenizer_hash: hash of the tokenizer's file; None without a tokenizer.
            rewind_interval: steps between the checkpoints that a rewind needs; 0: none.
            environment: what else decides the bits of the run, besides config, mesh and torch, by name; stored, and
                compared on resuming.
            metrics: the run's metrics.jsonl; copied to where checkpoints are moved that the run does not continue.
            incarnation: of an elastic run; nothing is committed, moved or removed once there is a newer one.
        """
        self._folder = folder
        self._settings = settings
        self._metrics = metrics
        self._rewind_interval = rewind_interval
        # The config as a manifest returns it, so that both sides of a comparison have the same types.
        config = json.loads(json.dumps(resolved))
        self._run = Description(config, dict(mesh), tokenizer_hash, dict(environment or {}))
        self._log = log if dist.get_rank() == 0 else lambda line: None
        self._warn = warn if dist.get_rank() == 0 else lambda line: None
        self._incarnation = incarnation or Alone()
        self._writer = Writer(folder, settings, rewind_interval, self._incarnation)
        self._group = self._writer.group
        self._reader = Reader(
            folder, settings, self._run, run_key_diff, allow_run_change, self._log, self._warn, self._group
        )
        self._pending: Save | None = None
        self._vote: Vote | None = None
        self._clock = SaveClock(settings.interval_minutes)
        self._found: Found | None = None
        """The checkpoint that the run continues."""
        self._run_id = ""
        self._last: Origin | None = None
        self.save_seconds: float | None = None
        """Duration of the last save, including background writing."""
        self._times_gone_back = 0
        self._initialized_from: Origin | None = None
        self._run_changes: list[RunChange] = []
        self._failures: list[SaveFailed] = []
        """Failures since the last save that succeeded."""

    def should_save(self, step: int) -> bool:
        """Whether `checkpoint.interval`, `interval_minutes` or a rewind requires a checkpoint after `step` steps."""
        intervals = (self._settings.interval, self._rewind_interval)
        return self._clock.is_due or any(interval > 0 and step % interval == 0 for interval in intervals)

    def latest_step(self) -> int | None:
        """Step of the checkpoint that was last loaded or committed."""
        return self._last.step if self._last else None

    @property
    def newest(self) -> Path | None:
        """Folder of the checkpoint that was last loaded or committed."""
        return manifests.step_folder(self._folder, self._last.step) if self._last else None

    @property
    def under_way(self) -> "Future[Saved] | None":
        """The outcome of the save in progress; any thread may wait for it."""
        return self._pending.result if self._pending else None

    # ------------------------------------------------------------------ loading

    def find(self, shapes: Mapping[str, Sequence[int]] | None = None) -> TrainerState | None:
        """Choose and check the checkpoint that the run begins from, as `Reader.find`; returns its trainer state."""
        found = self._reader.find(shapes)
        return found.trainer_state if found else None

    def resume(self, state: State) -> TrainerState | None:
        """Load the checkpoint that `checkpoint.load` chooses into `state`, in place; changes nothing on disk.

        Returns:
            The trainer state saved with it, another one than `find`'s if that checkpoint has turned out to be damaged;
            None if the run starts from scratch, perhaps with the weights that `checkpoint.init_from` names.

        Raises:
            KeelError: as in `Reader.load`.
        """
        if found := self._reader.load(state):
            return self._continue(found)
        if initial := self._reader.initial:
            self._initialized_from = Origin(initial.manifest.run_id, initial.manifest.step)
        return None

    def _continue(self, found: Found) -> TrainerState:
        """Let later checkpoints continue the one that was loaded; returns the trainer state saved with it."""
        self._found = found
        self._last = Origin(found.manifest.run_id, found.manifest.step)
        self._times_gone_back = max(found.manifest.times_gone_back, self._settings.go_back)
        self._initialized_from = found.manifest.initialized_from
        self._run_changes = [*found.manifest.run_changes, *found.changes]
        return found.trainer_state

    def begin_line(self) -> None:
        """Prepare the folder for new checkpoints. Call it once, after everything that can fail.

        Removes the leftovers of interrupted saves. Checkpoints that the run does not resume from (later steps; all of
        them if it starts from scratch or from another folder) are moved aside; see checkpoint.folder.

        Raises:
            UserError: the folder can't be written.
        """
        self._begin_incarnation()
        on_rank_zero(self._group, self._prepare)
        self._leave_later_ones()

    def _begin_incarnation(self) -> None:
        """Record the step at which this launch begins."""
        step = self._found.manifest.step if self._found else 0
        try:
            on_rank_zero(self._group, lambda: self._incarnation.begin(step))
        except OSError as error:
            raise UserError(f"the beginning of this launch can't be recorded: {error} (see job.output_dir)") from None

    def _prepare(self) -> None:
        self._incarnation.require_current()
        folders.prepare(self._folder, self._log, self._warn)

    def check_room(self, state: State) -> None:
        """Check that the hosts' memory has room for checkpoints, and warn if not. Call it once, after `begin_line`.

        If a host has too little memory to stage its ranks' state, this launch saves like `checkpoint.mode = "sync"`:
        through a small buffer, while training waits.
        """
        given = (store.shards_of(state), self._writer.saved_dtype, self._group)
        if self._writer.mode == "async" and (complaint := too_little_room(*given)):
            self._writer.mode = "sync"
            self._warn(complaint)

    def can_rewind(self, step: int) -> bool:
        """Wait for a save in progress; returns whether the run has a checkpoint of `step`.

        Raises:
            SaveFailed: as in `save`.
        """
        self.wait()
        return on_rank_zero(self._group, lambda: step in manifests.steps_in(self._folder))

    def rewind(self, step: int, state: State) -> TrainerState:
        """Load the run's checkpoint of `step` during training, after `can_rewind`; later ones are moved aside.

        Returns:
            The trainer state saved with it.

        Raises:
            KeelError: as in `resume` and `begin_line`.
        """
        trainer_state = self._continue(self._reader.load_step(step, state))
        self._begin_incarnation()
        self._leave_later_ones()
        return trainer_state

    def _leave_later_ones(self) -> None:
        """Move the checkpoints aside that the run does not continue, and begin a new line if there were any."""
        found = self._found
        is_own = found is not None and on_rank_zero(
            self._group, lambda: folders.is_own(self._folder, found.folder, found.manifest.step)
        )
        newest_kept = found.manifest.step if found and is_own else None
        aside = on_rank_zero(self._group, lambda: self._set_aside(newest_kept))
        if aside:
            self._log(f"checkpoints that this run does not continue were moved to {aside}, with a copy of its metrics")
        if found and is_own and not aside:
            self._run_id = found.manifest.run_id
        else:
            self._run_id = on_rank_zero(self._group, lambda: uuid4().hex)

    def _set_aside(self, newest_kept: int | None) -> str | None:
        self._incarnation.require_current()
        aside = folders.set_aside(self._folder, newest_kept, self._metrics)
        return str(aside) if aside else None

    # ------------------------------------------------------------------ saving

    def save(
        self,
        step: int,
        state: State,
        trainer_state: TrainerState,
        data_fingerprint: Mapping[str, str] | None = None,
        validation_loss: float | None = None,
        prune: bool = True,
    ) -> float:
        """Write a checkpoint of the run after `step` steps.

        Both states are saved as they are now, even if they are written in the background. Waits for a save that is
        still in progress. A step that this run has already saved, or was loaded from, is skipped.

        Args:
            step: number of steps so far.
            state: the tensors.
            trainer_state: JSON-able, with the `tokens` trained on so far.
            data_fingerprint: hash of the content of each data source.
            validation_loss: None unless it was measured at this step.
            prune: remove the checkpoints that the settings don't keep; False while this one may turn out bad.

        Returns:
            Seconds that training waited.

        Raises:
            NotFinite: a tensor has a non-finite value, regardless of max_save_failures; nothing is written or removed.
            SaveFailed: the disk has refused `max_save_failures` times in a row, including this save or the one in the
                background before it; raised on all ranks. Earlier failures are warnings, and the run continues.
        """
        started = time.perf_counter()
        unfinished = self._begin(step)
        if unfinished is None:
            return time.perf_counter() - started
        draft = self._draft(step, trainer_state["tokens"], data_fingerprint or {}, validation_loss)
        self._pending = Save(started, unfinished, draft, json.dumps(trainer_state), prune, self.newest)
        self._writer.start(self._pending, state)
        if self._writer.mode == "sync":
            self.wait()
            return time.perf_counter() - started
        stall = time.perf_counter() - started
        self._pending = replace(self._pending, stall=stall)
        return stall

    def _begin(self, step: int) -> Path | None:
        """The temporary folder of a checkpoint; None if there is none to write, or the disk refuses."""
        self.wait()
        self._clock.start()
        folder = manifests.step_folder(self._folder, step)
        try:
            begun = self._writer.begin(folder, step == self.latest_step(), self._run_id)
        except SaveFailed as error:
            self._failed(error)
            return None
        if isinstance(begun, Manifest):
            self._succeeded(begun)
            self._log(f"checkpoint {folder.name} is complete: the error came after it was written")
            return None
        return begun

    def _succeeded(self, manifest: Manifest) -> None:
        self._failures.clear()
        self._last = Origin(manifest.run_id, manifest.step)

    def poll(self) -> None:
        """Check whether the background save has finished. All ranks call it once per step; it never waits long.

        The ranks vote, and each poll reads the result of the previous poll's vote, which has long arrived. So all ranks
        learn at the same step that the save has finished or why it failed, and that `interval_minutes` have passed.

        Raises:
            SaveFailed: as in `save`.
        """
        self._clock.poll()
        if self._pending is None:
            return
        if self._vote is not None and self._vote.is_unanimous():
            self.wait()
        else:
            self._vote = Vote(self._pending.result.done())

    def wait(self) -> None:
        """Wait until no save is in progress.

        Raises:
            SaveFailed: as in `save`.
        """
        if self._pending is None:
            return
        if self._vote is not None:
            self._vote.is_unanimous()
        save = self._pending
        self._pending = None
        self._vote = None
        try:
            # A little longer than its collectives wait for a rank.
            left = save.started + self._settings.timeout_seconds + GRACE_SECONDS - time.perf_counter()
            saved = save.result.result(max(0.0, left))
        except SaveFailed as error:
            self._failed(error)
            return
        except TimeoutError:
            if save.result.done():  # the TimeoutError came from the writer itself
                raise
            raise UserError(
                f"the save to {save.unfinished} has not finished within {self._settings.timeout_seconds} s "
                f"(checkpoint.timeout_seconds): the disk does not answer on rank {dist.get_rank()}, or is too slow"
            ) from None
        manifest = saved.manifest
        self._succeeded(manifest)
        megabytes = sum(entry.size for entry in manifest.files.values()) / 1e6
        self.save_seconds = saved.seconds
        name = manifests.step_folder(self._folder, manifest.step).name
        stall = saved.seconds if save.stall is None else save.stall
        waited = f"training waited {stall:.3f} s"
        self._log(f"checkpoint {name}: committed, {megabytes:.1f} MB in {saved.seconds:.1f} s; {waited}")
        for line in saved.notes:
            self._log(line)

    def close(self) -> None:
        """Wait for the last save and release the process groups. Don't call it after a crash: it waits for all ranks.

        Raises:
            SaveFailed: the last save failed, whatever the settings allow, because the training since the newest
                checkpoint would otherwise be lost silently.
        """
        self.wait()
        self._clock.close()
        self._writer.close()
        if self._failures:
            raise self._failures[-1]

    def _draft(
        self, step: int, tokens: int, data_fingerprint: Mapping[str, str], validation_loss: float | None
    ) -> Manifest:
        is_known = validation_loss is not None and math.isfinite(validation_loss)
        return Manifest(
            step=step,
            tokens=tokens,
            **vars(self._run),
            config_hash=manifests.config_hash(self._run.config),
            torch_version=torch.__version__,
            run_id=self._run_id,
            parent=self._last,
            run_changes=self._run_changes,
            files={},
            initialized_from=self._initialized_from,
            data_fingerprint=dict(data_fingerprint),
            validation_loss=validation_loss if is_known else None,
            times_gone_back=self._times_gone_back,
        )

    def _failed(self, error: SaveFailed) -> None:
        """Raise if too many saves in a row have failed, otherwise warn."""
        self._failures.append(error)
        count = len(self._failures)
        limit = self._settings.max_save_failures
        if count >= limit:
            raise SaveFailed(f"{error}; failed saves in a row: {count} (checkpoint.max_save_failures is {limit})")
        newest = self.latest_step()
        kept = "there is no checkpoint yet" if newest is None else f"the newest checkpoint is step {newest}"
        self._warn(f"{error}; training continues, {kept}; failed saves in a row: {count}, the run ends at {limit}")
