"""Turn text into token files: scripts/prepare_data.py INPUT... --output FOLDER --tokenizer FILE

Writes OUTPUT/train and, with --validation-fraction, OUTPUT/validation: the folders that a job file's
`[[data.sources]]` and `[[validation.sources]]` name. After a stop, the same command resumes where it stopped.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if not __package__:  # run as a file, from any folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.command import end, parser_of, run_command
from trainer.data.prepare import TRAIN, VALIDATION, Split, prepare
from trainer.report.console import Console


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the preparation; returns the exit code."""
    options = _parser().parse_args(arguments)

    def work(console: Console) -> None:
        with console.progress(f"Writing token files to {options.output}") as progress:
            record = prepare(
                options.inputs,
                options.output,
                options.tokenizer,
                processes=options.processes,
                validation_fraction=options.validation_fraction,
                max_bad_files=options.max_bad_files,
                progress=progress,
                text_key=options.text_key,
            )
        _say(console, record, options.output)

    return run_command(work, "stopped; the same command resumes from there")


def _say(console: Console, record: dict[str, Any], output: Path) -> None:
    for message in record["bad_files"]:
        console.warning(f"skipped: {message}")
    if record["empty_documents"]:
        console.line(f"empty documents, skipped: {record['empty_documents']:,}")
    for name in (TRAIN, VALIDATION):
        if name in record:
            split = Split(**record[name])
            counts = f"{split.documents:,} documents, {split.tokens:,} tokens, {split.text_bytes:,} bytes of text"
            console.line(f"{output / name}: {counts}")


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("inputs", nargs="+", metavar="INPUT", help="file, folder, hub:NAME[:CONFIG], or python_stdlib")
    add("--output", type=Path, required=True, metavar="FOLDER", help="folder to create, with train/ and validation/")
    add("--tokenizer", type=Path, required=True, metavar="FILE", help="SentencePiece .model, or a tokenizer.json")
    add(
        "--processes",
        type=_positive,
        default=os.cpu_count() or 1,
        metavar="N",
        help="number of processes (default: %(default)s)",
    )
    add("--validation-fraction", type=_fraction, default=0.0, metavar="F", help="fraction of the documents to hold out")
    add("--max-bad-files", type=int, default=0, metavar="N", help="unreadable inputs that may be skipped (default: 0)")
    add("--text-key", default="text", metavar="K", help="field that holds the text in .jsonl, .parquet and Hub rows")
    return parser


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def _fraction(text: str) -> float:
    if not 0 <= (value := float(text)) < 1:
        raise argparse.ArgumentTypeError(f"{value} is not in [0, 1)")
    return value


if __name__ == "__main__":
    end(main)
