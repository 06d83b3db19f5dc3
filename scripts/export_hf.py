"""Export a checkpoint's model to Hugging Face format, or its optimizer state: scripts/export_hf.py CHECKPOINT OUTPUT

CHECKPOINT is a run folder (its newest checkpoint), or a folder such as runs/debug/checkpoints/step-00000150, saved on
any mesh. An export takes the memory of one file of weights (--max-shard-size). OUTPUT must not exist; it
appears when it is complete. It may be a place in object storage, to which the files are copied at the end.

With --optimizer, OUTPUT gets the optimizer state for plain torch, in a file with the optimizer's name, adamw.pt (with
Muon, in two), which torch.load(..., weights_only=True) reads and the optimizer's load_state_dict accepts; its groups
and their param_names list the parameters that it needs, in order. The experts of a mixture stay sharded, in a file for
each rank that wrote some, and index.json says where each part is. --gather chooses what is gathered.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if not __package__:  # run as a file
    import keel  # noqa: F401 - Keel's packages come first

from checkpoint.find import HF_CONFIG_NAME, OPTIMIZER_INDEX_NAME, tokenizer_of
from checkpoint.lock import ReadLock
from configs.errors import ConfigError, UserError
from configs.own_code import admit, is_import_path
from configs.reading.overrides import split_flags
from scripts.command import checkpoint_in, end, folder_for, parsed, parser_of, place_argument, run_command
from trainer.report.console import Console
from trainer.report.units import parse_size

if TYPE_CHECKING:
    from checkpoint.export.hf_export import TokenizerFiles

DEFAULT_SHARD_SIZE = "5GB"
_OF_OWN_CODE = ("--model.architecture", "--lr_schedule.name")
"""Keys by which the command line names code of the user's own that an optimizer's state depends on."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the export; returns the exit code."""
    parser = _parser()
    options, overrides = parsed(parser, arguments)
    of_model = (options.dtype, options.max_shard_size, options.tokenizer, options.own_class)
    if options.optimizer and any(of_model):
        parser.error(
            "--dtype, --max-shard-size, --tokenizer and --own-class are for a model; leave them out with --optimizer"
        )
    if options.gather and not options.optimizer:
        parser.error("--gather needs --optimizer")

    def work(console: Console) -> None:
        _admit(overrides, _OF_OWN_CODE if options.optimizer else ())
        last = OPTIMIZER_INDEX_NAME if options.optimizer else HF_CONFIG_NAME
        with folder_for(options.output, last, console) as output:
            checkpoint = checkpoint_in(options.checkpoint, console)  # a wrong path costs no import of torch
            export = _export_optimizer if options.optimizer else _export_model
            with ReadLock(checkpoint):  # a run that trains would remove it meanwhile
                export(checkpoint, output, options, console)

    return run_command(work, "stopped; the export is not complete")


def _admit(overrides: Sequence[str], flags: Sequence[str]) -> None:
    """Import the code of the user's own that the command line names by these keys of a job.

    Raises:
        UserError: it can't be imported.
        ConfigError: another key is set.
    """
    for flag, value in split_flags(overrides):
        if flag not in flags or not is_import_path(value):
            raise ConfigError(
                f"{flag}: without effect on an export; only --optimizer takes {' and '.join(_OF_OWN_CODE)}, for code "
                "of your own; leave it out"
            )
        admit(str(value), flag)


def _export_model(checkpoint: Path, output: Path, options: argparse.Namespace, console: Console) -> None:
    from checkpoint.export.hf_export import export_hf

    tokenizer = _tokenizer(checkpoint, options.tokenizer)
    if not tokenizer.files and options.tokenizer is None:
        console.warning("exported without a tokenizer: the job sets no tokenizer.path; --tokenizer FILE names one")
    with console.progress(f"Exporting to {options.output}", in_bytes=True) as report:
        export_hf(
            checkpoint,
            output,
            tokenizer,
            dtype=options.dtype,
            max_shard_bytes=options.max_shard_size or parse_size(DEFAULT_SHARD_SIZE),
            verify=options.verify,
            progress=report,
            warn=console.warning,
            own_class=options.own_class,
        )


def _export_optimizer(checkpoint: Path, output: Path, options: argparse.Namespace, console: Console) -> None:
    from scripts.export.optimizer import export_optimizer

    gather = list(dict.fromkeys(options.gather or ["dense"]))
    with console.progress(f"Exporting to {options.output}", in_bytes=True) as report:
        export_optimizer(checkpoint, output, gather, options.verify, report)


def _tokenizer(checkpoint: Path, wanted: str | None) -> "TokenizerFiles":
    """Find the tokenizer of the command line, or of the job that wrote the checkpoint."""
    from checkpoint.export.hf_export import TokenizerFiles
    from scripts.export.hf_tokenizer import tokenizer_files

    path = wanted or tokenizer_of(checkpoint)
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
    add("checkpoint", type=place_argument, metavar="CHECKPOINT", help="run folder or checkpoint")
    add("output", metavar="OUTPUT", help="folder to create; or its place in object storage, s3://BUCKET/NAME")
    add("--dtype", choices=("float32", "bfloat16"), help="type of the weights (default: as in the checkpoint)")
    add(
        "--max-shard-size",
        type=parse_size,
        metavar="SIZE",
        help=f"maximum size of a file (default: {DEFAULT_SHARD_SIZE})",
    )
    add("--verify", choices=("hash", "size"), default="hash", help="how to verify the checkpoint (default: hash)")
    add("--tokenizer", metavar="FILE", help="replaces the job's tokenizer.path; none: no tokenizer")
    add(
        "--own-class",
        action="store_true",
        help="write DeepSeekMoE as DeepseekForCausalLM, which transformers does not have, not as Qwen2MoeForCausalLM",
    )
    add("--optimizer", action="store_true", help="export the optimizer state for plain torch instead of the model")
    add(
        "--gather",
        action="append",
        metavar="HOW",
        help='of the optimizer state: all; dense: leave the experts sharded (default); "PATTERN=stay", which may be '
        "repeated: leave parameters with such names sharded",
    )
    return parser


if __name__ == "__main__":
    end(main)
