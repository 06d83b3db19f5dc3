"""An exponential moving average of the weights, which evaluates better than the weights themselves while they move.

It is kept beside the weights: each rank averages the part that it saves (its shard, or the parameters that it owns), so
no communication is needed, and a checkpoint moves it between meshes as it moves weights. Training does not see it.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from checkpoint.reader import AVERAGE, UPDATES
from configs.schema import Average
from parallelisms.ranks import local_part

_AT_ONCE = 16
"""Tensors whose distance from the average is in memory at the same time."""


class WeightAverage:
    """The average of this rank's weights."""

    def __init__(self, config: Average, weights: Callable[[], Mapping[str, Tensor]]) -> None:
        """
        Args:
            config: [average], with an interval.
            weights: returns this rank's trained weights, by name; called each time, since FSDP may move them.
        """
        self._config = config
        self._weights = weights
        self._averages = {name: weight.clone() for name, weight in weights().items()}
        device = next((local_part(average).device for average in self._averages.values()), torch.device("cpu"))
        self._updates = torch.zeros((), dtype=torch.int64, device=device)
        """Updates so far; 0: what `_averages` holds is no average yet."""
        self._has_begun: bool | None = False

    def state(self) -> dict[str, Tensor]:
        """The tensors of a checkpoint, by name; to restore, load into them in place and call `was_loaded`."""
        return {f"{AVERAGE}{name}": average for name, average in self._averages.items()} | {UPDATES: self._updates}

    def was_loaded(self) -> None:
        """Note that something may have been loaded into `state`."""
        self._has_begun = None

    @property
    def has_begun(self) -> bool:
        """Whether there is an average."""
        if self._has_begun is None:
            self._has_begun = bool(self._updates)
        return self._has_begun

    @torch.no_grad()
    def update(self, number: int, skip: Tensor) -> None:
        """Move the average towards the weights after step `number`, if that is due; the first update copies them.

        Products and sums are separate operations, so no bit depends on the shards (CPUs fuse them for whole vectors of
        elements, but not for the remainder).

        Args:
            number: the step's.
            skip: a scalar, 1. if the step has changed nothing; the average stays as it is then.
        """
        if not self._is_due(number):
            return
        averages = [local_part(average) for average in self._averages.values()]
        weights = [local_part(weight) for weight in self._weights().values()]
        if not self.has_begun:
            torch._foreach_copy_(averages, weights)
            self._has_begun = True
        elif averages:
            share = ((1.0 - self._config.decay) * (1.0 - skip.double())).to(averages[0])
            for first in range(0, len(averages), _AT_ONCE):
                some = slice(first, first + _AT_ONCE)
                distances = torch._foreach_sub(weights[some], averages[some])
                torch._foreach_mul_(distances, share)
                torch._foreach_add_(averages[some], distances)
        self._updates += 1

    def take_back(self, number: int) -> None:
        """Forget the update after step `number`, which changed no weight and will be computed again."""
        if self._is_due(number):
            self._updates -= 1
            self._has_begun = None

    def _is_due(self, number: int) -> bool:
        start = self._config.start_step
        return number > start and (number - start) % self._config.interval == 0

    @torch.no_grad()
    def exchange(self) -> None:
        """Exchange the values of this rank's weights with those of their average."""
        for average, weight in zip(self._averages.values(), self._weights().values(), strict=True):
            kept = local_part(weight).clone()
            local_part(weight).copy_(local_part(average))
            local_part(average).copy_(kept)
