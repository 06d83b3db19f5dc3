"""Write the texts that configs/debug_stages.toml reads beside the standard library: scripts/examples/python_texts.py

Both are on every machine that runs Keel: Python's documentation, as `help()` prints it, and the licenses of the
packages that are installed. Every tenth document is held out, for `keel score`.
"""

import json
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path
from pydoc_data.topics import topics

FOLDER = Path("runs/data/python_texts")
NAMES = ("LICENSE", "LICENCE", "COPYING", "NOTICE")


def main() -> None:
    """Write documentation.jsonl and licenses.jsonl, and what is held out of each."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    write("documentation", [topics[name] for name in sorted(topics)])
    write("licenses", sorted(set(licenses())))


def licenses() -> Iterator[str]:
    """The licenses of the installed packages; some are the same text."""
    for package in distributions():
        for file in package.files or []:
            path = Path(file.locate())
            if file.name.upper().startswith(NAMES) and file.suffix != ".py" and path.is_file():
                yield path.read_text(errors="replace")


def write(name: str, texts: list[str]) -> None:
    """Write a source and its held-out part."""
    held_out = texts[::10]
    trained = [text for number, text in enumerate(texts) if number % 10]
    for file, part in ((f"{name}.jsonl", trained), (f"{name}_held_out.jsonl", held_out)):
        lines = [json.dumps({"text": text}) + "\n" for text in part]
        (FOLDER / file).write_text("".join(lines))
        print(f"{FOLDER / file}: {len(part)} documents, {sum(map(len, part)):,} characters")


if __name__ == "__main__":
    main()
