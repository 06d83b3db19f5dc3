"""What to run first on a real GPU, in five stages of 2 to 6 minutes: is it right, how fast is it, does memory fit?

    python -m tests.gpu.first_half_hour STAGE [--output FOLDER]     right, 1b, large, plans, kernels, or all

Ends with a table of what was predicted and what was measured, and keeps both in FOLDER/first_half_hour.json, to which
each figure is added when it is there. What fails is noted in the table, and the next figure follows. After --minutes a
stage begins nothing more; a later call keeps the figures that are there. Predictions of
speed and memory are in predicted.json (predict.py), those of kernels are of bytes and FLOPs on an H200. `pytest -m gpu`
asserts what must hold. wheels.sh gathers the packages that a machine with torch alone lacks.
"""

import argparse
import json
import math
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch.autograd import DeviceType

from tests.gpu.hang import seconds_until_reported
from tests.gpu.jobs import JOBS, Job, predicted
from tests.gpu.kernels import (
    BACKENDS,
    attention_tflops,
    context_gradient_error,
    copy_terabytes_per_second,
    delta_milliseconds,
    head_gradient_error,
    matmul_tflops,
    update_terabytes_per_second,
)
from tests.gpu.plans import RUNS, compared
from tests.gpu.runs import benchmark, end_after, seconds_left
from tests.gpu.values import differences


@dataclass(frozen=True)
class Figure:
    """One row of the table."""

    name: str
    unit: str
    predicted: float | None
    measured: float | None
    note: str = ""


def right(folder: Path, only: list[str]) -> Iterator[Figure]:
    """Ceilings, kernels, and runs that must agree, or of these the ones of these names alone."""
    if not only:
        yield from _of_kernels(folder)
    for pair, loss, norm, why in differences(folder / "runs", only):
        yield Figure(f"{pair.name}: losses", "nats", pair.loss, loss, why)
        if norm is not None:
            yield Figure(f"{pair.name}: norms", "relative", pair.norm, norm)


def _of_kernels(folder: Path) -> Iterator[Figure]:
    yield _figure("matmul of 8,192, bfloat16", "TFLOP/s", 790, matmul_tflops)
    yield _figure("copy", "TB/s", 4.3, copy_terabytes_per_second)
    # Of weights in bfloat16, 94 instructions fit into the time of an element's bytes; it takes about 105.
    updates = (("nothing", "torch", 3.5), ("nothing", "auto", 3.8), ("moments", "auto", 3.6), ("weights", "auto", 3.2))
    for narrow, kernel, before in updates:
        work = partial(update_terabytes_per_second, narrow, kernel)
        yield _figure(f"AdamW, {narrow} in bfloat16, kernel {kernel}", "TB/s", before, work)
    for backend in BACKENDS:
        for seq_len, head_dim in ((2048, 64), (8192, 128)):
            name = f"attention of {seq_len:,} x {head_dim}, {backend}"
            for place, direction in enumerate(("forward", "backward")):
                work = lambda b=backend, s=seq_len, d=head_dim, i=place: attention_tflops(b, s, d)[i]  # noqa: E731
                yield _figure(f"{name}, {direction}", "TFLOP/s", None, work)
    for rule, known in (("torch", (13.5, 85.6)), ("fla", (None, None))):  # on an H200, torch's before it was rewritten
        for place, direction in enumerate(("forward", "backward")):
            work = lambda r=rule, i=place: delta_milliseconds(r)[i]  # noqa: E731
            yield _figure(f"Gated DeltaNet of 4,096, {rule}, {direction}", "ms", known[place], work)
    for kernel in ("auto", "cudnn"):
        work = partial(context_gradient_error, kernel)
        yield _figure(f"context parallelism's gradients, {kernel}", "relative error", 0.005, work)
    yield _figure("the head's gradient over chunks", "relative error", 1e-6, head_gradient_error)
    yield _figure("a hang's report", "s", 10, partial(seconds_until_reported, folder / "hang", timeout_seconds=20))


def speed(stage: str, folder: Path, only: list[str]) -> Iterator[Figure]:
    """Tokens a second and memory of the stage's jobs, or of those of these names alone."""
    for job in (job for job in JOBS[stage] if not only or job.name in only):
        before = predicted(job.name, torch.cuda.get_device_name())
        file = folder / f"{job.name.replace(' ', '_').replace(',', '')}.json"
        try:
            measured = benchmark(file, job)
        except Exception as failure:
            yield Figure(job.name, "tokens/s", before.tokens_per_second, None, _last_line(failure))
            continue
        yield Figure(job.name, "tokens/s", before.tokens_per_second, measured["tokens_per_second"])
        if job.beside_bare:
            yield Figure(f"{job.name}, over a bare loop", "ratio", 1.0, measured["keel_over_bare"]["compiled"])
        else:  # with two models, the peak is of both
            peak = measured["memory_peak_bytes"] / 2**30
            yield Figure(f"{job.name}, memory", "GiB", before.peak_bytes and before.peak_bytes / 2**30, peak)


def plans(folder: Path, only: list[str]) -> Iterator[Figure]:
    """Each family's run beside its plan, or the runs of these names alone."""
    for name in (name for name in RUNS if not only or name in only):
        try:
            for each in compared(folder / "beside_plan", name):
                yield Figure(f"{name}: {each.quantity}", "", each.planned, each.measured)
        except Exception as failure:
            yield Figure(name, "", None, None, _last_line(failure))


def kernels(_: Path, output: Path) -> Iterator[Figure]:
    """Where the time of a step goes: a table of its longest kernels, in a file of `output`."""
    from tests.null_gpu.step import join

    join(1)
    of_1b, of_8b = JOBS["1b"][0], JOBS["large"][0]
    for job, words in ((of_1b, ["--training.global_batch_size", "16"]), (of_8b, ["--training.global_batch_size", "1"])):
        yield _figure(
            f"{job.name}: a step of 16 or 1 sequences on the device", "s", None, partial(_busy, job, words, output)
        )


def _busy(job: Job, words: list[str], folder: Path) -> float:
    from tests.null_gpu.step import build, load_job

    config, *given = job.split()
    learner, loader = build(load_job(config, [*given, *words], 1), draw="KEEL_NULL_GPUS" not in os.environ)
    for _ in range(3):
        learner.step(next(loader), lr=1e-4)
    with torch.profiler.profile() as profile:
        loss = learner.step(next(loader), lr=1e-4).read().loss
        torch.cuda.synchronize()
    loader.close()
    averages = profile.key_averages()
    file = folder / f"kernels_{job.name.replace(' ', '_').replace(',', '')}.txt"
    file.write_text(averages.table(sort_by="self_device_time_total", row_limit=45, max_name_column_width=90))
    if not math.isfinite(loss):
        raise ValueError(f"the loss is {loss}")
    # Operators have the time of their kernels again, and so have annotations; as the table's own total.
    of_kernels = (each for each in averages if each.device_type == DeviceType.CUDA and not each.is_user_annotation)
    busy = sum(each.self_device_time_total for each in of_kernels) / 1e6
    if not busy:
        raise LookupError("the profiler has recorded no kernel")
    return busy


def _figure(name: str, unit: str, before: float | None, work: Callable[[], float]) -> Figure:
    try:
        seconds_left()
        return Figure(name, unit, before, work())
    except Exception as failure:  # of one figure; the others follow
        traceback.print_exc()
        return Figure(name, unit, before, None, _last_line(failure))


def _last_line(failure: Exception) -> str:
    return f"{type(failure).__name__}: {(str(failure).splitlines() or [''])[0][:200]}"


def table(figures: list[Figure]) -> str:
    """Predicted and measured, a line a figure."""
    width = max(len(figure.name) for figure in figures)
    lines = [f"{'':{width}}  {'predicted':>12} {'measured':>12}"]
    lines += [
        f"{figure.name:{width}}  {_number(figure.predicted):>12} {_number(figure.measured):>12}  {figure.unit}"
        + (f"  ({figure.note})" if figure.note else "")
        for figure in figures
    ]
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def main() -> int:
    """Run the stages asked for; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("stage", choices=("right", *JOBS, "plans", "kernels", "all"), help="what to measure")
    parser.add_argument("--output", type=Path, default=Path("runs/gpu"), help="folder (default: %(default)s)")
    parser.add_argument(
        "--job",
        action="append",
        default=[],
        metavar="NAME",
        help="this job of 1b or large, or this run of right or plans, only",
    )
    parser.add_argument("--minutes", type=float, default=8.5, help="most minutes of a stage (default: %(default)s)")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: there is no CUDA device here", file=sys.stderr)
        return 1
    options.output.mkdir(parents=True, exist_ok=True)
    file = options.output / "first_half_hour.json"
    known = {each["name"]: Figure(**each) for each in json.loads(file.read_text())} if file.exists() else {}
    stages: dict[str, Callable[[Path], Iterator[Figure]]] = {"right": partial(right, only=options.job)}
    stages |= {stage: lambda folder, stage=stage: speed(stage, folder, options.job) for stage in JOBS} | {
        "plans": partial(plans, only=options.job),
        "kernels": partial(kernels, output=options.output),
    }
    with tempfile.TemporaryDirectory() as work:
        for stage in stages if options.stage == "all" else (options.stage,):
            end_after(60 * options.minutes)
            for figure in stages[stage](Path(work)):
                print(table([figure]).splitlines()[1], flush=True)
                earlier = known.get(figure.name)
                if figure.measured is not None or earlier is None or earlier.measured is None:
                    known[figure.name] = figure
                file.write_text(json.dumps([asdict(each) for each in known.values()], indent=2) + "\n")
    print(
        f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}; kept in {file}\n\n{table(list(known.values()))}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
