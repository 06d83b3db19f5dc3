"""What to run first on a real GPU, in four stages of 4 to 9 minutes: is it right, how fast is it, does memory fit?

    python -m tests.gpu.first_half_hour STAGE [--output FOLDER]     right, 1b, large, kernels, or all

Ends with a table of what was predicted and what was measured, and keeps both in FOLDER/first_half_hour.json, to which
each stage adds. Predictions of speed are estimates for one H200 (of bytes and FLOPs); those of memory
are what the null GPU allocates (tests/null_gpu), or else the estimate of trainer/planning/memory.py. `pytest -m gpu`
asserts what must hold.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch.autograd import DeviceType

from tests.gpu.kernels import (
    BACKENDS,
    attention_tflops,
    context_gradient_error,
    copy_terabytes_per_second,
    head_gradient_error,
    matmul_tflops,
    update_terabytes_per_second,
)
from tests.gpu.runs import Failed, benchmark, differences, null_gpu_bytes

_FULL = "--activation_checkpoint.mode full --activation_checkpoint.save_every_nth_matmul 1"
_1B = "--config llama_1b.toml --training.global_batch_size 32"
_3B_8K = "--config llama_3b.toml --training.seq_len 8192 --training.micro_batch_size 2 --training.global_batch_size 8"
_8B = "--config llama_8b.toml --training.global_batch_size 8"
JOBS: dict[str, dict[str, tuple[str, float | None]]] = {
    # stage: {name: (words, tokens a second predicted for one H200)}
    "1b": {
        "1B at 2,048": (_1B, 67_000),
        "1B at 2,048, transient copies": (f"{_1B} --fsdp.reshard_after_forward always", 64_600),
        "1B at 2,048, eager": (f"{_1B} --compile.enable false", None),
        "1B at 8,192": (
            "--config llama_1b.toml --training.seq_len 8192 --training.micro_batch_size 2 "
            "--training.global_batch_size 8",
            54_000,
        ),
    },
    "large": {
        "3B at 8,192, nothing recomputed": (
            f"{_3B_8K} --activation_checkpoint.mode none --activation_checkpoint.save_every_nth_matmul 1",
            23_200,
        ),
        "8B at 8,192, full": (f"{_8B} {_FULL}", 7_900),
        "8B at 8,192, attention kept": (
            f"{_8B} --activation_checkpoint.save_every_nth_matmul 1 "
            """--activation_checkpoint.save_ops '["aten._scaled_dot_product_*attention*"]'""",
            None,
        ),
    },
}


@dataclass(frozen=True)
class Figure:
    """One row of the table."""

    name: str
    unit: str
    predicted: float | None
    measured: float | None
    note: str = ""


def right(folder: Path) -> Iterator[Figure]:
    """Ceilings, kernels, and runs that must agree."""
    yield _figure("matmul of 8,192, bfloat16", "TFLOP/s", 790, matmul_tflops)
    yield _figure("copy", "TB/s", 4.3, copy_terabytes_per_second)
    for moments, kernel, predicted in (("float32", "torch", 3.5), ("float32", "auto", 3.8), ("bfloat16", "auto", 3.6)):
        work = partial(update_terabytes_per_second, moments, kernel)
        yield _figure(f"AdamW, moments in {moments}, kernel {kernel}", "TB/s", predicted, work)
    for backend in BACKENDS:
        for seq_len, head_dim in ((2048, 64), (8192, 128)):
            name = f"attention of {seq_len:,} x {head_dim}, {backend}"
            for place, direction in enumerate(("forward", "backward")):
                work = lambda b=backend, s=seq_len, d=head_dim, i=place: attention_tflops(b, s, d)[i]  # noqa: E731
                yield _figure(f"{name}, {direction}", "TFLOP/s", None, work)
    for kernel in ("auto", "cudnn"):
        work = partial(context_gradient_error, kernel)
        yield _figure(f"context parallelism's gradients, {kernel}", "relative error", 0.005, work)
    yield _figure("the head's gradient over chunks", "relative error", 1e-6, head_gradient_error)
    expected = (1e-5, 0.02, 0.0)
    try:
        found = differences(folder / "runs")
    except Failed as failure:
        yield Figure("runs that must agree", "nats", None, None, str(failure))
        return
    for (name, value), prediction in zip(found.items(), expected, strict=True):
        yield Figure(f"losses, {name}", "nats", prediction, value)


def speed(stage: str, folder: Path) -> Iterator[Figure]:
    """Tokens a second and memory of the stage's jobs."""
    for name, (words, predicted) in JOBS[stage].items():
        file = folder / f"{name.replace(' ', '_').replace(',', '')}.json"
        try:
            memory, note = null_gpu_bytes(file.with_suffix(".null.json"), words), ""
        except Failed as failure:
            memory, note = estimated_bytes(words), f"estimated; no null GPU: {failure}"
        try:
            measured = benchmark(file, words)
        except Failed as failure:
            yield Figure(name, "tokens/s", predicted, None, str(failure))
            continue
        yield Figure(name, "tokens/s", predicted, measured["tokens_per_second"])
        yield Figure(f"{name}, memory", "GiB", memory / 2**30, measured["memory_peak_bytes"] / 2**30, note)


def kernels(folder: Path) -> Iterator[Figure]:
    """Where the time of 1B's step goes: a table of its longest kernels, in a file."""
    from tests.null_gpu.step import build, join, load_job

    join(1)
    learner, loader = build(load_job("llama_1b.toml", ["--training.global_batch_size", "16"], 1))
    for _ in range(3):
        learner.step(next(loader), lr=1e-4)
    with torch.profiler.profile() as profile:
        learner.step(next(loader), lr=1e-4)
        torch.cuda.synchronize()
    loader.close()
    averages = profile.key_averages()
    file = folder / "kernels_1b.txt"
    file.write_text(averages.table(sort_by="self_device_time_total", row_limit=45, max_name_column_width=90))
    # Operators have the time of their kernels again, and so have annotations; as the table's own total.
    of_kernels = (each for each in averages if each.device_type == DeviceType.CUDA and not each.is_user_annotation)
    busy = sum(each.self_device_time_total for each in of_kernels) / 1e6
    yield Figure("1B, a step of 32,768 tokens on the device", "s", 32_768 / 64_100, busy, f"kernels are in {file}")


def _figure(name: str, unit: str, predicted: float | None, work: Callable[[], float]) -> Figure:
    try:
        return Figure(name, unit, predicted, work())
    except RuntimeError as error:  # a kernel that this device or version lacks
        return Figure(name, unit, predicted, None, str(error).splitlines()[0])


def estimated_bytes(words: str) -> int:
    from configs.layout import mesh_sizes
    from tests.null_gpu.step import load_job
    from trainer.planning.memory import estimate_memory

    _, config, *overrides = shlex.split(words)
    job = load_job(config, overrides, 1)
    return estimate_memory(job, mesh_sizes(job, 1), "cuda").device


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
    parser.add_argument("stage", choices=("right", *JOBS, "kernels", "all"), help="what to measure")
    parser.add_argument("--output", type=Path, default=Path("runs/gpu"), help="folder (default: %(default)s)")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: there is no CUDA device here", file=sys.stderr)
        return 1
    options.output.mkdir(parents=True, exist_ok=True)
    file = options.output / "first_half_hour.json"
    known = {each["name"]: Figure(**each) for each in json.loads(file.read_text())} if file.exists() else {}
    stages: dict[str, Callable[[Path], Iterator[Figure]]] = {"right": right}
    stages |= {stage: lambda folder, stage=stage: speed(stage, folder) for stage in JOBS} | {"kernels": kernels}
    for stage in stages if options.stage == "all" else (options.stage,):
        for figure in stages[stage](options.output):
            known[figure.name] = figure
            print(table([figure]).splitlines()[1], flush=True)
            file.write_text(json.dumps([asdict(each) for each in known.values()], indent=2) + "\n")
    print(
        f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}; kept in {file}\n\n{table(list(known.values()))}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
