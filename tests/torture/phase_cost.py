"""What timing the phases of a step costs: python -m tests.torture.phase_cost [--ranks 2] [--rounds 30] [overrides]

Blocks of steps take turns: without a clock, and with one that listens to each step. What a rank pays is the difference
of their CPU time, shared out to the steps between two that are listened to, beside a step's time; medians over rounds.
"""

import argparse
import statistics
import time
from itertools import islice

import torch
import torch.distributed as dist

from configs.layout import mesh_sizes
from configs.load import load
from parallelisms.guards.collective_waits import CollectiveWaits
from parallelisms.mesh import build_mesh, groups_of_axes
from scripts.rank_pool import RankPool
from trainer.data.loader import build_loader
from trainer.guards import phases
from trainer.guards.phases import Phase, PhaseClock
from trainer.step import build_learner

BLOCK = 5


def rounds(n: int, overrides: tuple[str, ...]) -> list[tuple[float, ...]]:
    """Of each round: CPU seconds of a step without a clock and with one, the step's wall seconds, its collectives,
    and what is reckoned for one."""
    config = load("parity.toml", ("--comm.order_guard_interval", "0", *overrides), dist.get_world_size()).config
    mesh = build_mesh(mesh_sizes(config, dist.get_world_size()), torch.device("cpu"))
    learner, loader = build_learner(config, mesh), build_loader(config, mesh.dp_rank, mesh.sizes.dp, 0)
    waits = CollectiveWaits(groups_of_axes(mesh).values(), mesh.device)
    clocks = [PhaseClock(waits, ratio, has_pipeline=mesh.sizes.pp > 1, warm_up_steps=0) for ratio in (0.0, 0.2)]
    found = []
    for _ in range(n + 2):
        cpu = []
        began = time.perf_counter()
        for clock in clocks:
            clock._stride, clock._in_window, calls = 1, 0, waits.calls
            started = time.process_time()
            for micro_batches in islice(loader, BLOCK):
                with clock.measure(Phase.DATA):
                    pass
                with clock.step():
                    step = learner.judge(micro_batches, learner.gradients(micro_batches))
                    clock.updating()
                    learner.update(step, 1e-3)
                clock.finish_step()
            cpu.append((time.process_time() - started) / BLOCK)
        found.append(
            (*cpu, (time.perf_counter() - began) / 2 / BLOCK, (waits.calls - calls) / BLOCK, waits.call_seconds)
        )
    loader.close()
    return found[2:]


def main() -> None:
    """Print the cost."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    given, overrides = parser.parse_known_args()
    pool = RankPool(given.ranks, timeout_seconds=600)
    for rank, found in enumerate(pool.run(given.ranks, rounds, given.rounds, tuple(overrides))):
        without, step, calls, call_seconds = (statistics.median(row[i] for row in found) for i in (0, 2, 3, 4))
        more = statistics.median(row[1] - row[0] for row in found)
        stride = phases.stride(calls * call_seconds, step)
        print(
            f"rank {rank}: {calls:.0f} collectives; a step takes {step * 1e3:.1f} ms, {without * 1e3:.1f} of CPU time, "
            f"listened to {more * 1e3:.2f} more; one of {stride} steps is: {more / stride / step:.3%}"
        )
    pool.close()


if __name__ == "__main__":
    main()
