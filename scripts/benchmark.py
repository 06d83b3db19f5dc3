"""Measure Keel's speed compared to a plain loop, and its loader's.

    python scripts/benchmark.py [bare] benchmark_10m.toml --json speed.json
    python scripts/benchmark.py loader

The cases of a benchmark take turns, a few steps each, so that drifts of the machine's speed affect all equally. Quote
the median over the rounds; for a ratio, the median of the ratios within each round. Each file in scripts/benchmarks/
says what it measures. `benchmark.py COMMAND --help` lists the options of a command; further words override the config.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

if not __package__:  # run as a file
    import keel  # noqa: F401 - Keel's packages come first

from configs.errors import ConfigError
from configs.files import write_json
from configs.load import find_job_file
from scripts.command import add_job_argument, end, job_of, positive, require_places, run_command, without_overrides
from trainer.report.console import Console

VARIANTS = ("bare-eager", "keel-eager", "bare-compiled", "keel-compiled")

Figures = tuple[Any, Iterable[str]]
"""What --json writes, and the lines to print."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark, print and write its figures; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] not in (*_COMMANDS, "-h", "--help"):
        words.insert(0, "bare")
    own, overrides = without_overrides(words)
    options = _parser().parse_args(own)

    def work(console: Console) -> None:
        require_places({"--json": options.json})
        if "job" in options:
            options.job = job_of(options)
            find_job_file(options.job)  # a wrong path costs no import of torch
        figures, lines = options.command(options, overrides)
        if os.environ.get("RANK", "0") == "0":
            console.line("\n".join(lines))
            if options.json:
                write_json(options.json, figures)

    return run_command(work, "stopped; nothing was written")


def bare(options: argparse.Namespace, overrides: list[str]) -> Figures:
    """Tokens per second compared to a minimal training loop, eager and compiled."""
    from scripts.benchmarks.bare import lines, measure

    figures = measure(options.job, overrides, options.variants, options.rounds, options.steps)
    return figures, lines(figures)


def loader(_options: argparse.Namespace, overrides: list[str]) -> Figures:
    """Tokens per second that the loader alone reads from token files."""
    if overrides:
        raise ConfigError(f"{' '.join(overrides)}: the loader is measured with a job of its own; leave it out")
    from scripts.benchmarks.bare import loader_speed

    figures = {"loader_tokens_per_second": loader_speed()}
    return figures, [f"{key}: {value}" for key, value in figures.items()]


_COMMANDS = ("bare", "loader")


def _parser() -> argparse.ArgumentParser:
    summary, _, details = (__doc__ or "").partition("\n\n")
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=summary, epilog=details, formatter_class=raw)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(function: Callable[..., Figures]) -> argparse.ArgumentParser:
        child = commands.add_parser(function.__name__, help=function.__doc__, description=function.__doc__)
        child.set_defaults(command=function)
        child.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
        return child

    child = command(bare)
    add_job_argument(child, "benchmark_10m.toml")
    add = child.add_argument
    add("--rounds", type=positive, default=10, help="number of turns of each case (default: %(default)s)")
    add("--steps", type=positive, default=2, help="steps per turn (default: %(default)s)")
    add("--variants", type=_variants, default=",".join(VARIANTS), help="variants to measure (default: %(default)s)")
    command(loader)
    return parser


def _variants(text: str) -> list[str]:
    if unknown := set(text.split(",")) - set(VARIANTS):
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; choose from {', '.join(VARIANTS)}")
    return text.split(",")


if __name__ == "__main__":
    end(main)
