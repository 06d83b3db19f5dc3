"""Decides when a checkpoint is written, which one the run continues, and how long each is kept.

The manager owns a run's folder `checkpoints/`. A save takes a snapshot of the state (in CPU memory if asynchronous, so
that training continues), writes it through the storage (`storage.py`, `store.py`) under a temporary name, commits it,
and removes older checkpoints. The reader (`reader.py`) chooses the checkpoint that the run begins from, checks it and
loads it; the manager then moves aside what the run does not continue. All methods are collective: every rank calls them
at the same step, and if one rank fails, all raise the same error, so that none is left waiting.
"""

import json
import math
import os
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import torch
import torch.distributed as dist

from checkpoint import folder as folders
from checkpoint import manifest as manifests
from checkpoint import store
from checkpoint.bucket import errors_for_user
from checkpoint.incarnation import Alone, Incarnation, Superseded
from checkpoint.lock import BeingRead
from checkpoint.manifest import MANIFEST_NAME, Damaged, FileEntry, Manifest, Origin, RunChange, manifest_of
from checkpoint.plan import Plans
from checkpoint.reader import Description, Found, Log, Reader, TrainerState
from checkpoint.shards import Shard, State, shards_of
from checkpoint.staging import Stager, hashes, require_unchanged, too_little_memory
from checkpoint.storage import FolderStorage, commit
from checkpoint.store import SaveFailed, save_failed
from checkpoint.verify import content_damages
from configs.errors import UserError
from configs.files import exists, insist
from configs.schema import Checkpoint
from parallelisms.ranks import Json, on_rank_zero

GRACE_SECONDS = 10.0


@dataclass(frozen=True)
class Saved:
    """A save that was committed."""

    manifest: Manifest
    seconds: float
    """Time from the start of the save to its commit."""
    notes: list[str]
    """Lines for the log: an error that came too late to matter, and the checkpoints that the settings do not keep."""


@dataclass(frozen=True)
class _Save:
    """A save in progress."""

    started: float
    """Start of the save by time.perf_counter()."""
    checkpoint: Path
    unfinished: Path
    """The path of its files until it is committed."""
    draft: Manifest
    """The manifest without its files."""
    trainer_text: str
    prune: bool
    stall: float | None = None
    """Seconds that training waited; None if it waits until the end."""
    result: "Future[Saved]" = field(default_factory=Future)


class _Vote:
    """Whether a save has finished on all ranks, asked while they train: the answer arrives a step later."""

    def __init__(self, yes: bool) -> None:
        self._votes = torch.tensor(int(yes))
        self._work = dist.all_reduce(self._votes, op=dist.ReduceOp.MIN, async_op=True)

    def is_unanimous(self) -> bool:
        """Whether all ranks voted yes; waits for the last vote."""
        assert self._work is not None
        self._work.wait()
        return bool(self._votes)


class CheckpointManager:
    """Saves, loads and prunes the checkpoints of one run.

    Call `find` (if mistakes are to show before the state exists), `resume`, `begin_lineage` and `check_memory`, then
    `poll` and perhaps `save` for each step, and `close` at the end.
    """

    max_save_failures = 3
    """Failed saves in a row that end the run. Until then it trains on: a full disk may have room again."""

    def __init__(
        self,
        folder: Path,
        settings: Checkpoint,
        run: Description,
        log: Log,
        incarnation: Incarnation | None = None,
        storage: FolderStorage | None = None,
    ) -> None:
        """Set up the manager; nothing is read or written yet.

        Args:
            folder: the `checkpoints/` of the run folder; created if missing.
            settings: the table `[checkpoint]`.
            run: stored in each checkpoint, and compared with the one that is resumed.
            log: called on rank 0, and on any rank that can't pin its memory.
            incarnation: of an elastic run; nothing is committed, moved or removed once there is a newer one.
            storage: where checkpoints are; None: in `folder`, which all ranks see.
        """
        self._folder = folder
        self._settings = settings
        # The config as a manifest returns it, so that both sides of a comparison have the same types.
        self._run = replace(run, config=json.loads(json.dumps(run.config)))
        self._log = log if dist.get_rank() == 0 else Log()
        self._incarnation = incarnation or Alone()
        self._storage: FolderStorage = storage or FolderStorage(self._incarnation.mark)
        # Its own process group: the thread that writes must not share one with the main thread, or collectives would
        # be paired up wrongly. That a write has finished, the main threads agree on the group of all ranks.
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=settings.timeout_seconds))
        self._reader = Reader(folder, settings, self._run, self._log, self._group)
        self._stager = Stager(log.warning)
        self._plans = Plans()
        self._mode = settings.mode
        self._pending: _Save | None = None
        self._vote: _Vote | None = None
        self._found: Found | None = None
        """The checkpoint that the run continues."""
        self._run_id = ""
        self._last: Origin | None = None
        self.repeated: Mapping[int, float] = {}
        """Losses of validations that were repeated after their checkpoint was saved, by step; on rank 0."""
        self.save_seconds: float | None = None
        """Duration of the last save, including background writing."""
        self._times_gone_back = 0
        self._initialized_from: Origin | None = None
        self._run_changes: list[RunChange] = []
        self._may_prune = True
        """Whether older checkpoints than the newest are not needed for its sake."""
        self._failures: list[SaveFailed] = []
        """Failures since the last save that succeeded."""

    def should_save(self, step: int) -> bool:
        """Whether `checkpoint.interval` or a rewind requires a checkpoint after `step` steps."""
        interval = self._settings.interval
        return (interval > 0 and step % interval == 0) or self.is_returned_to(step)

    def is_returned_to(self, step: int) -> bool:
        """Whether a spike of the loss may return to the checkpoint after `step` steps."""
        interval = self._run.rewind_interval
        return interval > 0 and step % interval == 0

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

    def begin_lineage(self) -> None:
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
        folders.prepare(self._folder, self._log.line, self._log.warning)

    def check_memory(self, state: State) -> None:
        """Check that the hosts have enough memory for saves, and warn if not. Call it once, after `begin_lineage`.

        If a host has too little memory to stage its ranks' state, this launch saves like `checkpoint.mode = "sync"`:
        one tensor after the other, while training waits. If all have enough, it is allocated in the background.
        """
        if self._mode == "sync":
            return
        shards = shards_of(state)
        if complaint := too_little_memory(shards, self._group):
            self._mode = "sync"
            self._log.warning(complaint)
        else:
            self._stager.prepare(shards)

    def can_rewind(self, step: int) -> bool:
        """Wait for a save in progress; returns whether the run has a checkpoint of `step`.

        Raises:
            SaveFailed: as in `save`.
        """
        self.wait()
        return on_rank_zero(self._group, lambda: step in insist(lambda: manifests.steps_in(self._folder)))

    @errors_for_user()
    def rewind(self, step: int, state: State) -> TrainerState:
        """Load the run's checkpoint of `step` during training, after `can_rewind`; later ones are moved aside.

        Returns:
            The trainer state saved with it.

        Raises:
            KeelError: as in `resume` and `begin_lineage`, or a bucket does not answer.
        """
        trainer_state = self._continue(self._reader.load_step(step, state))
        self._begin_incarnation()
        self._leave_later_ones()
        return trainer_state

    def _leave_later_ones(self) -> None:
        """Move the checkpoints aside that the run does not continue, and begin a new lineage if there were any."""
        found = self._found
        is_own = found is not None and on_rank_zero(
            self._group, lambda: folders.is_own(self._folder, found.folder, found.manifest.step)
        )
        newest_kept = found.manifest.step if found and is_own else None
        aside = on_rank_zero(self._group, lambda: self._set_aside(newest_kept))
        if aside:
            what = "checkpoints that this run does not continue"
            self._log.line(f"{what} were moved to {aside}, with a copy of its metrics")
        if found and is_own and not aside:
            self._run_id = found.manifest.run_id
        else:
            self._run_id = on_rank_zero(self._group, lambda: uuid4().hex)

    def _set_aside(self, newest_kept: int | None) -> str | None:
        self._incarnation.require_current()
        aside = folders.set_aside(self._folder, newest_kept, self._folder.parent / "metrics.jsonl")
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
            NotFinite: a tensor has a non-finite value, however many saves have failed; nothing is written or removed.
            SaveFailed: the disk has refused `max_save_failures` times in a row, including this save or the one in the
                background before it; raised on all ranks. Earlier failures are warnings, and the run continues.
        """
        started = time.perf_counter()
        checkpoint = manifests.step_folder(self._folder, step)
        unfinished = self._begin(checkpoint, is_known=step == self.latest_step())
        if unfinished is None:
            return time.perf_counter() - started
        draft = self._draft(step, trainer_state["tokens"], data_fingerprint or {}, validation_loss)
        self._pending = _Save(started, checkpoint, unfinished, draft, json.dumps(trainer_state), prune)
        self._start(self._pending, state)
        if self._mode == "sync":
            self.wait()
            return time.perf_counter() - started
        stall = time.perf_counter() - started
        self._pending = replace(self._pending, stall=stall)
        return stall

    def _begin(self, checkpoint: Path, is_known: bool) -> Path | None:
        """Begin a checkpoint; returns where to put its files, or None if it is there or the disk refuses.

        `is_known`: whether the run has loaded or committed it, if it is there.
        """
        self.wait()
        try:
            unfinished, there = on_rank_zero(self._group, lambda: self._begin_or_find(checkpoint, is_known))
        except SaveFailed as error:
            self._failed(error)
            return None
        if there:
            self._succeeded(manifest_of(there))
            self._log.line(f"checkpoint {checkpoint.name} is complete: the error came after it was written")
        return Path(unfinished) if unfinished else None

    def _begin_or_find(self, checkpoint: Path, is_known: bool) -> Json:
        """Return where to put the files of a checkpoint, or the manifest of one whose save was taken for failed."""
        try:
            self._incarnation.require_newest_known()  # training waits here; the commit asks again
            if not os.path.lexists(checkpoint):
                return [str(self._storage.begin(checkpoint)), None]
            if is_known:
                return [None, None]
            if exists(checkpoint / MANIFEST_NAME):
                found = manifests.read_manifest(checkpoint)
                if found.run_id == self._run_id:
                    return [None, asdict(found)]
        except (OSError, Damaged) as error:
            raise save_failed(self._storage, checkpoint, error) from None
        raise UserError(
            f"{checkpoint} exists, but not by this run; make sure no other run uses the same job.output_dir"
        )

    def _start(self, save: _Save, state: State) -> None:
        """Write `state` as it is now, in the background if the mode is "async"; `save.result` becomes the outcome."""
        try:
            shards = shards_of(state)
            if self._mode == "sync":
                self._write(save, shards, False)
                return
            arguments = (save, self._stager.stage(shards), True)
            # A daemon: if training dies, the process must not linger until a collective times out.
            threading.Thread(target=self._write, args=arguments, name="checkpoint", daemon=True).start()
        except BaseException as error:
            save.result.set_exception(error)  # another thread may wait for it
            raise

    def _write(self, save: _Save, shards: dict[str, Shard], is_staged: bool) -> None:
        """Write, commit and prune; sets `save.result`, also to an error (this may run in a thread)."""
        try:
            save.result.set_result(self._saved(save, shards, is_staged))
        except BaseException as error:
            cause = error
            try:
                if dist.get_rank() == 0:
                    with suppress(Exception):  # what has made the save fail may make its clean-up fail
                        self._storage.discard(save.unfinished)
                self._incarnation.require_current()
            except Superseded as superseded:  # a newer launch renames the folders of older ones away
                cause = superseded
            except OSError:
                pass
            finally:
                save.result.set_exception(cause)

    def _saved(self, save: _Save, shards: dict[str, Shard], is_staged: bool) -> Saved:
        """Write, commit and prune."""
        staged = hashes(shards) if is_staged else {}
        store.require_finite(shards, save.checkpoint.name, self.newest, self._group)
        files = store.write(self._storage, save.unfinished, shards, self._group, self._plans)
        if is_staged:
            require_unchanged(shards, staged, save.checkpoint.name, self._group)
        self._require_readable(save.unfinished, files)
        manifest, notes = on_rank_zero(self._group, lambda: self._commit(save, files))
        seconds = time.perf_counter() - save.started
        self._may_prune = save.prune and not notes  # if a power cut may undo the rename, older checkpoints are needed
        if self._may_prune:
            notes = on_rank_zero(self._group, self._prune)
        return Saved(manifest_of(manifest), seconds, notes)

    def _require_readable(self, unfinished: Path, files: dict[str, FileEntry]) -> None:
        """Read the new checkpoint back before it is committed, if older ones may then be removed."""
        if self._settings.keep_last:
            try:
                problems = content_damages(self._storage, unfinished, files, self._group)
            except OSError as error:
                raise save_failed(self._storage, unfinished, f"read again, {error}") from None
            if problems:
                raise save_failed(self._storage, unfinished, f"read again, {'; '.join(problems)}")

    def _commit(self, save: _Save, files: dict[str, FileEntry]) -> Json:
        notes: list[str] = []
        paths = (save.unfinished, save.checkpoint)
        guards = (self._incarnation.require_current, notes.append)
        try:
            manifest = commit(self._storage, *paths, save.draft, files, save.trainer_text, *guards)
        except OSError as error:
            n_bytes = sum(entry.size for entry in files.values())
            raise save_failed(self._storage, save.unfinished, error, n_bytes) from None
        return [asdict(manifest), notes]

    def prune(self) -> None:
        """Remove what a save has left because it was being read. Call it on each rank, also after `close`.

        Raises:
            Superseded: there is a newer launch.
        """
        if dist.get_rank() == 0 and self._may_prune:
            for line in self._prune():
                self._log.line(line)

    def _prune(self) -> list[str]:
        """Remove the checkpoints that the settings don't keep, on rank 0; returns lines for the log."""
        try:
            self._incarnation.require_current()
            superfluous = folders.to_be_pruned(self._folder, self._settings, self.repeated)
        except OSError as error:
            return [f"can't look for checkpoints to remove: {error}"]
        return [self._removed(checkpoint) for checkpoint in superfluous]

    def _removed(self, checkpoint: Path) -> str:
        """Remove a checkpoint; returns a line for the log."""
        try:
            self._storage.remove(checkpoint)
        except BeingRead as error:
            return f"{error}; a later save removes it"
        except OSError as error:
            return f"checkpoint {checkpoint.name} is no longer kept, but can't be removed: {error}"
        return f"checkpoint {checkpoint.name}: removed, it is no longer kept"

    def _succeeded(self, manifest: Manifest) -> None:
        self._failures.clear()
        self._last = Origin(manifest.run_id, manifest.step)

    def poll(self) -> None:
        """Check whether the background save has finished. All ranks call it once per step; it never waits long.

        The ranks vote, and each poll reads the result of the previous poll's vote, which has long arrived. So all ranks
        learn at the same step that the save has finished or why it failed.

        Raises:
            SaveFailed: as in `save`.
        """
        if self._pending is None:
            return
        if self._vote is not None and self._vote.is_unanimous():
            self.wait()
        else:
            self._vote = _Vote(self._pending.result.done())

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
        self._log.line(f"checkpoint {name}: committed, {megabytes:.1f} MB in {saved.seconds:.1f} s; {waited}")
        for line in saved.notes:
            self._log.line(line)

    def close(self) -> None:
        """Wait for the last save and release the process groups. Don't call it after a crash: it waits for all ranks.

        Raises:
            SaveFailed: the last save failed, whatever the settings allow, because the training since the newest
                checkpoint would otherwise be lost silently.
        """
        self.wait()
        # A rank that leaves a new group at once may do so before gloo has told another that they are connected.
        dist.barrier(group=self._group)
        dist.destroy_process_group(self._group)
        if self._failures:
            raise self._failures[-1]

    def _draft(
        self, step: int, tokens: int, data_fingerprint: Mapping[str, str], validation_loss: float | None
    ) -> Manifest:
        is_known = validation_loss is not None and math.isfinite(validation_loss)
        return Manifest(
            step=step,
            tokens=tokens,
            config=self._run.config,
            mesh=self._run.mesh,
            tokenizer_hash=self._run.tokenizer_hash,
            teacher=self._run.teacher,
            environment=self._run.environment,
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
        limit = self.max_save_failures
        if count >= limit:
            raise SaveFailed(f"{error}; failed saves in a row: {count}")
        newest = self.latest_step()
        kept = "there is no checkpoint yet" if newest is None else f"the newest checkpoint is step {newest}"
        self._log.warning(
            f"{error}; training continues, {kept}; failed saves in a row: {count}, the run ends at {limit}"
        )
