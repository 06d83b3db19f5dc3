"""A folder of files for others to read, which is there when it is whole and on the disk, or not at all."""

import json
import shutil
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from checkpoint.manifest import UNFINISHED, FileEntry
from checkpoint.tensor_stream import synced_file
from configs.errors import UserError
from configs.files import sync_folder


@contextmanager
def unfinished_folder(output: Path) -> Generator[Path, None, None]:
    """An empty folder beside `output` that the block fills and renames; it goes away if the block fails.

    Raises: UserError if `output` exists, or the disk refuses.
    """
    if output.exists():
        raise UserError(f"{output} exists; name another folder, or move it away")
    folder = output.with_name(output.name + UNFINISHED)
    try:
        if folder.exists():
            shutil.rmtree(folder)  # what a killed process has left behind
        folder.mkdir(parents=True)
        yield folder
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise UserError(f"{output} could not be written: {error}") from None
        raise


def finish(folder: Path, output: Path) -> None:
    """Give an unfinished folder, whose files are synced, its name."""
    sync_folder(folder)
    folder.rename(output)
    sync_folder(output.parent)


def write_json(path: Path, content: Mapping[str, Any]) -> FileEntry:
    """Write an object for programs and people to read."""
    return write_bytes(path, (json.dumps(content, indent=2) + "\n").encode())


def write_bytes(path: Path, content: bytes) -> FileEntry:
    """Write a small file, and sync it."""
    with synced_file(path) as file:
        file.write(content)
    return file.entry()
