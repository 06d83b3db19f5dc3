"""Documents of text from files, folders and datasets, always in the same order.

An input is a file, a folder, `hub:NAME`, or `python_stdlib`. It is first divided into *pieces* (`pieces`): parts that
can be read independently, so that many processes can share one corpus, and that depend on nothing but the input.
Reading the pieces in sequence (`read`) gives the input's documents.

| input | documents |
|---|---|
| `x.jsonl` | the text under `text_key` in each line |
| `x.parquet` | the text in the column `text_key` of each row |
| another file | the whole file is one document |
| a folder | its files by the rules above, recursively, ordered by path |
| `hub:NAME`, `hub:NAME:CONFIG` | the rows of the split `train` of a Hugging Face dataset, as of one commit (`pin`) |
| `python_stdlib` | the source files of this Python's standard library, without its tests |

In a folder, hidden files and folders (`.git`) and `__pycache__` are not text and are skipped; links to folders are not
followed. Anything else that cannot be read as UTF-8 is named, and counted against a limit (`BadFiles`).
"""

import importlib
import json
import os
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any, Literal

from configs.errors import UserError
from configs.untrusted import parse_json, read_file, shortened

MAX_TEXT_BYTES = 16 << 30
"""Limit on a file that is one document."""
MAX_LINE_BYTES = 256 << 20
"""Limit on a document in a .jsonl file; reading it takes about three times its size in memory."""
JSONL_PIECE_BYTES = 8 << 20
HUB_PIECE_BYTES = 64 << 20
"""The assumed size of a piece of a hub dataset, since its true size is unknown before it is read."""
STDLIB = "python_stdlib"
HUB = "hub:"
NO_STDLIB_TEXT = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
"""Folders excluded from the standard library: tests (some contain broken text on purpose), installed packages."""


@dataclass(frozen=True)
class Piece:
    """A part of an input that can be read independently."""

    kind: Literal["file", "jsonl", "parquet", "hub"]
    path: str
    """The file, or the dataset as NAME or NAME:CONFIG, with @COMMIT."""
    start: int
    """Where it begins. jsonl: a byte (the line around it belongs to the previous piece); parquet: a row group; hub: a
    shard."""
    stop: int
    """Where it ends, exclusive, in the same unit."""
    n_bytes: int
    """Its size, for the progress display and for an even division of the work."""


class BadFiles:
    """The inputs that could not be read; more than `limit` of them are an error that names them."""

    def __init__(self, limit: int | None = None) -> None:
        """Tolerate up to `limit` of them; None: none, and the error does not mention a limit."""
        self.limit = limit
        self.messages: list[str] = []

    def add(self, message: str) -> None:
        """Count one more.

        Raises:
            UserError: it exceeds the limit.
        """
        self.messages.append(message)
        if len(self.messages) > (self.limit or 0):
            shown = "\n".join(f"  {message}" for message in self.messages[-20:])
            allowed = "" if self.limit is None else f", {self.limit} allowed (max_bad_files)"
            choice = "" if self.limit is None else ", or allow that many to be skipped"
            raise UserError(f"{len(self.messages)} unreadable input(s){allowed}:\n{shown}\nFix or remove them{choice}")

    def extend(self, messages: Iterable[str]) -> None:
        """Count several more.

        Raises:
            UserError: they exceed the limit.
        """
        for message in messages:
            self.add(message)


def documents(input: str, text_key: str = "text", bad: BadFiles | None = None) -> Iterator[str]:
    """The documents of one input, in order; without `bad`, the first unreadable one is an error (UserError)."""
    bad = bad or BadFiles()
    for piece in pieces(input):
        yield from read(piece, text_key, bad)


def pieces(input: str) -> list[Piece]:
    """Divide one input into pieces.

    Raises:
        UserError: there is no such file, folder or dataset.
    """
    if input == STDLIB:
        return _stdlib_pieces()
    if input.startswith(HUB):
        return _hub_pieces(pin(input).removeprefix(HUB))
    path = Path(input)
    if path.is_dir():
        return [piece for file in _files_below(path) for piece in _file_pieces(file)]
    if not path.exists():
        raise UserError(f"{input}: no such file or folder; inputs are files, folders, {HUB}NAME, or {STDLIB}")
    return _file_pieces(path)


def pin(input: str, before: str | None = None) -> str:
    """Pin a hub dataset, which can change under its name, to the commit at which it is read.

    `hub:NAME@REVISION` (a branch or tag; by default the main branch) becomes `hub:NAME@COMMIT`: the commit of `before`,
    if that is the same dataset, pinned in an earlier launch, and otherwise the revision's current commit. A commit, and
    an input that is not a hub dataset, stay unchanged.

    Raises:
        UserError: the hub has no such dataset or revision, or does not answer.
    """
    if not input.startswith(HUB):
        return input
    name, config, revision = _hub_parts(input.removeprefix(HUB))
    if Path(name).exists() or _COMMIT.fullmatch(revision):
        return input
    dataset = f"{HUB}{name}:{config}" if config else f"{HUB}{name}"
    if before and before.startswith(f"{dataset}@") and _COMMIT.fullmatch(before.removeprefix(f"{dataset}@")):
        return before
    return f"{dataset}@{_commit(name, revision)}"


def read(piece: Piece, text_key: str, bad: BadFiles) -> Iterator[str]:
    """The documents of a piece, in order; unreadable parts are added to `bad`."""
    readers: dict[str, Callable[[Piece, str, BadFiles], Iterator[str]]] = {
        "file": _read_file,
        "jsonl": _read_jsonl,
        "parquet": _read_parquet,
        "hub": _read_hub,
    }
    yield from readers[piece.kind](piece, text_key, bad)


# ------------------------------------------------------------------------------------------- dividing into pieces


def _stdlib_pieces() -> list[Piece]:
    root = Path(sysconfig.get_path("stdlib"))
    found = [path for path in _files_below(root) if path.suffix == ".py"]
    found = [path for path in found if not NO_STDLIB_TEXT.intersection(path.relative_to(root).parts)]
    if not found:
        raise UserError(f"{STDLIB}: no source files in {root}; name a folder of text instead")
    return [piece for path in found for piece in _file_pieces(path)]


def _files_below(folder: Path) -> list[Path]:
    def refuse(error: OSError) -> None:
        raise UserError(f"{error.filename}: cannot read this folder ({error.strerror})")

    found = []
    for parent, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".") and name != "__pycache__"]
        found += [Path(parent, name) for name in files if not name.startswith(".")]
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def _file_pieces(path: Path) -> list[Piece]:
    size = path.stat().st_size if path.exists() else 0  # a dangling link is reported when it is read
    if path.suffix == ".jsonl":
        starts = range(0, max(size, 1), JSONL_PIECE_BYTES)
        stops = [*starts[1:], size]
        return [Piece("jsonl", str(path), a, b, b - a) for a, b in zip(starts, stops, strict=True)]
    if path.suffix == ".parquet":
        return _parquet_pieces(path, size)
    return [Piece("file", str(path), 0, size, size)]


def _parquet_pieces(path: Path, size: int) -> list[Piece]:
    parquet = _import("pyarrow.parquet", f"{path}: .parquet files")
    if not path.is_file():
        return [Piece("parquet", str(path), 0, 1, size)]  # reported when it is read
    try:
        metadata = parquet.read_metadata(path)
    except Exception:  # for a damaged file pyarrow raises a dozen types; it is reported when it is read
        return [Piece("parquet", str(path), 0, 1, size)]
    sizes = [metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)]
    return [Piece("parquet", str(path), i, i + 1, size) for i, size in enumerate(sizes)]


def _hub_pieces(dataset: str) -> list[Piece]:
    n_shards = _open_hub(dataset).num_shards
    return [Piece("hub", dataset, i, i + 1, HUB_PIECE_BYTES) for i in range(n_shards)]


# ------------------------------------------------------------------------------------------- reading


def _read_file(piece: Piece, text_key: str, bad: BadFiles) -> Iterator[str]:
    path = Path(piece.path)
    try:
        text = read_file(path, MAX_TEXT_BYTES).decode()  # bytes, so that line ends stay unchanged
    except OSError as error:
        bad.add(f"{piece.path}: {error.strerror}")
    except UnicodeDecodeError as error:
        bad.add(f"{piece.path}: not UTF-8 at byte {error.start}")
    else:
        yield text


def _read_jsonl(piece: Piece, text_key: str, bad: BadFiles) -> Iterator[str]:
    if not _is_regular(piece.path, bad):
        return
    try:
        with open(piece.path, "rb") as file:
            if piece.start:
                file.seek(piece.start - 1)
                _pass_line(file, piece.stop)
            while (at := file.tell()) < piece.stop:
                line = file.readline(MAX_LINE_BYTES + 1)
                if not line.strip():
                    continue
                try:
                    if len(line) > MAX_LINE_BYTES:
                        _pass_line(file, piece.stop)
                        raise ValueError(f"the line is longer than {MAX_LINE_BYTES:,} bytes")
                    yield _text_of(_parse(line), text_key)
                except ValueError as error:
                    bad.add(f"{piece.path}:{_line_number(piece.path, at)}: {error}")
    except OSError as error:
        bad.add(f"{piece.path}: {error.strerror}")


def _is_regular(path: str, bad: BadFiles) -> bool:
    """Whether a path that exists is a regular file; reading a pipe or a device might never end."""
    if os.path.exists(path) and not os.path.isfile(path):
        bad.add(f"{path}: it is not a regular file")
        return False
    return True


def _pass_line(file: IO[bytes], stop: int) -> None:
    """Skip to the end of the line, or past `stop`, so that each piece reads only its part of a very long line."""
    while (part := file.readline(1 << 20)) and not part.endswith(b"\n") and file.tell() < stop:
        pass


def _read_parquet(piece: Piece, text_key: str, bad: BadFiles) -> Iterator[str]:
    parquet = _import("pyarrow.parquet", f"{piece.path}: .parquet files")
    if not _is_regular(piece.path, bad):
        return
    try:
        _check_column(parquet.read_schema(piece.path).names, text_key, piece)
        with parquet.ParquetFile(piece.path, read_dictionary=[text_key]) as file:
            row = 0
            for batch in file.iter_batches(1024, row_groups=range(piece.start, piece.stop), columns=[text_key]):
                for scalar in batch.column(0):  # one by one: a dictionary may share one long text among all rows
                    value = scalar.as_py()
                    if isinstance(value, str):
                        yield value
                    else:
                        bad.add(f"{piece.path}, row group {piece.start}, row {row}: not text but {value!r:.40}")
                    row += 1
    except UserError:
        raise
    except Exception as error:  # for a damaged file pyarrow raises a dozen types
        bad.add(f"{piece.path}: {error}")


def _check_column(names: list[str], text_key: str, piece: Piece) -> None:
    if text_key not in names:
        raise UserError(f"{piece.path}: no column {text_key!r}; there are {shortened(str(names), 400)}")


def _read_hub(piece: Piece, text_key: str, bad: BadFiles) -> Iterator[str]:
    for row, record in enumerate(_hub_rows(piece)):
        try:
            yield _text_of(record, text_key)
        except ValueError as error:
            bad.add(f"{HUB}{piece.path}, shard {piece.start}, row {row}: {error}")


def _hub_rows(piece: Piece) -> Iterator[dict[str, Any]]:
    dataset = _open_hub(piece.path)
    try:
        yield from dataset.shard(num_shards=dataset.num_shards, index=piece.start)
    except Exception as error:
        raise _hub_error(piece.path, "read", error) from None


def _open_hub(dataset: str) -> Any:
    name, config, revision = _hub_parts(dataset)
    datasets = _import("datasets", f"{HUB}{dataset}")
    try:
        return datasets.load_dataset(name, config or None, split="train", streaming=True, revision=revision or None)
    except Exception as error:
        raise _hub_error(dataset, "open", error) from None


_COMMIT = re.compile("[0-9a-f]{40}")


def _hub_parts(dataset: str) -> tuple[str, str, str]:
    """Name, config and revision of NAME[:CONFIG][@REVISION]; "" for a missing part."""
    dataset, _, revision = dataset.partition("@")
    name, _, config = dataset.partition(":")
    return name, config, revision


@cache  # all of one launch is read at one commit
def _commit(name: str, revision: str) -> str:
    _import("datasets", f"{HUB}{name}")  # it brings the other, and is what to install
    hub = _import("huggingface_hub", f"{HUB}{name}")
    try:
        return hub.HfApi().dataset_info(name, revision=revision or None).sha
    except Exception as error:
        raise _hub_error(name, "open", error) from None


def _hub_error(dataset: str, what: str, error: Exception) -> UserError:
    """One message for errors of the network, of the hub and of a dataset's own files, which have a dozen types."""
    return UserError(f"{HUB}{dataset}: cannot {what} the dataset ({type(error).__name__}: {error})")


def _parse(line: bytes) -> object:
    """Parse the JSON value on a line.

    Raises:
        ValueError: there is none.
    """
    try:
        return parse_json(line.rstrip().decode())
    except json.JSONDecodeError as error:  # its own text would mention a second line number
        raise ValueError(f"no JSON at column {error.colno} ({error.msg})") from None


def _text_of(record: object, text_key: str) -> str:
    """The text of a JSON object or row.

    Raises:
        ValueError: it has none.
    """
    if not isinstance(record, dict):
        raise ValueError(f"expected an object with the key {text_key!r}, found {type(record).__name__}")
    if not isinstance(text := record.get(text_key), str):
        raise ValueError(f"no text under the key {text_key!r}; the keys are {shortened(str(list(record)), 400)}")
    text.encode()  # JSON can spell half of a character ("\\ud800"), which is not text
    return text


def _line_number(path: str, offset: int) -> int:
    """The number, from 1, of the line that begins at byte `offset`."""
    with open(path, "rb") as file:
        return 1 + sum(file.read(min(1 << 20, offset - at)).count(b"\n") for at in range(0, offset, 1 << 20))


def _import(module: str, purpose: str) -> Any:
    """Import a package that only some inputs need.

    Raises:
        UserError: it is not installed; the message has the install command.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise UserError(f"{purpose} need the package {package}; install it: pip install {package}") from None
