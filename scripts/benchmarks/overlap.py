"""Measures how well FSDP's communication overlaps computation, with delays that stand in for a network.

All variants run the same job. Without a delay: with the order guard off and on at every step, and with exact
reductions. With a delay of each FSDP all-gather: for `comm.streams` "shared" and "per_group", each prefetch depth (in
both directions) and exact reductions. On a CPU the all-gathers are also counted: those that the computation waited
for, and among them those that had waited in their queue behind another process group's.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from configs.layout import mesh_sizes
from configs.load import load
from configs.schema import Config
from parallelisms.mesh import Mesh, build_mesh, start_process_group
from scripts.benchmarks.gathers import GatherCounts, count_gathers, delay_gathers
from scripts.benchmarks.turns import KeelStep, seconds_a_step, take_turns, warm_up

_WARM_UP_STEPS = 2


@dataclass(frozen=True)
class Variant:
    """One case of the measurement."""

    words: tuple[str, ...] = ()
    """Overrides of the job."""
    seconds: float = 0.0
    """Delay of each all-gather."""


def variants(milliseconds: float, depths: Sequence[int]) -> dict[str, Variant]:
    """The variants by name."""
    # By default the guard runs only in the first step, which is part of the warm-up.
    guarded = Variant(("--comm.order_guard_interval", "1"))
    exact = ("--training.reduction", "exact")
    found = {"no delay": Variant(), "no delay, guarded": guarded, "no delay, exact": Variant(exact)}
    seconds = milliseconds / 1000
    for depth in depths:
        prefetch = ("--comm.prefetch", str(depth))
        for streams in ("shared", "per_group"):
            found[f"{streams}, prefetch {depth}"] = Variant((*prefetch, "--comm.streams", streams), seconds)
        found[f"shared, prefetch {depth}, exact"] = Variant((*prefetch, *exact), seconds)
    return found


def measure_here(
    config_name: str, overrides: Sequence[str], chosen: Mapping[str, Variant], rounds: int
) -> list[dict[str, Any]]:
    """Run `measure` on the ranks that torchrun started.

    Raises:
        KeelError: the job is not valid.
    """
    job = load(config_name, overrides).config.job
    device = start_process_group("cuda" if torch.cuda.is_available() else "cpu", job.timeout_seconds)
    figures = measure(config_name, overrides, chosen, rounds, device)
    dist.destroy_process_group()
    return figures


def measure(
    config_name: str, overrides: Sequence[str], chosen: Mapping[str, Variant], rounds: int, device: torch.device
) -> list[dict[str, Any]]:
    """Return a row per variant: the seconds of each step, and this rank's all-gathers per step."""
    n_ranks = dist.get_world_size()
    mesh = build_mesh(mesh_sizes(load(config_name, overrides, n_ranks).config, n_ranks), device)
    built = {
        name: _Step(load(config_name, [*overrides, *variant.words], n_ranks).config, mesh, variant.seconds)
        for name, variant in chosen.items()
    }
    for step in built.values():
        warm_up(step, _WARM_UP_STEPS)
    before = {name: asdict(step.gathers) for name, step in built.items()}
    turns = {name: partial(seconds_a_step, step, 1, device) for name, step in built.items()}
    seconds = take_turns(turns, rounds)
    results = []
    for name, step in built.items():
        counted = {key: (value - before[name][key]) / rounds for key, value in asdict(step.gathers).items()}
        results.append({"variant": name, "seconds": seconds[name]} | counted)
    return results


class _Step(KeelStep):
    """A step with late all-gathers, after which all ranks are synchronized; on a CPU its all-gathers are counted."""

    def __init__(self, config: Config, mesh: Mesh, seconds: float) -> None:
        super().__init__(config, mesh)
        self.gathers = GatherCounts()
        if mesh.device.type == "cpu":
            self.gathers = count_gathers(self.learner.stages.values(), config.comm.streams, lambda _: seconds)
        elif seconds:
            delay_gathers(self.learner.stages.values(), lambda _: seconds)

    def __call__(self) -> None:
        super().__call__()
        dist.barrier()


def lines(figures: list[dict[str, Any]]) -> Iterator[str]:
    """Format the figures for printing."""
    yield f"{'':22s} {'ms a step':>10s} {'lowest':>8s} {'gathers':>8s} {'waits':>6s} {'behind others':>14s}   (rank 0)"
    for row in figures:
        median = statistics.median(row["seconds"]) * 1000
        lowest = min(row["seconds"]) * 1000
        counts = f"{row['gathers']:8.1f} {row['waits']:6.1f} {row['waits_behind_others']:14.1f}"
        yield f"{row['variant']:22s} {median:10.1f} {lowest:8.1f} {counts}"
