"""A folder of files for others to read, which exists only once it is complete and on the disk."""

import fcntl
import json
import os
import shutil
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from checkpoint.lock import is_at, try_lock
from checkpoint.manifest import UNFINISHED, FileEntry
from checkpoint.storage import FolderStorage
from configs.errors import UserError
from configs.files import exists, is_folder, is_link


@contextmanager
def unfinished_folder(output: Path) -> Generator[Path, None, None]:
    """Yield an empty folder next to `output`, to be filled and renamed; it is removed if the block fails.

    Raises:
        UserError: `output` exists, or can't be written.
    """
    if exists(output):
        raise UserError(f"{output} exists; name another folder, or move it away")
    folder = output.with_name(output.name + UNFINISHED)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder, output):
            try:
                for left in folder.iterdir():  # by a killed process
                    shutil.rmtree(left) if is_folder(left) and not is_link(left) else left.unlink()
                yield folder
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
    except OSError as error:
        raise UserError(f"{output} could not be written: {error}") from None


@contextmanager
def _locked(folder: Path, output: Path) -> Generator[None, None, None]:
    """Keep other processes out of an unfinished folder, as far as the file system has locks of folders.

    Raises:
        UserError: another one is writing it.
        OSError: it is a link, or can't be opened.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if not try_lock(descriptor, fcntl.LOCK_EX) or not is_at(descriptor, folder):  # renamed since it was opened
            raise UserError(f"{output} is being written by another command; wait for it, or name another folder")
        yield
    finally:
        os.close(descriptor)


def finish(folder: Path, output: Path) -> None:
    """Rename an unfinished folder, whose files are synced, to its final name."""
    FolderStorage().commit(folder, output)


def write_json(path: Path, content: Mapping[str, Any]) -> FileEntry:
    """Write a JSON object, indented for people."""
    return write_bytes(path, (json.dumps(content, indent=2) + "\n").encode())


def write_bytes(path: Path, content: bytes) -> FileEntry:
    """Write a small file and sync it."""
    with FolderStorage().put(path) as file:
        file.write(content)
    return file.entry()
