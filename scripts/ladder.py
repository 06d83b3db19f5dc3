"""Predict a job's loss from smaller runs: scripts/ladder.py JOB [--sizes N] [--seeds N] [--rule RULE] [--run FOLDER]

    python scripts/ladder.py debug.toml
    python scripts/ladder.py debug.toml --run runs/debug

The first trains the job at five smaller widths, each with three seeds, one after the other in processes of their own;
fits a scaling law to their validation losses; and predicts the job's, with an interval. The second, while the job
trains or afterwards, shows its validation losses beside what was predicted for that part of the run. The same command
continues: what is finished is not trained again. Keys set on the command line (--table.key VALUE) apply to all runs.
docs/optimizers.md says what is shrunk by which rule.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if not __package__:  # run as a file
    import keel  # noqa: F401 - Keel's packages come first

from checkpoint.find import require_run
from configs.errors import UserError
from configs.files import write_atomically, write_json
from configs.load import LoadedConfig, find_job_file, load
from configs.schema import Config
from scripts.command import (
    add_job_argument,
    end,
    folder_argument,
    job_of,
    list_of,
    number_of,
    parsed,
    parser_of,
    place_argument,
    positive,
    run_command,
    stopping_at_once,
)
from scripts.comparison.runs import CONTINUES, Launch, refuse_own_keys, run_process, train
from scripts.widths.picture import Line, Panel, picture
from trainer.report.console import Console
from trainer.report.metrics import METRICS_NAME, read_records

if TYPE_CHECKING:
    from scripts.scaling.law import Law
    from scripts.scaling.rungs import Rung

RULES = ("mup", "compute")
_LEAST_SIZES = 4
"""Three sizes would determine the three numbers of the law and leave nothing to judge it by."""


@dataclass(frozen=True)
class Climbed:
    """A rung whose runs are finished."""

    rung: "Rung"
    curves: list[dict[int, float]]
    """The validation loss by step, for each seed."""


def main(arguments: Sequence[str] | None = None, launch: Launch | None = None) -> int:
    """Run the command line; returns the exit code.

    Args:
        launch: how a run is started (default: as a process of its own).
    """
    options, overrides = parsed(_parser(), arguments)

    def work(console: Console) -> None:
        job = job_of(options)
        refuse_own_keys(overrides)
        find_job_file(job)  # a wrong path costs no import of torch
        if options.run:
            require_run(options.run)
        _climb(options, job, overrides, launch or run_process, console)

    with stopping_at_once(CONTINUES):
        return run_command(work, f"stopped; {CONTINUES}")


def _climb(options: argparse.Namespace, job: str, overrides: list[str], launch: Launch, console: Console) -> None:
    """Train the rungs, and write and print what follows from them."""
    from scripts.scaling.rungs import choose_rungs, load_target, training_flops

    loaded = load_target(job, overrides)
    target = loaded.config
    rungs = choose_rungs(job, overrides, target, options.sizes, options.dims, options.ranks, options.rule)
    flops = training_flops(target)
    output = options.output or Path("runs") / f"ladder-{target.job.name}"
    parts = [rung.flops / flops for rung in rungs]
    seeds = f"{options.seeds} seed{'s' * (options.seeds > 1)}"
    console.line(f"{len(rungs)} widths, {seeds}: {options.seeds * sum(parts):.1%} of the job's {flops:.3g} FLOPs")
    climbed = [Climbed(rung, []) for rung in rungs]
    for seed in range(target.training.seed, target.training.seed + options.seeds):
        for each in climbed:
            folder = output / f"dim-{each.rung.dim}" / f"seed-{seed}"
            words = [job, *each.rung.with_seed(seed, folder)]
            train(load(job, words[1:], options.ranks), words, folder, options.ranks, launch, console)
            each.curves.append(_validations(folder))
            _require_whole(each, folder)
    laws = _laws(climbed, parts, options.confidence)
    for line in _lines(climbed, parts, target, laws[1.0], options.confidence):
        console.line(line)
    found = _found(climbed, parts, flops, laws)
    if options.run:
        found["run"] = _check(options.run, target, laws)
        for line in _lines_of_run(options.run, found["run"]):
            console.line(line)
        _warn_of_differences(options.run, loaded, console)
    write_json(output / "ladder.json", found)
    write_atomically(output / "ladder.svg", [_drawn(climbed, parts, laws[1.0], target)])
    console.line(f"wrote {output / 'ladder.json'} and {output / 'ladder.svg'}")


def _validations(folder: Path) -> dict[int, float]:
    """The validation loss by step."""
    records = read_records(folder / METRICS_NAME)
    return {each["step"]: each["validation_loss"] for each in records if each.get("validation_loss") is not None}


def _require_whole(climbed: Climbed, folder: Path) -> None:
    """Check that the newest curve has a loss wherever the law is fitted.

    Raises:
        UserError: one is missing.
    """
    missing = [step for step in _validated_steps(climbed) if step not in climbed.curves[-1]]
    if missing:
        raise UserError(
            f"{folder}: the validation at step {missing[0]} has no finite loss, so no law can be fitted; climb with a "
            "lower optimizer.lr, or with other --sizes"
        )


def _validated_steps(climbed: Climbed) -> list[int]:
    from scripts.scaling.rungs import VALIDATIONS

    steps = climbed.rung.job.config.training.steps
    return [steps * number // VALIDATIONS for number in range(1, VALIDATIONS + 1)]


def _laws(climbed: Sequence[Climbed], parts: Sequence[float], confidence: float) -> "dict[float, Law]":
    """The law at each part of a run's length: a run that is compared with others at the same part of all."""
    import numpy as np

    from scripts.scaling.law import fit
    from scripts.scaling.rungs import VALIDATIONS

    laws = {}
    for number, steps in enumerate(zip(*map(_validated_steps, climbed), strict=True), 1):
        losses = [[curve[step] for curve in each.curves] for each, step in zip(climbed, steps, strict=True)]
        laws[number / VALIDATIONS] = fit(parts, np.array(losses), confidence)
    return laws


def _check(run: Path, target: Config, laws: "Mapping[float, Law]") -> list[dict[str, Any]]:
    """A run's validation losses beside the law's, at parts of the run that the ladder's runs have validated at."""
    import numpy as np

    found = []
    parts = list(laws)
    for step, loss in _validations(run).items():
        part = step / target.training.steps
        if parts[0] <= part <= 1:
            names = ("predicted", "low", "high")
            values = [np.interp(part, parts, [getattr(law, name) for law in laws.values()]) for name in names]
            predicted = dict(zip(names, map(float, values), strict=True))
            is_within = predicted["low"] <= loss <= predicted["high"]
            found.append({"step": step, "part": part, "loss": loss, **predicted, "is_within": is_within})
    return found


def _warn_of_differences(run: Path, target: LoadedConfig, console: Console) -> None:
    """Say which run keys of the run are not the job's."""
    from scripts.comparison.arms import differences

    theirs = load(str(run / "config.toml"), is_stored=True)
    lines = [line for line in differences(target, theirs) if not line.endswith("(machine key)")]
    ours = [line for line in lines if not line.startswith(("validation.interval", "average.", "checkpoint."))]
    if ours:
        console.warning(f"{run} is not a run of this job:\n  " + "\n  ".join(ours))


# --------------------------------------------------------------------------- report


def _found(
    climbed: Sequence[Climbed], parts: Sequence[float], flops: float, laws: "Mapping[float, Law]"
) -> dict[str, Any]:
    """The figures as JSON."""
    rungs = []
    for each, part in zip(climbed, parts, strict=True):
        training = each.rung.job.config.training
        rungs.append(
            {
                "dim": each.rung.dim,
                "n_layers": each.rung.n_layers,
                "steps": training.steps,
                "global_batch_size": training.global_batch_size,
                "lr": each.rung.job.config.optimizer.lr,
                "flops": each.rung.flops,
                "part": part,
                "losses": [curve[training.steps] for curve in each.curves],
            }
        )
    return {"flops": flops, "rungs": rungs, "laws": [{"part": part, **asdict(law)} for part, law in laws.items()]}


def _lines(
    climbed: Sequence[Climbed], parts: Sequence[float], target: Config, law: "Law", confidence: float
) -> list[str]:
    """The table of the rungs, the law, and the prediction."""
    lines = ["", f"{'dim':>7}{'layers':>8}{'steps':>9}{'batch':>8}{'lr':>10}{'FLOPs':>9}{'loss':>10}{'law':>10}"]
    for each, part in zip(climbed, parts, strict=True):
        config = each.rung.job.config
        loss = _mean_loss(each)
        lines.append(
            f"{each.rung.dim:>7}{each.rung.n_layers:>8}{config.training.steps:>9,}{config.training.global_batch_size:>8,}"
            f"{config.optimizer.lr:>10.2e}{part:>9.2%}{loss:>10.4f}{law.at(part):>10.4f}"
        )
    lines.append(
        f"{target.model.dim:>7}{target.model.n_layers:>8}{target.training.steps:>9,}{target.training.global_batch_size:>8,}"
        f"{target.optimizer.lr:>10.2e}{1:>9.0%}{'?':>10}{law.predicted:>10.4f}"
    )
    lines += [
        "",
        f"law: loss = {law.irreducible:.4f} + {law.reducible:.4f} x (FLOPs / the job's) ^ -{law.exponent:.3f}",
    ]
    lines.append(f"residuals: {law.residual:.4f} (root mean square)")
    percent = f"{100 * confidence:.4g}%"
    lines.append(f"predicted validation loss: {law.predicted:.4f}, {percent} interval {law.low:.4f} to {law.high:.4f}")
    return lines


def _mean_loss(climbed: Climbed) -> float:
    steps = climbed.rung.job.config.training.steps
    return sum(curve[steps] for curve in climbed.curves) / len(climbed.curves)


def _lines_of_run(run: Path, found: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = ["", f"{run}:" if found else f"{run}: there is no validation loss to compare yet"]
    for each in found:
        text = f"  at {each['part']:.0%} of the run (step {each['step']:,}): {each['loss']:.4f}"
        outside = "" if each["is_within"] else "  OUTSIDE"
        lines.append(f"{text}, predicted {each['low']:.4f} to {each['high']:.4f}{outside}")
    return lines


def _drawn(climbed: Sequence[Climbed], parts: Sequence[float], law: "Law", target: Config) -> str:
    """The losses over compute, and the law through them."""
    curve = [parts[0] ** (1 - n / 40) for n in range(41)]
    lines = [
        Line("law", [(part, law.at(part)) for part in curve]),
        Line("interval", [(1, law.low), (1, law.high)]),
        Line("runs", [(part, _mean_loss(each)) for each, part in zip(climbed, parts, strict=True)]),
    ]
    ticks = [part for part in (0.0001, 0.001, 0.01, 0.1, 1) if part >= parts[0]]
    return picture(
        "Validation loss by training FLOPs", "part of the job's FLOPs", [[Panel(target.job.name, lines, ticks)]]
    )


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__, keeps_lines=True)
    add_job_argument(parser)
    add = parser.add_argument
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--sizes", type=_sizes, default=5, metavar="N", help="smaller widths (default: %(default)s)")
    dims = list_of(positive, "widths: 512,768,1024,1536", at_least=_LEAST_SIZES)
    sizes.add_argument("--dims", type=dims, metavar="LIST", help="the widths (model.dim) instead")
    add("--rule", choices=RULES, default=RULES[0], help="how they shrink, docs/optimizers.md (default: %(default)s)")
    add("--seeds", type=positive, default=3, metavar="N", help="runs at each width (default: %(default)s)")
    add("--run", type=place_argument, metavar="FOLDER", help="a run of the job itself, to compare with the prediction")
    add("--ranks", type=positive, default=1, metavar="N", help="ranks of each run on this host (default: 1)")
    add("--output", type=folder_argument, metavar="FOLDER", help="folder of the runs (default: runs/ladder-NAME)")
    confidence = number_of(lambda c: 0.5 <= c < 1, "a confidence, such as 0.95")
    add("--confidence", type=confidence, default=0.9, metavar="C", help="of the interval (default: %(default)s)")
    return parser


def _sizes(text: str) -> int:
    if (sizes := positive(text)) < _LEAST_SIZES:
        raise argparse.ArgumentTypeError(f"a law with three numbers needs {_LEAST_SIZES} sizes or more, got {text}")
    return sizes


if __name__ == "__main__":
    end(main)
