"""How often `keel compare` calls a difference between equal configs: python -m tests.a_against_a [--trials 200]

Two runs of one config and seed have the same bits, so they tell nothing: the difference is 0 in every trial. Here B
differs from A in the name of its source of training data, which only keys the order of the samples. Both learn from the
same text, start from the same weights and are equally good, but never equal, as if one of them had been run on another
day. Every trial has seeds of its own. The trainings are real, but run in this process without run folders and
checkpoints, which 1,200 of them would spend most of their time on; `trials_of_the_command` goes the whole way. With
--sweep, other configs are compared, such as two learning rates.
"""

import argparse
import json
import os
import shutil
import statistics
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from configs.layout import mesh_sizes
from configs.load import load
from parallelisms.mesh import build_mesh, start_process_group
from scripts import compare as command
from scripts import score
from scripts.comparison.score import sequence_sums
from scripts.comparison.statistics import Comparison, compare
from tests.end_to_end.launch import TEXT
from trainer.data.loader import build_loader
from trainer.lifecycle import StopRequest
from trainer.lr_schedule import learning_rate
from trainer.preparation import prepare_data
from trainer.report.console import Console
from trainer.run import run
from trainer.step import build_learner

EQUAL = "data.sources.0.name=text,other"
JOB = ("--metrics.tensorboard", "false", "--metrics.interval", "100", "--checkpoint.mode", "sync")
SIZE = (
    *("--validation.interval", "0", "--validation.sequences", "32", "--training.steps", "12"),
    *("--training.micro_batch_size", "8"),
)


def launch_here(line: Sequence[str]) -> int:
    """Run a keel command in this process, which costs a tenth of a launch."""
    name, target, *words = line
    assert "RANK" not in os.environ
    if name == "score":
        return score.main([target, *words])
    try:
        return run(load(target, words, 1), StopRequest())
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def losses(sweep_value: str, seed: int) -> np.ndarray:
    """The loss of each validation sequence after a training."""
    config = load(str(TEXT), (*SIZE, "--training.seed", str(seed), f"--{sweep_value}"), 1).config
    learner = build_learner(config, build_mesh(mesh_sizes(config, 1), torch.device("cpu")))
    with closing(build_loader(config, 0, 1, 0)) as loader:
        for step in range(config.training.steps):
            learner.step(next(loader), learning_rate(config.lr_schedule, config.optimizer.lr, step))
    sums = sequence_sums(config, learner).numpy()
    return sums[0] / sums[1].mean()


def trials(numbers: range, sweep: str, seeds: int) -> Iterator[Comparison]:
    """Trainings of two values with the same seeds, compared; each trial has seeds of its own."""
    key, _, values = sweep.partition("=")
    first, second = (f"{key}={value}" for value in values.split(","))
    for trial in numbers:
        own = range(1 + trial * seeds, 1 + (trial + 1) * seeds)
        yield compare(*(np.stack([losses(value, seed) for seed in own]) for value in (first, second)), 1)


def trials_of_the_command(n: int, sweep: str, seeds: int, folder: Path) -> Iterator[dict[str, Any]]:
    """The comparison of each trial; `folder` is the current one, with `text/` in it."""
    for trial in range(n):
        output, report = folder / "runs", folder / "report.json"
        words = [str(TEXT), "--sweep", sweep, "--seeds", str(seeds), "--output", str(output), "--json", str(report)]
        first = ("--training.seed", str(1 + trial * seeds))
        with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
            assert command.main([*words, *first, *JOB, *SIZE], launch_here) == 0
        yield json.loads(report.read_text())["comparisons"][0]
        shutil.rmtree(output)


def gather_text(folder: Path) -> None:
    """Make a folder the current one, with some real text."""
    (folder / "text").mkdir()
    for module in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-c]*.py")):
        shutil.copy(module, folder / "text")
    os.chdir(folder)


def prepare() -> None:
    """Make tokenizer and token files in the current folder."""
    config = load(str(TEXT), SIZE, 1).config
    with Console() as console:
        prepare_data(config, console, StopRequest())


def summary(found: list[Comparison]) -> str:
    """How many trials call a difference, and how wide the intervals are."""
    called = sum(each.is_decided for each in found)
    width = statistics.median(each.paired or 0.0 for each in found)
    unpaired = statistics.median((each.unpaired or 0.0) / (each.paired or 1.0) for each in found)
    floor = statistics.median(each.noise_floor[0] or 0.0 for each in found)
    return (
        f"a difference is called in {called} of {len(found)} trials; median half-width {width:.4f} paired, "
        f"{unpaired:.1f} times as wide unpaired; noise floor {floor:.4f}"
    )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="number of the first trial, for a run in several parts")
    parser.add_argument("--sweep", default=EQUAL, help="other configs, such as optimizer.lr=1e-2,1.1e-2")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        gather_text(Path(folder))
        start_process_group("cpu", 600)
        prepare()
        found = []
        for each in trials(range(options.first, options.first + options.trials), options.sweep, options.seeds):
            found.append(each)
            if len(found) % 10 == 0 or len(found) == options.trials:
                print(f"{options.sweep}: {summary(found)}", flush=True)


if __name__ == "__main__":
    main()
