"""Measure Keel's speed beside the plainest loop there is.

    python scripts/benchmark.py --config benchmark_10m.toml --json speed.json
    torchrun --nproc-per-node 8 scripts/benchmark.py --config llama_7b.toml --variants keel-compiled \\
        --data.sources '[{name = "random", kind = "synthetic"}]'

A *bare* loop is the same model with its data in memory, cross-entropy of whole logits and AdamW: no loader, clipping,
sharding, mixed precision or skipping of bad steps. Compiled, its model and loss are one `torch.compile`, the best that
a plain loop gets. The variants take turns, a few steps each, so that a machine whose speed drifts is fair to all;
quote the ratio, which is the median over the rounds.
"""

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from configs.errors import KeelError
from configs.layout import mesh_sizes
from configs.load import LoadedConfig, load
from configs.schema import Config, Data, Source
from models import build_model
from parallelisms.init import materialize
from parallelisms.mesh import Mesh, build_mesh, start_process_group
from trainer.data.loader import build_loader
from trainer.data.token_file import TokenFileWriter
from trainer.planning.flops import flops_per_token, mfu, peak_flops, tflops_per_device
from trainer.report.metrics import memory_peak_bytes
from trainer.step import build_learner

Step = Callable[[], None]
VARIANTS = ("bare-eager", "keel-eager", "bare-compiled", "keel-compiled")
WARM_UP_STEPS = 3  # compiling takes two


def bare_step(config: Config, mesh: Mesh, compiled: bool) -> Step:
    """A step of the plain loop."""
    with torch.device("meta"):
        model = build_model(config.model).to(getattr(torch, config.training.dtype))
    materialize(model, mesh.device, config.training.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.optimizer.lr, fused=True)
    compute_dtype = getattr(torch, config.training.compute_dtype)
    batches = _batches_in_memory(config, mesh.device)

    def loss_of(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast(mesh.device.type, compute_dtype, enabled=compute_dtype is torch.bfloat16):
            logits = model(tokens)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    if compiled:
        loss_of = torch.compile(loss_of, fullgraph=True)

    def step() -> None:
        loss_of(*next(batches)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _batches_in_memory(config: Config, device: torch.device) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    shape = (8, config.training.global_batch_size, config.training.seq_len + 1)
    tokens = torch.randint(config.model.vocab_size, shape, device=device)
    return cycle([(each[:, :-1].contiguous(), each[:, 1:].contiguous()) for each in tokens])


def keel_step(config: Config, mesh: Mesh) -> Step:
    """A step as the trainer makes it: the loader, and all that `Learner.step` does."""
    learner = build_learner(config, mesh)
    loader = build_loader(config, mesh.dp_rank, mesh.sizes.dp, start_sample=0)

    def step() -> None:
        learner.step(next(loader), config.optimizer.lr)

    return step


def build_steps(job: LoadedConfig, overrides: list[str], mesh: Mesh, variants: list[str]) -> dict[str, Step]:
    """The variants asked for, warmed up."""
    steps: dict[str, Step] = {}
    for name in variants:
        loop, _, mode = name.partition("-")
        if loop == "bare":
            steps[name] = bare_step(job.config, mesh, compiled=mode == "compiled")
        else:
            compiled = ["--compile.enable", str(mode == "compiled").lower()]
            steps[name] = keel_step(load(job.file, [*overrides, *compiled], dist.get_world_size()).config, mesh)
        for _ in range(WARM_UP_STEPS):
            steps[name]()
    return steps


def take_turns(steps: dict[str, Step], rounds: int, steps_a_turn: int, device: torch.device) -> dict[str, list[float]]:
    """Seconds a step of each variant in each round."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            started = _now(device)
            for _ in range(steps_a_turn):
                step()
            seconds[name].append((_now(device) - started) / steps_a_turn)
    return seconds


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def report(config: Config, mesh: Mesh, seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Tokens a second of each variant, and Keel's over the bare loop's."""
    tokens = config.training.global_batch_size * config.training.seq_len
    flops = flops_per_token(config.model, config.training.seq_len).causal
    name = torch.cuda.get_device_name() if mesh.device.type == "cuda" else "cpu"
    rows = {}
    for variant, each in seconds.items():
        speed = tokens / statistics.median(each)
        tflops = tflops_per_device(speed, flops, mesh.sizes.world_size)
        peak = peak_flops(name, config.training.compute_dtype)
        rows[variant] = {"tokens_per_second": speed, "seconds": each, "tflops": tflops, "mfu": mfu(tflops, peak)}
    ratios = {
        mode: statistics.median(b / k for b, k in zip(seconds[f"bare-{mode}"], seconds[f"keel-{mode}"], strict=True))
        for mode in ("eager", "compiled")
        if f"bare-{mode}" in seconds and f"keel-{mode}" in seconds
    }
    return {
        "job": config.job.name,
        "device": name,
        "ranks": mesh.sizes.world_size,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "variants": rows,
        "keel_over_bare": ratios,
        "memory_peak_bytes": memory_peak_bytes(mesh.device.type),
    }


def loader_speed(seconds: float = 3.0) -> float:
    """Tokens a second that one process reads from token files: 100 M tokens, windows of 2,048, 8 at once."""
    with tempfile.TemporaryDirectory() as folder:
        random = np.random.default_rng(0)
        with TokenFileWriter(Path(folder) / "00000.tokens", vocab_size=32_000, tokenizer_hash="") as writer:
            for _ in range(100):
                writer.append(random.integers(0, 32_000, size=1_000_000))
        sizes = {"seq_len": 2048, "global_batch_size": 64, "micro_batch_size": 8}
        words = [word for key, value in sizes.items() for word in (f"--training.{key}", str(value))]
        config = load("benchmark_10m.toml", [*words, "--model.vocab_size", "32000"]).config
        files = Data(sources=[Source(name="files", kind="tokens", path=folder)])
        loader = build_loader(config.model_copy(update={"data": files}), 0, 1, start_sample=0)
        for _ in islice(loader, 3):
            pass
        started, steps = time.perf_counter(), 0
        while time.perf_counter() - started < seconds:
            next(loader)
            steps += 1
        speed = steps * 64 * 2048 / (time.perf_counter() - started)
        loader.close()
        return speed


def main() -> int:
    """Measure, print and write; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], epilog="Further words override the config.")
    parser.add_argument("--config", default="benchmark_10m.toml", help="job file (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="which to measure (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=10, help="turns of each variant (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=2, help="steps a turn (default: %(default)s)")
    parser.add_argument("--loader", action="store_true", help="measure the loader alone, on token files")
    arguments, overrides = parser.parse_known_args()
    variants = arguments.variants.split(",")
    if unknown := set(variants) - set(VARIANTS):
        parser.error(f"unknown variants: {', '.join(unknown)}; there are {', '.join(VARIANTS)}")
    try:
        if arguments.loader:
            figures: dict[str, Any] = {"loader_tokens_per_second": loader_speed()}
        else:
            figures = _measure(arguments, overrides, variants)
    except KeelError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    if not dist.is_initialized() or dist.get_rank() == 0:
        _print(figures)
        if arguments.json:
            arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


def _measure(arguments: argparse.Namespace, overrides: list[str], variants: list[str]) -> dict[str, Any]:
    job = load(arguments.config, overrides)
    device = start_process_group("cuda" if torch.cuda.is_available() else "cpu", job.config.job.timeout_seconds)
    job = load(arguments.config, overrides, dist.get_world_size())
    mesh = build_mesh(mesh_sizes(job.config, dist.get_world_size()), device)
    if dist.get_world_size() > 1 and any(name.startswith("bare") for name in variants):
        raise KeelError("the bare loop runs in one process: measure several ranks with --variants keel-compiled")
    steps = build_steps(job, overrides, mesh, variants)
    return report(job.config, mesh, take_turns(steps, arguments.rounds, arguments.steps, device))


def _print(figures: dict[str, Any]) -> None:
    for name, row in figures.get("variants", {}).items():
        spread = f"{min(row['seconds']):.3f} to {max(row['seconds']):.3f} s a step"
        print(f"{name:14s} {row['tokens_per_second']:12,.0f} tokens/s  ({spread})")
    for key, value in figures.items():
        if key != "variants":
            print(f"{key}: {value}")


if __name__ == "__main__":
    sys.exit(main())
