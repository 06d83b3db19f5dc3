"""How often `keel compare` calls a difference between equal configs: python -m tests.a_against_a [--trials 200]

Two runs of one config and seed have the same bits, so they tell nothing: the difference is 0 in every trial. Here B
differs from A in the name of its source of training data, which only keys the order of the samples. Both learn from the
same text, start from the same weights and are equally good, but never equal, as if one of them had been run on another
day. Every trial has seeds of its own. For comparison, --real also counts how often a learning rate that is 3 times
lower is called worse.
"""

import argparse
import json
import os
import shutil
import statistics
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch.distributed as dist

from configs.load import load
from scripts import compare, score
from tests.end_to_end.launch import TEXT
from trainer.lifecycle import StopRequest
from trainer.run import run

EQUAL = "data.sources.0.name=text,other"
DIFFERENT = "optimizer.lr=1e-2,3.3e-3"
JOB = ("--metrics.tensorboard", "false", "--metrics.interval", "100", "--checkpoint.mode", "sync")
SIZE = ("--validation.interval", "0", "--validation.sequences", "64", "--fault.compare_interval", "0")


def launch_here(command: Sequence[str]) -> int:
    """Run a keel command in this process, which costs a tenth of a launch."""
    name, target, *words = command
    assert "RANK" not in os.environ
    if name == "score":
        return score.main([target, *words])
    try:
        return run(load(target, words, 1), StopRequest())
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def trials(n: int, sweep: str, seeds: int, folder: Path) -> Iterator[dict[str, Any]]:
    """The comparison of each trial; `folder` is the current one, with `text/` in it."""
    for trial in range(n):
        output, report = folder / "runs", folder / "report.json"
        words = [str(TEXT), "--sweep", sweep, "--seeds", str(seeds), "--output", str(output), "--json", str(report)]
        first = ("--training.seed", str(1 + trial * seeds))
        with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
            assert compare.main([*words, *first, *JOB, *SIZE], launch_here) == 0
        yield json.loads(report.read_text())["comparisons"][0]
        shutil.rmtree(output)


def gather_text(folder: Path) -> None:
    """Make a folder the current one, with some real text."""
    (folder / "text").mkdir()
    for module in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-c]*.py")):
        shutil.copy(module, folder / "text")
    os.chdir(folder)


def summary(found: list[dict[str, Any]]) -> str:
    """How many trials call a difference, and how wide the intervals are."""
    called = sum(each["is_decided"] for each in found)
    ratio = statistics.median(each["unpaired"] / each["paired"] for each in found)
    widths = f"median half-width {statistics.median(each['paired'] for each in found):.4f} paired"
    return f"a difference is called in {called} of {len(found)} trials; {widths}, {ratio:.1f} times as wide unpaired"


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--real", type=int, default=0, metavar="N", help="trials with a real difference")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        gather_text(Path(folder))
        for name, n, sweep in (("equal", options.trials, EQUAL), ("different", options.real, DIFFERENT)):
            found = []
            for each in trials(n, sweep, options.seeds, Path(folder)):
                found.append(each)
                if len(found) % 10 == 0 or len(found) == n:
                    print(f"{name} configs: {summary(found)}", flush=True)


if __name__ == "__main__":
    main()
