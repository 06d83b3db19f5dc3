"""Decides when a checkpoint is written and which one a run resumes from.

The manager owns a run's folder `checkpoints/`. A save takes a snapshot of the state (in CPU memory if asynchronous, so
that training continues), which the writer (`writer.py`) turns into a checkpoint. A load chooses a checkpoint, checks
everything that can be checked, and only then changes the first tensor. All methods are collective: every rank calls
them at the same step, and if one rank fails, all raise the same error, so that none is left waiting.
"""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata

from checkpoint import folder as folders
from checkpoint import manifest as manifests
from checkpoint import store
from checkpoint.bits import CODE, changed_settings, changed_surroundings
from checkpoint.compare import shape_differences
from checkpoint.incarnation import Alone, Incarnation
from checkpoint.manifest import Damaged, Manifest, Origin, RunChange, damaged
from checkpoint.memory_copies import Copy, MemoryCopies, with_copies
from checkpoint.room import crowded_hosts, measure_room
from checkpoint.safe_read import read_metadata
from checkpoint.store import SaveFailed, State
from checkpoint.verify import content_damages
from checkpoint.votes import SaveClock, Vote
from checkpoint.writer import OPTIMIZER, Save, Saved, Writer
from configs.errors import ConfigError, UserError, listed
from configs.run_change import function_diff
from configs.schema import Checkpoint
from parallelisms.ranks import on_rank, on_rank_zero

TrainerState = dict[str, Any]
GRACE_SECONDS = 10.0
MODEL = "model."


@dataclass(frozen=True)
class Found:
    """A checkpoint that has passed every check except that of its tensors."""

    folder: Path
    manifest: Manifest
    metadata: Metadata
    trainer_state: TrainerState
    changes: list[RunChange] = field(default_factory=list)
    """Run keys that differ now, as `job.allow_run_change` allows."""
    copy: Copy | None = None
    """If it is a copy in the hosts' memory."""


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
        self._folder, self._metrics = folder, metrics
        self._rewind_interval = rewind_interval
        self._settings = settings
        # As a manifest returns it, so that both sides of a comparison have the same types.
        self._config: dict[str, Any] = json.loads(json.dumps(resolved))
        self._mesh = dict(mesh)
        self._run_key_diff = run_key_diff
        self._allow_run_change = allow_run_change
        self._log = log if dist.get_rank() == 0 else lambda line: None
        self._warn = warn if dist.get_rank() == 0 else lambda line: None
        self._tokenizer_hash = tokenizer_hash
        self._environment = dict(environment or {})
        self._incarnation = incarnation or Alone()
        self._writer = Writer(folder, settings, rewind_interval, self._incarnation)
        self._copies: MemoryCopies | None = None
        if settings.memory_copies and incarnation:
            given = (settings.memory_copies, self._writer.group, incarnation, self._log, self._warn)
            self._copies = self._writer.copies = MemoryCopies(folder.parent, *given)
        self._copy_is_due = self._has_copied = False
        self._pending: Save | None = None
        self._vote: Vote | None = None
        self._clock = SaveClock(settings.interval_minutes)
        self._candidates: list[Path | Copy] | None = None
        """Checkpoints to fall back to if `_found` is damaged; None before `find`."""
        self._reason = ""
        """Why they were chosen."""
        self._problems: list[str] = []
        """Damages of the checkpoints before `_found`."""
        self._found: Found | None = None
        self._initial: Found | None = None
        """The checkpoint that `checkpoint.init_from` names, if the run takes its weights from it."""
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
    def under_way(self) -> "Future[Saved] | None":
        """The outcome of the save in progress; any thread may wait for it."""
        return self._pending.result if self._pending else None

    # ------------------------------------------------------------------ loading

    def find(self, shapes: Mapping[str, Sequence[int]] | None = None) -> TrainerState | None:
        """Choose the checkpoint that the run begins from, and check it as far as possible without the run's state.

        Args:
            shapes: of the model's tensors, by name, if known.

        Returns:
            The trainer state saved with it; None if the run starts from scratch.

        Raises:
            KeelError: as in `resume`.
        """
        load, go_back = self._settings.load, self._settings.go_back
        choice = on_rank_zero(self._writer.group, lambda: folders.choose(self._folder, load, go_back))
        self._candidates, self._reason = [*choice.candidates], choice.reason
        if self._copies and load == "latest":
            self._candidates = with_copies(choice.candidates, self._copies.find())
        self._find_next()
        found = self._found or self._initial
        if found and shapes:
            self._require_none(found, shape_differences(found.metadata, shapes))
        if self._initial and (changes := function_diff(self._initial.manifest.config, self._config)):
            self._warn(
                f"checkpoint.init_from: the model that was trained in {self._initial.folder} computes something else "
                f"from these weights than this job's:\n  {listed(changes)}"
            )
        return self._found.trainer_state if self._found else None

    def resume(self, state: State) -> TrainerState | None:
        """Load the checkpoint that `checkpoint.load` chooses into `state`, in place; changes nothing on disk.

        Returns:
            The trainer state saved with it, which is not that of `find` if that checkpoint has turned out to be
            damaged; None if the run starts from scratch, and then only the weights that `checkpoint.init_from` names
            are loaded into `state`.

        Raises:
            ConfigError: the checkpoint does not exist, or is of another model or tokenizer, or has other run keys.
            Damaged: it is damaged, and with `on_damage = "fall_back"` all earlier ones are, too.
            UserError: it has a newer format.
        """
        if self._candidates is None:
            self.find()
        while self._found:
            try:
                self._load(self._found, state)
            except Damaged as error:
                self._pass_over(error, self._found.copy is not None)
                self._find_next()
                continue
            newer = ", all newer ones are damaged" if self._problems else ""
            if self._copies and (copy := self._found.copy):
                hosts = self._copies.names(copy.holders)
                self._log(f"resuming from step {copy.step}, from copies in the memory of {hosts}{newer}")
            else:
                self._log(f"resuming from {self._found.folder}: {self._reason}{newer}")
            self._say_other_bits(self._found.manifest)
            return self._found.trainer_state
        self._initialize(state)
        return None

    def _find_next(self) -> None:
        """Read the first candidate that is not damaged, and check that the run may resume from it.

        If there is none, the run starts from scratch: perhaps with the weights that `checkpoint.init_from` names.
        """
        assert self._candidates is not None
        self._found = None
        while self._found is None and self._candidates:
            candidate = self._candidates.pop(0)
            try:
                self._found = self._find(candidate)
            except Damaged as error:
                self._pass_over(error, isinstance(candidate, Copy))
        if self._found is None and self._settings.init_from is not None:
            self._initial = self._find_initial(Path(self._settings.init_from))

    def _pass_over(self, error: Damaged, is_copy: bool) -> None:
        """Warn of a damaged checkpoint if there is one to fall back to; otherwise raise.

        A copy in memory is more than a run can count on: without a checkpoint it begins as it would without the copy.
        """
        self._problems.append(str(error))
        if self._settings.on_damage == "stop" or not (self._candidates or is_copy):
            raise Damaged("\n".join(self._problems)) from None
        self._warn(f"{error}; trying the one before it (checkpoint.on_damage)")

    def begin_line(self) -> None:
        """Prepare the folder for new checkpoints. Call it once, after everything that can fail.

        Removes the leftovers of interrupted saves. Checkpoints that the run does not resume from (later steps; all of
        them if it starts from scratch or from another folder) are moved aside; see checkpoint.folder.

        Raises:
            UserError: the folder can't be written.
        """
        self._begin_incarnation()
        on_rank_zero(self._writer.group, self._prepare)
        self._leave_later_ones()

    def _begin_incarnation(self) -> None:
        """Record where this launch begins, before anything later is cut off: later copies in memory are out of date."""
        found = self._found
        step, source = (found.manifest.step if found else 0), "memory" if found and found.copy else "disk"
        try:
            line = on_rank_zero(self._writer.group, lambda: self._incarnation.begin(step, source))
        except OSError as error:
            raise UserError(f"the beginning of this launch can't be recorded: {error} (see job.output_dir)") from None
        if self._copies:
            self._copies.begin_line(line, found.copy if found else None)

    def _prepare(self) -> None:
        self._incarnation.require_current()
        folders.prepare(self._folder, self._log, self._warn)

    def check_room(self, state: State) -> None:
        """Check that the hosts' memory has room for checkpoints, and warn if not. Call it once, after `begin_line`.

        If a host has too little memory to stage its ranks' state, this launch saves like `checkpoint.mode = "sync"`:
        through a small buffer, while training waits.
        """
        if self._copies:
            self._copies.check_room(store.shards_of(state), self._writer.saved_dtype)
        if self._writer.mode == "sync":
            return
        hosts_room = measure_room(store.shards_of(state), self._writer.saved_dtype, self._writer.group)
        if crowded := crowded_hosts(hosts_room):
            hosts = ", ".join(f"{host} has {free:,} of {staged:,} bytes" for host, (staged, free) in crowded.items())
            self._writer.mode = "sync"
            self._warn(
                f'checkpoint.mode = "async" copies the state to host memory, of which there is too little: '
                f"{hosts}. Training will wait for each save of this launch"
            )

    def can_rewind(self, step: int) -> bool:
        """Wait for a save in progress; returns whether the run has a checkpoint of `step`.

        Raises:
            SaveFailed: as in `save`.
        """
        self.wait()
        return on_rank_zero(self._writer.group, lambda: step in manifests.steps_in(self._folder))

    def rewind(self, step: int, state: State) -> TrainerState:
        """Load the run's checkpoint of `step` during training, after `can_rewind`; later ones are moved aside.

        Returns:
            The trainer state saved with it.

        Raises:
            KeelError: as in `resume` and `begin_line`.
        """
        self._found = self._find(manifests.step_folder(self._folder, step))
        self._load(self._found, state)
        self._begin_incarnation()
        self._leave_later_ones()
        return self._found.trainer_state

    def _leave_later_ones(self) -> None:
        """Move the checkpoints aside that the run does not continue, and begin a new line if there were any."""
        found = self._found
        is_own = found is not None and on_rank_zero(
            self._writer.group,
            lambda: bool(found.copy) or folders.is_own(self._folder, found.folder, found.manifest.step),
        )
        newest_kept = found.manifest.step if found and is_own else None
        aside = on_rank_zero(self._writer.group, lambda: self._set_aside(newest_kept))
        if aside:
            self._log(f"checkpoints that this run does not continue were moved to {aside}, with a copy of its metrics")
        if found and is_own and not aside:
            self._run_id = found.manifest.run_id
        else:
            self._run_id = on_rank_zero(self._writer.group, lambda: uuid4().hex)

    def _set_aside(self, newest_kept: int | None) -> Path | None:
        self._incarnation.require_current()
        return folders.set_aside(self._folder, newest_kept, self._metrics)

    def _find(self, candidate: Path | Copy) -> Found:
        """Read what describes a checkpoint, and check that the run may resume from it."""
        if isinstance(candidate, Copy):
            return self._find_copy(candidate)
        folder = candidate
        found = on_rank_zero(self._writer.group, lambda: _read(folder))
        if not found.trainer_state:  # made by scripts/import_hf.py
            raise ConfigError(
                f"checkpoint.load: {folder} holds only a model's weights, no run to resume; to start a run from them, "
                f'set checkpoint.init_from = "{folder}", and checkpoint.load back to "latest"'
            )
        return replace(found, changes=self._changes(found))

    def _find_copy(self, copy: Copy) -> Found:
        """Like `_find`; a rank that has it reads it for all."""
        assert self._copies is not None
        folder = self._copies.folder / copy.name
        if self._settings.verify == "hash":
            copy = self._copies.verified(copy)
        found = on_rank(self._copies.describer(copy), self._writer.group, lambda: _read(folder, is_whole=False))
        return replace(found, folder=folder, copy=copy, changes=self._changes(found))

    def _load(self, found: Found, state: State) -> None:
        if found.copy is None:
            self._verify(found)
        self._fill(found, state, _may_resume_from)
        # A copy is not a checkpoint that later ones may name, or that need not be saved.
        self._last = found.manifest.parent if found.copy else Origin(found.manifest.run_id, found.manifest.step)
        self._times_gone_back = max(found.manifest.times_gone_back, self._settings.go_back)
        self._initialized_from = found.manifest.initialized_from
        self._run_changes = [*found.manifest.run_changes, *found.changes]

    def _find_initial(self, folder: Path) -> Found:
        """Read what describes the checkpoint whose weights are to be the initial ones."""
        found = on_rank_zero(self._writer.group, lambda: _read(folder))
        theirs = found.manifest.tokenizer_hash
        if theirs and self._tokenizer_hash and theirs != self._tokenizer_hash and not self._allow_run_change:
            raise ConfigError(
                f"checkpoint.init_from: the weights in {found.folder} were trained with another tokenizer, so their "
                "embedding does not fit this one; set tokenizer.path to it, or --job.allow_run_change true"
            )
        tensors = {name: entry for name, entry in found.metadata.state_dict_metadata.items() if name.startswith(MODEL)}
        return replace(found, metadata=replace(found.metadata, state_dict_metadata=tensors))

    def _initialize(self, state: State) -> None:
        """Start from scratch: from the weights that `checkpoint.init_from` names, or the initial ones."""
        found = self._initial
        if found is None:
            self._log(f"starting from random weights ({self._reason})")
            return
        self._verify(found)
        weights = {name: tensor for name, tensor in state.items() if name.startswith(MODEL)}
        self._fill(found, weights, lambda name, saved: saved.is_floating_point)
        self._initialized_from = Origin(found.manifest.run_id, found.manifest.step)
        self._log(f"starting from the weights of {found.folder} (checkpoint.init_from): {self._reason}")

    def _verify(self, found: Found) -> None:
        """Compare the content of every file with its hash, if `checkpoint.verify` says so."""
        files = found.manifest.files
        if self._settings.verify == "hash":
            started = time.perf_counter()
            if problems := content_damages(found.folder, files, self._writer.group):
                raise damaged(found.folder, "; ".join(problems))
            seconds = time.perf_counter() - started
            self._log(f"{found.folder}: verified {len(files)} files ({seconds:.1f} s)")

    def _changes(self, found: Found) -> list[RunChange]:
        """Return what of the run has changed since the checkpoint.

        Raises:
            ConfigError: something has, and `job.allow_run_change` is not set.
        """
        manifest = found.manifest
        changes = list(self._run_key_diff(manifest.config, self._config))
        if manifest.tokenizer_hash != self._tokenizer_hash:
            changes.append(f"content of the tokenizer: {manifest.tokenizer_hash} -> {self._tokenizer_hash}")
        if not changes:
            return []
        lines = "".join(f"\n  {change}" for change in changes)
        if not self._allow_run_change:
            raise ConfigError(
                f"the run's settings differ from those of checkpoint {found.folder}:{lines}\n"
                "Change it back, choose another job.output_dir, or resume with --job.allow_run_change true (not "
                "possible for training.seq_len, training.seed or the mixture, which order the samples)"
            )
        self._log(f"run keys have changed since the checkpoint, as job.allow_run_change allows:{lines}")
        return [RunChange(manifest.step, changes)]

    def _say_other_bits(self, manifest: Manifest) -> None:
        """Report if the resumed run will not be bit-identical to an uninterrupted one.

        This is a warning if the machine or the software differs, which may be unintended. If only the mesh or machine
        keys differ, the user has set them, and a log line suffices.
        """
        surroundings = changed_surroundings(manifest, self._environment)
        changes = surroundings | changed_settings(manifest.config, manifest.mesh, self._config, self._mesh)
        if changes:
            say = self._warn if surroundings else self._log
            verb = "may" if changes.keys() == {CODE} else "will"
            lines = "; ".join(f"{name} {change}" for name, change in changes.items())
            say(f"from here on, the bits of this run {verb} differ from those of an uninterrupted one: {lines}")

    def _fill(self, found: Found, state: State, may_convert: Callable[[str, torch.dtype], bool]) -> None:
        """Compare names, shapes and dtypes on all ranks, then load the tensors."""
        shards = store.shards_of(state)
        self._require_none(found, store.differences(found.metadata, shards, self._writer.group, may_convert))
        started = time.perf_counter()
        if self._copies and found.copy:
            self._copies.fetch(found.copy, store.files_for(found.metadata, shards))
        store.read(found.folder, found.metadata, shards, self._writer.group)
        self._log(f"loaded step {found.manifest.step} in {time.perf_counter() - started:.1f} s")

    def _require_none(self, found: Found, differences: Sequence[str]) -> None:
        """Raise ConfigError if a checkpoint's tensors differ from the run's."""
        if differences:
            remedy = "Change [model] and [optimizer] back, or choose another checkpoint.load or job.output_dir"
            if self._initial:
                remedy = "Set [model] to that of these weights, or choose another checkpoint.init_from"
            raise ConfigError(
                f"checkpoint {found.folder} is of another model; {len(differences)} tensors differ:\n"
                f"  {listed(differences)}\n{remedy}"
            )

    # ------------------------------------------------------------------ saving

    def save(
        self,
        step: int,
        state: State,
        trainer_state: TrainerState,
        data_fingerprint: Mapping[str, str] | None = None,
        validation_loss: float | None = None,
        prune: bool = True,
        chain: str = "",
        in_memory: bool = False,
    ) -> float:
        """Write a checkpoint of the run after `step` steps, or a copy of its state to the hosts' memory.

        Both states are saved as they are now, even if they are written in the background. Waits for a save that is
        still in progress. A step that this run has already saved, or was loaded from, is skipped.

        Args:
            step: number of steps so far.
            state: the tensors.
            trainer_state: JSON-able, with the `tokens` trained on so far.
            data_fingerprint: hash of the content of each data source.
            validation_loss: None unless it was measured at this step.
            prune: remove the checkpoints that the settings don't keep; False while this one may turn out bad.
            chain: `Manifest.chain`.
            in_memory: make a copy in memory; `should_copy` has said so. A failure is a warning: the one before is kept.

        Returns:
            Seconds for which training waited.

        Raises:
            NotFinite: a tensor has a non-finite value, regardless of max_save_failures; nothing is written or removed.
            SaveFailed: the disk has refused `max_save_failures` times in a row, including this save or the one in the
                background before it; raised on all ranks. Earlier failures are warnings, and the run continues.
        """
        started = time.perf_counter()
        unfinished = self._begin_copy(step) if in_memory else self._begin(step)
        if unfinished is None:
            return time.perf_counter() - started
        self._copy_is_due = False
        draft = self._draft(step, trainer_state["tokens"], data_fingerprint or {}, validation_loss, chain)
        text, prune = json.dumps(trainer_state), prune and not in_memory
        self._pending = Save(started, unfinished, draft, text, prune, self._newest(), in_memory)
        self._writer.start(self._pending, state)
        if self._writer.mode == "sync":
            self.wait()
        stall = time.perf_counter() - started
        if not in_memory:
            name = manifests.step_folder(self._folder, step).name
            self._log(f"checkpoint {name}: training waited {stall:.3f} s")
        return stall

    def _begin(self, step: int) -> Path | None:
        """The temporary folder of a checkpoint; None if there is none to write, or the disk refuses."""
        self.wait()
        self._clock.start()
        try:
            return self._writer.begin(manifests.step_folder(self._folder, step), is_ours=step == self.latest_step())
        except SaveFailed as error:
            self._failed(error)
            return None

    def _begin_copy(self, step: int) -> Path | None:
        """The temporary folder of a copy on this host; None if a host refuses."""
        assert self._copies is not None
        self._copy_is_due = False
        try:
            return self._copies.begin(step)
        except SaveFailed as error:
            self._copy_failed(step, error)
            return None

    def should_copy(self, step: int) -> bool:
        """Whether to copy the state to the hosts' memory after `step` steps.

        A copy that is due while a save or another copy is under way waits for its end.
        """
        if self._copies is None:
            return False
        self._copy_is_due |= step % self._settings.memory_interval == 0
        return self._copy_is_due and self._pending is None

    def _copy_failed(self, step: int, error: SaveFailed) -> None:
        why = str(error).removesuffix(" (see job.output_dir)")
        self._warn(f"the copy of step {step} in the hosts' memory has failed, TRAINING GOES ON without it: {why}")

    def _announce_copy(self, saved: Saved) -> None:
        """Say so of the first one."""
        if not self._has_copied and self._copies:
            self._has_copied = True
            megabytes = sum(entry.size for entry in saved.manifest.files.values()) / 1e6
            self._log(
                f"the state of step {saved.manifest.step}, {megabytes:.1f} MB, is in the memory of "
                f"{self._copies.names(range(len(self._copies.hosts)))}, {saved.seconds:.1f} s after its step; the next "
                "copies are not announced"
            )

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
        save, self._pending, self._vote = self._pending, None, None
        try:
            saved = save.result.result(self._seconds_left(save))
        except SaveFailed as error:
            if save.in_memory:
                self._copy_failed(save.draft.step, error)
            else:
                self._failed(error)
            return
        except TimeoutError:
            if save.result.done():  # the TimeoutError came from the writer itself
                raise
            raise UserError(
                f"the save to {save.unfinished} has not finished within {self._settings.timeout_seconds} s "
                f"(checkpoint.timeout_seconds): the disk does not answer on rank {dist.get_rank()}, or is too slow"
            ) from None
        if save.in_memory:
            self._announce_copy(saved)
            return
        self._failures.clear()
        manifest = saved.manifest
        self._last = Origin(manifest.run_id, manifest.step)
        megabytes = sum(entry.size for entry in manifest.files.values()) / 1e6
        self.save_seconds = saved.seconds
        name = manifests.step_folder(self._folder, manifest.step).name
        self._log(f"checkpoint {name}: committed, {megabytes:.1f} MB, {saved.seconds:.1f} s after its step")
        for line in saved.pruned:
            self._log(line)

    def _seconds_left(self, save: Save) -> float:
        """How long to wait for a save: a little longer than its collectives wait for a rank."""
        return max(0.0, save.started + self._settings.timeout_seconds + GRACE_SECONDS - time.perf_counter())

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
        if self._copies:
            self._copies.forget()

    def _draft(
        self, step: int, tokens: int, data_fingerprint: Mapping[str, str], validation_loss: float | None, chain: str
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
            chain=chain,
        )

    def _newest(self) -> Path | None:
        step = self.latest_step()
        return None if step is None else manifests.step_folder(self._folder, step)

    def _failed(self, error: SaveFailed) -> None:
        """Raise if too many saves in a row have failed, otherwise warn."""
        self._failures.append(error)
        count, limit = len(self._failures), self._settings.max_save_failures
        if count >= limit:
            raise SaveFailed(f"{error}; failed saves in a row: {count} (checkpoint.max_save_failures is {limit})")
        newest = self.latest_step()
        kept = "there is no checkpoint yet" if newest is None else f"the newest checkpoint is step {newest}"
        self._warn(f"{error}; TRAINING GOES ON, {kept}; failed saves in a row: {count}, the run ends at {limit}")


def _read(folder: Path, is_whole: bool = True) -> Found:
    """Read the parts of a checkpoint that describe it.

    Args:
        folder: the checkpoint.
        is_whole: whether all its files must be there.

    Raises:
        Damaged: it is damaged.
        UserError: it has a newer format.
    """
    manifest = manifests.read_manifest(folder) if is_whole else manifests.read_description(folder)
    sizes = None if is_whole else {name: entry.size for name, entry in manifest.files.items()}
    return Found(folder, manifest, read_metadata(folder, sizes), manifests.read_trainer_state(folder))


def _may_resume_from(name: str, saved: torch.dtype) -> bool:
    """Whether a tensor may change its type: only moments may, which were saved as bfloat16 (`optimizer_dtype`), or are
    kept in it from now on (`optimizer.moments_dtype`, whose change was allowed)."""
    return name.startswith(OPTIMIZER) and saved in (torch.bfloat16, torch.float32)
