"""Writes a checkpoint: stages the state, writes it under a temporary name, commits it, and prunes older ones.

All methods are collective. If one rank fails, all raise the same error, and nothing of the checkpoint is kept.

The writer has a separate process group: a background thread must not share one with the main thread, or collectives
would be paired up wrongly. The ranks agree that a write is finished in the main thread, on the group of all ranks.
"""

import os
import shutil
import socket
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from checkpoint import folder as folders
from checkpoint import manifest as manifests
from checkpoint import store
from checkpoint.incarnation import Alone, Incarnation, Superseded
from checkpoint.manifest import MANIFEST_NAME, Damaged, FileEntry, Manifest, manifest_of
from checkpoint.pin import Pinned, remove
from checkpoint.store import NotFinite, SaveFailed, Shard, State, save_failed
from checkpoint.verify import content_damages
from configs.errors import UserError, listed
from configs.schema import Checkpoint
from parallelisms.ranks import Json, gather, on_rank_zero

OPTIMIZER = "optimizer."


@dataclass(frozen=True)
class Saved:
    """A save that was committed."""

    manifest: Manifest
    seconds: float
    """Time from the start of the save to its commit."""
    notes: list[str]
    """Lines for the log: an error that came too late to matter, and the checkpoints that the settings do not keep."""


@dataclass(frozen=True)
class Save:
    """A save in progress."""

    started: float
    """Start of the save by time.perf_counter()."""
    unfinished: Path
    """The temporary folder, from `Writer.begin`."""
    draft: Manifest
    """The manifest without its files."""
    trainer_text: str
    prune: bool
    newest: Path | None
    """The run's checkpoint before this one."""
    stall: float | None = None
    """Seconds that training waited; None if it waits until the end."""
    result: "Future[Saved]" = field(default_factory=Future)


class Writer:
    """Writes the checkpoints of one run, one at a time."""

    def __init__(
        self,
        folder: Path,
        settings: Checkpoint,
        rewind_interval: int,
        incarnation: Incarnation | Alone,
    ) -> None:
        """Create the process group.

        Args:
            folder: the run's `checkpoints/`.
            settings: the table `[checkpoint]`.
            rewind_interval: steps between the checkpoints that a rewind needs; 0: none.
            incarnation: of this launch.
        """
        self._incarnation = incarnation
        self._folder = folder
        self._settings = settings
        self._rewind_interval = rewind_interval
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=settings.timeout_seconds))
        """The group of all ranks."""
        self.mode = settings.mode
        """ "async" writes in the background."""
        self._stager = store.Stager()

    def begin(self, folder: Path, is_known: bool, run_id: str) -> Path | Manifest | None:
        """Create the temporary folder for a checkpoint, unless the run has it already.

        Args:
            folder: of the checkpoint.
            is_known: whether the run has loaded or committed it, if it exists; then returns None.
            run_id: of the run. If it has the checkpoint although the save was taken for failed, returns its manifest.

        Raises:
            UserError: it exists, and another run has written it.
            SaveFailed: the disk refuses.
            Superseded: a newer launch has taken the run over.
        """
        begun = on_rank_zero(self.group, lambda: self._begin(folder, is_known, run_id))
        if isinstance(begun, str):
            return folder.with_name(begun)
        return None if begun is None else manifest_of(begun)

    def start(self, save: Save, state: State) -> None:
        """Write `state` as it is now, in the background if the mode is "async"; `save.result` becomes the outcome."""
        try:
            self._start(save, state)
        except BaseException as error:
            save.result.set_exception(error)  # another thread may wait for it
            raise

    def _start(self, save: Save, state: State) -> None:
        shards = store.shards_of(state)
        is_staged = self.mode == "async" or self._settings.optimizer_dtype != "same"
        if is_staged:
            shards = self._stager.stage(shards, self.saved_dtype)
        if self.mode == "async":
            # A daemon: if training dies, the process must not linger until a collective times out.
            arguments = (save, shards, is_staged)
            threading.Thread(target=self._write, args=arguments, name="checkpoint", daemon=True).start()
        else:
            self._write(save, shards, is_staged)

    def close(self) -> None:
        """Release the process group."""
        dist.destroy_process_group(self.group)

    def saved_dtype(self, name: str, tensor: Tensor) -> torch.dtype:
        """The tensor's own dtype; for the optimizer's moments (not its step count), a smaller one if asked for."""
        is_moment = name.startswith(OPTIMIZER) and tensor.dim() > 0
        return torch.bfloat16 if is_moment and self._settings.optimizer_dtype == "bfloat16" else tensor.dtype

    def _write(self, save: Save, shards: dict[str, Shard], is_staged: bool) -> None:
        """Write, commit and prune; sets `save.result`, also to an error (this may run in a thread)."""
        try:
            save.result.set_result(self._saved(save, shards, is_staged))
        except BaseException as error:
            cause = error
            try:
                if dist.get_rank() == 0:
                    with suppress(Exception):  # what has made the save fail may make its clean-up fail
                        shutil.rmtree(save.unfinished, ignore_errors=True)
                self._incarnation.require_current()
            except Superseded as superseded:  # a newer launch renames the folders of older ones away
                cause = superseded
            except OSError:
                pass
            finally:
                save.result.set_exception(cause)

    def _saved(self, save: Save, shards: dict[str, Shard], is_staged: bool) -> Saved:
        """Write, commit and prune."""
        staged = store.hashes(shards) if is_staged else {}
        self._check_finite(save, shards)
        files = store.write(save.unfinished, shards, self.group)
        if is_staged:
            self._check_staged(save, shards, staged)
        self._check_before_pruning(save.unfinished, files)
        manifest, notes = on_rank_zero(self.group, lambda: self._commit(save, files))
        seconds = time.perf_counter() - save.started
        if save.prune and not notes:  # if a power cut may still undo the rename, older checkpoints are needed
            notes = on_rank_zero(self.group, self._prune)
        return Saved(manifest_of(manifest), seconds, notes)

    def _begin(self, folder: Path, is_known: bool, run_id: str) -> Json:
        try:
            self._incarnation.require_current()
            if not os.path.lexists(folder):
                return manifests.begin(folder, self._incarnation.mark).name
            if is_known:
                return None
            if (folder / MANIFEST_NAME).exists() and (found := manifests.read_manifest(folder)).run_id == run_id:
                return asdict(found)
        except (OSError, Damaged) as error:
            raise save_failed(folder, error) from None
        raise UserError(f"{folder} exists, but not by this run; make sure no other run uses the same job.output_dir")

    def _commit(self, save: Save, files: dict[str, FileEntry]) -> Json:
        notes: list[str] = []
        guards = (self._incarnation.mark, self._incarnation.require_current, notes.append)
        try:
            return asdict(manifests.commit(save.unfinished, save.draft, files, save.trainer_text, *guards)), notes
        except OSError as error:
            raise save_failed(save.unfinished, error, sum(entry.size for entry in files.values())) from None

    def _check_finite(self, save: Save, shards: dict[str, Shard]) -> None:
        """Raise on all ranks unless all values on all ranks are finite: a run must be able to resume from them."""
        if places := self._places(store.not_finite(shards)):
            raise _not_finite(save, places)

    def _check_staged(self, save: Save, shards: dict[str, Shard], hashes: dict[str, int]) -> None:
        """Raise on all ranks if staged memory has changed.

        The files' hashes are computed from the bytes as they are written, so they cannot reveal a bit that flipped in
        memory before: it is in both the file and its hash.
        """
        now = store.hashes(shards)
        if places := self._places([name for name, value in hashes.items() if now[name] != value]):
            raise SaveFailed(
                f"checkpoint {save.unfinished.stem} is not kept: memory that nothing writes to has changed "
                f"during the save, in {listed(places)}; if that host is named again, stop using it"
            )

    def _places(self, names: list[str]) -> list[str]:
        """ "NAME of rank R on HOST" for the names of all ranks; the same on all."""
        by_rank = gather((socket.gethostname(), names), self.group)
        return [f"{name} of rank {rank} on {host}" for rank, (host, names) in enumerate(by_rank) for name in names]

    def _check_before_pruning(self, unfinished: Path, files: dict[str, FileEntry]) -> None:
        """Read the new checkpoint back before it is committed, if older ones may then be removed."""
        if self._settings.keep_last and self._settings.verify == "hash":
            problems = content_damages(unfinished, files, self.group)
            if problems:
                raise save_failed(unfinished, f"read again, {'; '.join(problems)}")

    def _prune(self) -> list[str]:
        """Remove the checkpoints that the settings don't keep, on rank 0; returns lines for the log."""
        try:
            self._incarnation.require_current()
            doomed = folders.to_be_pruned(self._folder, self._settings, self._rewind_interval)
            return [_removed(folder) for folder in doomed]
        except OSError as error:
            return [f"can't look for checkpoints to remove: {error}"]


def _not_finite(save: Save, places: list[str]) -> NotFinite:
    go_on = f"the newest checkpoint is {save.newest}: the same command resumes from it"
    return NotFinite(
        f"checkpoint {save.unfinished.stem} is not written: not all values are finite in "
        f"{listed(places, ', ')}; {go_on if save.newest else 'there is no checkpoint before it'}. If "
        "it recurs, lower optimizer.lr or training.max_norm; if it recurs on one host only, test that host's memory"
    )


def _removed(folder: Path) -> str:
    """Remove a checkpoint; returns a line for the log."""
    try:
        remove(folder)
    except Pinned as error:
        return f"{error}; a later save removes it"
    except OSError as error:
        return f"checkpoint {folder.name} is no longer kept, but can't be removed: {error}"
    return f"checkpoint {folder.name}: removed, it is no longer kept"
