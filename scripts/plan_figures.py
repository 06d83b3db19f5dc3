"""Which figures of a plan's JSON are counted, which modelled, and which measured, by their paths.

A path has the keys on the way to a figure, without places in lists; `*` stands for all keys of a table.
"""

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

ORIGINS = {
    "counted": (
        "ranks",
        "memory_by_kind.pipeline_rank",
        *(f"memory_by_kind.parts_bytes.{name}" for name in ("parameters", "compute copies", "optimizer", "gradients")),
        *(f"stages.{name}" for name in ("stage", "first_step", "steps", "tokens")),
        *(f"time.by_kind.{name}" for name in ("pipeline_rank", "collectives.calls", "collectives.n_bytes")),
        *("time.run.tokens", "time.run.steps", "time.model_flops_per_step", "time.checkpoint_bytes"),
        *("time.data.n_bytes", "time.saves.n_bytes", "time.saves.interval"),
        *("proof.ranks", "proof.events", "proof.groups"),
    ),
    "modelled": (
        "chosen.*",
        *("memory_by_kind.peak_bytes", "memory_by_kind.communicators_bytes"),
        *(f"memory_by_kind.parts_bytes.{name}" for name in ("gathered", "activations", "loss", "buffers")),
        *(f"stages.{name}" for name in ("peak_bytes", "step_seconds", "tokens_per_second_per_gpu", "mfu")),
        *("time.step_seconds", "time.tokens_per_second_per_gpu", "time.mfu", "time.parts_seconds.*"),
        *("time.by_kind.seconds", "time.by_kind.parts_seconds.*"),
        *(f"time.by_kind.collectives.{name}" for name in ("seconds", "inside", "between", "exposed")),
        *("time.run.seconds", "time.run.gpu_hours", "time.run.price"),
        *("time.data.seconds", "time.data.waiting"),
        *(f"time.saves.{name}" for name in ("copy", "write", "wait", "seconds_of_a_step")),
    ),
    "measured": ("proof.seconds",),
}
"""Patterns of paths by how the figures came about; each figure has one."""


def figures(value: Any, path: Sequence[str] = ()) -> Iterator[str]:
    """The paths of the numbers in plain values."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from figures(inner, (*path, key))
    elif isinstance(value, list):
        for inner in value:
            yield from figures(inner, path)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield ".".join(path)


def origins(plan: dict[str, Any]) -> dict[str, list[str]]:
    """The patterns that a plan has figures of, by origin."""
    paths = set(figures(plan))
    return {
        origin: [pattern for pattern in patterns if any(fnmatchcase(path, pattern) for path in paths)]
        for origin, patterns in ORIGINS.items()
    }
