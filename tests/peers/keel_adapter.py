"""A job in Keel: the loader and everything in `Learner.step`."""

from collections.abc import Callable
from typing import Any

import torch

from configs.layout import mesh_sizes
from configs.load import load
from parallelisms.mesh import build_mesh, start_process_group
from scripts.benchmarks.turns import KeelStep
from scripts.keel import VERSION
from trainer.numerics import set_numerics


def version() -> str:
    """The version of this checkout."""
    return VERSION


def train(job: dict[str, Any], after_step: Callable[[], None]) -> None:
    """Train without end; see `serve.Train`."""
    config = load(job["file"], [*job["overrides"], "--compile.enable", str(job["compile"]).lower()], 1).config
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    set_numerics(config.training, kind)
    device = start_process_group(kind, config.job.timeout_seconds)
    step = KeelStep(config, build_mesh(mesh_sizes(config, 1), device))
    while True:
        step()
        after_step()
