"""The content of a preparation's inputs: each file's size and hash, so that a later change is noticed.

The list is kept as OUTPUT/inputs.jsonl, one file per line. A file whose size and modification time are the
recorded ones counts as unchanged; otherwise its content is compared. Datasets of the hub are not listed, since their
commit is recorded.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path

import xxhash

from configs.errors import UserError
from configs.files import is_file, write_atomically
from configs.untrusted import parse_json, read_file, shortened
from trainer.data.text.bad_files import BadFiles
from trainer.data.text.documents import Keys, file_pieces, read
from trainer.data.text.inputs import HUB, content_files, files_of

NAME = "inputs.jsonl"
MAX_LIST_BYTES = 1 << 30
_BLOCK_BYTES = 1 << 20
_SHOWN = 5
_REPORT_SECONDS = 1.0


@dataclass(frozen=True)
class InputFile:
    """A file as it was when it was read."""

    input: str
    """The input that it belongs to."""
    path: str
    n_bytes: int
    modified_ns: int
    hash: str
    """xxh3_128 of its content, in hex."""

    def is_untouched(self) -> bool:
        """Whether the file still has this size and modification time."""
        try:
            status = os.stat(self.path)
        except OSError:
            return False
        return (status.st_size, status.st_mtime_ns) == (self.n_bytes, self.modified_ns)


def list_files(inputs: Sequence[str], bad: BadFiles) -> list[tuple[str, Path]]:
    """All files and saved datasets of the inputs, each with its input.

    Raises:
        UserError: an input does not exist or cannot be listed.
    """
    return [(name, file) for name in inputs if not name.startswith(HUB) for file in files_of(name, bad)]


def examine(
    files: Sequence[tuple[str, Path]],
    keys: Keys,
    bad: BadFiles,
    threads: int = 1,
    report: Callable[[int], None] = lambda n_bytes: None,
) -> list[InputFile]:
    """Read all files once, before hours go into tokenizing them.

    Args:
        bad: receives all that cannot be read and is skipped, unchecked. Text is read to its end; of files with records,
            the first is tried.
        report: called now and then with the bytes read so far.
    """
    return [entry for entries in examined(files, keys, bad, threads, report) for entry in entries]


def examined(
    files: Sequence[tuple[str, Path]], keys: Keys, bad: BadFiles, threads: int, report: Callable[[int], None]
) -> Iterator[list[InputFile]]:
    """Do the work of `examine`; yields one list for each file, since a saved dataset has several."""
    done = 0
    told_at = time.monotonic()
    with ThreadPoolExecutor(threads) as pool:  # reading and hashing do not hold Python's lock
        for entries, own in pool.map(partial(_examine, keys), files):
            bad.merge(own.messages, own.skipped)
            done += sum(entry.n_bytes for entry in entries)
            if time.monotonic() - told_at > _REPORT_SECONDS:
                told_at = time.monotonic()
                report(done)
            yield entries


def _examine(keys: Keys, file: tuple[str, Path]) -> tuple[list[InputFile], BadFiles]:
    name, path = file
    entries = [_entry(name, each) for each in plain_files(path)]
    bad = BadFiles()
    try:
        for piece in file_pieces(path)[:1]:  # a .parquet file may have none
            next(read(piece, keys, bad), None)
    except UserError:
        if not bad.messages:  # such as a missing package
            raise
    return entries, bad


def plain_files(path: Path) -> list[Path]:
    """The files with an entry's content; a pipe must not be waited for."""
    return [file for file in content_files(path) if is_file(file)]


def content_hash(path: Path, start: int = 0, stop: int | None = None) -> str:
    """xxh3_128 of a file's bytes [start, stop), in hex; "" if they can't be read, as its reader will say."""
    digest = xxhash.xxh3_128()
    left = sys.maxsize if stop is None else stop - start
    try:
        with path.open("rb") as file:
            file.seek(start)
            while block := file.read(min(left, _BLOCK_BYTES)):
                digest.update(block)
                left -= len(block)
    except OSError:
        return ""
    return digest.hexdigest()


def _entry(name: str, path: Path) -> InputFile:
    with suppress(OSError):
        status = path.stat()
        if digest := content_hash(path):
            return InputFile(name, str(path), status.st_size, status.st_mtime_ns, digest)
    return InputFile(name, str(path), 0, 0, "")  # it can't be read, and its reader says why


def summary(files: Sequence[InputFile]) -> dict[str, int | str]:
    """The list in short, for the record: its files, their bytes, and a hash of paths and contents."""
    content = json.dumps([[file.path, file.n_bytes, file.hash] for file in files])
    return {
        "files": len(files),
        "bytes": sum(file.n_bytes for file in files),
        "xxh3_128": xxhash.xxh3_128_hexdigest(content.encode()),
    }


def write_list(folder: Path, files: Sequence[InputFile]) -> None:
    """Write the list into a folder.

    Raises:
        OSError: it can't be written.
    """
    write_atomically(folder / NAME, [json.dumps(astuple(file)) + "\n" for file in files])


def read_list(folder: Path) -> list[InputFile]:
    """The list in a folder.

    Raises:
        UserError: it is damaged.
    """
    path = folder / NAME
    try:
        rows = [parse_json(line) for line in read_file(path, MAX_LIST_BYTES).splitlines()]
        if not all(isinstance(row, list) and list(map(type, row)) == [str, str, int, int, str] for row in rows):
            raise ValueError("not in the form that Keel writes")
        return [InputFile(*row) for row in rows]
    except (OSError, ValueError) as error:
        what = getattr(error, "strerror", None) or shortened(str(error), 400)
        raise UserError(f"{path}: cannot be read ({what}); delete its folder to have it made again") from None


def changes(before: Sequence[InputFile], inputs: Sequence[str], output: Path) -> tuple[list[str], list[str]]:
    """Compare the inputs with a list of them; a pattern may match OUTPUT, which is none.

    Returns:
        A line for each kind of change, and the inputs that no longer exist, which cannot be compared.
    """
    now: dict[str, Path] = {}
    gone = []
    own = os.path.join(os.path.abspath(output), "")
    for name in inputs:
        try:
            now |= {str(file): file for _, path in list_files([name], BadFiles()) for file in plain_files(path)}
        except UserError:
            gone.append(name)
    now = {path: file for path, file in now.items() if not os.path.abspath(path).startswith(own)}
    known = {file.path: file for file in before if file.input not in gone}
    return lines_of_changes(known.keys(), now.keys(), lambda path: not _is_same(known[path])), gone


def lines_of_changes(before: Set[str], now: Set[str], has_changed: Callable[[str], bool]) -> list[str]:
    """A line for each kind of change between two sets of paths."""
    found = {"added": now - before, "removed": before - now, "changed": set(filter(has_changed, before & now))}
    return [f"  {what}: {named(sorted(paths))}" for what, paths in found.items() if paths]


def _is_same(file: InputFile) -> bool:
    return file.is_untouched() or _entry(file.input, Path(file.path)).hash == file.hash


def named(paths: Sequence[str]) -> str:
    """The first of some paths, and how many more there are."""
    more = f" and {len(paths) - _SHOWN:,} more" if len(paths) > _SHOWN else ""
    return ", ".join(paths[:_SHOWN]) + more
