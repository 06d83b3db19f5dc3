"""The place where checkpoints are, behind one interface: folders of a file system here, objects in `bucket_storage`.

A checkpoint is a set of files under one name, and its manifest makes it complete. In a file system it is written as
`step-00000100.tmp/`. When all ranks are done, the manifest, which lists every file with its size and hash, is added;
files and folder are synced to the disk, and the folder is renamed to `step-00000100/`. A rename is atomic, so after a
crash at any moment there is either the complete checkpoint under its final name or a `.tmp` folder that the next start
removes. Nothing ever writes to a folder that has its final name.
"""

import json
import os
import shutil
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any

import xxhash

from checkpoint.lock import not_being_read
from checkpoint.manifest import (
    MANIFEST_NAME,
    TRAINER_NAME,
    UNFINISHED,
    FileEntry,
    Manifest,
    content_damage,
    read_manifest,
    sealed,
)
from configs.errors import UserError
from configs.files import is_folder, is_link, sync_folder, synced

_REMOVED = f".removed{UNFINISHED}"


class HashedFile:
    """A file open for sequential writing that hashes what is written."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._hash = xxhash.xxh3_128()
        self._size = 0

    def write(self, data: Any) -> int:
        self._file.write(data)
        self._hash.update(data)
        n_bytes = memoryview(data).nbytes
        self._size += n_bytes
        return n_bytes

    def tell(self) -> int:
        return self._size

    def entry(self) -> FileEntry:
        """The size and hash of what was written."""
        return FileEntry(self._size, self._hash.hexdigest())


class FolderStorage:
    """A place for checkpoints: folders of a file system that all ranks see. Every error of the place is an OSError.

    A checkpoint's path is `root/step-00000100`, whatever stands behind it. Its files are put one by one, by all ranks,
    and count for nothing until one process commits them. What was committed never changes; it may be removed.
    """

    def __init__(self, mark: str = "") -> None:
        """`mark`: of this launch, in the names of its unfinished checkpoints."""
        self._mark = mark

    def begin(self, checkpoint: Path) -> Path:
        """Prepare to put the files of a new checkpoint, and remove what a failed save of it has left behind.

        Returns:
            The path under which they are put until they are committed.
        """
        unfinished = checkpoint.with_name(checkpoint.name + self._mark + UNFINISHED)
        if os.path.lexists(unfinished):
            _remove_tree(unfinished)
        unfinished.mkdir()
        return unfinished

    @contextmanager
    def put(self, file: Path) -> Generator[HashedFile, None, None]:
        """Open a new file for writing; at the end of the block it is complete and survives a power cut."""
        with synced(file) as stream:
            yield HashedFile(stream)

    def commit(self, unfinished: Path, checkpoint: Path) -> None:
        """Let the files under `unfinished`, of which the manifest was put last, appear as `checkpoint`, all at once.

        They may have appeared in spite of an error.
        """
        sync_folder(unfinished)
        unfinished.rename(checkpoint)
        sync_folder(checkpoint.parent)

    def discard(self, unfinished: Path) -> None:
        """Remove the files of a checkpoint that is not going to be committed, as far as possible."""
        shutil.rmtree(unfinished, ignore_errors=True)

    def open(self, file: Path) -> IO[bytes]:
        """Open a file for reading at any position."""
        return file.open("rb")

    def damage(self, checkpoint: Path, name: str, entry: FileEntry) -> str | None:
        """Describe what is wrong with a file, before its tensors are read or after they were put; None: nothing.

        Here the whole file is read, and its hash compared.
        """
        return content_damage(checkpoint, name, entry)

    def room(self, folder: Path) -> int | None:
        """How many bytes still fit there; None if nobody knows."""
        try:
            return shutil.disk_usage(folder).free
        except OSError:
            return None

    def remove(self, checkpoint: Path) -> None:
        """Remove a checkpoint, or a folder of them, so that a crash midway leaves no part of it under its name.

        Raises:
            BeingRead: somebody reads it.
        """
        with not_being_read(checkpoint):
            doomed = checkpoint.with_name(checkpoint.name + _REMOVED)
            checkpoint.rename(doomed)
            _remove_tree(doomed)

    def abandoned(self, root: Path) -> Sequence[Path]:
        """What `remove` can remove of steps that the run has gone back from."""
        return sorted(root.glob("abandoned-*"))


def commit(
    storage: FolderStorage,
    unfinished: Path,
    checkpoint: Path,
    draft: Manifest,
    files: Mapping[str, FileEntry],
    trainer_state: str,
    may_commit: Callable[[], None] = lambda: None,
    note: Callable[[str], None] = lambda line: None,
) -> Manifest:
    """Turn the files that the ranks have put into a checkpoint.

    A file system may report an error for a rename that it has done (NFS does if it has to repeat the request), or fail
    to sync the parent folder afterwards. The checkpoint counts if it is there.

    Args:
        storage: the place.
        unfinished: the path of the files, from `FolderStorage.begin`.
        checkpoint: the checkpoint's path.
        draft: the manifest without its files.
        files: the files that the ranks have put.
        trainer_state: JSON.
        may_commit: called last; its error leaves the checkpoint unfinished.
        note: called with a line for the user if an error came although the checkpoint is there.

    Returns:
        The complete manifest.

    Raises:
        UserError: this rank can't see all the files.
        OSError: a file can't be put, or the checkpoint not committed.
    """
    for name in files:
        try:
            storage.open(unfinished / name).close()
        except FileNotFoundError:
            hint = "is the folder on a disk that all nodes share? (job.output_dir)"
            raise UserError(
                f"{unfinished / name} was written by another rank, but rank 0 can't see it: {hint}"
            ) from None
    with storage.put(unfinished / TRAINER_NAME) as file:
        file.write(trainer_state.encode())
    manifest = replace(draft, files={**dict(sorted(files.items())), TRAINER_NAME: file.entry()})
    with storage.put(unfinished / MANIFEST_NAME) as file:
        file.write(sealed(json.dumps(asdict(manifest), indent=1)).encode())
    may_commit()
    try:
        storage.commit(unfinished, checkpoint)
    except OSError as error:
        if not _is_there(checkpoint, manifest):
            raise
        note(f"checkpoint {checkpoint.name} is complete, although the file system reported: {error}")
    return manifest


def _is_there(checkpoint: Path, manifest: Manifest) -> bool:
    try:
        return read_manifest(checkpoint) == manifest
    except (OSError, UserError):
        return False


def remove_unfinished(root: Path, log: Callable[[str], None], warn: Callable[[str], None]) -> None:
    """Remove what interrupted saves and removals have left behind, calling `log` with a line for each.

    What can't be removed, such as a mount point or a file that NFS keeps because a process has it open, does no harm,
    and is reported to `warn`.
    """
    for folder in sorted([*root.glob(f"step-*{UNFINISHED}"), *root.glob(f"abandoned-*{UNFINISHED}")]):
        try:
            _remove_tree(_renamed_away(folder))
            log(f"removed {folder}, which an interrupted save, export or removal has left behind")
        except OSError as error:
            warn(f"{folder}, which an interrupted save, export or removal has left behind, can't be removed: {error}")


def _renamed_away(folder: Path) -> Path:
    """Rename what is to be removed, as a whole, so that a launch that still writes there can't commit it."""
    if folder.name.endswith(_REMOVED):
        return folder
    doomed = folder.with_name(folder.name.removesuffix(UNFINISHED) + _REMOVED)
    folder.rename(doomed)
    return doomed


def _remove_tree(folder: Path) -> None:
    """Remove a folder with its content; if it is a link, only the link, since its target is not ours."""
    if is_link(folder) or not is_folder(folder):
        folder.unlink()
    else:
        shutil.rmtree(folder)
