"""Import a Hugging Face model as a checkpoint to continue training: scripts/import_hf.py SOURCE OUTPUT

SOURCE is a folder with config.json and safetensors files of a family that Keel has (docs/hugging_face.md), or, with
--as-it-is, of any family that the installed transformers has (architecture = "hf"). OUTPUT gets the
weights, the tokenizer and model.toml, a base for job files. A job starts from them with
`checkpoint.init_from = "OUTPUT"`, on any mesh. OUTPUT may be a place in object storage.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a file
    import keel  # noqa: F401 - Keel's packages come first

from checkpoint.bucket_files import bring
from checkpoint.bucket_storage import put_as_saves_do
from checkpoint.find import HF_CONFIG_NAME
from checkpoint.manifest import MANIFEST_NAME
from configs.errors import UserError
from configs.files import is_file, is_folder, whole
from configs.places import is_url
from scripts.command import end, folder_for, parser_of, place, run_command
from trainer.report.console import Console


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the import; returns the exit code."""
    options = _parser().parse_args(arguments)

    def work(console: Console) -> None:
        source = Path(options.source)
        if is_url(options.source):
            with console.progress(f"Bringing {options.source}", in_bytes=True) as report:
                source = bring(options.source, report)
        if not is_file(source / HF_CONFIG_NAME):  # a wrong path costs no import of torch
            what = f"it has no {HF_CONFIG_NAME}" if is_folder(source) else "no such folder"
            raise UserError(f"{whole(source)} is not a Hugging Face model folder: {what}")
        from checkpoint.export.hf_import import MODEL_TOML, import_hf, unread
        from scripts.export.hf_tokenizer import find_tokenizer

        tokenizer = find_tokenizer(source)
        home = options.output if is_url(options.output) else str(Path(options.output).resolve())
        with (
            folder_for(options.output, MANIFEST_NAME, console, put_as_saves_do) as output,
            console.progress(f"Importing to {options.output}", in_bytes=True) as report,
        ):
            import_hf(source, output, tokenizer, options.dtype, report, options.as_it_is, home)
        for what in () if options.as_it_is else unread(source):
            console.warning(what)
        if tokenizer is None:
            console.warning(f"{source} has no tokenizer that Keel can read; set tokenizer.path to one")
        base = place(options.output).resolve() / MODEL_TOML  # a base is relative to the job file
        console.line(f'To train it: base = "{base}", checkpoint.init_from = "{home}"')

    return run_command(work, "stopped; nothing was written")


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("source", metavar="SOURCE", help="folder of a Hugging Face model; or its place in object storage")
    add("output", metavar="OUTPUT", help="folder to create; or its place in object storage, s3://BUCKET/NAME")
    add(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="type of the weights (default: one that holds the source exactly)",
    )
    add("--as-it-is", action="store_true", help='for transformers\' own modules: architecture = "hf"')
    return parser


if __name__ == "__main__":
    end(main)
