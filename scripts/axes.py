"""What each axis of the mesh costs on this machine: step times beside one process, at equal tokens.

    python scripts/axes.py [--config benchmark_10m.toml] [--rounds 3] [--json axes.json]

All ranks run on this machine's CPU cores, shared out evenly as threads; so the ratio to one process, which has all
cores, says what the axis itself takes: its collectives, its idle ranks, its smaller matrices. The meshes take turns,
and the figure is the median over the rounds of the ratio within a round.
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist

from configs.errors import KeelError
from configs.layout import mesh_sizes
from configs.load import load
from parallelisms.mesh import build_mesh
from scripts.rank_pool import RankPool
from trainer.data.loader import build_loader
from trainer.step import build_learner

RANKS = (2, 4)
WARM_UP_STEPS = 1


def meshes(ranks: int, global_batch: int) -> dict[str, dict[str, object]]:
    """Overrides of the config, by the axis that the ranks are arranged along."""
    share = max(1, global_batch // ranks)
    data: dict[str, object] = {"training.micro_batch_size": share}
    model: dict[str, object] = {"training.micro_batch_size": global_batch}
    replicas: dict[str, object] = {"mesh.dp_replicate": ranks, "mesh.dp_shard": 1, **data}
    return {
        "FSDP": data,
        "ZeRO 1": {"fsdp.zero_stage": 1, **data},
        "DDP": replicas,
        "owner": {"fsdp.partition": "owner", **replicas},
        "TP": {"mesh.tp": ranks, **model},
        "CP gather": {"mesh.cp": ranks, "context.method": "gather", **model},
        "CP ring": {"mesh.cp": ranks, "context.method": "ring", **model},
        "PP": {"mesh.pp": ranks, **data},
    }


def seconds_a_step(config_name: str, overrides: tuple[str, ...], steps: int) -> float:
    """Time of a step on this rank's mesh; to be called on all ranks."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // dist.get_world_size()))
    config = load(config_name, overrides, dist.get_world_size()).config
    mesh = build_mesh(mesh_sizes(config, dist.get_world_size()), torch.device("cpu"))
    learner = build_learner(config, mesh)
    loader = build_loader(config, mesh.dp_rank, mesh.sizes.dp, start_sample=0)
    try:
        for step in range(WARM_UP_STEPS + steps):
            if step == WARM_UP_STEPS:
                dist.barrier()
                started = time.perf_counter()
            learner.step(next(loader), config.optimizer.lr)
        learner.finish_update()
        dist.barrier()
        return (time.perf_counter() - started) / steps
    finally:
        loader.close()


def measure(config_name: str, words: list[str], rounds: int, steps: int) -> dict[str, list[float]]:
    """Step times over one process's, by mesh, one a round."""
    batch = load(config_name, words).config.training.global_batch_size
    cases: dict[str, tuple[int, dict[str, object]]] = {"1 process": (1, {"training.micro_batch_size": batch})}
    cases |= {f"{axis} {ranks}": (ranks, changes) for ranks in RANKS for axis, changes in meshes(ranks, batch).items()}
    ratios: dict[str, list[float]] = {name: [] for name in cases}
    pool = RankPool(size=max(RANKS))
    try:
        for _ in range(rounds):
            found = {}
            for name, (ranks, changes) in cases.items():
                overrides = (*words, *(word for key, value in changes.items() for word in (f"--{key}", str(value))))
                found[name] = pool.run(ranks, seconds_a_step, config_name, overrides, steps)[0]
                ratios[name].append(found[name] / found["1 process"])
    finally:
        pool.close()
    return ratios


def main() -> int:
    """Measure and print; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], epilog="Further words override the config.")
    parser.add_argument("--config", default="benchmark_10m.toml", help="job file (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each mesh (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=3, help="steps a turn (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments, words = parser.parse_known_args()
    try:
        ratios = measure(arguments.config, words, arguments.rounds, arguments.steps)
    except KeelError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print("step time over one process's, equal tokens: median (smallest to largest)")
    for name, each in ratios.items():
        print(f"{name:14s} {statistics.median(each):6.2f}  ({min(each):.2f} to {max(each):.2f})")
    if arguments.json:
        arguments.json.write_text(json.dumps(ratios, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
