"""When a checkpoint is written, and which one a run goes on from.

The manager owns the folder `checkpoints/` of a run. Saving is: snapshot the state (asynchronous: in CPU memory, while
training goes on), write it under a temporary name, commit. Loading is: choose, check everything that can be checked,
and only then touch the first tensor. All methods are collective: every rank calls them, at the same step, and where
one rank fails all of them raise the same error, so that none is left waiting.

Two process groups of its own keep it out of training's way: one for the writer (a background thread must not share a
group with the main thread: collectives would pair up wrongly), one on which the ranks agree, in the main thread, that
a write is over.
"""

import json
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist

from checkpoint import manifest as manifests
from checkpoint import store
from checkpoint.manifest import Manifest, Origin, RunChange
from checkpoint.safe_read import read_metadata
from checkpoint.store import State, on_rank_zero
from configs.errors import ConfigError, UserError
from configs.schema import Checkpoint

TrainerState = dict[str, Any]
SHOWN_DIFFERENCES = 8


@dataclass(frozen=True)
class Found:
    """The checkpoint that a run goes on from."""

    folder: Path
    manifest: Manifest
    trainer_state: TrainerState


@dataclass(frozen=True)
class _Save:
    """A save on its way. Its last fields are what the thread that writes needs, and brings."""

    started: float
    unfinished: Path
    draft: Manifest
    trainer_text: str
    result: "Future[Manifest]"


class CheckpointManager:
    """The checkpoints of one run.

    folder: the run's `checkpoints/`; made if need be.
    resolved: the whole config as JSON-able tables; stored in every checkpoint, and compared on a resume.
    mesh: sizes of the mesh by name; stored for the reader's information.
    run_key_diff: of an old and a new resolved config, the lines that tell which run keys differ (configs.run_change).
    allow_run_change: go on although run keys have changed; later checkpoints record it.
    log: called on rank 0 with one line for people.
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
    ) -> None:
        self._folder = folder
        self._settings = settings
        # As it will come back from a manifest, so that both sides of a comparison are of one kind.
        self._config: dict[str, Any] = json.loads(json.dumps(resolved))
        self._mesh = dict(mesh)
        self._run_key_diff = run_key_diff
        self._allow_run_change = allow_run_change
        self._log = log if dist.get_rank() == 0 else lambda line: None
        self._writers = dist.new_group(backend="gloo")
        self._voters = dist.new_group(backend="gloo")
        self._stager = store.Stager()
        self._pending: _Save | None = None
        self._vote: _Vote | None = None
        self._run_id = ""
        self._last: Origin | None = None
        self._run_changes: list[RunChange] = []

    def should_save(self, step: int) -> bool:
        """Whether `checkpoint.interval` asks for a checkpoint after `step` steps."""
        return self._settings.interval > 0 and step % self._settings.interval == 0

    def latest_step(self) -> int | None:
        """Step of the checkpoint that was last loaded or committed."""
        return self._last.step if self._last else None

    def resume(self, state: State) -> TrainerState | None:
        """Load what `checkpoint.load` chooses into `state`, in place, and return the trainer state saved with it.

        To be called once, before the first save. Returns None, with `state` untouched, if the run starts anew.
        Checkpoints that the run does not go on from (later steps; all of them if it starts anew or from another
        folder) are moved to `abandoned-001/` and so on: they are kept, but never picked up again or written over.
        Raises: ConfigError if the choice isn't there, or is of another model or of other run keys; UserError if it is
        damaged or of a newer format, or the folder can't be written. `state` is untouched by all but a file whose
        content is damaged.
        """
        found = on_rank_zero(self._writers, self._choose)
        if found:
            self._check_run_keys(found)
            self._load(found, state)
        self._start_line(found)
        return found.trainer_state if found else None

    def save(self, step: int, state: State, trainer_state: TrainerState) -> float:
        """Write a checkpoint of the run after `step` steps; returns the seconds that training stood still.

        trainer_state: JSON-able, with the `tokens` trained on so far. Both states are saved as they are now, also when
        the writing goes on in the background. Waits for a save that is still under way. A step that this run has saved
        already, or was loaded from, is skipped.
        Raises: UserError on all ranks if the disk refuses, also for a save that ran in the background until now.
        """
        started = time.perf_counter()
        self.wait()
        folder = manifests.step_folder(self._folder, step)
        unfinished = on_rank_zero(self._writers, lambda: _begin(folder, step == self.latest_step()))
        if unfinished is None:
            self._log(f"checkpoint {folder.name} is there already")
            return time.perf_counter() - started
        draft = self._draft(step, trainer_state["tokens"])
        self._pending = _Save(started, unfinished, draft, json.dumps(trainer_state), Future())
        shards = store.shards_of(state)
        if self._settings.mode == "async":
            arguments = (self._pending, self._stager.stage(shards))
            # A daemon: if training dies, the process must not linger until a collective times out.
            threading.Thread(target=self._write, args=arguments, name="checkpoint", daemon=True).start()
        else:
            self._write(self._pending, shards)
            self.wait()
        stall = time.perf_counter() - started
        self._log(f"checkpoint {folder.name}: training waited {stall:.3f} s")
        return stall

    def poll(self) -> None:
        """See whether the save in the background is over. To be called by all ranks once a step; never waits for long.

        The ranks vote, and the result of one poll's vote counts at the next, by when it has long arrived: so all ranks
        learn at the same step that the save has ended, or why it failed.
        Raises: UserError on all ranks if the disk refused on one.
        """
        if self._pending is None:
            return
        if self._vote is not None and self._vote.is_unanimous():
            self.wait()
        else:
            self._vote = _Vote(self._pending.result.done(), self._voters)

    def wait(self) -> None:
        """Wait until no save is under way. Raises: UserError on all ranks if the disk refused on one."""
        if self._pending is None:
            return
        if self._vote is not None:
            self._vote.is_unanimous()
        save, self._pending, self._vote = self._pending, None, None
        manifest = save.result.result()
        self._last = Origin(manifest.run_id, manifest.step)
        megabytes = sum(entry.size for entry in manifest.files.values()) / 1e6
        seconds = time.perf_counter() - save.started
        name = manifests.step_folder(self._folder, manifest.step).name
        self._log(f"checkpoint {name}: committed, {megabytes:.1f} MB, {seconds:.1f} s after its step")

    def close(self) -> None:
        """Wait for the last save and give the process groups back. Not for a crash: it waits for the other ranks."""
        self.wait()
        dist.destroy_process_group(self._writers)
        dist.destroy_process_group(self._voters)

    # ------------------------------------------------------------------ loading

    def _choose(self) -> Found | None:
        """On rank 0: make the folder ready, and find what `checkpoint.load` names."""
        prepare(self._folder, self._log)
        folder = find(self._folder, self._settings.load)
        if folder is None:
            reason = "checkpoint.load is none" if self._settings.load == "none" else f"{self._folder} has no checkpoint"
            self._log(f"starting from the initial weights: {reason}")
            return None
        manifest = manifests.read_manifest(folder)
        try:
            trainer_state = json.loads((folder / manifests.TRAINER_NAME).read_text())
        except (OSError, ValueError) as error:
            raise manifests.damaged(folder, f"{manifests.TRAINER_NAME} can't be read: {error}") from None
        self._log(f"going on from {folder}: checkpoint.load is {self._settings.load}")
        return Found(folder, manifest, trainer_state)

    def _check_run_keys(self, found: Found) -> None:
        changes = list(self._run_key_diff(found.manifest.config, self._config))
        self._run_changes = list(found.manifest.run_changes)
        if not changes:
            return
        lines = "".join(f"\n  {change}" for change in changes)
        if not self._allow_run_change:
            raise ConfigError(
                f"what is learned has changed since checkpoint {found.folder}:{lines}\n"
                "Change it back, or choose another job.output_dir, or go on with --job.allow_run_change true"
            )
        self._log(f"run keys have changed since the checkpoint, as job.allow_run_change allows:{lines}")
        self._run_changes.append(RunChange(found.manifest.step, changes))

    def _load(self, found: Found, state: State) -> None:
        metadata = on_rank_zero(self._writers, lambda: read_metadata(found.folder))
        shards = store.shards_of(state)
        differences = store.differences(metadata, shards, self._writers)
        if differences:
            lines = "".join(f"\n  {line}" for line in differences[:SHOWN_DIFFERENCES])
            more = len(differences) - SHOWN_DIFFERENCES
            raise ConfigError(
                f"checkpoint {found.folder} is of another model; {len(differences)} tensors differ:{lines}"
                f"{f'{chr(10)}  and {more} more' if more > 0 else ''}\n"
                "Set [model] and [optimizer] to what they were, or choose another checkpoint.load or job.output_dir"
            )
        started = time.perf_counter()
        store.read(found.folder, metadata, shards, self._writers)
        self._log(f"loaded step {found.manifest.step} in {time.perf_counter() - started:.1f} s")

    def _start_line(self, found: Found | None) -> None:
        """Settle the identity of the checkpoints to come, and set those aside that aren't in their line."""
        is_own = found is not None and found.folder.resolve().parent == self._folder.resolve()
        newest_kept = found.manifest.step if found and is_own else None
        aside = on_rank_zero(self._writers, lambda: set_aside(self._folder, newest_kept))
        if aside:
            self._log(f"checkpoints that this run does not go on from were moved to {aside}")
        if found:
            self._last = Origin(found.manifest.run_id, found.manifest.step)
        if found and is_own and not aside:
            self._run_id = found.manifest.run_id
        else:
            self._run_id = on_rank_zero(self._writers, lambda: uuid4().hex)

    # ------------------------------------------------------------------ saving

    def _draft(self, step: int, tokens: int) -> Manifest:
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
        )

    def _write(self, save: _Save, shards: dict[str, store.Shard]) -> None:
        """Write and commit; the outcome, an error too, goes to `save.result` (this may run in a thread)."""
        try:
            names = store.write(save.unfinished, shards, self._writers)
            save.result.set_result(on_rank_zero(self._writers, lambda: _commit(save, names)))
        except BaseException as error:
            if dist.get_rank() == 0:
                shutil.rmtree(save.unfinished, ignore_errors=True)
            save.result.set_exception(error)


class _Vote:
    """One question to all ranks, answered by when one asks for the answer."""

    def __init__(self, yes: bool, group: dist.ProcessGroup) -> None:
        self._votes = torch.tensor(int(yes))
        self._work = dist.all_reduce(self._votes, op=dist.ReduceOp.MIN, group=group, async_op=True)

    def is_unanimous(self) -> bool:
        """Whether all ranks voted yes; waits for the last of them."""
        assert self._work is not None
        self._work.wait()
        return bool(self._votes)


def prepare(root: Path, log: Callable[[str], None]) -> None:
    """Make `root`, see that it can be written to, and remove what unfinished saves left behind, with a line to `log`.

    Raises: UserError if the disk refuses.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        probe = root / ".probe"
        probe.touch()
        probe.unlink()
        for name in manifests.remove_unfinished(root):
            log(f"removed {root / name}, which an interrupted save has left behind")
    except OSError as error:
        raise UserError(f"the folder for checkpoints, {root}, can't be written: {error} (see job.output_dir)") from None


def find(root: Path, load: str | int) -> Path | None:
    """The checkpoint folder that `checkpoint.load` means; None: start anew.

    load: "latest" (None if there is none), "none", a step in `root`, or the path of a checkpoint.
    Raises: ConfigError if a step or path isn't there.
    """
    steps = manifests.steps_in(root)
    if load == "none" or (load == "latest" and not steps):
        return None
    if load == "latest":
        return manifests.step_folder(root, steps[-1])
    if isinstance(load, str):
        folder = Path(load)
        if not folder.is_dir():
            raise ConfigError(f'checkpoint.load = "{load}": no such folder (use "latest", "none", a step or a path)')
        return folder
    if load not in steps:
        there = ", ".join(map(str, steps)) or "none"
        raise ConfigError(f"checkpoint.load = {load}: no such step in {root}; steps there: {there}")
    return manifests.step_folder(root, load)


def set_aside(root: Path, newest_kept: int | None) -> Path | None:
    """Move the checkpoints after step `newest_kept` (None: all) to a new `abandoned-001/`; None if there are none."""
    steps = [step for step in manifests.steps_in(root) if newest_kept is None or step > newest_kept]
    if not steps:
        return None
    aside = root / f"abandoned-{len(list(root.glob('abandoned-*'))) + 1:03d}"
    try:
        aside.mkdir()
        for step in steps:
            folder = manifests.step_folder(root, step)
            folder.rename(aside / folder.name)
    except OSError as error:
        raise UserError(f"checkpoints can't be moved to {aside}: {error}") from None
    return aside


def _begin(folder: Path, is_ours: bool) -> Path | None:
    """The temporary folder to write to, or None if the checkpoint is there already and `is_ours`."""
    if folder.exists() and is_ours:
        return None
    if folder.exists():
        raise UserError(f"{folder} exists, but not by this run: does another one use the same job.output_dir?")
    try:
        return manifests.begin(folder)
    except OSError as error:
        raise _refused(folder, error) from None


def _commit(save: _Save, names: set[str]) -> Manifest:
    try:
        return manifests.commit(save.unfinished, save.draft, names, save.trainer_text)
    except OSError as error:
        raise _refused(save.unfinished, error) from None


def _refused(folder: Path, error: OSError) -> UserError:
    return UserError(f"checkpoint {folder.stem} could not be written: {error} (see job.output_dir)")
