"""Measures the cost of each axis of the mesh on this machine: step times relative to one process, for equal tokens.

The ranks divide this machine's CPU cores evenly as threads. The ratio to one process, which has all cores, therefore
shows the cost of the axis itself: its collectives, idle ranks and smaller matrices.
"""

import os
from collections.abc import Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist

from configs.layout import mesh_sizes
from configs.load import load
from parallelisms.mesh import build_mesh
from scripts.benchmarks.turns import KeelStep, ratios, seconds_a_step, spread, take_turns, warm_up
from scripts.rank_pool import RankPool

_RANKS = (2, 4)
_ONE = "1 process"
_WARM_UP_STEPS = 1


def measure(config_name: str, words: Sequence[str], rounds: int, steps: int) -> dict[str, list[float]]:
    """Measure step times relative to one process, by mesh, one per round.

    Raises:
        KeelError: the job is not valid.
    """
    cases = _cases(words, load(config_name, words).config.training.global_batch_size)
    for ranks, overrides in cases.values():
        load(config_name, overrides, ranks)
    pool = RankPool(size=max(_RANKS))

    def turn(ranks: int, overrides: tuple[str, ...]) -> float:
        return pool.run(ranks, _seconds_a_step, config_name, overrides, steps)[0]

    try:
        seconds = take_turns({name: partial(turn, *case) for name, case in cases.items()}, rounds)
    finally:
        pool.close()
    return {name: ratios(each, seconds[_ONE]) for name, each in seconds.items()}


def lines(figures: dict[str, list[float]]) -> Iterator[str]:
    """Format the figures for printing."""
    yield "step time over one process's, equal tokens: median (smallest to largest)"
    for name, each in figures.items():
        yield f"{name:14s} {spread(each, '.2f')}"


def _cases(words: Sequence[str], global_batch: int) -> dict[str, tuple[int, tuple[str, ...]]]:
    """The number of ranks and the overrides of each mesh."""
    changes: dict[str, tuple[int, dict[str, object]]] = {_ONE: (1, {"training.micro_batch_size": global_batch})}
    for ranks in _RANKS:
        changes |= {f"{axis} {ranks}": (ranks, keys) for axis, keys in _meshes(ranks, global_batch).items()}
    cases = {}
    for name, (ranks, keys) in changes.items():
        overrides = (word for key, value in keys.items() for word in (f"--{key}", str(value)))
        cases[name] = (ranks, (*words, *overrides))
    return cases


def _meshes(ranks: int, global_batch: int) -> dict[str, dict[str, object]]:
    """Config overrides, by the axis along which the ranks are arranged."""
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


def _seconds_a_step(config_name: str, overrides: tuple[str, ...], steps: int) -> float:
    """Measure the time of a step on this rank's mesh; called on all ranks."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // dist.get_world_size()))
    config = load(config_name, overrides, dist.get_world_size()).config
    device = torch.device("cpu")
    step = KeelStep(config, build_mesh(mesh_sizes(config, dist.get_world_size()), device))

    def finish() -> None:
        step.learner.finish_update()
        dist.barrier()

    try:
        warm_up(step, _WARM_UP_STEPS)
        dist.barrier()
        return seconds_a_step(step, steps, device, finish)
    finally:
        step.loader.close()
