"""The ranks of a job that are rehearsed, each in a process of its own, and what comes of it."""

import random
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from configs.errors import KeelError
from configs.layout import MeshSizes, mesh_sizes
from configs.machine import available_cores
from configs.schema import Config
from scripts.rank_pool import fork_server
from scripts.rehearsal.job import rehearsal_job
from scripts.rehearsal.match import match
from scripts.rehearsal.play import Event, play

ALL_UP_TO = 16
"""Worlds of up to so many ranks are rehearsed whole."""
_SAMPLE = 4
"""Ranks drawn at random in a larger world, beside those at its edges."""


@dataclass(frozen=True)
class Proof:
    """What the rehearsal found."""

    ranks: list[int]
    """The rehearsed ones."""
    events: int
    """Collectives and messages that they issued."""
    groups: int
    problem: str | None
    """Why ranks wait forever, or fail, for people; None: none does."""
    size: str
    """How small the rehearsed job is, for people."""
    left_out: list[str]
    """What of the job was not rehearsed, for people."""
    seconds: float


def rehearse(config: Config, ranks: int, later: Sequence[Config], as_all: bool = False) -> Proof:
    """Rehearse a job from its start to a stop, as some of its ranks, and match what they issue.

    Args:
        config: the job, or the first stage of it.
        ranks: how many it shall run on.
        later: the later stages of the run.
        as_all: whether as all of its ranks.
    """
    started = time.perf_counter()
    chosen = list(range(ranks)) if as_all else ranks_to_rehearse(mesh_sizes(config, ranks))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for rank in chosen:
            job = rehearsal_job(config, ranks, folder / f"run-{rank}", later)
            (folder / f"{rank}.toml").write_text(job.text)
        workers = min(len(chosen), available_cores())
        context = fork_server(play.__module__)  # which imports torch
        with ProcessPoolExecutor(workers, mp_context=context, max_tasks_per_child=1) as pool:
            played = list(pool.map(partial(_played, folder, ranks), chosen))
    programs = {rank: events for rank, (events, _) in zip(chosen, played, strict=True)}
    failures = {rank: error for rank, (_, error) in zip(chosen, played, strict=True) if error}
    found = match(programs)
    problem = next((f"rank {rank} fails: {error}" for rank, error in failures.items()), found.problem)
    events = sum(map(len, programs.values()))
    return Proof(chosen, events, found.groups, problem, job.size, job.left_out, time.perf_counter() - started)


def _played(folder: Path, ranks: int, rank: int) -> tuple[list[Event], str | None]:
    """What a rank issues, or why it fails."""
    torch.set_num_threads(1)  # the processes share the cores
    try:
        return play(folder / f"{rank}.toml", ranks, rank), None
    except KeelError as error:
        return [], str(error)
    except Exception as error:
        return [], "".join(traceback.format_exception(error))


def ranks_to_rehearse(sizes: MeshSizes) -> list[int]:
    """One rank of each kind, and some more: all of a small world, or the edges of a large one.

    Of the latter every rank of the pipeline; of its first, middle and last those that are last along one axis, and
    along all; and a few drawn at random.
    """
    world = sizes.world_size
    if world <= ALL_UP_TO:
        return list(range(world))
    shape = (sizes.pp, sizes.dp_replicate, sizes.dp_shard, sizes.cp, sizes.tp)
    found = {int(np.ravel_multi_index((stage, 0, 0, 0, 0), shape)) for stage in range(sizes.pp)}
    for stage in {0, sizes.pp // 2, sizes.pp - 1}:
        found |= {int(np.ravel_multi_index((stage, *corner), shape)) for corner in _corners(shape[1:])}
    drawn = random.Random(0).sample(range(world), _SAMPLE)
    return sorted(found.union(drawn))


def _corners(sizes: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    last = tuple(size - 1 for size in sizes)
    yield last
    for axis in range(len(sizes)):
        yield tuple(last[axis] if each == axis else 0 for each in range(len(sizes)))
