"""Runs of train.py and of the benchmark, each in a process of its own, and what they left behind."""

import json
import math
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.gpu.jobs import Job

ROOT = Path(__file__).parents[2]
IS_NULL = "KEEL_NULL_GPUS" in os.environ
"""Whether this is a rehearsal: the device computes nothing (tests/null_gpu)."""
SYNTHETIC = ["--data.sources", '[{name = "random", kind = "synthetic"}]']
SMALL = (
    "--config llama_1b.toml --model.dim 512 --model.n_layers 4 --model.n_heads 8 --model.n_kv_heads 4 "
    "--model.ffn_dim 1024 --model.vocab_size 4096 --training.seq_len 512 --training.micro_batch_size 2 "
    """--training.global_batch_size 8 --lr_schedule.warmup_steps 2 --tokenizer.path '""' --metrics.interval 1 """
    "--metrics.tensorboard false --checkpoint.interval 0"
)


class Failed(Exception):
    """A run did not end well; the message is its last line."""


_end = math.inf
"""When no further figure is begun, by `time.monotonic`."""


def end_after(seconds: float) -> None:
    """Let everything here end after so long."""
    global _end
    _end = time.monotonic() + seconds


def seconds_left() -> float:
    """Seconds until the end. Raises: Failed, after it."""
    left = _end - time.monotonic()
    if left <= 0:
        raise Failed("not begun: the time was over")
    return left


Curve = dict[int, tuple[float, float]]
"""Loss and gradient norm of each step."""


def train(folder: Path, words: str, program: str = "train.py") -> Curve:
    """Train the small job in `folder`, or go on. Raises: Failed."""
    if IS_NULL and program == "train.py" and "--job.device cpu" not in words:
        program = "tests/null_gpu/train.py"
    given = shlex.split(f"{SMALL} {words}")
    run_python(program, *([] if "--data.sources" in given else SYNTHETIC), *given, "--job.output_dir", str(folder))
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return {line["step"]: (line["loss"], line["grad_norm"]) for line in map(json.loads, lines)}


def benchmark(file: Path, job: Job) -> dict[str, Any]:
    """Tokens a second and bytes of a job on this GPU. Raises: Failed."""
    config, *overrides = job.split()
    variant = "keel-eager" if "--compile.enable" in overrides else "keel-compiled"
    variants = ["bare-compiled", variant] if job.beside_bare else [variant]
    options = [
        "--variants",
        ",".join(variants),
        "--rounds",
        str(job.rounds),
        "--steps",
        str(job.steps),
        "--json",
        str(file),
    ]
    program = "tests/null_gpu/benchmark.py" if IS_NULL else "scripts/benchmark.py"
    run_python(program, *options, "--config", config, *overrides, *SYNTHETIC)
    figures = json.loads(file.read_text())
    return {"tokens_per_second": figures["variants"][variant]["tokens_per_second"]} | figures


def null_gpu_bytes(file: Path, job: Job) -> int:
    """What the job allocates at its peak on the null GPU. Raises: Failed."""
    config, *overrides = job.split()
    run_python("-m", "tests.null_gpu.step", "--json", str(file), "--config", config, *overrides)
    peak: int = json.loads(file.read_text())["peak_allocated_bytes"]
    return peak


def run_python(*words: str, timeout_seconds: float = 600) -> str:
    """Run a program in the repository; returns what it says. Raises: Failed."""
    timeout_seconds = min(timeout_seconds, seconds_left())
    try:
        done = subprocess.run(
            [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=timeout_seconds
        )
    except subprocess.TimeoutExpired:
        raise Failed(f"no end after {timeout_seconds:.0f} s") from None
    if done.returncode:
        said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        errors = [line for line in said if "rror" in line] or said or ["nothing was said"]
        raise Failed(f"exit code {done.returncode}: {errors[-1][:200]}")
    return done.stdout
