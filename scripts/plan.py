"""Check whether a job fits before requesting machines: build it for any number of ranks, in one process.

    python scripts/plan.py llama_7b.toml --ranks 8 [--memory-gib 80] [--trace]

The model is built on the meta device and parallelized over a fake process group, with the same code and checks as on a
cluster, but without memory for the weights. The plan shows what rank 0 would hold, counted from its shards, and an
estimate of the rest; with --memory-gib also whether that fits, or what would make it fit. With --trace, one step of
each kind of rank is run with fake tensors, to show what it communicates.
"""

import argparse
import math
import sys
import time
from collections.abc import Sequence
from math import prod

if not __package__:  # run as a file
    import keel  # noqa: F401 - Keel's packages come first

from configs.layout import mesh_sizes
from configs.load import load
from configs.schema import Config
from configs.stages import layers_of_stages, stages_of_rank
from scripts.command import add_job_argument, end, job_of, number_of, positive, run_command, without_overrides
from trainer.report.console import Console, Row
from trainer.report.metrics import memory_peak_bytes
from trainer.report.units import count, duration, size


def shard_bytes(config: Config, ranks: int) -> int:
    """Bytes of the parameters that rank 0 of `ranks` holds, after all parallelisms are applied."""
    import torch

    from parallelisms.fake_ranks import fake_ranks
    from parallelisms.mesh import build_mesh
    from parallelisms.ranks import local_part
    from trainer.step import build_stages

    with fake_ranks(ranks):
        stages, _ = build_stages(config, build_mesh(mesh_sizes(config, ranks), torch.device("cpu")))
        locals_ = [local_part(p) for s in stages.values() for p in s.parameters()]
        assert all(p.is_meta for p in locals_)
        return sum(p.numel() * p.element_size() for p in locals_)


def decided(config: Config, ranks: int, device_bytes: int | None, console: Console) -> Config:
    """The job with what `activation_checkpoint.memory_limit_gib` chooses, which is printed."""
    from trainer.planning.least_recomputation import chosen, planned_choice

    choice = planned_choice(config, ranks, device_bytes)
    if choice:
        console.line(str(choice))
    return chosen(config, choice)


def rows(config: Config, ranks: int, device_bytes: int | None) -> list[Row]:
    """Return the rows of the plan; `device_bytes` is the memory of a GPU, None if unknown."""
    from trainer.planning.memory import estimate_memory
    from trainer.planning.skeleton import skeleton
    from trainer.planning.takes_less import does_not_fit
    from trainer.report.summary import native_modules

    started = time.perf_counter()
    held = shard_bytes(config, ranks)
    sizes = mesh_sizes(config, ranks)
    estimate = estimate_memory(config, sizes, "cuda")
    return [
        (
            "model",
            f"{count(sum(map(prod, skeleton(config.model).shapes.values())))} parameters{native_modules(config)}",
        ),
        ("ranks", f"{ranks}: {sizes}"),
        ("held by rank 0", f"{size(held)} of parameters; with gradients and optimizer {size(estimate.states)}"),
        (
            "at the peak",
            f"about {size(estimate.device)} allocated of a GPU's memory (estimate), in {estimate.peak.name}",
        ),
        *([("fits", does_not_fit(config, ranks, device_bytes) or "yes")] if device_bytes else []),
        ("built in", duration(time.perf_counter() - started)),
        ("this process", f"{size(memory_peak_bytes('cpu'))} at its peak"),
    ]


def kinds_of_ranks(config: Config, ranks: int) -> dict[int, str]:
    """Return one rank of each kind, with its description.

    In a pipeline, ranks differ by their layers and by whether they hold the first or last stage. Otherwise these are
    the first and the last rank, whose shards are smaller where the ranks do not divide the rows.
    """
    a_stage = ranks // config.mesh.pp
    if config.mesh.pp == 1:
        return {0: "the first rank", ranks - 1: "the last rank"}
    layers = layers_of_stages(config)
    kinds: dict[tuple, int] = {}
    for rank in range(config.mesh.pp):
        own = stages_of_rank(config, rank)
        kinds.setdefault((0 in own, len(layers) - 1 in own, tuple(len(layers[stage]) for stage in own)), rank)
    return {rank * a_stage: f"rank {rank} of the pipeline" for rank in kinds.values()}


def traffic_rows(config: Config, ranks: int, rank: int) -> list[Row]:
    """Return the rows of what a rank communicates in a step."""
    from trainer.planning.traffic import trace_step

    started = time.perf_counter()
    traffic = trace_step(config, ranks, rank)
    rows = [
        (f"{kind.op} over {kind.axis}", f"{calls:,} calls, {size(n_bytes)} in all")
        for kind, (calls, n_bytes) in traffic.items()
    ]
    return [*rows, ("traced in", duration(time.perf_counter() - started))]


def _traced(config: Config, ranks: int) -> dict[str, list[Row]]:
    """The communication of a step on each kind of rank; kinds that communicate the same are one."""
    found: dict[tuple[Row, ...], tuple[list[str], Row]] = {}
    for rank, kind in kinds_of_ranks(config, ranks).items():
        *traffic, took = traffic_rows(config, ranks, rank)
        found.setdefault(tuple(traffic), ([], took))[0].append(kind)
    return {" and of ".join(kinds): [*traffic, took] for traffic, (kinds, took) in found.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the plan; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], epilog="Further words override the config.")
    add_job_argument(parser)
    parser.add_argument("--ranks", type=positive, required=True, help="number of ranks to run the job on")
    gib = number_of(lambda n: 0 < n < math.inf, "a number above 0")
    parser.add_argument("--memory-gib", type=gib, help="memory of a GPU, to check whether the job fits")
    parser.add_argument("--trace", action="store_true", help="run one step of each kind of rank with fake tensors")
    own, overrides = without_overrides(sys.argv[1:] if arguments is None else arguments)
    options = parser.parse_args(own)
    device_bytes = int(options.memory_gib * 2**30) if options.memory_gib else None

    def work(console: Console) -> None:
        config = load(job_of(options), overrides, options.ranks).config
        config = decided(config, options.ranks, device_bytes, console)
        console.table(f"{config.job.name} on {options.ranks} ranks", rows(config, options.ranks, device_bytes))
        for kinds, traffic in _traced(config, options.ranks).items() if options.trace else ():
            console.table(f"one step of {kinds}", traffic)

    return run_command(work, "stopped")


if __name__ == "__main__":
    end(main)
