"""Documents of text from files, folders and datasets, always in the same order.

An input (see `inputs`) is first divided into *pieces* (`pieces`): parts that can be read independently, so that many
processes can share one corpus, and that depend on nothing but the input. Reading the pieces in sequence (`read`) gives
the input's documents.

| file | documents |
|---|---|
| `x.jsonl`, `x.ndjson` | the text under `text_key` in each line |
| `x.json` | the same, if it has an object per line, or one list of objects |
| `x.csv`, `x.tsv`, `x.parquet`, `x.arrow`, a folder of `save_to_disk` | the text in the column `text_key` of each row |
| another file | the whole file is one document; with a separator, a `.txt` file is cut at each |
| any of them but `.parquet` and `.arrow` with `.gz`, `.zst` or `.bz2` | as without |
| `hub:NAME` | the rows of a Hugging Face dataset, as of one commit (`hub`) |

Records may also have a prompt for each text, under a key of its own.

Each reader gives a piece's records with their numbers; `read` takes the texts from them and names what has none, in
one way for all formats. What cannot be read as UTF-8 text is counted against a limit (`BadFiles`). A file with a NUL
byte is binary: it is skipped and counted.

The package `datasets` reads the hub, saved datasets and .arrow files. It does not read the rest (measured with 5.2),
since every bad record must be named, and nothing else lost with it:

- .jsonl, .json: one bad line or record ends its file, and a list of objects takes 4 to 7 times as long.
- .csv: a row with a field too many loses it, and one with a field too few gets "", both silently.
- .parquet: a piece is a row group, and version 3.1 reads only whole files.
- text: line ends change. .zst: a further package is needed.
"""

import codecs
import csv
import io
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, pairwise
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, cast

from configs.errors import UserError
from configs.files import exists, is_file, is_folder
from configs.untrusted import parse_json, read_file, shortened
from trainer.data.text import hub
from trainer.data.text.bad_files import BINARY, BadFiles
from trainer.data.text.hub import pin
from trainer.data.text.inputs import HUB, content_files, files_of, import_package

MAX_TEXT_BYTES = 16 << 30
"""Limit on a file that is one document."""
MAX_LINE_BYTES = 256 << 20
"""Limit on a document in a .jsonl file; reading it takes about three times its size in memory."""
MAX_GROWTH = 32
"""Limit on a compressed file that is one document: 64 MiB, or this many times its size."""
PIECE_BYTES = 8 << 20
HUB_PIECE_BYTES = 64 << 20
"""The assumed size of a piece of a hub dataset, since its true size is unknown before it is read."""
COMPRESSION = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
_KINDS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
}

Kind = Literal["file", "jsonl", "json", "csv", "parquet", "arrow", "hub"]


@dataclass(frozen=True)
class Piece:
    """A part of an input that can be read independently."""

    kind: Kind
    path: str
    """The file, or the hub dataset without `hub:`, with @COMMIT."""
    start: int
    """Where it begins. jsonl: a byte (the line around it belongs to the previous piece); parquet: a row group; arrow: a
    row; hub: a shard."""
    stop: int
    """Where it ends, exclusive, in the same unit."""
    n_bytes: int
    """Its size, for the progress display and for an even division of the work."""


class Keys(NamedTuple):
    """The keys of records, or their columns, in which texts are."""

    text: str = "text"
    prompt: str | None = None
    """None: there are no prompts."""

    @property
    def options(self) -> dict[str, str]:
        """The keys, each with the name of the option that sets it."""
        return {self.text: "text_key"} | ({self.prompt: "prompt_key"} if self.prompt else {})


class Document(NamedTuple):
    """A text, and the prompt that it answers."""

    text: str
    prompt: str = ""
    """It comes before the text, and gives no loss."""

    @property
    def content(self) -> bytes:
        """What the document is told from others by; a byte that no UTF-8 has divides the prompt from the text."""
        text = self.text.encode()
        return self.prompt.encode() + b"\xff" + text if self.prompt else text

    @property
    def n_bytes(self) -> int:
        """Bytes of text."""
        return len(self.prompt.encode()) + len(self.text.encode())


def documents(input: str, text_key: str = "text", bad: BadFiles | None = None, separator: str = "") -> Iterator[str]:
    """The texts of one input, in order; without `bad`, the first unreadable one is an error (UserError)."""
    bad = bad or BadFiles()
    for piece in pieces(input, bad):
        for document in read(piece, Keys(text_key), bad, separator):
            yield document.text


def pieces(input: str, bad: BadFiles | None = None) -> list[Piece]:
    """Divide one input into pieces; files that are skipped as no text are added to `bad`.

    Raises:
        UserError: there is no such file, folder or dataset.
    """
    if input.startswith(HUB):
        pinned = pin(input)
        name = pinned.removeprefix(HUB)
        return [Piece("hub", name, i, i + 1, HUB_PIECE_BYTES) for i in range(hub.shards(pinned))]
    return [piece for file in files_of(input, bad or BadFiles()) for piece in file_pieces(file)]


def read(piece: Piece, keys: Keys, bad: BadFiles, separator: str = "") -> Iterator[Document]:
    """The documents of a piece, in order; unreadable parts are added to `bad`."""
    path = piece.path
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        bad.add(f"{path}: not a regular file")  # reading a pipe or a device might never end
        return
    # For a damaged file pyarrow and `datasets` raise a dozen types.
    damage = Exception if piece.kind in ("parquet", "arrow") else (OSError, ValueError, csv.Error)
    try:
        if piece.kind == "file":
            yield from map(Document, _read_file(path, keys, separator))
            return
        for number, record in _READERS[piece.kind](piece, keys):
            try:
                document = Document(*(_text_of(record, key, option) for key, option in keys.options.items()))
            except ValueError as error:
                bad.add(f"{_place(piece, number)}: {error}")
                continue
            yield document
    except UserError:
        raise
    except _IsBinary:
        bad.skip(BINARY, path)
    except damage as error:
        bad.add(f"{path}: {_reason(error)}")


_PLACES = {
    "jsonl": "{path}:{number}",
    "json": "{path}, record {number}",
    "csv": "{path}:{number}",
    "parquet": "{path}, row group {start}, row {number}",
    "arrow": "{path}, row {number}",
    "hub": HUB + "{path}, shard {start}, row {number}",
}


def _place(piece: Piece, number: int) -> str:
    """Where a record is, for a message; `number` is what its reader gives with it."""
    if piece.kind == "jsonl":
        number = _line_number(piece.path, number)
    return _PLACES[piece.kind].format(path=piece.path, start=piece.start, number=number)


# ------------------------------------------------------------------------------------------- dividing into pieces


def file_pieces(path: Path) -> list[Piece]:
    """Divide a file (or a saved dataset) into pieces."""
    kind, is_compressed = _kind_of(path)
    size = sum(file.stat().st_size for file in content_files(path)) if exists(path) else 0  # else reported when read
    if kind == "jsonl" and not is_compressed:
        starts = range(0, max(size, 1), PIECE_BYTES)
        stops = [*starts[1:], size]
        return [Piece("jsonl", str(path), a, b, b - a) for a, b in zip(starts, stops, strict=True)]
    if kind in ("parquet", "arrow") and size:
        try:
            return _row_groups(path) if kind == "parquet" else _row_ranges(path, size)
        except UserError:
            raise
        except Exception:  # for a damaged file pyarrow raises a dozen types; it is reported when it is read
            pass
    return [Piece(kind, str(path), 0, size, size)]


def is_divided_by_content(name: str) -> bool:
    """Whether `file_pieces` reads all of a file; of a .parquet file it reads the end, and of others the size."""
    return _KINDS.get(_suffix(name)) in ("json", "arrow")


def _kind_of(path: Path) -> tuple[Kind, bool]:
    """How a file is read, and whether it is compressed."""
    if is_folder(path):
        return "arrow", False
    kind = cast(Kind, _KINDS.get(_suffix(str(path)), "file"))
    return "jsonl" if kind == "json" and _has_json_lines(path) else kind, _is_compressed(str(path))


def _is_compressed(path: str) -> bool:
    return os.path.splitext(path)[1].lower() in COMPRESSION


def _suffix(path: str) -> str:
    """The suffix of the name, in lower case, without a compression's."""
    return os.path.splitext(os.path.splitext(path)[0] if _is_compressed(path) else path)[1].lower()


def read_by(path: str) -> str:
    """The part of a file's name that decides how it is read: its suffix, and that of a compression."""
    return _suffix(path) + (os.path.splitext(path)[1].lower() if _is_compressed(path) else "")


def _has_json_lines(path: Path) -> bool:
    """Whether a .json file's first line is an object, with another line after it."""
    if not is_file(path):
        return False
    try:
        with _open(path) as file:
            first = _without_mark(file.readline(MAX_LINE_BYTES))
            is_object = first.lstrip().startswith(b"{") and isinstance(_parse(first), dict)
            return is_object and any(line.strip() for line in iter(lambda: file.readline(1 << 20), b""))
    except (OSError, ValueError):
        return False


def _row_groups(path: Path) -> list[Piece]:
    metadata = import_package("pyarrow.parquet", f"{path}: .parquet files").read_metadata(path)
    sizes = [metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)]
    return [Piece("parquet", str(path), i, i + 1, size) for i, size in enumerate(sizes)]


def _row_ranges(path: Path, size: int) -> list[Piece]:
    n_rows = len(_open_arrow(str(path)))
    n_pieces = max(1, min(n_rows, size // PIECE_BYTES))
    bounds = [n_rows * i // n_pieces for i in range(n_pieces + 1)]
    return [Piece("arrow", str(path), a, b, size // n_pieces) for a, b in pairwise(bounds)]


# ------------------------------------------------------------------------------------------- reading


class _IsBinary(Exception):
    """A file is not text."""


def _read_file(path: str, keys: Keys, separator: str) -> list[str]:
    raw = _whole(path)
    if b"\0" in raw:
        raise _IsBinary
    text = _decoded(raw)
    _require_no_prompt(keys)
    return text.split(separator) if separator and _suffix(path) == ".txt" else [text]


def _whole(path: str) -> bytes:
    """The content of a file that is one document, unpacked.

    Raises:
        OSError, ValueError: it can't be read.
    """
    if not _is_compressed(path):
        return read_file(Path(path), MAX_TEXT_BYTES)  # bytes, so that line ends stay unchanged
    most = max(64 << 20, MAX_GROWTH * os.path.getsize(path))
    with _open(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(f"unpacks to more than {most:,} bytes")
    return content


def _decoded(raw: bytes) -> str:
    """The text without a byte order mark.

    Raises:
        ValueError: it isn't UTF-8.
    """
    text = _without_mark(raw)
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {len(raw) - len(text) + error.start}") from None


def _open(path: str | Path) -> IO[bytes]:
    """Open a file for reading, unpacked if its name says that it is compressed."""
    compression = COMPRESSION.get(os.path.splitext(path)[1].lower())
    if compression is None:
        return open(path, "rb")
    if not os.path.getsize(path):  # to Arrow, such a file has no text
        raise OSError("has no bytes, which no compressed file has: it was cut off")
    pyarrow = import_package("pyarrow", f"{path}: compressed files")
    return cast(IO[bytes], io.BufferedReader(pyarrow.input_stream(str(path), compression=compression), 1 << 20))


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or shortened(str(error), 400)


def _without_mark(raw: bytes) -> bytes:
    return raw.removeprefix(codecs.BOM_UTF8)


def _read_jsonl(piece: Piece, keys: Keys) -> Iterator[tuple[int, object]]:
    """The values on the lines that begin in the piece, each with the byte where its line begins."""
    at = piece.start
    stop = sys.maxsize if _is_compressed(piece.path) else piece.stop
    with _open(piece.path) as file:
        if piece.start:
            file.seek(piece.start - 1)
            at += _pass_line(file, piece.stop - piece.start + 1) - 1
        while at < stop and (line := file.readline(MAX_LINE_BYTES + 1)):
            begin = at
            at += len(line)
            content = line if begin else _without_mark(line)
            if not content.strip():
                continue
            if len(line) > MAX_LINE_BYTES:
                at += 0 if line.endswith(b"\n") else _pass_line(file, stop - at)
                yield begin, ValueError(f"the line is longer than {MAX_LINE_BYTES:,} bytes")
            else:
                yield begin, _parse(content)


def _pass_line(file: IO[bytes], most: int) -> int:
    """Skip to the end of the line, or past `most` bytes, so that each piece reads only its part of a very long line.

    Returns:
        The number of bytes skipped.
    """
    n_bytes = 0
    while (part := file.readline(1 << 20)) and (n_bytes := n_bytes + len(part)) < most and not part.endswith(b"\n"):
        pass
    return n_bytes


def _read_json(piece: Piece, keys: Keys) -> Iterable[tuple[int, object]]:
    """The records of a list of objects, or of one object with the key; any other JSON is a text like other files."""
    text = _decoded(_whole(piece.path))
    try:
        value = parse_json(text)
    except ValueError:
        if text.lstrip().startswith("[") and text.lstrip()[1:].lstrip().startswith("{"):
            raise
        value = None  # such as JSON with comments
    if isinstance(value, list) and all(isinstance(first, dict) for first in value[:1]):
        return enumerate(value)
    if isinstance(value, dict) and isinstance(value.get(keys.text), str):
        return [(0, value)]
    _require_no_prompt(keys)
    return [(0, {keys.text: text})]


def _read_csv(piece: Piece, keys: Keys) -> Iterator[tuple[int, object]]:
    """The rows, each with the number of its last line."""
    csv.field_size_limit(MAX_LINE_BYTES)
    delimiter = "\t" if _suffix(piece.path) == ".tsv" else ","
    # A byte that is not UTF-8 becomes half of a character: an error of the decoder would lose all rows of its block.
    with io.TextIOWrapper(_open(piece.path), "utf-8-sig", "surrogateescape", newline="") as file:
        rows = csv.DictReader(file, delimiter=delimiter, strict=True)
        _require_columns(rows.fieldnames or [], keys)
        try:
            for row in rows:
                yield rows.line_num, _fault_of_row(row, keys) or row
        except csv.Error as error:  # where the next row begins cannot be told
            yield rows.reader.line_num, ValueError(f"{error}; this row and all behind it are not read")


def _fault_of_row(row: dict[Any, Any], keys: Keys) -> ValueError | None:
    """What is wrong with a row of a .csv file; None if nothing is."""
    if None in row:
        return ValueError("more fields than the first line has names")
    try:
        "".join(row[key] or "" for key in keys.options).encode()
    except UnicodeEncodeError:
        return ValueError("not UTF-8")
    return None


def _read_parquet(piece: Piece, keys: Keys) -> Iterator[tuple[int, object]]:
    parquet = import_package("pyarrow.parquet", f"{piece.path}: .parquet files")
    metadata = parquet.read_metadata(piece.path)
    _require_columns(metadata.schema.to_arrow_schema().names, keys)
    columns = list(keys.options)
    groups = range(piece.start, piece.stop)
    dictionaries = [name for name in columns if _can_be_dictionary(metadata, groups, name)]
    with parquet.ParquetFile(piece.path, metadata=metadata, read_dictionary=dictionaries) as file:
        yield from _rows(file.iter_batches(1024, row_groups=groups, columns=columns), columns, 0)


def _can_be_dictionary(metadata: Any, groups: Iterable[int], name: str) -> bool:
    """Whether Arrow can read a column as a dictionary, in which rows share a text: no structure, and no text that is
    stored as its difference from the one before (DELTA_BYTE_ARRAY, as of DuckDB, Trino and Spark in Parquet's version
    2)."""
    chunks = [metadata.row_group(group).column(i) for group in groups for i in range(metadata.num_columns)]
    found = [chunk.encodings for chunk in chunks if chunk.path_in_schema == name]
    return bool(found) and not any(each.startswith("DELTA_") for encodings in found for each in encodings)


def _read_arrow(piece: Piece, keys: Keys) -> Iterator[tuple[int, object]]:
    dataset = _open_arrow(piece.path)
    _require_columns(dataset.column_names, keys)
    columns = list(keys.options)
    chosen = dataset.select_columns(columns).select(range(piece.start, piece.stop)).with_format("arrow")
    batches = chain.from_iterable(table.to_batches() for table in chosen.iter(1024))
    yield from _rows(batches, columns, piece.start)


@cache
def _open_arrow(path: str) -> Any:
    """A memory-mapped dataset: a folder of `save_to_disk`, or an .arrow file.

    Raises:
        OSError: it is damaged, or of another format.
    """
    datasets = import_package("datasets", f"{path}: .arrow files")
    pyarrow = import_package("pyarrow", f"{path}: .arrow files")
    try:
        if os.path.isdir(path):
            return datasets.load_from_disk(path)
        with open(path, "rb") as file:
            is_stream = file.read(6) != b"ARROW1"
        if is_stream:  # as `datasets` writes them
            return datasets.Dataset.from_file(path)
        table = pyarrow.ipc.open_file(pyarrow.memory_map(path)).read_all()
        return datasets.Dataset(datasets.table.InMemoryTable(table))
    except Exception as error:  # of a dozen types
        raise OSError(f"datasets can't read it ({shortened(str(error), 400)})") from None


def _rows(batches: Iterable[Any], columns: Sequence[str], first: int) -> Iterator[tuple[int, object]]:
    """The rows of Arrow's record batches, numbered from `first`."""
    number = first
    for batch in batches:
        # One by one: a dictionary may share one long text among all rows.
        for scalars in zip(*map(batch.column, columns), strict=True):
            yield number, {name: scalar.as_py() for name, scalar in zip(columns, scalars, strict=True)}
            number += 1


def _require_columns(names: Sequence[str], keys: Keys) -> None:
    """Raise ValueError if a text's column is not among those of a file."""
    for key, option in keys.options.items():
        if key not in names:
            raise ValueError(f"no column {key!r}; there are {shortened(str(list(names)), 200)}{_hint(option)}")


def _require_no_prompt(keys: Keys) -> None:
    """Raise ValueError if a prompt is asked for, of a file that is one text."""
    if keys.prompt:
        raise ValueError(
            f"it has no records, and so no prompt {keys.prompt!r} (prompt_key); give files of records, such as .jsonl"
        )


def _read_hub(piece: Piece, keys: Keys) -> Iterable[tuple[int, object]]:
    return enumerate(hub.rows(HUB + piece.path, piece.start))


_READERS: dict[str, Callable[[Piece, Keys], Iterable[tuple[int, object]]]] = {
    "jsonl": _read_jsonl,
    "json": _read_json,
    "csv": _read_csv,
    "parquet": _read_parquet,
    "arrow": _read_arrow,
    "hub": _read_hub,
}
"""Each gives the numbers and records of a piece; in place of a bad record, the ValueError that says what is wrong."""


def _parse(line: bytes) -> object:
    """The JSON value on a line, or the ValueError that says why there is none."""
    try:
        return parse_json(line.rstrip().decode())
    except json.JSONDecodeError as error:  # its own text would mention a second line number
        return ValueError(f"no JSON at column {error.colno} ({error.msg})")
    except ValueError as error:
        return error


def _hint(option: str) -> str:
    """How to name another key."""
    return f"; --{option.replace('_', '-')} ({option} in a job) names another"


def _text_of(record: object, key: str, option: str) -> str:
    """The text of a JSON object or row under a key, which `option` sets.

    Raises:
        ValueError: it has none, or is itself the reason for that.
    """
    if isinstance(record, ValueError):
        raise record
    if not isinstance(record, dict):
        raise ValueError(f"expected an object with the key {key!r}, found {type(record).__name__}")
    if key not in record:
        keys = shortened(str(list(record)), 400)
        raise ValueError(f"no text under the key {key!r}; the keys are {keys}{_hint(option)}")
    text = record[key]
    if not isinstance(text, str):
        raise ValueError(f"{key!r} is {'null' if text is None else type(text).__name__}, not a text")
    text.encode()  # JSON can spell half of a character ("\\ud800"), which is not text
    return text


def _line_number(path: str, offset: int) -> int:
    """The number, from 1, of the line that begins at byte `offset`."""
    with _open(path) as file:
        return 1 + sum(file.read(min(1 << 20, offset - at)).count(b"\n") for at in range(0, offset, 1 << 20))
