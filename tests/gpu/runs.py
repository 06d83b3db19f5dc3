"""Runs of train.py and of the benchmark, each in a process of its own, and what they left behind."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SYNTHETIC = ["--data.sources", '[{name = "random", kind = "synthetic"}]']
SMALL = (
    "--config llama_1b.toml --model.dim 512 --model.n_layers 4 --model.n_heads 8 --model.n_kv_heads 4 "
    "--model.ffn_dim 1024 --model.vocab_size 4096 --training.seq_len 512 --training.micro_batch_size 2 "
    """--training.global_batch_size 8 --lr_schedule.warmup_steps 2 --tokenizer.path '""' --metrics.interval 1 """
    "--metrics.tensorboard false --checkpoint.interval 0"
)
FLOAT32 = "--training.compute_dtype float32 --compile.enable false"


class Failed(Exception):
    """A run did not end well; the message is its last line."""


def train(folder: Path, words: str) -> dict[int, tuple[float, float]]:
    """Train the small job in `folder`, or go on; loss and gradient norm of each step. Raises: Failed."""
    has_no_values = "KEEL_NULL_GPUS" in os.environ and "--job.device cpu" not in words
    program = "tests/null_gpu/train.py" if has_no_values else "train.py"
    run_python(program, *shlex.split(f"{SMALL} {words}"), *SYNTHETIC, "--job.output_dir", str(folder))
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return {line["step"]: (line["loss"], line["grad_norm"]) for line in map(json.loads, lines)}


def difference(one: dict[int, tuple[float, float]], other: dict[int, tuple[float, float]]) -> float:
    """The largest of the losses' differences."""
    assert one.keys() == other.keys()
    return max(abs(one[step][0] - other[step][0]) for step in one)


def differences(folder: Path, steps: int = 8) -> dict[str, float]:
    """The largest difference of losses between pairs of runs that should be near each other."""
    shutil.rmtree(folder, ignore_errors=True)
    cpu = train(folder / "cpu", f"{FLOAT32} --training.steps {steps} --job.device cpu")
    gpu = train(folder / "gpu", f"{FLOAT32} --training.steps {steps}")
    eager = train(folder / "eager", f"--training.steps {steps} --compile.enable false")
    compiled = train(folder / "compiled", f"--training.steps {steps}")
    train(folder / "resumed", f"--training.steps {steps // 2}")
    resumed = train(folder / "resumed", f"--training.steps {steps}")
    return {
        "CPU against GPU, float32": difference(cpu, gpu),
        "eager against compiled, bfloat16": difference(eager, compiled),
        "whole against stopped and resumed": difference(compiled, resumed),
    }


def benchmark(file: Path, words: str) -> dict[str, Any]:
    """Tokens a second and bytes of a job on this GPU. Raises: Failed."""
    variant = "keel-eager" if "--compile.enable false" in words else "keel-compiled"
    options = ["--variants", variant, "--rounds", "5", "--steps", "3", "--json", str(file)]
    run_python("scripts/benchmark.py", *options, *shlex.split(words), *SYNTHETIC)
    figures = json.loads(file.read_text())
    return {"tokens_per_second": figures["variants"][variant]["tokens_per_second"]} | figures


def null_gpu_bytes(file: Path, words: str) -> int:
    """What the same job allocates at its peak on the null GPU, beside the real one. Raises: Failed."""
    run_python("-m", "tests.null_gpu.step", "--json", str(file), *shlex.split(words))
    return json.loads(file.read_text())["peak_allocated_bytes"]


def run_python(*words: str, timeout_seconds: float = 600) -> None:
    """Run a program in the repository. Raises: Failed."""
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
