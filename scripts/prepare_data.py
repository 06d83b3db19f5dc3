"""Turn text into token files: scripts/prepare_data.py INPUT... --output FOLDER --tokenizer FILE

Writes OUTPUT/train and, with --validation-fraction, OUTPUT/validation: the folders that a job file's
`[[data.sources]]` and `[[validation.sources]]` name. After a stop, the same command resumes where it stopped.
"""

import argparse
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

if not __package__:  # run as a file
    import keel  # noqa: F401 - Keel's packages come first

from scripts.command import add_text_arguments, end, number_of, parser_of, positive, run_command, separator
from trainer.data.text.prepare import prepare
from trainer.data.text.prepared_folder import RECORD, described
from trainer.report.console import Console


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the preparation; returns the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.mask_after and not options.mask_until:
        parser.error("--mask-after does nothing without --mask-until, behind which tokens give loss")

    def work(console: Console) -> None:
        make = partial(
            prepare,
            options.inputs,
            options.output,
            options.tokenizer,
            processes=options.processes,
            validation_fraction=options.validation_fraction,
            max_bad_files=options.max_bad_files,
            text_key=options.text_key,
            separator=options.separator,
            drop_duplicates=options.drop_duplicates,
            pack=options.pack,
            mask_until=options.mask_until,
            mask_after=options.mask_after,
            say=console.line,
        )
        if (options.output / RECORD).exists():
            record = make()  # only checks that it would be the same
            console.line(f"{options.output}: already there, from the same files and settings; nothing was written")
        else:
            with console.progress("Tokenizing", in_bytes=True) as progress:
                record = make(progress=progress)
        for message in record["bad_files"]:
            console.warning(f"skipped: {message}")
        for line in described(record, options.output):
            console.line(line)

    return run_command(work, "stopped; the same command resumes from there")


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--output", type=Path, required=True, metavar="FOLDER", help="folder to create, with train/ and validation/")
    add("--tokenizer", type=Path, required=True, metavar="FILE", help="SentencePiece .model, or a tokenizer.json")
    add(
        "--processes",
        type=positive,
        default=os.cpu_count() or 1,
        metavar="N",
        help="number of processes (default: %(default)s)",
    )
    add(
        "--validation-fraction",
        type=number_of(lambda f: 0 <= f < 1, "in [0, 1)"),
        default=0.0,
        metavar="F",
        help="fraction of the documents to hold out",
    )
    add_text_arguments(parser)
    add("--drop-duplicates", action="store_true", help="use only the first of documents with exactly the same text")
    add(
        "--pack",
        type=positive,
        metavar="SEQ_LEN",
        help="pack whole documents into windows of this training.seq_len; the default is one stream, cut into windows",
    )
    add(
        "--mask-until",
        type=_marker,
        metavar="TEXT",
        help=r"only tokens behind this text give loss: an answer behind '<|assistant|>'; \n is a line end, \t a tab",
    )
    add(
        "--mask-after",
        type=_marker,
        metavar="TEXT",
        help="tokens behind this text give no loss again, until the next --mask-until: the end of an answer",
    )
    return parser


def _marker(text: str) -> str:
    """The type of an option that is a text to look for."""
    if not text:
        raise argparse.ArgumentTypeError("an empty text is everywhere; give the text that marks the place")
    return separator(text)


if __name__ == "__main__":
    end(main)
