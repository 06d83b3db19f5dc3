"""When a checkpoint is written, and which one a run goes on from.

The manager owns the folder `checkpoints/` of a run. Saving is: snapshot the state (asynchronous: in CPU memory, while
training goes on), write it under a temporary name, commit, then remove what is not kept any more. Loading is: choose,
check everything that can be checked, and only then touch the first tensor. All methods are collective: every rank calls
them, at the same step, and where one rank fails all of them raise the same error, so that none is left waiting.

A process group of its own keeps the writer out of training's way: a background thread must not share a group with the
main thread, since collectives would pair up wrongly. That a write is over the ranks agree on in the main thread, on the
group of all ranks.
"""

import json
import math
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from checkpoint import folder as folders
from checkpoint import manifest as manifests
from checkpoint import store
from checkpoint.bits import CODE, changed_settings, changed_surroundings
from checkpoint.manifest import Damaged, FileEntry, Manifest, Origin, RunChange, damaged
from checkpoint.pin import Pinned, remove
from checkpoint.room import measure_room
from checkpoint.safe_read import read_metadata
from checkpoint.store import NotFinite, SaveFailed, Shard, State, save_failed
from checkpoint.verify import content_damages
from checkpoint.votes import SaveClock, Vote
from configs.errors import ConfigError, UserError
from configs.schema import Checkpoint
from parallelisms.ranks import gather, on_rank_zero

TrainerState = dict[str, Any]
SHOWN_DIFFERENCES = 8
GRACE_SECONDS = 10.0
MODEL, OPTIMIZER = "model.", "optimizer."


@dataclass(frozen=True)
class Found:
    """A checkpoint that has passed every check but that of its tensors."""

    folder: Path
    manifest: Manifest
    metadata: Metadata
    trainer_state: TrainerState


@dataclass(frozen=True)
class _Save:
    """A save on its way. Its last fields are what the thread that writes needs, and brings."""

    started: float
    unfinished: Path
    draft: Manifest
    trainer_text: str
    prune: bool
    result: "Future[_Saved]"


@dataclass(frozen=True)
class _Saved:
    manifest: Manifest
    seconds: float
    """From the beginning of the save to its commit."""
    pruned: list[str]
    """What may be said of the checkpoints that the settings did not keep, a line each."""


class CheckpointManager:
    """The checkpoints of one run.

    folder: the run's `checkpoints/`; made if need be.
    resolved: the whole config as JSON-able tables; stored in every checkpoint, and compared on a resume.
    mesh: sizes of the mesh by name; stored for the reader's information.
    run_key_diff: of an old and a new resolved config, the lines that tell which run keys differ (configs.run_change).
    allow_run_change: go on although run keys or the tokenizer have changed; later checkpoints record it.
    log: called on rank 0 with one line for people.
    warn: the same, for what they must not overlook.
    tokenizer_hash: of the tokenizer's file; None without a tokenizer.
    rewind_interval: steps at whose multiples there must be a checkpoint to go back to; 0: none.
    environment: what decides the bits of the run beside config, mesh and torch, by name; stored, and compared on a
        resume.

    The order of calls: `resume`, `begin_line`, `check_room`, then for every step `poll` and perhaps `save`, at last
    `close`.
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
    ) -> None:
        self._folder = folder
        self._rewind_interval = rewind_interval
        self._settings = settings
        # As it will come back from a manifest, so that both sides of a comparison are of one kind.
        self._config: dict[str, Any] = json.loads(json.dumps(resolved))
        self._mesh = dict(mesh)
        self._run_key_diff = run_key_diff
        self._allow_run_change = allow_run_change
        self._log = log if dist.get_rank() == 0 else lambda line: None
        self._warn = warn if dist.get_rank() == 0 else lambda line: None
        self._tokenizer_hash = tokenizer_hash
        self._environment = dict(environment or {})
        self._writers = dist.new_group(backend="gloo", timeout=timedelta(seconds=settings.timeout_seconds))
        self._stager = store.Stager()
        self._mode = settings.mode
        self._pending: _Save | None = None
        self._vote: Vote | None = None
        self._clock = SaveClock(settings.interval_minutes)
        self._found: Found | None = None
        self._run_id = ""
        self._last: Origin | None = None
        self.save_seconds: float | None = None
        """How long the last save took, its writing in the background included."""
        self._times_gone_back = 0
        self._initialized_from: Origin | None = None
        self._run_changes: list[RunChange] = []
        self._failures: list[SaveFailed] = []
        """Of the saves since the last that succeeded."""

    def should_save(self, step: int) -> bool:
        """Whether `checkpoint.interval`, `interval_minutes` or a rewind asks for a checkpoint after `step` steps."""
        intervals = (self._settings.interval, self._rewind_interval)
        return self._clock.is_due or any(interval > 0 and step % interval == 0 for interval in intervals)

    def latest_step(self) -> int | None:
        """Step of the checkpoint that was last loaded or committed."""
        return self._last.step if self._last else None

    @property
    def under_way(self) -> "Future[_Saved] | None":
        """The outcome of the save that is under way; any thread may wait for it."""
        return self._pending.result if self._pending else None

    # ------------------------------------------------------------------ loading

    def resume(self, state: State) -> TrainerState | None:
        """Load what `checkpoint.load` chooses into `state`, in place, and return the trainer state saved with it.

        Returns None if the run starts anew; then `state` is untouched, but for the weights that
        `checkpoint.init_from` names. Nothing on the disk is changed.
        Raises: ConfigError if the choice isn't there, or is of another model, tokenizer or other run keys; Damaged if
        it (and with `on_damage = "fall_back"` each one before it) is damaged; UserError if it is of a newer format.
        """
        load, go_back = self._settings.load, self._settings.go_back
        choice = on_rank_zero(self._writers, lambda: folders.choose(self._folder, load, go_back))
        problems: list[str] = []
        for folder in choice.candidates:
            try:
                self._found = self._load(folder, state)
            except Damaged as error:
                problems.append(str(error))
                if self._settings.on_damage == "stop" or folder is choice.candidates[-1]:
                    raise Damaged("\n".join(problems)) from None
                self._warn(f"{error}; trying the one before (checkpoint.on_damage)")
                continue
            self._log(f"going on from {folder}: {choice.reason}{', all newer ones are damaged' if problems else ''}")
            self._say_other_bits(self._found.manifest)
            return self._found.trainer_state
        self._initialize(state, choice.reason)
        return None

    def begin_line(self) -> None:
        """Make the folder ready for the checkpoints to come. To be called once, when nothing can go wrong any more.

        Removes what interrupted saves left behind. Checkpoints that the run does not go on from (later steps; all of
        them if it starts anew or from another folder) are moved aside; see checkpoint.folder.
        Raises: UserError if the folder can't be written.
        """
        on_rank_zero(self._writers, lambda: folders.prepare(self._folder, self._log, self._warn))
        self._leave_later_ones()

    def check_room(self, state: State) -> None:
        """See whether the checkpoints to come have room, and say what is lacking. To be called once, after begin_line.

        Where a host has no memory to stage what its ranks hold, this launch saves as `checkpoint.mode = "sync"` does:
        through a small buffer, while training waits.
        """
        room = measure_room(self._folder, store.shards_of(state), self._saved_dtype, self._writers)
        if not room.is_on_disk:
            self._warn(
                f"a checkpoint takes {room.file_bytes:,} bytes, and {self._folder} has {room.free_on_disk:,} free: "
                "saves will fail (checkpoint.max_save_failures). Make room, or set job.output_dir to another disk"
            )
        if self._mode == "async" and (crowded := room.crowded_hosts()):
            hosts = ", ".join(f"{host} has {free:,} of {staged:,} bytes" for host, (staged, free) in crowded.items())
            self._mode = "sync"
            self._warn(
                f'checkpoint.mode = "async" copies the state to the memory of its hosts, where there is too little: '
                f"{hosts}. This launch saves while training waits"
            )

    def can_rewind(self, step: int) -> bool:
        """Whether the run has a checkpoint of `step`; waits for a save under way. Raises: SaveFailed as `save` does."""
        self.wait()
        return on_rank_zero(self._writers, lambda: step in manifests.steps_in(self._folder))

    def rewind(self, step: int, state: State) -> TrainerState:
        """Amid a run, after `can_rewind`, load its checkpoint of `step`; returns the trainer state saved with it.

        Those of later steps are moved aside. Raises: as `resume` and `begin_line` do.
        """
        self._found = self._load(manifests.step_folder(self._folder, step), state)
        self._leave_later_ones()
        return self._found.trainer_state

    def _leave_later_ones(self) -> None:
        """Move what the run does not go on from aside, and begin a new line if there was any."""
        found = self._found
        is_own = found is not None and on_rank_zero(
            self._writers, lambda: folders.is_own(self._folder, found.folder, found.manifest.step)
        )
        newest_kept = found.manifest.step if found and is_own else None
        aside = on_rank_zero(self._writers, lambda: folders.set_aside(self._folder, newest_kept))
        if aside:
            self._log(f"checkpoints that this run does not go on from were moved to {aside}")
        if found and is_own and not aside:
            self._run_id = found.manifest.run_id
        else:
            self._run_id = on_rank_zero(self._writers, lambda: uuid4().hex)

    def _load(self, folder: Path, state: State) -> Found:
        found = on_rank_zero(self._writers, lambda: _read(folder))
        if not found.trainer_state:  # scripts/import_hf.py has made it
            raise ConfigError(
                f"checkpoint.load: {folder} holds a model's weights, but no run to go on from; to start one from them, "
                f'set checkpoint.init_from = "{folder}", and checkpoint.load back to "latest"'
            )
        changes = self._changes(found)
        self._verify(found)
        self._fill(found, state, _may_resume_from)
        self._last = Origin(found.manifest.run_id, found.manifest.step)
        self._times_gone_back = max(found.manifest.times_gone_back, self._settings.go_back)
        self._initialized_from = found.manifest.initialized_from
        self._run_changes = [*found.manifest.run_changes, *changes]
        return found

    def _initialize(self, state: State, reason: str) -> None:
        """Start anew, from the weights that `checkpoint.init_from` names, or from those that are there."""
        if self._settings.init_from is None:
            self._log(f"starting from newly drawn weights: {reason}")
            return
        folder = Path(self._settings.init_from)
        found = on_rank_zero(self._writers, lambda: _read(folder))
        theirs = found.manifest.tokenizer_hash
        if theirs and self._tokenizer_hash and theirs != self._tokenizer_hash and not self._allow_run_change:
            raise ConfigError(
                f"checkpoint.init_from: the weights in {found.folder} were trained with another tokenizer, to whose "
                "tokens their embedding belongs; set tokenizer.path to it, or --job.allow_run_change true"
            )
        self._verify(found)
        weights = {name: tensor for name, tensor in state.items() if name.startswith(MODEL)}
        tensors = {name: entry for name, entry in found.metadata.state_dict_metadata.items() if name.startswith(MODEL)}
        found = replace(found, metadata=replace(found.metadata, state_dict_metadata=tensors))
        self._fill(found, weights, lambda name, saved: saved.is_floating_point)
        self._initialized_from = Origin(found.manifest.run_id, found.manifest.step)
        self._log(f"starting from the weights of {found.folder} (checkpoint.init_from): {reason}")

    def _verify(self, found: Found) -> None:
        """Compare the content of every file with its hash, if `checkpoint.verify` says so."""
        files = found.manifest.files
        if self._settings.verify == "hash":
            started = time.perf_counter()
            if problems := content_damages(found.folder, files, self._writers):
                raise damaged(found.folder, "; ".join(problems))
            seconds = time.perf_counter() - started
            self._log(f"{found.folder}: all {len(files)} files are as they were written ({seconds:.1f} s)")

    def _changes(self, found: Found) -> list[RunChange]:
        """What of the run has changed since the checkpoint; an error unless that is allowed."""
        manifest = found.manifest
        changes = list(self._run_key_diff(manifest.config, self._config))
        if manifest.tokenizer_hash != self._tokenizer_hash:
            changes.append(f"content of the tokenizer: {manifest.tokenizer_hash} -> {self._tokenizer_hash}")
        if not changes:
            return []
        lines = "".join(f"\n  {change}" for change in changes)
        if not self._allow_run_change:
            raise ConfigError(
                f"what is learned has changed since checkpoint {found.folder}:{lines}\n"
                "Change it back, or choose another job.output_dir, or go on with --job.allow_run_change true (not with "
                "another training.seq_len, training.seed or mixture: they order the samples)"
            )
        self._log(f"run keys have changed since the checkpoint, as job.allow_run_change allows:{lines}")
        return [RunChange(manifest.step, changes)]

    def _say_other_bits(self, manifest: Manifest) -> None:
        """Say it if the run goes on with other bits than it would have had undisturbed.

        A warning where the machine or the software is another, which nobody may have meant; where only the mesh or
        machine keys are, they were set so.
        """
        surroundings = changed_surroundings(manifest, self._environment)
        changes = surroundings | changed_settings(manifest, self._config, self._mesh)
        if changes:
            say = self._warn if surroundings else self._log
            verb = "may" if changes.keys() == {CODE} else "will"
            lines = "; ".join(f"{name} {change}" for name, change in changes.items())
            say(f"from here on, the bits of this run {verb} differ from those of an undisturbed one: {lines}")

    def _fill(self, found: Found, state: State, may_convert: Callable[[str, torch.dtype], bool]) -> None:
        """Load the tensors, after a comparison of names, shapes and dtypes on all ranks."""
        shards = store.shards_of(state)
        differences = store.differences(found.metadata, shards, self._writers, may_convert)
        if differences:
            lines = "".join(f"\n  {line}" for line in differences[:SHOWN_DIFFERENCES])
            more = len(differences) - SHOWN_DIFFERENCES
            raise ConfigError(
                f"checkpoint {found.folder} is of another model; {len(differences)} tensors differ:{lines}"
                f"{f'{chr(10)}  and {more} more' if more > 0 else ''}\n"
                "Set [model] and [optimizer] to what they were, or choose another checkpoint.load or job.output_dir"
            )
        started = time.perf_counter()
        store.read(found.folder, found.metadata, shards, self._writers)
        self._log(f"loaded step {found.manifest.step} in {time.perf_counter() - started:.1f} s")

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
        """Write a checkpoint of the run after `step` steps; returns the seconds that training stood still.

        trainer_state: JSON-able, with the `tokens` trained on so far. Both states are saved as they are now, also when
        the writing goes on in the background. Waits for a save that is still under way. A step that this run has saved
        already, or was loaded from, is skipped.
        data_fingerprint: what the content of each source of data hashes to.
        validation_loss: if it was measured at this step.
        prune: remove the checkpoints that the settings don't keep; not where it is in doubt how good this one is.
        Raises: NotFinite if a tensor holds a value that is not, whatever max_save_failures says: nothing is written
        and nothing removed; SaveFailed on all ranks when the disk has refused `max_save_failures` times in a row, this
        save, or the one that ran in the background until now, included; before that it is a warning, and the run may
        go on.
        """
        started = time.perf_counter()
        self.wait()
        self._clock.start()
        folder = manifests.step_folder(self._folder, step)
        try:
            unfinished = on_rank_zero(self._writers, lambda: _begin(folder, step == self.latest_step()))
        except SaveFailed as error:
            self._failed(error)
            return time.perf_counter() - started
        if unfinished is None:
            return time.perf_counter() - started
        draft = self._draft(step, trainer_state["tokens"], data_fingerprint or {}, validation_loss)
        self._pending = _Save(started, unfinished, draft, json.dumps(trainer_state), prune, Future())
        self._start(self._pending, store.shards_of(state))
        stall = time.perf_counter() - started
        self._log(f"checkpoint {folder.name}: training waited {stall:.3f} s")
        return stall

    def poll(self) -> None:
        """See whether the save in the background is over. To be called by all ranks once a step; never waits for long.

        The ranks vote, and the result of one poll's vote counts at the next, by when it has long arrived: so all ranks
        learn at the same step that the save has ended, or why it failed, and that `interval_minutes` have passed.
        Raises: SaveFailed as `save` does.
        """
        self._clock.poll()
        if self._pending is None:
            return
        if self._vote is not None and self._vote.is_unanimous():
            self.wait()
        else:
            self._vote = Vote(self._pending.result.done())

    def wait(self) -> None:
        """Wait until no save is under way. Raises: SaveFailed as `save` does."""
        if self._pending is None:
            return
        if self._vote is not None:
            self._vote.is_unanimous()
        save, self._pending, self._vote = self._pending, None, None
        try:
            saved = save.result.result(self._seconds_left(save))
        except SaveFailed as error:
            self._failed(error)
            return
        except TimeoutError:
            if save.result.done():  # the writer's own error
                raise
            raise UserError(
                f"the save to {save.unfinished} has not ended for {self._settings.timeout_seconds} s "
                f"(checkpoint.timeout_seconds): the disk does not answer on rank {dist.get_rank()}, or is too slow"
            ) from None
        self._failures.clear()
        manifest = saved.manifest
        self._last = Origin(manifest.run_id, manifest.step)
        megabytes = sum(entry.size for entry in manifest.files.values()) / 1e6
        self.save_seconds = saved.seconds
        name = manifests.step_folder(self._folder, manifest.step).name
        self._log(f"checkpoint {name}: committed, {megabytes:.1f} MB, {saved.seconds:.1f} s after its step")
        for line in saved.pruned:
            self._log(line)

    def _seconds_left(self, save: _Save) -> float:
        """For how long a save may still be waited for: a little longer than its collectives wait for a rank."""
        return max(0.0, save.started + self._settings.timeout_seconds + GRACE_SECONDS - time.perf_counter())

    def close(self) -> None:
        """Wait for the last save and give the process groups back. Not for a crash: it waits for the other ranks.

        Raises: SaveFailed if the last save did not succeed, however many failures the settings allow: what was trained
        since the newest checkpoint would be lost without anybody being told.
        """
        self.wait()
        self._clock.close()
        dist.destroy_process_group(self._writers)
        if self._failures:
            raise self._failures[-1]

    def _start(self, save: _Save, shards: dict[str, Shard]) -> None:
        is_staged = self._mode == "async" or self._settings.optimizer_dtype != "same"
        if is_staged:
            shards = self._stager.stage(shards, self._saved_dtype)
        if self._mode == "async":
            # A daemon: if training dies, the process must not linger until a collective times out.
            arguments = (save, shards, is_staged)
            threading.Thread(target=self._write, args=arguments, name="checkpoint", daemon=True).start()
        else:
            self._write(save, shards, is_staged)
            self.wait()

    def _saved_dtype(self, name: str, tensor: Tensor) -> torch.dtype:
        """As the tensor's own, but for the moments of the optimizer (not its step count) if a smaller one is asked."""
        is_moment = name.startswith(OPTIMIZER) and tensor.dim() > 0
        return torch.bfloat16 if is_moment and self._settings.optimizer_dtype == "bfloat16" else tensor.dtype

    def _draft(
        self, step: int, tokens: int, data_fingerprint: Mapping[str, str], validation_loss: float | None
    ) -> Manifest:
        is_known = validation_loss is not None and math.isfinite(validation_loss)
        return Manifest(
            step=step,
            tokens=tokens,
            config=self._config,
            config_hash=manifests.config_hash(self._config),
            mesh=self._mesh,
            torch_version=torch.__version__,
            run_id=self._run_id,
            parent=self._last,
            run_changes=self._run_changes,
            files={},
            initialized_from=self._initialized_from,
            tokenizer_hash=self._tokenizer_hash,
            data_fingerprint=dict(data_fingerprint),
            validation_loss=validation_loss if is_known else None,
            environment=self._environment,
            times_gone_back=self._times_gone_back,
        )

    def _write(self, save: _Save, shards: dict[str, Shard], is_staged: bool) -> None:
        """Write, commit, prune; the outcome, an error too, goes to `save.result` (this may run in a thread)."""
        try:
            staged = store.hashes(shards) if is_staged else {}
            self._check_finite(save, shards)
            files = store.write(save.unfinished, shards, self._writers)
            if is_staged:
                self._check_staged(save, shards, staged)
            self._check_before_pruning(save.unfinished, files)
            manifest = on_rank_zero(self._writers, lambda: _commit(save, files))
            seconds = time.perf_counter() - save.started
            pruned = on_rank_zero(self._writers, self._prune) if save.prune else []
            save.result.set_result(_Saved(manifest, seconds, pruned))
        except BaseException as error:
            if dist.get_rank() == 0:
                shutil.rmtree(save.unfinished, ignore_errors=True)
            save.result.set_exception(error)

    def _check_finite(self, save: _Save, shards: dict[str, Shard]) -> None:
        """Raise on all ranks unless all values of all ranks are finite: a checkpoint is what a run can go on from."""
        if places := self._places(store.not_finite(shards)):
            raise _not_finite(save, places, self._newest())

    def _check_staged(self, save: _Save, shards: dict[str, Shard], hashes: dict[str, int]) -> None:
        """Raise on all ranks unless what was staged is still what it was: the files' own hashes are taken of the bytes
        as they are written, so a bit that has flipped in memory before is in the file and in its hash alike."""
        now = store.hashes(shards)
        if places := self._places([name for name, value in hashes.items() if now[name] != value]):
            raise SaveFailed(
                f"checkpoint {save.unfinished.stem} is not kept: while it was written, memory that nothing writes to "
                f"has changed, in {_listed(places)}; if that host is named again, leave it out"
            )

    def _places(self, names: list[str]) -> list[str]:
        """ "NAME of rank R on HOST" for the names of all ranks; the same on all."""
        by_rank = gather((socket.gethostname(), names), self._writers)
        return [f"{name} of rank {rank} on {host}" for rank, (host, names) in enumerate(by_rank) for name in names]

    def _newest(self) -> Path | None:
        step = self.latest_step()
        return None if step is None else manifests.step_folder(self._folder, step)

    def _check_before_pruning(self, unfinished: Path, files: dict[str, FileEntry]) -> None:
        """Where older checkpoints may be removed for the new one, read it again before it counts as one."""
        if self._settings.keep_last and self._settings.verify == "hash":
            problems = content_damages(unfinished, files, self._writers)
            if problems:
                raise save_failed(unfinished, f"read again, {'; '.join(problems)}")

    def _prune(self) -> list[str]:
        """On rank 0: remove the checkpoints that the settings don't keep; returns what there is to say of it."""
        try:
            doomed = folders.to_be_pruned(self._folder, self._settings, self._rewind_interval)
            return [_removed(folder) for folder in doomed]
        except OSError as error:
            return [f"the checkpoints that are not kept any more can't be looked for: {error}"]

    def _failed(self, error: SaveFailed) -> None:
        """Raise if it has happened too often in a row, else warn."""
        self._failures.append(error)
        count, limit = len(self._failures), self._settings.max_save_failures
        if count >= limit:
            raise SaveFailed(f"{error}; failed saves in a row: {count} (checkpoint.max_save_failures is {limit})")
        newest = self.latest_step()
        kept = "there is no checkpoint yet" if newest is None else f"the newest checkpoint is step {newest}"
        self._warn(f"{error}; TRAINING GOES ON, {kept}; failed saves in a row: {count}, the run ends at {limit}")


def _not_finite(save: _Save, places: list[str], newest: Path | None) -> NotFinite:
    go_on = f"the newest checkpoint is {newest}: the same command goes on from it"
    return NotFinite(
        f"checkpoint {save.unfinished.stem} is not written: not all values are finite in "
        f"{_listed(places)}; {go_on if newest else 'there is no checkpoint before it'}. If "
        "it comes again, lower optimizer.lr or training.max_norm; if it comes on one host only, look at its memory"
    )


def _listed(places: list[str]) -> str:
    more = f" and {len(places) - SHOWN_DIFFERENCES} more" if len(places) > SHOWN_DIFFERENCES else ""
    return f"{', '.join(places[:SHOWN_DIFFERENCES])}{more}"


def _read(folder: Path) -> Found:
    """The parts of a checkpoint that describe it. Raises: Damaged; UserError for a newer format."""
    return Found(folder, manifests.read_manifest(folder), read_metadata(folder), manifests.read_trainer_state(folder))


def _may_resume_from(name: str, saved: torch.dtype) -> bool:
    """Moments that were saved as bfloat16 (`optimizer_dtype`) may have another type here; nothing else may."""
    return name.startswith(OPTIMIZER) and saved == torch.bfloat16


def _begin(folder: Path, is_ours: bool) -> Path | None:
    """The temporary folder to write to, or None if the checkpoint is there already and `is_ours`."""
    try:
        if os.path.lexists(folder):
            if is_ours:
                return None
            raise UserError(f"{folder} exists, but not by this run: does another one use the same job.output_dir?")
        return manifests.begin(folder)
    except OSError as error:
        raise save_failed(folder, error) from None


def _commit(save: _Save, files: dict[str, FileEntry]) -> Manifest:
    try:
        return manifests.commit(save.unfinished, save.draft, files, save.trainer_text)
    except OSError as error:
        raise save_failed(save.unfinished, error, sum(entry.size for entry in files.values())) from None


def _removed(folder: Path) -> str:
    """Remove a checkpoint; says how that went."""
    try:
        remove(folder)
    except Pinned as error:
        return f"{error}; a later save removes it"
    except OSError as error:
        return f"checkpoint {folder.name} is not kept any more, but can't be removed: {error}"
    return f"checkpoint {folder.name}: removed, it is not kept any more"
