"""The folder `checkpoints/` of a run: its content, which checkpoint a run resumes from, and which are kept.

Only the checkpoints of one lineage have their final names; each continues the one before. When a run goes back to an
earlier step, or starts from scratch, the later steps belong to an abandoned lineage: they are moved to
`abandoned-001/` and so on, where nothing loads, counts or removes them.
"""

import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from checkpoint import manifest as manifests
from checkpoint.find import find_checkpoint
from checkpoint.manifest import step_folder, steps_in
from checkpoint.storage import remove_unfinished
from configs.errors import ConfigError, UserError
from configs.files import exists, is_folder, synced, whole
from configs.places import standing_for
from configs.schema import Checkpoint


@dataclass(frozen=True)
class Choice:
    """The checkpoints that a run may resume from."""

    candidates: list[Path]
    """The chosen checkpoint, then those to fall back to if it is damaged; empty: start from scratch."""
    reason: str
    """Why it was chosen, for the log."""


def choose(root: Path, load: str | int, go_back: int = 0) -> Choice:
    """Choose what `checkpoint.load` means for a run with its checkpoints in `root`; changes nothing on disk.

    Args:
        root: the run's `checkpoints/`.
        load: "latest" (start from scratch if there is none), "none", a step in `root`, or the path of a checkpoint, or
            of a run, for its newest one. A step or path is where the run begins; once `root` has a checkpoint of that
            step or a later one (any, if `load` is a run, which may have continued since), the run resumes from that.
        go_back: a number above `times_gone_back` of the run's newest checkpoint applies `load` nevertheless.

    Raises:
        ConfigError: the step or path does not exist.
        Damaged: the checkpoint must be read, but can't be.
    """
    steps = steps_in(root)
    setting = f"checkpoint.load is {load}"
    if load == "none":
        return Choice([], setting)
    if load == "latest":
        if not steps:
            return Choice([], f"no checkpoint in {root} yet")
        return Choice([step_folder(root, step) for step in reversed(steps)], f"{setting}, of {len(steps)} in {root}")
    start, step = _starting_point(root, load)
    own = [step_folder(root, each) for each in reversed(steps) if step is not None and each >= step]
    times = _times_gone_back(own)
    if own and own != [start] and go_back <= times:
        fallback = [start] if is_folder(start) and start not in own else []
        advice = f"to go back to it, set checkpoint.go_back = {times + 1}"
        return Choice([*own, *fallback], f"{setting}, but this run has its own checkpoints from that step on; {advice}")
    if isinstance(load, int) and load not in steps:
        known = ", ".join(map(str, steps)) or "none"
        raise ConfigError(f"checkpoint.load = {load}: no such step in {root}; steps there: {known}")
    if isinstance(load, str):
        if not is_folder(start):
            what = 'no such folder (use "latest", "none", a step or a path)'
            raise ConfigError(f'checkpoint.load = "{load}": {what}: {whole(load)}')
        manifests.read_manifest(start)
    return Choice([start], f"{setting}, and checkpoint.go_back {go_back}" if go_back else setting)


def _starting_point(root: Path, load: str | int) -> tuple[Path, int | None]:
    """Return the checkpoint that a run begins from, and its step; None if unknown or an import, which has no run."""
    if isinstance(load, int):
        return step_folder(root, load), load
    folder = standing_for(load)
    with suppress(UserError):
        newest = find_checkpoint(folder)
        if newest != folder:
            return newest, 0
    try:
        step = manifests.read_manifest(folder).step
        is_import = not manifests.read_trainer_state(folder)
    except UserError:  # it may have been removed or damaged since the run began from it
        named = re.fullmatch(r"step-(\d{8,})", folder.name)
        return folder, int(named[1]) if named else None
    if is_own(root, folder, step):
        return step_folder(root, step), step
    return folder, None if is_import else step


def _times_gone_back(folders: list[Path]) -> int:
    """Return `Manifest.times_gone_back` of the first readable checkpoint, or 0 without one."""
    for folder in folders:
        try:
            return manifests.read_manifest(folder).times_gone_back
        except UserError:
            continue
    return 0


def prepare(root: Path, log: Callable[[str], None], warn: Callable[[str], None]) -> None:
    """Create `root`, check that it is writable, and remove the leftovers of unfinished saves.

    Raises:
        UserError: the disk refuses.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        probe = root / ".probe"
        probe.unlink(missing_ok=True)
        with synced(probe):
            pass
        probe.unlink()
    except OSError as error:
        raise UserError(f"the folder for checkpoints, {root}, can't be written: {error} (see job.output_dir)") from None
    remove_unfinished(root, log, warn)


def is_own(root: Path, found: Path, step: int) -> bool:
    """Whether the checkpoint of `step` at `found` is the one in `root`, which may be a link to another disk."""
    own = step_folder(root, step)
    return exists(own) and own.samefile(found)


def set_aside(root: Path, newest_kept: int | None, metrics: Path | None = None) -> Path | None:
    """Move the checkpoints after step `newest_kept` (None: all) to a new `abandoned-001/`; None if there are none.

    A copy of the run's `metrics`, which are about to be cut back to that step, is kept with them.

    Raises:
        UserError: the disk refuses.
    """
    steps = [step for step in steps_in(root) if newest_kept is None or step > newest_kept]
    if not steps:
        return None
    aside = root / f"abandoned-{_last_abandoned(root) + 1:03d}"
    try:
        aside.mkdir()
        if metrics and exists(metrics):
            shutil.copyfile(metrics, aside / metrics.name)
        for step in reversed(steps):  # newest first: after a crash, the older part of the lineage remains
            folder = step_folder(root, step)
            folder.rename(aside / folder.name)
    except OSError as error:
        raise UserError(f"checkpoints can't be moved to {aside}: {error}") from None
    return aside


def superfluous(
    losses: Mapping[int, float | None], keep_last: int, keep_every: int, keep_best: int, rewind_interval: int = 0
) -> list[int]:
    """Return the steps that may be removed, in order.

    All others are kept: the `keep_last` newest (0: all), the multiples of `keep_every` (0: off), the `keep_best` with
    the lowest validation loss (the newest among equals), and the newest multiple of `rewind_interval` (0: off).
    `losses` has the validation loss of every step; None: unknown.
    """
    if keep_last == 0:
        return []
    newest = sorted(losses)[-keep_last:]
    measured = [(loss, -step) for step, loss in losses.items() if loss is not None]
    best = [-step for _, step in sorted(measured)[:keep_best]]
    every = [step for step in losses if keep_every and step % keep_every == 0]
    rewind_to = [step for step in sorted(losses) if rewind_interval and step % rewind_interval == 0][-1:]
    return sorted(losses.keys() - {*newest, *best, *every, *rewind_to})


def to_be_pruned(root: Path, settings: Checkpoint, repeated: Mapping[int, float]) -> list[Path]:
    """Return the checkpoints in `root` that neither the settings nor a rewind need; never an unreadable one.

    `repeated` has the losses of validations that came after their checkpoint: a stop had ended them before.
    """
    if settings.keep_last == 0:
        return []
    losses: dict[int, float | None] = {}
    rewind_interval = 0
    for step in steps_in(root):
        try:
            manifest = manifests.read_manifest(step_folder(root, step))
        except UserError:
            continue
        losses[step] = repeated.get(step) if manifest.validation_loss is None else manifest.validation_loss
        rewind_interval = manifest.rewind_interval  # the newest one's holds
    steps = superfluous(losses, settings.keep_last, settings.keep_every, settings.keep_best, rewind_interval)
    return [step_folder(root, step) for step in steps]


def _last_abandoned(root: Path) -> int:
    numbers = (path.name.removeprefix("abandoned-") for path in root.glob("abandoned-*"))
    return max((int(number) for number in numbers if number.isdecimal()), default=0)
