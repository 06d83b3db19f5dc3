"""Write what is generated from the schema, configs/schema.json and docs/keys.md: python scripts/config_schema.py

With schema.json, editors complete and check job files. Those that support TOML schemas (taplo, VS Code's Even Better
TOML) find it through the first line of a job file, `#:schema ./schema.json`. The schema requires no keys, because a job
may inherit them from its `base`; `train.py --validate` reports missing keys.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

if not __package__:  # run as a file
    import keel  # noqa: F401 - Keel's packages come first

from configs.display import header, keys_by_table, sentence
from configs.errors import UserError
from configs.only_with import conditions
from configs.reading.keys import Key, tables_in
from configs.reading.toml_text import value_text
from configs.schema import Config, Table, is_run_key
from scripts.command import end, parser_of, run_command
from trainer.report.console import Console

SCHEMA_FILE = Path(__file__).resolve().parents[1] / "configs" / "schema.json"
KEYS_FILE = SCHEMA_FILE.parents[1] / "docs" / "keys.md"
_BASE = {
    "type": "string",
    "description": "Another job file, relative to this one, whose keys apply where this one does not set them.",
}


def schema_text() -> str:
    """Return the JSON schema of a job file."""
    schema = Config.model_json_schema()
    for table in _tables(Config):
        described = schema if table is Config else schema["$defs"][table.__name__]
        for name, field in table.model_fields.items():
            words = [field.description or "", *map(str, conditions(field))]
            described["properties"][name]["description"] = " ".join(words)
    schema = _plain(schema)
    schema["title"] = "Keel job file"
    schema["properties"] = {"base": _BASE, **schema["properties"]}
    return json.dumps(schema, indent=2) + "\n"


def keys_text() -> str:
    """Return the page of every key, in Markdown."""
    sections = [_HEADING]
    for table, keys in keys_by_table():
        kind = "Run table" if is_run_key(table.name) else "Machine table"
        lines = [f"## `{header(table)}`", "", f"{kind}. {sentence(table)}", ""]
        rows = [_row(key) for key in keys]
        head = ["| key | type | default | meaning |", "|---|---|---|---|"] if rows else []
        sections.append("\n".join([*lines, *head, *rows]).rstrip())
    return "\n\n".join(sections) + "\n"


_HEADING = """\
# Every key of a job file

Generated from `configs/schema.py` by `python scripts/config_schema.py`. `python train.py --help` prints the same.
[configs.md](configs.md) explains run tables, machine tables and inheritance. A key without a default may be unset again
with the value `"none"`."""


def _row(key: Key) -> str:
    cells = (f"`{key.name.rpartition('.')[2]}`", key.type, _default(key), sentence(key))
    return f"| {' | '.join(' '.join(cell.split()).replace('|', chr(92) + '|') for cell in cells)} |"


def _default(key: Key) -> str:
    if key.required:
        return "required"
    return "" if key.default is None else f"`{value_text(key.default)}`"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write both files; returns the exit code."""
    parser_of(__doc__).parse_args(arguments)

    def work(console: Console) -> None:
        for path, text in ((SCHEMA_FILE, schema_text()), (KEYS_FILE, keys_text())):
            try:
                path.write_text(text, encoding="utf-8")
            except OSError as error:
                raise UserError(f"{path} can't be written: {error.strerror}") from None
            console.line(f"wrote {path}")

    return run_command(work, "stopped")


def _tables(table: type[Table]) -> Iterator[type[Table]]:
    yield table
    for field in table.model_fields.values():
        for inner in tables_in(field.annotation):
            yield from _tables(inner)


def _plain(node: Any) -> Any:
    """Remove titles, which are redundant, `required`, because a base may supply those keys, and what is the default.

    That further properties are allowed is the default, which pydantic writes from 2.11 on.
    """
    if isinstance(node, list):
        return [_plain(item) for item in node]
    if not isinstance(node, dict):
        return node
    dropped = {"title", "required"} | ({"additionalProperties"} if node.get("additionalProperties") is True else set())
    return {key: _plain(value) for key, value in node.items() if key not in dropped or isinstance(value, dict)}


if __name__ == "__main__":
    end(main)
