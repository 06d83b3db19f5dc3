"""Import a plain torch optimizer's state into a checkpoint: scripts/import_optimizer.py CHECKPOINT STATE OUTPUT

The inverse of export_optimizer.py. CHECKPOINT is a folder such as runs/debug/checkpoints/step-00000150, of the run to
continue. STATE is a folder that export_optimizer.py wrote, with all parts of tensors that stayed sharded; or a similar
one, or the file of the job's only optimizer, in which torch.save wrote the optimizer's state_dict(). OUTPUT is a new
checkpoint: CHECKPOINT with that state, and with the weights of --weights, if given. The run resumes from it with
checkpoint.load = "OUTPUT", on any mesh; step, data and learning rate are those of CHECKPOINT.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a file, from any folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.command import end, parser_of, run_command
from scripts.export_optimizer import described_optimizers
from trainer.report.console import Console


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the import; returns the exit code."""
    options = _parser().parse_args(arguments)
    from checkpoint.export.optimizer_import import import_optimizer

    def work(console: Console) -> None:
        optimizers, _ = described_optimizers(options.checkpoint)
        with console.progress(f"Importing to {options.output}", in_bytes=True) as report:
            differences = import_optimizer(
                options.checkpoint,
                options.state,
                options.output,
                optimizers,
                weights=options.weights,
                verify=options.verify,
                progress=report,
            )
        for line in differences:
            console.warning(f"the job's own settings apply: {line}")
        console.line(f'To resume from it: checkpoint.load = "{options.output}" and, in the same run, go_back = 1')

    return run_command(work, "stopped; nothing was written")


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("checkpoint", type=Path, metavar="CHECKPOINT", help="checkpoint folder of the run to continue")
    add("state", type=Path, metavar="STATE", help="folder of an export, or a file with an optimizer's state")
    add("output", type=Path, metavar="OUTPUT", help="folder to create")
    add(
        "--weights",
        type=Path,
        metavar="FILE",
        help="file of torch.save(model.state_dict(), FILE); replaces CHECKPOINT's weights",
    )
    add("--verify", choices=("hash", "size"), default="hash", help="how to verify the checkpoint (default: hash)")
    return parser


if __name__ == "__main__":
    end(main)
