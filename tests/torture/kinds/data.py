"""Text, token files, and what preparation records of them."""

import csv
import gzip
import io
import json
import random
from pathlib import Path
from typing import Any

import xxhash

from configs.errors import UserError
from tests.torture.kinds.kind import TEXT, Kind
from tests.torture.mutations import mutated_bytes, mutated_json
from trainer.data.text.bad_files import BadFiles
from trainer.data.text.documents import documents
from trainer.data.text.listing import NAME as LIST_NAME
from trainer.data.text.listing import InputFile, changes, read_list, write_list
from trainer.data.text.prepared_folder import RECORD, Settings, described, is_finished, read_record
from trainer.data.text.token_writer import TokenFileWriter
from trainer.data.token_file import SUFFIX, TokenFolder


def _token_file(folder: Path, has_mask: bool = False) -> Path:
    path = folder / f"00000{SUFFIX}"
    with TokenFileWriter(path, 500, "0" * 32, has_mask) as file:
        dice = random.Random(0)
        for _ in range(40):
            file.append([dice.randrange(500 << has_mask) for _ in range(dice.randint(1, 300))])
    return path


def _masked_token_file(folder: Path) -> Path:
    return _token_file(folder, has_mask=True)


def _rehash_tokens(path: Path) -> None:
    """Make the header's own hash true again."""
    content = bytearray(path.read_bytes())
    if len(content) >= 80:
        content[72:80] = xxhash.xxh3_64_digest(content[:72])
        path.write_bytes(content)


def _read_tokens(path: Path) -> str:
    folder = TokenFolder(path.parent, 500)
    tokens = folder.read(0, folder.n_tokens)
    assert tokens.max() < 500
    folder.document_starts(0, folder.n_tokens)
    return ""


def _jsonl(folder: Path) -> Path:
    lines = [json.dumps({"text": text, "meta": {"id": 2**64 - 1}}) for text in TEXT.split("\n\n")[:60]]
    (folder / "a.jsonl").write_text("\n".join(lines) + "\n")
    return folder / "a.jsonl"


def _text(folder: Path) -> Path:
    (folder / "a.txt").write_text(TEXT)
    return folder / "a.txt"


def _jsonl_gz(folder: Path) -> Path:
    content = _jsonl(folder).read_bytes()
    (folder / "a.jsonl").rename(folder / "a.jsonl.gz")
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(content))
    return folder / "a.jsonl.gz"


def _json(folder: Path) -> Path:
    (folder / "a.json").write_text(json.dumps([{"text": text} for text in TEXT.split("\n\n")[:60]]))
    return folder / "a.json"


def _csv(folder: Path) -> Path:
    with (folder / "a.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["id", "text"], *enumerate(TEXT.split("\n\n")[:60])])
    return folder / "a.csv"


def _inputs(folder: Path) -> Path:
    write_list(folder, [InputFile("text", f"text/{i}.txt", i, 2**60, "0" * 32) for i in range(20)])
    return folder / LIST_NAME


def _read_inputs(path: Path) -> str:
    changed, gone = changes(read_list(path.parent), ["text"], path.parent)
    return "\n".join([*changed, *gone])


def _parquet(folder: Path) -> Path:
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.table({"id": list(range(60)), "text": TEXT.split("\n\n")[:60]})
    parquet.write_table(table, folder / "a.parquet", row_group_size=20)
    return folder / "a.parquet"


def _mutated_parquet(content: bytes, dice: random.Random) -> bytes:
    import pyarrow
    from pyarrow import parquet

    if dice.random() < 0.9:
        return mutated_bytes(content, dice)
    columns: tuple[Any, ...] = (
        pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 5_000), ["x" * 1_000_000]),
        [["x"]] * 100,
        [b"\xff\xfe"] * 100,
        [None] * 100,
        [2**62] * 100,
    )
    out = io.BytesIO()
    parquet.write_table(pyarrow.table({"text": dice.choice(columns)}), out, compression=dice.choice(("zstd", "none")))
    return out.getvalue()


def _read_text(path: Path) -> str:
    bad = BadFiles(3)
    for text in documents(str(path), "text", bad):
        text.encode()
    if bad.messages:
        raise UserError("\n".join(bad.messages))
    return ""


_SETTINGS = Settings(["a"], "text", "0" * 32, 500, 0.0)


def _prepared(folder: Path) -> Path:
    split = {"documents": 1, "tokens": 2, "text_bytes": 3}
    values = {
        "settings": _SETTINGS.__dict__,
        "inputs": {"files": 1, "bytes": 3, "xxh3_128": "0" * 32},
        "skipped": {"empty files": {"count": 1, "first": ["x"]}},
        "bad_files": ["x"],
        "empty_documents": 0,
        "train": split,
        "masked": {"train": {"tokens_with_loss": 1, "documents_without_loss": 0}},
    }
    (folder / RECORD).write_text(json.dumps(values, indent=2))
    return folder / RECORD


def _read_prepared(path: Path) -> str:
    """As the command that made it is given once more."""
    if not is_finished(path.parent, _SETTINGS):
        raise UserError("it would be prepared again")
    record = read_record(path.parent)
    return "\n".join([*record["bad_files"], *described(record, path.parent)])


KINDS = (
    Kind("token file", _token_file, mutated_bytes, _read_tokens, _rehash_tokens),
    Kind("token file with a mask", _masked_token_file, mutated_bytes, _read_tokens, _rehash_tokens),
    Kind(".txt", _text, mutated_bytes, _read_text),
    Kind(".jsonl", _jsonl, mutated_bytes, _read_text),
    Kind(".jsonl.gz", _jsonl_gz, mutated_bytes, _read_text),
    Kind(".json", _json, mutated_bytes, _read_text),
    Kind(".csv", _csv, mutated_bytes, _read_text),
    Kind(LIST_NAME, _inputs, mutated_bytes, _read_inputs),
    Kind(".parquet", _parquet, _mutated_parquet, _read_text),
    Kind(RECORD, _prepared, mutated_json, _read_prepared),
)
