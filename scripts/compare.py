"""Train configs with the same seeds, and compare them on the same sequences: scripts/compare.py A B [--seeds N]

A and B are job files, trained one after the other in processes of their own, or the folders of two finished runs. With
--sweep table.key=VALUE,VALUE there is one job file, and each value is compared with the first. Keys set on the command
line (--table.key VALUE) apply to all. The same command continues: what is finished is not trained again.
docs/evaluation.md explains what is reported.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if not __package__:  # run as a file
    import keel  # noqa: F401 - Keel's packages come first

from checkpoint.find import find_checkpoint, require_run
from checkpoint.manifest import read_manifest
from configs.errors import ConfigError, UserError
from configs.files import is_file, is_folder, write_json
from configs.load import LoadedConfig, find_job_file, load
from configs.own_code import is_import_path
from configs.reading import overrides
from configs.run_stages import stage_of
from configs.schema import Config
from scripts.command import (
    end,
    folder_argument,
    number_of,
    parser_of,
    place,
    positive,
    refuse_keys,
    require_places,
    run_command,
    stopping_at_once,
    without_overrides,
)
from scripts.comparison.runs import CONTINUES, Launch, ranks_words, refuse_own_keys, run_process, run_to_its_end, train
from scripts.score import load_for_scoring, with_tokenizer_of
from trainer.report.console import Console
from trainer.report.units import count

if TYPE_CHECKING:
    from scripts.comparison.score import Scores
    from scripts.comparison.statistics import Comparison


@dataclass(frozen=True)
class Side:
    """One config with its runs."""

    label: str
    job: Any
    """`LoadedConfig` of its first run."""
    folders: list[Path]
    """One per seed."""
    scores: "list[Scores]"


def main(arguments: Sequence[str] | None = None, launch: Launch | None = None) -> int:
    """Run the command line; returns the exit code.

    Args:
        launch: how a run is started (default: as a process of its own).
    """
    own, words = without_overrides(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_intermixed_args(own)

    def work(console: Console) -> None:
        require_places({"--json": options.json})
        swept = [] if options.sweep is None else [f"--{options.sweep}"]
        refuse_own_keys([*words, *swept])
        refuse_keys(swept, ["training.seed"], "every config is trained with the same seeds; leave it out, see --seeds")
        options.configs = [str(place(each)) for each in options.configs]
        folders = [Path(each) for each in options.configs if is_folder(each)]
        is_run = len(folders) == len(options.configs) or any(is_file(each / "config.toml") for each in folders)
        if is_run and options.sweep is None:
            for each in options.configs:  # a wrong path costs no import of torch
                require_run(Path(each))
            sides = _finished(options, words, launch or run_process, console)
        else:
            for each in options.configs:
                find_job_file(each)
            sides = _trained(options, words, launch or run_process, console)
        report = _report(sides, options.confidence)
        for line in _lines(sides, report):
            console.line(line)
        if options.json:
            write_json(options.json, report)

    with stopping_at_once(CONTINUES):
        return run_command(work, f"stopped; {CONTINUES}")


# --------------------------------------------------------------------------- runs


def _trained(options: argparse.Namespace, words: list[str], launch: Launch, console: Console) -> list[Side]:
    """Train and score what is not finished."""
    from scripts.comparison.arms import arms_of, folder_name, require_same_scoring
    from scripts.comparison.score import require_sequences

    arms = arms_of(options.configs, words, options.sweep)
    first = arms[0].load(options.ranks).config.training.seed
    jobs = [arm.with_seed(first, Path()).load(options.ranks) for arm in arms]
    scored = [stage_of(job.stages, job.config.training.steps).config for job in jobs]
    for config in scored:
        require_sequences(config)
        require_same_scoring(scored[0], config)
    root = options.output or Path("runs") / f"compare-{'-'.join(folder_name(arm.label) for arm in arms)}"[:100]
    seeds = range(first, first + options.seeds)
    sides = [Side(arm.label, job, [], []) for arm, job in zip(arms, jobs, strict=True)]
    for seed in seeds:  # all configs of a seed first, so that a stop leaves whole pairs
        for number, (arm, side) in enumerate(zip(arms, sides, strict=True)):
            folder = root / f"{number}-{folder_name(arm.label)}" / f"seed-{seed}"
            own = arm.with_seed(seed, folder)
            train(own.load(options.ranks), [own.file, *own.words], folder, options.ranks, launch, console)
            side.folders.append(folder)
            side.scores.append(_score(folder, _code_of(scored[number]), options.ranks, launch))
    return sides


def _code_of(config: Config) -> list[str]:
    """The keys by which a job names code of its user's own, which `keel score` does not take from the run folder."""
    named = {"model.architecture": config.model.architecture, "optimizer.name": config.optimizer.name}
    named |= {f"validation.sources.{n}.kind": source.kind for n, source in enumerate(config.validation.sources)}
    return list(overrides.words({key: name for key, name in named.items() if is_import_path(name)}))


def _finished(options: argparse.Namespace, words: list[str], launch: Launch, console: Console) -> list[Side]:
    """Score two runs that exist."""
    from scripts.comparison.arms import require_same_scoring
    from scripts.comparison.score import require_sequences

    if len(options.configs) != 2:
        raise ConfigError("give two run folders")
    folders = [Path(each) for each in options.configs]
    steps = [read_manifest(find_checkpoint(folder)).step for folder in folders]
    first, second = (
        load_for_scoring(folder, step, words, options.ranks) for folder, step in zip(folders, steps, strict=True)
    )
    require_same_scoring(first.config, second.config)
    require_sequences(first.config)
    return [
        Side(str(folder), _job_of(folder), [folder], [_score(folder, words, options.ranks, launch)])
        for folder in folders
    ]


def _job_of(folder: Path) -> LoadedConfig:
    return load(str(folder / "config.toml"), is_stored=True)


def _score(folder: Path, words: Sequence[str], ranks: int, launch: Launch) -> "Scores":
    """The scores of a run's newest checkpoint, computed unless they exist."""
    from scripts.comparison.score import are_current, read_scores

    checkpoint = find_checkpoint(folder)
    job = load_for_scoring(folder, read_manifest(checkpoint).step, words, ranks)
    found = read_scores(folder)
    if found and are_current(found, with_tokenizer_of(checkpoint, job), checkpoint):
        return found
    run_to_its_end(["score", str(folder), *ranks_words(ranks), *words], folder, launch)
    found = read_scores(folder)
    if found is None:
        raise UserError(f"{folder} was scored, but its scores can't be read")
    return found


# --------------------------------------------------------------------------- report


def _report(sides: list[Side], confidence: float) -> dict[str, Any]:
    """The findings as JSON; each config is compared with the first."""
    import numpy as np

    from scripts.comparison.arms import differences, pairing
    from scripts.comparison.forks import common_steps
    from scripts.comparison.statistics import compare

    all_scores = [scores for side in sides for scores in side.scores]
    if len({scores.digest for scores in all_scores}) > 1:
        raise UserError("the runs were scored on different sequences: their validation data differ")
    for folder, scores in zip((each for side in sides for each in side.folders), all_scores, strict=True):
        if not np.isfinite(scores.losses).all():
            raise UserError(
                f"{folder}: the loss of a validation sequence is not finite, so it can't be compared; leave this "
                "config out, or give it a lower optimizer.lr"
            )
    weights = np.array(all_scores[0].targets) / np.mean(all_scores[0].targets)
    # Of several comparisons with one config, all are right with the confidence asked for (Bonferroni).
    each = 1 - (1 - confidence) / (len(sides) - 1)
    losses = [np.array([scores.losses for scores in side.scores]) * weights for side in sides]
    comparisons = []
    for side, own in zip(sides[1:], losses[1:], strict=True):
        tokens = sides[0].scores[0].tokens + side.scores[0].tokens
        found = compare(losses[0], own, tokens, each)
        common = common_steps(sides[0].folders[0], side.folders[0])
        comparisons.append(
            {
                "first": sides[0].label,
                "second": side.label,
                "differs": differences(sides[0].job, side.job, common),
                "pairing": str(pairing(sides[0].job, side.job, common)),
                **asdict(found),
                "interval": _interval(found.difference, found.paired),
                "unpaired_interval": _interval(found.difference, found.unpaired),
                "is_decided": found.is_decided,
                "verdict": _verdict(sides[0].label, side.label, found),
            }
        )
    return {
        "sequences": len(weights),
        "confidence": confidence,
        "configs": [
            {
                "label": side.label,
                "runs": [str(folder) for folder in side.folders],
                "seeds": [_job_of(folder).config.training.seed for folder in side.folders],
                "steps": [scores.step for scores in side.scores],
                "tokens": [scores.tokens for scores in side.scores],
                "losses": own.mean(1).tolist(),
            }
            for side, own in zip(sides, losses, strict=True)
        ],
        "comparisons": comparisons,
    }


def _interval(difference: float, half: float | None) -> list[float] | None:
    return None if half is None else [difference - half, difference + half]


def _verdict(first: str, second: str, found: "Comparison") -> str:
    better = second if found.difference < 0 else first
    if found.is_equal:
        return "equal to the last bit"
    if found.of_seeds is None:
        of_models = found.paired is not None and abs(found.difference) > found.paired
        models = f"the model of {better} is better on such text, but one" if of_models else "one"
        return f"undecided: {models} seed says nothing about another training; compare job files with --seeds 3 or more"
    if found.is_decided:
        return f"{better} is better by {abs(found.difference):.5f}"
    return "undecided: the interval includes 0"


def _lines(sides: list[Side], report: dict[str, Any]) -> list[str]:
    """The report for people."""
    seeds = [config["seeds"] for config in report["configs"]]
    width = max(len(side.label) for side in sides)
    names = (
        [f"seed {seed}" for seed in seeds[0]] if all(each == seeds[0] for each in seeds) else ["loss"] * len(seeds[0])
    )
    lines = ["", f"loss on {report['sequences']} validation sequences, the same for all runs:", ""]
    lines.append(f"{'':{width}}" + "".join(f"{name:>12}" for name in [*names, "mean"]))
    for config in report["configs"]:
        numbers = [*config["losses"], sum(config["losses"]) / len(config["losses"])]
        lines.append(f"{config['label']:{width}}" + "".join(f"{number:>12.5f}" for number in numbers))
    for found in report["comparisons"]:
        lines += ["", *_lines_of(found)]
    return lines


def _lines_of(found: dict[str, Any]) -> list[str]:
    percent = f"{100 * found['confidence']:.4g}%"
    differs = found["differs"] or ["nothing: with one seed, both runs have the same bits"]
    rows = [
        ("differs", "; ".join(differs)),
        ("shared", found["pairing"]),
        ("difference", f"{found['difference']:+.5f}, {percent} interval {_range(found['interval'])}"),
        ("unpaired", f"{percent} interval {_range(found['unpaired_interval'])}"),
    ]
    floors = ", ".join("-" if floor is None else f"{floor:.5f}" for floor in found["noise_floor"])
    if found["paired_noise"] is not None:
        floors += f"; of the difference {found['paired_noise']:.5f}"
    rows.append(("noise", f"standard deviation over seeds {floors}"))
    if needed := found["needed"]:
        tokens = f"{needed['seeds']} seeds of each = {count(needed['tokens'])} tokens"
        rows.append(("to decide", f"{tokens}, scored on {needed['sequences']} sequences"))
    rows.append(("verdict", found["verdict"]))
    title = f"{found['second']} against {found['first']}"
    return [title, *(f"  {name:<12}{text}" for name, text in rows)]


def _range(interval: list[float] | None) -> str:
    return "unknown" if interval is None else f"{interval[0]:+.5f} to {interval[1]:+.5f}"


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("configs", nargs="+", metavar="CONFIG", help="two job files or run folders, or one job file with --sweep")
    add("--sweep", metavar="KEY=VALUES", help="compare values of one key: --sweep optimizer.lr=1e-3,2e-3,4e-3")
    add("--seeds", type=positive, default=3, metavar="N", help="seeds, from the job's own on (default: %(default)s)")
    add("--ranks", type=positive, default=1, metavar="N", help="ranks of each run on this host (default: 1)")
    add("--output", type=folder_argument, metavar="FOLDER", help="folder of the runs (default: runs/compare-...)")
    add("--json", type=Path, metavar="FILE", help="also write the report to FILE")
    confidence = number_of(lambda c: 0.5 <= c < 1, "a confidence, such as 0.95")
    add("--confidence", type=confidence, default=0.98, metavar="C", help="of the intervals (default: %(default)s)")
    return parser


if __name__ == "__main__":
    end(main)
