"""What of a run's folder can be removed: only what Keel has written, by the names it writes, and never by a guess.

Whatever else is in the folder stays, and so do then the folders that hold it. Links are removed, their targets are not.
"""

import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from checkpoint.lock import LOCK_NAME
from checkpoint.manifest import UNFINISHED, step_folder, steps_in
from checkpoint.storage import FolderStorage

What = Literal["leftovers", "checkpoints", "everything"]
WHAT = get_args(What)
_LEFTOVERS = tuple(
    f"{place}/{name}"
    for place in ("checkpoints", "after_save/*", "evaluations")
    for name in (f"step-*{UNFINISHED}", "abandoned-*")
)
_EVERYTHING = (
    *("checkpoints/step-*", "after_save/*/step-*", "evaluations/*"),
    "tensorboard/events.out.tfevents.*",
    *("wandb", "profile/step-*-rank-*", "hangs/step-*", "crashes/rank-*"),
    *("incarnations/*", ".shared-*", "scores.json", "fingerprints.jsonl", "run.log", "metrics.jsonl", "config.toml"),
    "imported-*",
    *("tokenizer.model", "tokenizer.json", "tokenizer-*.model", "tokenizer-*.json"),
    "status.json",
)
"""The last is what makes a folder a run: after a crash midway it is still one, and can be cleaned again."""


@dataclass(frozen=True)
class Doomed:
    """Something that can be removed."""

    path: Path
    size: int
    """Bytes of its files."""


def removable(run: Path, what: What) -> list[Doomed]:
    """List what can be removed of a run folder, each thing once.

    Args:
        what: "leftovers" are interrupted saves and abandoned lines; "checkpoints" adds all checkpoints but the newest;
            "everything" is all that Keel has written.
    """
    found = list(_matching(run, _LEFTOVERS))
    if what == "checkpoints":
        root = run / "checkpoints"
        found += [step_folder(root, step) for step in steps_in(root)[:-1]]
    if what == "everything":
        found += _matching(run, _EVERYTHING)
    return [Doomed(path, size_of(path)) for path in dict.fromkeys(found)]


def _matching(run: Path, patterns: tuple[str, ...]) -> Iterator[Path]:
    """The paths of these names, but none behind a link, which would lead out of the run."""
    for pattern in patterns:
        for path in sorted(run.glob(pattern)):
            if not any((run / place).is_symlink() for place in path.relative_to(run).parents if place.name):
                yield path


def size_of(path: Path) -> int:
    """Bytes of a file, or of the files below a folder; of a link, its own."""
    if path.is_symlink() or not path.is_dir():
        return path.lstat().st_size
    return sum(each.lstat().st_size for each in path.rglob("*") if each.is_symlink() or each.is_file())


def remove_one(path: Path) -> None:
    """Remove a file, a link, or a folder with its content.

    Raises:
        BeingRead: it is a checkpoint that is being read.
        OSError: it can't be removed.
    """
    if path.is_symlink() or not path.is_dir():
        path.unlink()
    elif path.name.endswith(UNFINISHED):
        shutil.rmtree(path)
    else:
        FolderStorage().remove(path)


def remove_emptied(run: Path) -> list[Path]:
    """Remove what is left of a run after everything was removed; returns the paths that stay.

    Those are files that Keel has not written, and the folders with them.
    """
    (run / LOCK_NAME).unlink(missing_ok=True)
    commands = [str(path.relative_to(run)) for path in run.glob("after_save/*")]
    folders = ("checkpoints", "after_save", "evaluations", "tensorboard", "profile", "hangs", "crashes", "incarnations")
    for name in (*commands, *folders, "."):
        if not (run / name).is_symlink():
            with suppress(OSError):  # it is not empty, or there is none
                (run / name).rmdir()
    return sorted(run.iterdir()) if run.is_dir() else []
