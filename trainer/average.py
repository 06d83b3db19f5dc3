"""An exponential moving average of the weights, which evaluates better than the weights themselves while they move.

It is kept beside the weights: each rank averages the part that it saves (its shard, or the parameters that it owns), so
no communication is needed, and a checkpoint moves it between meshes as it moves weights. Training does not see it.

In bfloat16 it takes half of the memory. An update then moves most elements by less than half of their last bit, so each
is rounded stochastically, by a hash of the step and of its place in the whole parameter (see `kernels/keyed.py`).
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from checkpoint.reader import AVERAGE, UPDATES
from configs.schema import Average
from parallelisms.part import part_of
from parallelisms.ranks import local_part
from trainer.kernels.keyed import Key, blocks, key_of, random_bits, rounded

_AT_ONCE = 16
"""Tensors whose distance from the average is in memory at the same time."""


class WeightAverage:
    """The average of this rank's weights."""

    def __init__(self, config: Average, weights: Callable[[], Mapping[str, Tensor]], seed: int = 0) -> None:
        """
        Args:
            config: [average], with an interval.
            weights: returns this rank's trained weights, by name; called each time, since FSDP may move them.
            seed: the run's, by which an average in bfloat16 is rounded.
        """
        self._config = config
        self._weights = weights
        self._dtype = torch.bfloat16 if config.dtype == "bfloat16" else None
        self._averages = {name: weight.to(dtype=self._dtype, copy=True) for name, weight in weights().items()}
        keyed = weights() if self._dtype else {}
        self._keys = {name: key_of(seed, name, part_of(weight), "average") for name, weight in keyed.items()}
        self._is_exchanged = False
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

        Args:
            number: the step's.
            skip: a scalar, 1. if the step has changed nothing; the average stays as it is then.
        """
        if not self._is_due(number):
            return
        averages = [local_part(average) for average in self._averages.values()]
        weights = [local_part(weight) for weight in self._weights().values()]
        share = (1.0 - self._config.decay) * (1.0 - skip.double()) if self.has_begun else None
        if self._keys:
            for average, weight, key in zip(averages, weights, self._keys.values(), strict=True):
                _move_rounded(average, weight, share, key, number)
        elif averages:
            _move(averages, weights, share)
        self._has_begun = True
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
        """Exchange the values of this rank's weights with those of their average; a second time brings them back.

        In between, the weights lie in their own type where the average was.
        """
        self._is_exchanged = not self._is_exchanged
        for name, weight in self._weights().items():
            kept = weight.to(dtype=None if self._is_exchanged else self._dtype, copy=True)
            local_part(weight).copy_(local_part(self._averages[name]))
            self._averages[name] = kept


def _move(averages: list[Tensor], weights: list[Tensor], share: Tensor | None) -> None:
    """Move averages by a share of their distance from the weights; None copies these.

    Products and sums are separate operations, so no bit depends on the shards (CPUs fuse them for whole vectors of
    elements, but not for the remainder).
    """
    if share is None:
        torch._foreach_copy_(averages, weights)
        return
    share = share.to(averages[0])
    for first in range(0, len(averages), _AT_ONCE):
        some = slice(first, first + _AT_ONCE)
        distances = torch._foreach_sub(weights[some], averages[some])
        torch._foreach_mul_(distances, share)
        torch._foreach_add_(averages[some], distances)


def _move_rounded(average: Tensor, weight: Tensor, share: Tensor | None, key: Key, number: int) -> None:
    """The same for one average in bfloat16, whose rounding depends on the step's number."""
    target = weight.reshape(-1)
    flat = average.view(-1)
    dtype = torch.promote_types(weight.dtype, torch.float32)
    for at in blocks(len(flat), flat.device):
        value = target[at].to(dtype)
        if share is not None:
            before = flat[at].to(dtype)
            value = (value - before).mul_(share.to(before)).add_(before)
        bits = random_bits(key, number, at.start, at.stop, flat.device)
        flat[at] = rounded(value.float(), bits & 0xFFFF)
