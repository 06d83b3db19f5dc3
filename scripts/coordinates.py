"""Show whether what is tuned at one width holds at others: scripts/coordinates.py JOB --dims LIST [--rates LIST]

    python scripts/coordinates.py debug.toml --dims 64,128,256,512,1024
    python scripts/coordinates.py debug.toml --dims 64,128,256 --rates 1e-3,2e-3,4e-3,8e-3

The first trains the job for a few steps at each width, and shows how the mean size of its activations grows with the
width. The second trains it to its end at each width with each learning rate, and shows which rate is best. Both do so
with muP, whose base is model.mup_base_dim or else the job's dim, and without it, in this process, and draw a picture.
Keys of the job (--table.key VALUE) make it small enough. docs/optimizers.md has both pictures of debug.toml.
"""

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import linear_regression
from typing import TYPE_CHECKING, Any

if not __package__:  # run as a file
    import keel  # noqa: F401 - Keel's packages come first

from configs.errors import ConfigError, UserError
from configs.files import write_atomically, write_json
from configs.load import LoadedConfig, find_job_file, load
from configs.schema import AnyModel, is_described
from scripts.command import (
    add_job_argument,
    end,
    job_of,
    list_of,
    parsed,
    parser_of,
    positive,
    refuse_keys,
    require_places,
    run_command,
)
from scripts.widths.picture import Line, Panel, picture
from scripts.widths.widen import widened
from trainer.report.console import Console

if TYPE_CHECKING:
    from parallelisms.mesh import Mesh

_STEPS = 5
FORMS = {False: "without muP", True: "with muP"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = _parser()
    options, overrides = parsed(parser, arguments)
    if options.rates and options.steps:
        parser.error("--steps goes without --rates, which trains to the job's end: --training.steps N")

    def work(console: Console) -> None:
        job = job_of(options)
        find_job_file(job)  # a wrong path costs no import of torch
        if options.rates:
            refuse_keys(overrides, ["optimizer.lr"], "--rates names the learning rates; leave it out")
        else:
            refuse_keys(overrides, ["training.steps"], "only with --rates; without, --steps N says how many")
        loaded = load(job, overrides, 1)
        _require_mup(job, overrides, loaded.config.model)
        for dim in options.dims:  # nor does a width that the job can't have
            widened(job, overrides, dim, with_mup=True)
        _require_one_stage(loaded, loaded.config.training.steps if options.rates else options.steps or _STEPS)
        kind = "rates" if options.rates else "coordinates"
        output = options.output or Path("runs") / f"{kind}-{loaded.config.job.name}.svg"
        output.parent.mkdir(parents=True, exist_ok=True)
        require_places({"--output": output, "--json": options.json})
        found, lines, drawn = _in_one_process(
            loaded, console, lambda mesh: (_sweep if options.rates else _check)(options, job, overrides, mesh, console)
        )
        for line in lines:
            console.line(line)
        write_atomically(output, [drawn])
        console.line(f"wrote {output}")
        if options.json:
            write_json(options.json, found)

    return run_command(work, "stopped; nothing is kept")


def _require_mup(job: str, overrides: Sequence[str], model: AnyModel) -> None:
    """Raise ConfigError if muP refuses the job, which is valid without it; the key is not the user's to leave out."""
    if not is_described(model):
        return  # `widened` says so
    try:
        widened(job, overrides, model.dim, with_mup=True)
    except ConfigError as error:
        raise ConfigError(
            "each width is trained with muP, too, by the key model.mup_base_dim, and this job can't be: " + str(error)
        ) from None


def _require_one_stage(job: LoadedConfig, steps: int) -> None:
    """Raise ConfigError if another stage of the job begins within its first `steps` steps."""
    for stage in job.later_stages:
        if stage.border.after < steps:
            after = stage.border.after
            raise ConfigError(f"only the first of the job's [[stages]] is trained here, so take at most {after} steps")


Found = tuple[dict[str, Any], list[str], str]
"""The figures for --json, the lines to print, and the picture."""


def _in_one_process(job: LoadedConfig, console: Console, measure: "Callable[[Mesh], Found]") -> Found:
    """Prepare the job's data, as its first launch would, and measure on a mesh of one rank."""
    import torch.distributed as dist

    from configs.layout import mesh_sizes
    from parallelisms.mesh import build_mesh, start_process_group
    from trainer.guards.environment import device_type
    from trainer.lifecycle import StopRequest
    from trainer.numerics import set_numerics
    from trainer.preparation import prepare_data, require_inputs

    require_inputs(job)
    prepare_data(job.config, console, StopRequest())
    kind = device_type(job)
    set_numerics(job.config.training, kind)
    device = start_process_group(kind, job.config.job.timeout_seconds)
    try:
        return measure(build_mesh(mesh_sizes(job.config, 1), device))
    finally:
        dist.destroy_process_group()


# --------------------------------------------------------------------------- activations


def _check(options: argparse.Namespace, job: str, overrides: Sequence[str], mesh: "Mesh", console: Console) -> Found:
    """The sizes of activations at each width."""
    from scripts.widths.measure import KINDS, activation_sizes

    steps = options.steps or _STEPS
    sizes: dict[bool, dict[int, list[dict[str, float]]]] = {form: {} for form in FORMS}
    for with_mup, name in FORMS.items():
        for dim in options.dims:
            found = sizes[with_mup][dim] = activation_sizes(widened(job, overrides, dim, with_mup), mesh, steps)
            if len(found) <= steps or not all(0 < size < math.inf for each in found for size in each.values()):
                raise UserError(
                    f"{name}, dim {dim}: within {steps} steps, the loss or an activation became 0 or left the finite "
                    "numbers, so no growth can be told; lower optimizer.lr, or take fewer --steps"
                )
            console.line(f"{name}, dim {dim}: done")
    growth = {
        name: {kind: _slope({dim: each[-1][kind] for dim, each in sizes[form].items()}) for kind in KINDS}
        for form, name in FORMS.items()
    }
    lines = ["", f"growth of mean |activation| after {steps} steps, as a power of the width:", ""]
    lines.append(f"{'':18}" + "".join(f"{name:>14}" for name in growth))
    lines += [f"{kind:18}" + "".join(f"{each[kind]:>+14.2f}" for each in growth.values()) for kind in KINDS]
    rows = [
        [
            Panel(
                f"{kind}, {FORMS[form]}",
                [
                    Line(f"{step} steps", [(dim, each[step][kind]) for dim, each in sizes[form].items()])
                    for step in range(steps + 1)
                ],
            )
            for kind in KINDS
        ]
        for form in FORMS
    ]
    figures = {"steps": steps, "growth": growth, "sizes": {FORMS[form]: each for form, each in sizes.items()}}
    return figures, lines, picture("Mean |activation| by width, before and after each step", "dim", rows)


def _slope(by_dim: Mapping[int, float]) -> float:
    """The power of the width that fits best (least squares of logarithms)."""
    xs = [math.log(dim) for dim in by_dim]
    ys = [math.log(size) for size in by_dim.values()]
    return linear_regression(xs, ys).slope


# --------------------------------------------------------------------------- learning rates


def _sweep(options: argparse.Namespace, job: str, overrides: Sequence[str], mesh: "Mesh", console: Console) -> Found:
    """The final loss at each width with each learning rate."""
    from scripts.widths.measure import final_loss

    losses: dict[str, dict[int, dict[float, float]]] = {}
    lines = ["", "mean loss of the last tenth of the steps, by learning rate:"]
    for with_mup, name in FORMS.items():
        losses[name] = {}
        lines += ["", f"{name:14}" + "".join(f"{rate:>10.2g}" for rate in options.rates) + "      best"]
        for dim in options.dims:
            found = losses[name][dim] = {}
            for rate in options.rates:
                words = (*overrides, "--optimizer.lr", repr(rate))
                found[rate] = final_loss(widened(job, words, dim, with_mup), mesh)
                console.line(f"{name}, dim {dim}, lr {rate:g}: {found[rate]:.4f}")
            numbers = "".join(f"{loss:>10.4f}" for loss in found.values())
            lines.append(f"{f'dim {dim}':14}{numbers}{_optimum(found):>10.2g}")
    panels = [
        Panel(name, [Line(f"dim {dim}", list(found.items()), _best(found)) for dim, found in by_dim.items()])
        for name, by_dim in losses.items()
    ]
    figures = {
        "losses": losses,
        "best": {name: {dim: _optimum(found) for dim, found in by_dim.items()} for name, by_dim in losses.items()},
    }
    drawn = picture("Final loss by learning rate; a dot is the best", "learning rate", [panels], same_y=True)
    return figures, lines, drawn


def _best(losses: Mapping[float, float]) -> float:
    """The learning rate with the least loss; NaN if no loss is finite."""
    return min((rate for rate, loss in losses.items() if math.isfinite(loss)), key=losses.__getitem__, default=math.nan)


def _optimum(losses: Mapping[float, float]) -> float:
    """The least point of a parabola through the best and its neighbors, by the rate's logarithm; else the best."""
    rates = list(losses)
    best = _best(losses)
    if math.isnan(best):
        return best
    place = rates.index(best)
    around = rates[max(0, place - 1) : place + 2]
    ys = [losses[rate] for rate in around]
    if len(around) < 3 or not all(map(math.isfinite, ys)):
        return rates[place]
    left, x, right = map(math.log, around)
    weights = ((x - left) * (ys[1] - ys[2]), (x - right) * (ys[1] - ys[0]))
    if weights[0] == weights[1]:
        return rates[place]
    return math.exp(x - ((x - left) * weights[0] - (x - right) * weights[1]) / (2 * (weights[0] - weights[1])))


# --------------------------------------------------------------------------- command line


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__, keeps_lines=True)
    add_job_argument(parser)
    add = parser.add_argument
    add(
        "--dims",
        type=list_of(positive, "widths: 64,128,256"),
        required=True,
        metavar="LIST",
        help="widths (model.dim)",
    )
    add("--steps", type=positive, metavar="N", help=f"steps before the sizes are compared (default: {_STEPS})")
    rates = list_of(_rate, "learning rates: 1e-3,2e-3")
    add("--rates", type=rates, metavar="LIST", help="compare these learning rates at each width instead")
    add("--output", type=Path, metavar="FILE", help="the picture, SVG (default: in runs/)")
    add("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    return parser


def _rate(text: str) -> float:
    rate = float(text)
    if not 0 < rate < math.inf:
        raise ValueError
    return rate


if __name__ == "__main__":
    end(main)
