"""A job in a minimal training loop (`scripts/benchmarks/bare.py`), in Keel's Python."""

from collections.abc import Callable
from typing import Any

import torch

from configs.load import load
from scripts.benchmarks.bare import bare_step


def version() -> str:
    """That of torch, of which alone the loop is made."""
    return torch.__version__


def train(job: dict[str, Any], after_step: Callable[[], None]) -> None:
    """Train without end; see `serve.Train`."""
    config = load(job["file"], job["overrides"], 1).config
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    step = bare_step(config, device, compiled=job["compile"])
    while True:
        step()
        after_step()
