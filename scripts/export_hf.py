"""Export a checkpoint's model to Hugging Face format: scripts/export_hf.py CHECKPOINT OUTPUT

CHECKPOINT is a folder such as runs/debug/checkpoints/step-00000150, saved on any mesh. Weights are processed one
by one, so a small machine can export a large model. OUTPUT must not exist; it appears when it is complete.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if not __package__:  # run as a file, from any folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from checkpoint.manifest import read_manifest
from configs.errors import UserError
from scripts.command import end, parser_of, run_command
from trainer.report.console import Console
from trainer.report.units import parse_size

if TYPE_CHECKING:
    from checkpoint.export.hf import TokenizerFiles


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the export; returns the exit code."""
    options = _parser().parse_args(arguments)
    from checkpoint.export.hf import export_hf

    def work(console: Console) -> None:
        tokenizer = _tokenizer(options.checkpoint, options.tokenizer)
        if not tokenizer.files:
            console.warning("exported without a tokenizer: the job sets no tokenizer.path, and --tokenizer names none")
        with console.progress(f"Exporting to {options.output}", in_bytes=True) as report:
            export_hf(
                options.checkpoint,
                options.output,
                tokenizer,
                dtype=options.dtype,
                max_shard_bytes=options.max_shard_size,
                verify=options.verify,
                progress=report,
            )

    return run_command(work, "stopped; nothing was written")


def _tokenizer(checkpoint: Path, wanted: str | None) -> "TokenizerFiles":
    """Find the tokenizer of the command line, or of the job that wrote the checkpoint."""
    from checkpoint.export.hf import TokenizerFiles
    from trainer.data.hf_tokenizer import tokenizer_files

    path = wanted or read_manifest(checkpoint).value("tokenizer", "path", str)
    if path == "none":
        return TokenizerFiles()
    try:
        return tokenizer_files(path)
    except UserError as error:
        raise UserError(
            f"{error}\nName the tokenizer with --tokenizer FILE, or omit it with --tokenizer none"
        ) from None


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("checkpoint", type=Path, metavar="CHECKPOINT", help="checkpoint folder")
    add("output", type=Path, metavar="OUTPUT", help="folder to create")
    add("--dtype", choices=("float32", "bfloat16"), help="type of the weights (default: as in the checkpoint)")
    add(
        "--max-shard-size",
        type=parse_size,
        default="5GB",
        metavar="SIZE",
        help="maximum size of a file (default: %(default)s)",
    )
    add("--verify", choices=("hash", "size"), default="hash", help="how to verify the checkpoint (default: hash)")
    add("--tokenizer", metavar="FILE", help="replaces the job's tokenizer.path; none: no tokenizer")
    return parser


if __name__ == "__main__":
    end(main)
