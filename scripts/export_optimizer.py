"""Export a checkpoint's optimizer state for plain torch: scripts/export_optimizer.py CHECKPOINT OUTPUT --gather all

CHECKPOINT is a folder such as runs/debug/checkpoints/step-00000150, saved on any mesh. OUTPUT gets adamw.pt (with Muon,
also muon.pt), which torch.load(..., weights_only=True) reads and the optimizer's load_state_dict accepts; its groups
and their param_names list the parameters that it needs, in order. With --gather dense the experts of a mixture stay
sharded, in a file for each rank that wrote some; with --gather "PATTERN=stay", which may be repeated, so do the
parameters whose names match; index.json says where each part is. Tensors are processed one by one. OUTPUT must not
exist; it appears when it is complete. import_optimizer.py is the inverse.
"""

import argparse
import difflib
import fnmatch
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

if not __package__:  # run as a file, from any folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pydantic import ValidationError

from checkpoint.manifest import read_manifest
from configs.errors import UserError
from configs.plan import plan_of
from configs.schema import Config
from scripts.command import end, parser_of, run_command
from trainer.lr_schedule import learning_rate
from trainer.report.console import Console
from trainer.report.units import parse_size


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the export; returns the exit code."""
    options = _parser().parse_args(arguments)
    from checkpoint.export.optimizer_export import export_optimizer
    from checkpoint.room import free_memory

    def work(console: Console) -> None:
        optimizers, experts = described_optimizers(options.checkpoint)
        gather = list(dict.fromkeys(options.gather))
        with console.progress(f"Exporting to {options.output}", in_bytes=True) as report:
            export_optimizer(
                options.checkpoint,
                options.output,
                optimizers,
                experts if gather == ["dense"] else staying(gather, optimizers),
                gather=", ".join(gather),
                max_bytes=options.max_bytes or free_memory(),
                verify=options.verify,
                progress=report,
            )

    return run_command(work, "stopped; nothing was written")


def staying(gather: Sequence[str], optimizers: Mapping[str, dict[str, Any]]) -> set[str]:
    """Return the parameters that "PATTERN=stay" leaves sharded; none for "all".

    Raises:
        UserError: a pattern matches no parameter, or "all" or "dense" is combined with another word.
    """
    if gather == ["all"]:
        return set()
    names = [n for state in optimizers.values() for group in state["param_groups"] for n in group["param_names"]]
    stay: set[str] = set()
    for word in gather:
        pattern, _, what = word.rpartition("=")
        if what != "stay":
            raise UserError(f'--gather {word}: choose all, dense, or one or more of "PATTERN=stay"')
        matches = fnmatch.filter(names, pattern)
        if not matches:
            nearest = ", ".join(difflib.get_close_matches(pattern, names, n=3, cutoff=0))
            raise UserError(f'--gather "{word}" matches no parameter; the nearest names are {nearest}')
        stay |= set(matches)
    return stay


def described_optimizers(checkpoint: Path) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Describe the optimizers of the job that wrote the checkpoint.

    Returns:
        The `state_dict` of each optimizer by name, with meta tensors and the learning rate of the next step; and the
        names of the experts' parameters.

    Raises:
        UserError: the checkpoint holds only weights, or does not fit its own config.
    """
    import torch

    from checkpoint.safe_read import read_metadata
    from models import build_model
    from trainer.optimizer import plain_optimizers, set_lr
    from trainer.step import hidden_matrices

    manifest = read_manifest(checkpoint)
    try:
        config = Config.model_validate_json(json.dumps(manifest.config))
    except ValidationError:
        raise UserError(f"{checkpoint} holds only a model's weights, no job to continue") from None
    n_tensors = len(read_metadata(checkpoint).state_dict_metadata)
    if config.model.n_layers > n_tensors:  # building that many might never end
        raise UserError(f"{checkpoint} describes {config.model.n_layers} layers, but holds only {n_tensors} tensors")
    with torch.device("meta"):
        model = build_model(config.model).to(getattr(torch, config.training.dtype))
        optimizers = plain_optimizers(config.optimizer, list(model.named_parameters()), hidden_matrices(model))
    for optimizer in optimizers.values():
        set_lr(optimizer, learning_rate(config.lr_schedule, config.optimizer.lr, manifest.step))
    of_experts = tuple(f"{module}." for module in plan_of(model).experts)
    experts = [name for name, _ in model.named_parameters() if name.startswith(of_experts)]
    return {name: optimizer.state_dict() for name, optimizer in optimizers.items()}, experts


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("checkpoint", type=Path, metavar="CHECKPOINT", help="checkpoint folder")
    add("output", type=Path, metavar="OUTPUT", help="folder to create")
    add(
        "--gather",
        action="append",
        required=True,
        metavar="HOW",
        help='all; dense: leave the experts sharded; "PATTERN=stay": leave parameters with such names sharded',
    )
    add("--max-bytes", type=parse_size, metavar="SIZE", help="maximum size of tensors in memory (default: free memory)")
    add("--verify", choices=("hash", "size"), default="hash", help="how to verify the checkpoint (default: hash)")
    return parser


if __name__ == "__main__":
    end(main)
