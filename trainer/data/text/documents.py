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

Lines are read here and not by `datasets`, which gives up a whole file for one bad line, and whose CSV reader takes the
word "NA" for a missing text. A file with a NUL byte is binary: it is skipped and counted. Anything else that cannot be
read as UTF-8 is named, and counted against a limit (`BadFiles`).
"""

import codecs
import csv
import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, Literal, cast

from configs.errors import UserError
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


def documents(input: str, text_key: str = "text", bad: BadFiles | None = None, separator: str = "") -> Iterator[str]:
    """The documents of one input, in order; without `bad`, the first unreadable one is an error (UserError)."""
    bad = bad or BadFiles()
    for piece in pieces(input, bad):
        yield from read(piece, text_key, bad, separator)


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


def read(piece: Piece, text_key: str, bad: BadFiles, separator: str = "") -> Iterator[str]:
    """The documents of a piece, in order; unreadable parts are added to `bad`."""
    if piece.kind == "file":
        yield from _read_file(piece, bad, separator)
        return
    readers: dict[str, Callable[[Piece, str, BadFiles], Iterator[str]]] = {
        "jsonl": _read_jsonl,
        "json": _read_json,
        "csv": _read_csv,
        "parquet": _read_parquet,
        "arrow": _read_arrow,
        "hub": _read_hub,
    }
    yield from readers[piece.kind](piece, text_key, bad)


# ------------------------------------------------------------------------------------------- dividing into pieces


def file_pieces(path: Path) -> list[Piece]:
    """Divide a file (or a saved dataset) into pieces."""
    kind, is_compressed = _kind_of(path)
    size = sum(file.stat().st_size for file in content_files(path)) if path.exists() else 0  # else reported when read
    if kind == "jsonl" and not is_compressed:
        starts = range(0, max(size, 1), PIECE_BYTES)
        stops = [*starts[1:], size]
        return [Piece("jsonl", str(path), a, b, b - a) for a, b in zip(starts, stops, strict=True)]
    if kind == "parquet":
        return _parquet_pieces(path, size)
    if kind == "arrow":
        return _arrow_pieces(path, size)
    return [Piece(kind, str(path), 0, size, size)]


def _kind_of(path: Path) -> tuple[Kind, bool]:
    """How a file is read, and whether it is compressed."""
    if path.is_dir():
        return "arrow", False
    kind = cast(Kind, _KINDS.get(_suffix(str(path)), "file"))
    return "jsonl" if kind == "json" and _has_json_lines(path) else kind, _is_compressed(str(path))


def _is_compressed(path: str) -> bool:
    return os.path.splitext(path)[1].lower() in COMPRESSION


def _suffix(path: str) -> str:
    """The suffix of the name, in lower case, without a compression's."""
    return os.path.splitext(os.path.splitext(path)[0] if _is_compressed(path) else path)[1].lower()


def _has_json_lines(path: Path) -> bool:
    """Whether a .json file's first line is an object, with another line after it."""
    if not path.is_file():
        return False
    try:
        with _open(path) as file:
            first = _without_mark(file.readline(MAX_LINE_BYTES))
            is_object = first.lstrip().startswith(b"{") and isinstance(_parse(first), dict)
            return is_object and any(line.strip() for line in iter(lambda: file.readline(1 << 20), b""))
    except (OSError, ValueError):
        return False


def _parquet_pieces(path: Path, size: int) -> list[Piece]:
    parquet = import_package("pyarrow.parquet", f"{path}: .parquet files")
    if not path.is_file():
        return [Piece("parquet", str(path), 0, 1, size)]  # reported when it is read
    try:
        metadata = parquet.read_metadata(path)
    except Exception:  # for a damaged file pyarrow raises a dozen types; it is reported when it is read
        return [Piece("parquet", str(path), 0, 1, size)]
    sizes = [metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)]
    return [Piece("parquet", str(path), i, i + 1, size) for i, size in enumerate(sizes)]


def _arrow_pieces(path: Path, size: int) -> list[Piece]:
    try:
        n_rows = len(_open_arrow(str(path)))
    except _NotReadable:
        n_rows = 1  # reported when it is read
    n_pieces = max(1, min(n_rows, size // PIECE_BYTES))
    bounds = [n_rows * i // n_pieces for i in range(n_pieces + 1)]
    return [Piece("arrow", str(path), a, b, size // n_pieces) for a, b in pairwise(bounds)]


# ------------------------------------------------------------------------------------------- reading


def _read_file(piece: Piece, bad: BadFiles, separator: str) -> Iterator[str]:
    raw = _whole(piece.path, bad)
    if raw is None:
        return
    if b"\0" in raw:
        bad.skip(BINARY, piece.path)
        return
    text = _decoded(raw, piece.path, bad)
    if text is not None:
        yield from text.split(separator) if separator and _suffix(piece.path) == ".txt" else (text,)


def _whole(path: str, bad: BadFiles) -> bytes | None:
    """The content of a file that is one document, unpacked; None, and added to `bad`, if it can't be read."""
    try:
        if not _is_compressed(path):
            return read_file(Path(path), MAX_TEXT_BYTES)  # bytes, so that line ends stay unchanged
        if not _is_regular(path, bad):
            return None
        most = max(64 << 20, MAX_GROWTH * os.path.getsize(path))
        with _open(path) as file:
            content = file.read(most + 1)
        if len(content) > most:
            raise OSError(f"unpacks to more than {most:,} bytes")
        return content
    except (OSError, ValueError) as error:
        bad.add(f"{path}: {_reason(error)}")
        return None


def _decoded(raw: bytes, path: str, bad: BadFiles) -> str | None:
    """The text without a byte order mark; None, and added to `bad`, if it isn't UTF-8."""
    try:
        return _without_mark(raw).decode()
    except UnicodeDecodeError as error:
        mark = len(raw) - len(_without_mark(raw))
        bad.add(f"{path}: not UTF-8 at byte {error.start + mark}")
        return None


def _open(path: str | Path) -> IO[bytes]:
    """Open a file for reading, unpacked if its name says that it is compressed."""
    compression = COMPRESSION.get(os.path.splitext(path)[1].lower())
    if compression is None:
        return open(path, "rb")
    pyarrow = import_package("pyarrow", f"{path}: compressed files")
    return cast(IO[bytes], io.BufferedReader(pyarrow.input_stream(str(path), compression=compression), 1 << 20))


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or shortened(str(error), 400)


def _without_mark(raw: bytes) -> bytes:
    return raw.removeprefix(codecs.BOM_UTF8)


def _read_jsonl(piece: Piece, text_key: str, bad: BadFiles) -> Iterator[str]:
    if not _is_regular(piece.path, bad):
        return
    at = piece.start
    stop = sys.maxsize if _is_compressed(piece.path) else piece.stop
    try:
        with _open(piece.path) as file:
            if piece.start:
                file.seek(piece.start - 1)
                at += _pass_line(file, piece.stop - piece.start + 1) - 1
            while at < stop and (line := file.readline(MAX_LINE_BYTES + 1)):
                begin = at
                at = at + len(line)
                if not line.strip():
                    continue
                try:
                    if len(line) > MAX_LINE_BYTES:
                        at += _pass_line(file, stop - at)
                        raise ValueError(f"the line is longer than {MAX_LINE_BYTES:,} bytes")
                    yield _text_of(_parse(line if begin else _without_mark(line)), text_key)
                except ValueError as error:
                    bad.add(f"{piece.path}:{_line_number(piece.path, begin)}: {error}")
    except (OSError, ValueError) as error:
        bad.add(f"{piece.path}: {_reason(error)}")


def _is_regular(path: str, bad: BadFiles) -> bool:
    """Whether a path that exists is a regular file; reading a pipe or a device might never end."""
    if os.path.exists(path) and not os.path.isfile(path):
        bad.add(f"{path}: not a regular file")
        return False
    return True


def _pass_line(file: IO[bytes], most: int) -> int:
    """Skip to the end of the line, or past `most` bytes, so that each piece reads only its part of a very long line.

    Returns:
        The number of bytes skipped.
    """
    n_bytes = 0
    while (part := file.readline(1 << 20)) and (n_bytes := n_bytes + len(part)) < most and not part.endswith(b"\n"):
        pass
    return n_bytes


def _read_json(piece: Piece, text_key: str, bad: BadFiles) -> Iterator[str]:
    """The records of a list of objects, or of one object with the key; any other JSON is a text like other files."""
    raw = _whole(piece.path, bad)
    text = None if raw is None else _decoded(raw, piece.path, bad)
    if text is None:
        return
    try:
        value = parse_json(text)
    except ValueError as error:
        if text.lstrip().startswith("[") and text.lstrip()[1:].lstrip().startswith("{"):
            bad.add(f"{piece.path}: {error}")
            return
        value = None  # such as JSON with comments
    if isinstance(value, list) and value and isinstance(value[0], dict):
        for number, record in enumerate(value):
            try:
                yield _text_of(record, text_key)
            except ValueError as error:
                bad.add(f"{piece.path}, record {number}: {error}")
    elif isinstance(value, dict) and isinstance(value.get(text_key), str):
        yield value[text_key]
    else:
        yield text


def _read_csv(piece: Piece, text_key: str, bad: BadFiles) -> Iterator[str]:
    if not _is_regular(piece.path, bad):
        return
    csv.field_size_limit(MAX_LINE_BYTES)
    delimiter = "\t" if _suffix(piece.path) == ".tsv" else ","
    try:
        with io.TextIOWrapper(_open(piece.path), "utf-8-sig", newline="") as file:
            rows = csv.DictReader(file, delimiter=delimiter, strict=True)
            if not _has_column(list(rows.fieldnames or []), text_key, piece, bad):
                return
            for row in rows:
                try:
                    if None in row:
                        raise ValueError("more fields than the first line has names")
                    yield _text_of(row, text_key)
                except ValueError as error:
                    bad.add(f"{piece.path}:{rows.line_num}: {error}")
    except (OSError, ValueError, csv.Error) as error:
        bad.add(f"{piece.path}: {_reason(error)}")


def _read_parquet(piece: Piece, text_key: str, bad: BadFiles) -> Iterator[str]:
    parquet = import_package("pyarrow.parquet", f"{piece.path}: .parquet files")
    if not _is_regular(piece.path, bad):
        return
    try:
        if not _has_column(parquet.read_schema(piece.path).names, text_key, piece, bad):
            return
        with parquet.ParquetFile(piece.path, read_dictionary=[text_key]) as file:
            batches = file.iter_batches(1024, row_groups=range(piece.start, piece.stop), columns=[text_key])
            yield from _texts_of(batches, f"{piece.path}, row group {piece.start}, row ", 0, bad)
    except UserError:
        raise
    except Exception as error:  # for a damaged file pyarrow raises a dozen types
        bad.add(f"{piece.path}: {error}")


def _read_arrow(piece: Piece, text_key: str, bad: BadFiles) -> Iterator[str]:
    if not Path(piece.path).is_dir() and not _is_regular(piece.path, bad):
        return
    try:
        dataset = _open_arrow(piece.path)
        if not _has_column(dataset.column_names, text_key, piece, bad):
            return
        chosen = dataset.select_columns([text_key]).select(range(piece.start, piece.stop)).with_format("arrow")
        batches = (batch for table in chosen.iter(1024) for batch in table.to_batches())
        yield from _texts_of(batches, f"{piece.path}, row ", piece.start, bad)
    except UserError:
        raise
    except Exception as error:  # for a damaged file pyarrow raises a dozen types
        bad.add(f"{piece.path}: {error}")


class _NotReadable(Exception):
    """`datasets` can't read a file or folder."""


@cache
def _open_arrow(path: str) -> Any:
    """A memory-mapped dataset: a folder of `save_to_disk`, or an .arrow file.

    Raises:
        _NotReadable: it is damaged, or of another format.
    """
    datasets = import_package("datasets", f"{path}: .arrow files")
    try:
        if os.path.isdir(path):
            return datasets.load_from_disk(path)
        with open(path, "rb") as file:
            is_stream = file.read(6) != b"ARROW1"
        if is_stream:  # as `datasets` writes them
            return datasets.Dataset.from_file(path)
        pyarrow = import_package("pyarrow", f"{path}: .arrow files")
        return datasets.Dataset(
            datasets.table.InMemoryTable(pyarrow.ipc.open_file(pyarrow.memory_map(path)).read_all())
        )
    except UserError:
        raise
    except Exception as error:
        raise _NotReadable(f"datasets can't read it ({shortened(str(error), 400)})") from None


def _texts_of(batches: Any, place: str, row: int, bad: BadFiles) -> Iterator[str]:
    """The values of the only column of Arrow's record batches; `place` and a row's number name one that is no text."""
    for batch in batches:
        for scalar in batch.column(0):  # one by one: a dictionary may share one long text among all rows
            value = scalar.as_py()
            if isinstance(value, str):
                yield value
            else:
                bad.add(f"{place}{row}: not text but {value!r:.40}")
            row += 1


def _has_column(names: list[str], text_key: str, piece: Piece, bad: BadFiles) -> bool:
    if text_key not in names:
        bad.add(f"{piece.path}: no column {text_key!r}; there are {shortened(str(names), 400)}{_KEY_HINT}")
    return text_key in names


def _read_hub(piece: Piece, text_key: str, bad: BadFiles) -> Iterator[str]:
    for row, record in enumerate(hub.rows(HUB + piece.path, piece.start)):
        try:
            yield _text_of(record, text_key)
        except ValueError as error:
            bad.add(f"{HUB}{piece.path}, shard {piece.start}, row {row}: {error}")


def _parse(line: bytes) -> object:
    """Parse the JSON value on a line.

    Raises:
        ValueError: there is none.
    """
    try:
        return parse_json(line.rstrip().decode())
    except json.JSONDecodeError as error:  # its own text would mention a second line number
        raise ValueError(f"no JSON at column {error.colno} ({error.msg})") from None


_KEY_HINT = "; --text-key (text_key in a job) names another"


def _text_of(record: object, text_key: str) -> str:
    """The text of a JSON object or row.

    Raises:
        ValueError: it has none.
    """
    if not isinstance(record, dict):
        raise ValueError(f"expected an object with the key {text_key!r}, found {type(record).__name__}")
    if text_key not in record:
        keys = shortened(str(list(record)), 400)
        raise ValueError(f"no text under the key {text_key!r}; the keys are {keys}{_KEY_HINT}")
    text = record[text_key]
    if not isinstance(text, str):
        raise ValueError(f"{text_key!r} is {'null' if text is None else type(text).__name__}, not a text")
    text.encode()  # JSON can spell half of a character ("\\ud800"), which is not text
    return text


def _line_number(path: str, offset: int) -> int:
    """The number, from 1, of the line that begins at byte `offset`."""
    with _open(path) as file:
        return 1 + sum(file.read(min(1 << 20, offset - at)).count(b"\n") for at in range(0, offset, 1 << 20))
