"""How all benchmarks measure: after a warm-up, the cases take turns, and a figure is a median over the rounds."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from configs.schema import Config
from parallelisms.mesh import Mesh
from trainer.data.loader import DataLoader, build_loader
from trainer.guards.verdict import QueuedStep
from trainer.step import Learner, build_learner

Step = Callable[[], None]
Turn = Callable[[], float]
"""One turn of a case; returns its seconds per step."""


class KeelStep:
    """A step like the trainer's on a GPU: the last step's result is read once this step's passes are queued."""

    def __init__(self, config: Config, mesh: Mesh) -> None:
        self.learner: Learner = build_learner(config, mesh)
        self.loader: DataLoader = build_loader(self.learner.config, mesh.dp_rank, mesh.sizes.dp, start_sample=0)
        self._lr = config.optimizer.lr
        self._last: QueuedStep | None = None

    def __call__(self) -> None:
        micro_batches = next(self.loader)
        gradients = self.learner.gradients(micro_batches)
        if self._last:
            self._last.result()
        self._last = self.learner.judge(micro_batches, gradients)
        self.learner.update(self._last, self._lr)


def warm_up(step: Step, steps: int) -> None:
    """Run steps that are not measured."""
    for _ in range(steps):
        step()


def seconds_a_step(step: Step, steps: int, device: torch.device) -> float:
    """Measure the mean time of consecutive steps."""
    started = _now(device)
    for _ in range(steps):
        step()
    return (_now(device) - started) / steps


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def take_turns(turns: Mapping[str, Turn], rounds: int) -> dict[str, list[float]]:
    """Measure seconds per step of each case in each round; in turns, so that drifts of speed affect all equally."""
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(rounds):
        for name, turn in turns.items():
            seconds[name].append(turn())
    return seconds


def ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """The ratio of two cases in each round."""
    return [a / b for a, b in zip(over, under, strict=True)]


def spread(values: Sequence[float], form: str) -> str:
    """Format the median, the smallest and the largest value, each in the given form, such as ".2f"."""
    median, least, most = (format(value, form) for value in (statistics.median(values), min(values), max(values)))
    return f"{median} ({least} to {most})"
