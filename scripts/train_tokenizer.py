"""Train a SentencePiece BPE tokenizer: scripts/train_tokenizer.py INPUT... --output FILE --vocab-size N

Decoding returns exactly the text that was encoded, because nothing is normalized and any character can be encoded as
bytes. The same text gives the same file. All text is held in memory: of a large corpus, use a sample of some gigabytes.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a file
    import keel  # noqa: F401 - Keel's packages come first

from scripts.command import add_text_arguments, end, parser_of, positive, run_command
from trainer.data.text.bad_files import PATIENCE, BadFiles
from trainer.data.text.documents import documents
from trainer.report.console import Console


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the training; returns the exit code."""
    options = _parser().parse_intermixed_args(arguments)
    bad = BadFiles(options.max_bad_files, PATIENCE)
    texts = (text for name in options.inputs for text in documents(name, options.text_key, bad, options.separator))

    def work(console: Console) -> None:
        from trainer.data.text.fill_in import NAMES as FIM_NAMES
        from trainer.data.tokenizer import train_sentencepiece  # and with it NumPy, for which --help need not wait

        with console.progress(f"Training a tokenizer of {options.vocab_size:,} pieces"):
            names = FIM_NAMES[0] if options.fim else ()
            train_sentencepiece(texts, options.output, options.vocab_size, bad.check, names)
        for message in bad.messages:
            console.warning(f"skipped: {message}")
        for line in bad.described():
            console.line(line)
        console.line(f"{options.output}: {options.vocab_size:,} pieces")

    return run_command(work, "stopped; nothing was written")


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--output", type=Path, required=True, metavar="FILE", help="the .model file to write")
    add(
        "--vocab-size",
        type=positive,
        required=True,
        metavar="N",
        help="number of pieces, including control symbols and bytes (259)",
    )
    add(
        "--fim",
        action="store_true",
        help="with the tokens that fill in the middle: <fim_prefix>, <fim_suffix>, <fim_middle>",
    )
    add_text_arguments(parser)
    return parser


if __name__ == "__main__":
    end(main)
