"""A folder of files for others to read, which exists only once it is complete and on the disk."""

import json
import shutil
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from checkpoint.manifest import UNFINISHED, FileEntry
from checkpoint.storage import FolderStorage
from configs.errors import UserError


@contextmanager
def unfinished_folder(output: Path) -> Generator[Path, None, None]:
    """Yield an empty folder next to `output`, to be filled and renamed; it is removed if the block fails.

    Raises:
        UserError: `output` exists, or can't be written.
    """
    if output.exists():
        raise UserError(f"{output} exists; name another folder, or move it away")
    folder = output.with_name(output.name + UNFINISHED)
    try:
        if folder.exists():
            shutil.rmtree(folder)  # left behind by a killed process
        folder.mkdir(parents=True)
        yield folder
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise UserError(f"{output} could not be written: {error}") from None
        raise


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
