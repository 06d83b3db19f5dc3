"""Measure how far FSDP's communication overlaps computation, with delays in place of a network.

    torchrun --nproc-per-node 4 scripts/overlap.py --config parity.toml --milliseconds 20 --json overlap.json \\
        --fsdp.reshard_after_forward always

Every variant is the same job: without a delay, without and with the order guard on every step; and with a delay of
every all-gather of FSDP, for `comm.streams` "shared" and "per_group" and each prefetch depth (in both directions). The
variants take turns, a step each, so that a machine whose speed drifts is fair to all. On a CPU the gathers are counted,
too: those that the computation waited for, and of them those that had waited in their queue behind another process
group's. Further words override the config.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist

from configs.errors import KeelError
from configs.layout import mesh_sizes
from configs.load import load
from configs.schema import Config
from parallelisms.mesh import Mesh, build_mesh, start_process_group
from parallelisms.streams import GatherCounts, count_gathers
from scripts.benchmark import take_turns
from trainer.data.loader import build_loader
from trainer.step import build_learner

WARM_UP_STEPS = 2


def variants(milliseconds: float, depths: list[int]) -> dict[str, list[str]]:
    """Overrides of each variant, by its name."""
    # The default guards the first step only, which warms up.
    delay = ["--comm.simulate.all_gather_milliseconds", str(milliseconds)]
    found = {"no delay": [], "no delay, guarded": ["--comm.order_guard_interval", "1"]}
    for depth in depths:
        prefetch = ["--comm.prefetch_forward", str(depth), "--comm.prefetch_backward", str(depth)]
        for streams in ("shared", "per_group"):
            found[f"{streams}, prefetch {depth}"] = [*delay, *prefetch, "--comm.streams", streams]
    return found


def _step(config: Config, mesh: Mesh) -> tuple[Callable[[], None], GatherCounts]:
    """A warmed-up step, after which all ranks are at the same place, and the counts that it adds to."""
    learner = build_learner(config, mesh)
    is_cpu = mesh.device.type == "cpu"
    counts = count_gathers(learner.stages.values(), config.comm) if is_cpu else GatherCounts()
    loader = build_loader(config, mesh.dp_rank, mesh.sizes.dp, start_sample=0)

    def step() -> None:
        learner.step(next(loader), config.optimizer.lr)
        dist.barrier()

    for _ in range(WARM_UP_STEPS):
        step()
    return step, counts


def measure(
    config_name: str, overrides: list[str], chosen: dict[str, list[str]], rounds: int, device: torch.device
) -> list[dict[str, Any]]:
    """A row a variant: seconds of each of its steps, and this rank's gathers a step."""
    n_ranks = dist.get_world_size()
    config = load(config_name, overrides, n_ranks).config
    mesh = build_mesh(mesh_sizes(config, n_ranks), device)
    built = {
        name: _step(load(config_name, [*overrides, *words], n_ranks).config, mesh) for name, words in chosen.items()
    }
    before = {name: asdict(counts) for name, (_, counts) in built.items()}
    seconds = take_turns({name: step for name, (step, _) in built.items()}, rounds, 1, device)
    return [
        {"variant": name, "seconds": seconds[name]}
        | {key: (value - before[name][key]) / rounds for key, value in asdict(counts).items()}
        for name, (_, counts) in built.items()
    ]


def _print(rows: list[dict[str, Any]]) -> None:
    print(f"{'':22s} {'ms a step':>10s} {'lowest':>8s} {'gathers':>8s} {'waits':>6s} {'behind others':>14s}   (rank 0)")
    for row in rows:
        median, lowest = statistics.median(row["seconds"]) * 1000, min(row["seconds"]) * 1000
        counts = f"{row['gathers']:8.1f} {row['waits']:6.1f} {row['waits_behind_others']:14.1f}"
        print(f"{row['variant']:22s} {median:10.1f} {lowest:8.1f} {counts}")


def main() -> int:
    """Measure, print and write; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--config", default="parity.toml", help="job file (default: %(default)s)")
    parser.add_argument(
        "--milliseconds", type=float, default=20.0, help="delay of an all-gather (default: %(default)s)"
    )
    parser.add_argument("--depths", default="0,1,2,3", help="prefetch depths (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=10, help="steps of each variant (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments, overrides = parser.parse_known_args()
    try:
        job = load(arguments.config, overrides).config.job
        device = start_process_group("cuda" if torch.cuda.is_available() else "cpu", job.timeout_seconds)
        chosen = variants(arguments.milliseconds, [int(depth) for depth in arguments.depths.split(",")])
        rows = measure(arguments.config, overrides, chosen, arguments.rounds, device)
    except KeelError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    if dist.get_rank() == 0:
        _print(rows)
        if arguments.json:
            arguments.json.write_text(json.dumps(rows, indent=2) + "\n")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
