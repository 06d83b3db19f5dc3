"""Write configs/schema.json, with which editors complete and check job files: python scripts/config_schema.py

Editors that support TOML schemas (taplo, VS Code's Even Better TOML) find it through the first line of a job file,
`#:schema ./schema.json`. The schema requires no keys, because a job may inherit them from its `base`;
`train.py --validate` reports missing keys.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if not __package__:  # run as a file, from any folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from configs.only_with import conditions
from configs.reading.keys import table_in
from configs.schema import Config, Table
from scripts.command import parser_of

SCHEMA_FILE = Path(__file__).resolve().parents[1] / "configs" / "schema.json"
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


def _tables(table: type[Table]) -> Iterator[type[Table]]:
    yield table
    for field in table.model_fields.values():
        if inner := table_in(field.annotation):
            yield from _tables(inner)


def _plain(node: Any) -> Any:
    """Remove titles, which are redundant, and `required`, because a base may supply those keys."""
    if isinstance(node, list):
        return [_plain(item) for item in node]
    if not isinstance(node, dict):
        return node
    return {
        key: _plain(value) for key, value in node.items() if key not in ("title", "required") or isinstance(value, dict)
    }


if __name__ == "__main__":
    parser_of(__doc__).parse_args()
    SCHEMA_FILE.write_text(schema_text(), encoding="utf-8")
    print(f"wrote {SCHEMA_FILE}")
