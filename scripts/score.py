"""Compute the loss of each validation sequence: scripts/score.py RUN [--step N] [--table.key VALUE ...]

The sequences are those of the run's [validation], in the checkpoint's stage. Machine keys, such as --mesh.tp 2, and
[validation] may be set on the command line: the checkpoint loads on any mesh, which does not change the losses. One
rank needs no --mesh keys, whatever the run's mesh was. The result goes to RUN/scores.json; `keel compare` compares two
of them sequence by sequence.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a file
    import keel  # noqa: F401 - Keel's packages come first

from checkpoint.find import find_checkpoint, require_run, tokenizer_of
from checkpoint.lock import ReadLock
from checkpoint.manifest import read_manifest
from configs.errors import KeelError, files_that_fail
from configs.load import LoadedConfig, load
from configs.schema import Config, LrSchedule, Mesh, Optimizer
from configs.table import with_keys
from scripts.command import end, folder_argument, parser_of, positive, refuse_keys, stopping_at_once, without_overrides
from scripts.launcher import run_ranks
from trainer.lifecycle import tell_torchrun
from trainer.report.console import Console

_OF_TRAINING = (
    *("average", "data.prepare", "data.sources", "distillation", "stages"),
    *(f"training.{key}" for key in ("max_norm", "max_skipped_steps", "norm_type", "seed", "steps", "z_loss_weight")),
    *(f"optimizer.{key}" for key in Optimizer.model_fields if key != "name"),
    *(f"lr_schedule.{key}" for key in LrSchedule.model_fields if key != "name"),
)
"""The keys without effect on a score; a name may be that of a user's own code, which is imported all the same."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Score a run; returns the exit code."""
    words = [*(sys.argv[1:] if arguments is None else arguments)]
    own, overrides = without_overrides(words)
    options = _parser().parse_args(own)
    if options.ranks > 1 and "RANK" not in os.environ:
        return run_ranks(__file__, words, options.ranks)
    at_stop = stopping_at_once("the same command computes the losses from the beginning")
    with at_stop, Console(int(os.environ.get("RANK", "0"))) as console:
        try:
            with files_that_fail():
                score_run(options.run, options.step, overrides, console)
        except KeelError as error:
            tell_torchrun(str(error))
            if os.environ.get("RANK", "0") == "0":
                console.error(str(error))
            return error.exit_code
    return 0


def score_run(folder: Path, step: int | None, overrides: Sequence[str], console: Console) -> None:
    """Score a run in this process, one of WORLD_SIZE ranks, and write its scores.json.

    Raises:
        KeelError: the run has no checkpoint, or it or the sequences can't be read.
    """
    require_run(folder)
    checkpoint = find_checkpoint(folder, step)
    read_lock = ReadLock(checkpoint)  # a run that trains would remove it meanwhile
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    job = load_for_scoring(folder, read_manifest(checkpoint).step, overrides, ranks)
    import torch.distributed as dist

    from parallelisms.mesh import start_process_group
    from parallelisms.nccl import configure_nccl, nccl_settings
    from parallelisms.ranks import on_rank_zero
    from scripts.comparison.score import score, write_scores
    from trainer.guards.environment import device_type
    from trainer.numerics import set_numerics

    kind = device_type(job)
    set_numerics(job.config.training, kind)
    if kind == "cuda":
        configure_nccl(nccl_settings(job.config), os.environ)
    device = start_process_group(kind, job.config.job.timeout_seconds)
    try:
        with read_lock:
            found = score(with_tokenizer_of(checkpoint, job), checkpoint, device, console)
        # Before the folder, which may be another's, has refused the file.
        console.line(f"{checkpoint}: loss {found.loss:.5f} on {len(found.losses)} validation sequences")
        on_rank_zero(None, lambda: write_scores(folder, found))
    finally:
        dist.destroy_process_group()
    console.line(f"written to {folder}/scores.json")


def load_for_scoring(folder: Path, step: int, overrides: Sequence[str], ranks: int) -> LoadedConfig:
    """Load a run folder's job with the keys of the stage of a step.

    The job is not elastic then; one rank drops its mesh, unless the overrides set one.

    Raises:
        ConfigError: the job is not valid, or the overrides set what no score depends on.
    """
    refuse_keys(overrides, _OF_TRAINING, "without effect on a run that is trained already; leave it out")
    drops_mesh = ranks == 1 and not any(word.startswith("--mesh.") for word in overrides)
    alone = [f"--mesh.{axis}=1" for axis in Mesh.model_fields] if drops_mesh else []
    words = ["--elastic.enable=false", *alone, *overrides]
    return load(str(folder / "config.toml"), words, ranks, is_stored=True, at_step=step)


def with_tokenizer_of(checkpoint: Path, job: LoadedConfig) -> Config:
    """The config of a run's job with the tokenizer of its checkpoint, unless the command line names one."""
    config = job.config
    tokenizer = tokenizer_of(checkpoint)
    if tokenizer is None or job.origins["tokenizer.path"].startswith("--"):
        return config
    return with_keys(config, tokenizer={"path": str(tokenizer)})


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    parser.add_argument("run", type=folder_argument, metavar="RUN", help="run folder")
    parser.add_argument("--step", type=int, metavar="N", help="the checkpoint of this step (default: the newest)")
    parser.add_argument(
        "--ranks", type=positive, default=1, metavar="N", help="ranks to start on this host (default: 1)"
    )
    return parser


if __name__ == "__main__":
    end(main)
