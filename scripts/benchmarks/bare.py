"""Measures Keel against a minimal training loop, and its loader alone.

A *bare* loop has the same model, data in memory, cross-entropy of whole logits and AdamW: no loader, clipping,
sharding, mixed precision or skipping of bad steps. Compiled, its model and loss are one `torch.compile`, the best case
for a plain loop.
"""

import platform
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from configs.errors import UserError
from configs.layout import mesh_sizes, tokens_per_step
from configs.load import LoadedConfig, load
from configs.reading.overrides import words
from configs.schema import Config, Data, Source
from models import build_model
from parallelisms.init import materialize
from parallelisms.mesh import Mesh, build_mesh, start_process_group
from scripts.benchmarks.turns import KeelStep, Step, ratios, seconds_a_step, spread, take_turns, warm_up
from trainer.data.loader import build_loader
from trainer.data.text.token_writer import TokenFileWriter
from trainer.planning.flops import flops_per_token, mfu, peak_flops, tflops_per_device
from trainer.report.metrics import memory_peak_bytes

_WARM_UP_STEPS = 3  # compiling takes two


def measure(
    config_name: str, overrides: Sequence[str], variants: Sequence[str], rounds: int, steps: int
) -> dict[str, Any]:
    """Measure tokens per second of each variant ("bare-eager", "keel-compiled", ...), and Keel's ratio to bare.

    Under torchrun, all ranks must call it.

    Raises:
        KeelError: the job is not valid, or a bare loop is requested on several ranks.
    """
    job = load(config_name, overrides)
    device = start_process_group("cuda" if torch.cuda.is_available() else "cpu", job.config.job.timeout_seconds)
    n_ranks = dist.get_world_size()
    job = load(config_name, overrides, n_ranks)
    mesh = build_mesh(mesh_sizes(job.config, n_ranks), device)
    if n_ranks > 1 and any(name.startswith("bare") for name in variants):
        raise UserError("the bare loop runs in one process: measure several ranks with --variants keel-compiled")
    built = {name: _step(job, overrides, mesh, name) for name in variants}
    for step in built.values():
        warm_up(step, _WARM_UP_STEPS)
    turns = {name: partial(seconds_a_step, step, steps, device) for name, step in built.items()}
    figures = _figures(job.config, mesh, take_turns(turns, rounds))
    dist.destroy_process_group()
    return figures


def _step(job: LoadedConfig, overrides: Sequence[str], mesh: Mesh, variant: str) -> Step:
    loop, _, mode = variant.partition("-")
    if loop == "bare":
        return bare_step(job.config, mesh.device, compiled=mode == "compiled")
    compiled = ["--compile.enable", str(mode == "compiled").lower()]
    return KeelStep(load(job.file, [*overrides, *compiled], mesh.sizes.world_size).config, mesh)


def bare_step(config: Config, device: torch.device, compiled: bool) -> Step:
    """Make the step function of the bare loop."""
    with torch.device("meta"):
        model = build_model(config.model).to(getattr(torch, config.training.dtype))
    materialize(model, device, config.training.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.optimizer.lr, fused=True)
    compute_dtype = getattr(torch, config.training.compute_dtype)
    batches = _batches_in_memory(config, device)

    def loss_of(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, compute_dtype, enabled=compute_dtype is torch.bfloat16):
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


def _figures(config: Config, mesh: Mesh, seconds: dict[str, list[float]]) -> dict[str, Any]:
    tokens = tokens_per_step(config)
    flops = flops_per_token(config.model, config.training.seq_len).causal
    name = torch.cuda.get_device_name() if mesh.device.type == "cuda" else "cpu"
    rows = {}
    for variant, each in seconds.items():
        speed = tokens / statistics.median(each)
        tflops = tflops_per_device(speed, flops, mesh.sizes.world_size)
        peak = peak_flops(name, config.training)
        rows[variant] = {"tokens_per_second": speed, "seconds": each, "tflops": tflops, "mfu": mfu(tflops, peak)}
    return {
        "job": config.job.name,
        "device": name,
        "ranks": mesh.sizes.world_size,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "variants": rows,
        "keel_over_bare": {
            mode: statistics.median(ratios(seconds[f"bare-{mode}"], seconds[f"keel-{mode}"]))
            for mode in ("eager", "compiled")
            if f"bare-{mode}" in seconds and f"keel-{mode}" in seconds
        },
        "memory_peak_bytes": memory_peak_bytes(mesh.device.type),
    }


def lines(figures: dict[str, Any]) -> Iterator[str]:
    """Format the figures for printing."""
    for name, row in figures["variants"].items():
        yield f"{name:14s} {row['tokens_per_second']:12,.0f} tokens/s   s a step: {spread(row['seconds'], '.3f')}"
    yield from (f"{key}: {value}" for key, value in figures.items() if key != "variants")


_LOADER_SECONDS = 3.0


def loader_speed() -> float:
    """Measure tokens per second that one process reads from token files: 100 M tokens, windows of 2,048, 8 at once."""
    with tempfile.TemporaryDirectory() as folder:
        random = np.random.default_rng(0)
        with TokenFileWriter(Path(folder) / "00000.tokens", vocab_size=32_000, tokenizer_hash="") as writer:
            for _ in range(100):
                writer.append(random.integers(0, 32_000, size=1_000_000))
        sizes = {"training.seq_len": 2048, "training.global_batch_size": 64, "training.micro_batch_size": 8}
        config = load("benchmark_10m.toml", words(sizes | {"model.vocab_size": 32_000})).config
        files = Data(sources=[Source(name="files", kind="tokens", path=folder)])
        loader = build_loader(config.model_copy(update={"data": files}), 0, 1, start_sample=0)
        for _ in islice(loader, 3):
            pass
        started = time.perf_counter()
        steps = 0
        while time.perf_counter() - started < _LOADER_SECONDS:
            next(loader)
            steps += 1
        speed = steps * 64 * 2048 / (time.perf_counter() - started)
        loader.close()
        return speed
