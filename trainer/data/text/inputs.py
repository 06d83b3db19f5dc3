"""The files that an input stands for, and what they contained when they were read.

An input is a file, a folder, a glob pattern, `hub:NAME` or `python_stdlib`. A folder stands for its files, recursively,
ordered by path; links are followed. Hidden files and folders (`.git`) and `__pycache__` are skipped and counted, and so
is a link to a folder that is read under another name. A folder that `datasets` wrote by `save_to_disk` counts as one
file.
"""

import importlib
import os
import sysconfig
from collections.abc import Iterable, Iterator, Set
from glob import glob, has_magic
from pathlib import Path
from typing import Any

from configs.errors import UserError
from configs.files import exists, is_file, is_folder, is_link, whole
from trainer.data.text.bad_files import HIDDEN, LINKED, BadFiles

STDLIB = "python_stdlib"
HUB = "hub:"
NO_STDLIB_TEXT = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
"""Folders excluded from the standard library: tests (some contain broken text on purpose), installed packages."""
_DICT = "dataset_dict.json"
"""The file beside the splits of a saved DatasetDict, which lists them and holds no text."""


def files_of(input: str, bad: BadFiles) -> list[Path]:
    """The files of an input that is not of the hub, in order; what is skipped is added to `bad`.

    Raises:
        UserError: there is no such file or folder, or it cannot be listed.
    """
    if input == STDLIB:
        return _stdlib_files(bad)
    if not input:  # pathlib takes it for the current folder
        raise UserError("an input is empty text (is a variable of the shell not set?); name a file or a folder")
    path = Path(input)
    if exists(path) or is_link(path):
        return _below(path, bad)
    if has_magic(input):
        if found := sorted(name for name in glob(input, recursive=True) if os.path.basename(name) != _DICT):
            return _each_once(file for name in found for file in _below(Path(name), bad))
        raise UserError(f"{whole(input)}: no file matches this pattern")
    what = f"inputs are files, folders, patterns, {HUB}NAME, or {STDLIB}"
    raise UserError(f"{whole(input)}: no such file or folder; {what}")


def _each_once(files: Iterable[Path]) -> list[Path]:
    """The files without those found again: "**" matches a folder and what is in it, and follows links in circles."""
    found: dict[tuple[str, str], Path] = {}
    for file in files:
        place, name = (file, "") if is_folder(file) else (file.parent, file.name)
        found.setdefault((os.path.realpath(place), name), file)
    return [file for (place, name), file in found.items() if not name or (place, "") not in found]


def is_saved_dataset(path: Path) -> bool:
    """Whether a folder was written by `Dataset.save_to_disk`."""
    return is_file(path / "state.json") and is_file(path / "dataset_info.json")


def content_files(path: Path) -> list[Path]:
    """The files whose content an entry of `files_of` has: itself, or all files of a saved dataset."""
    return sorted(file for file in path.iterdir() if is_file(file)) if is_folder(path) else [path]


def import_package(module: str, purpose: str) -> Any:
    """Import a package that only some inputs need.

    Raises:
        UserError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise UserError(f"{purpose} need the package {package}; install it: pip install {package}") from None


def _stdlib_files(bad: BadFiles) -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    found = [path for path in _below(root, bad, NO_STDLIB_TEXT) if path.suffix == ".py"]
    if not found:
        raise UserError(f"{STDLIB}: no source files in {root}; name a folder of text instead")
    return found


def _below(path: Path, bad: BadFiles, left_out: Set[str] = frozenset()) -> list[Path]:
    """The path itself, or a folder's files without those in folders of the names `left_out`, ordered by path."""
    if not is_folder(path) or is_saved_dataset(path):
        return [path]
    if is_file(path / _DICT):
        return [_only_split(path)]
    return sorted(_walk(path, bad, left_out), key=lambda file: file.relative_to(path).as_posix())


def _walk(folder: Path, bad: BadFiles, left_out: Set[str]) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise UserError(f"{error.filename}: cannot read this folder ({error.strerror})")

    seen = {_identity(folder)}
    for parent, folders, files in os.walk(folder, onerror=refuse, followlinks=True):
        kept = []
        for name in sorted(set(folders) - left_out):
            path = Path(parent, name)
            if name.startswith(".") or name == "__pycache__":
                bad.skip(HIDDEN, str(path))
            elif _identity(path) in seen:
                bad.skip(LINKED, str(path))
            else:
                seen.add(_identity(path))
                if is_saved_dataset(path):
                    yield path
                elif is_file(path / _DICT):
                    yield _only_split(path)
                else:
                    kept.append(name)
        folders[:] = kept
        for name in files:
            if name.startswith("."):
                bad.skip(HIDDEN, str(Path(parent, name)))
            else:
                yield Path(parent, name)


def _identity(folder: Path) -> tuple[int, int]:
    status = folder.stat()
    return status.st_dev, status.st_ino


def _only_split(folder: Path) -> Path:
    """The only split of a saved DatasetDict.

    Raises:
        UserError: it has several, or none.
    """
    splits = sorted(split.name for split in folder.iterdir() if is_saved_dataset(split))
    if len(splits) == 1:
        return folder / splits[0]
    names = f"several splits ({', '.join(splits)}); name one of them: {folder}/{splits[0]}" if splits else "no split"
    raise UserError(f"{folder}: a dataset with {names}")
