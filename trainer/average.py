"""An average of the weights, which evaluates better than the weights themselves while they move.

It is kept beside the weights: each rank averages the part that it saves (its shard, or the parameters that it owns), so
no communication is needed, and a checkpoint moves it between meshes as it moves weights. Training does not see it.

An exponential average in bfloat16 takes half of the memory. An update then moves most elements by less than half of
their last bit, so each is rounded stochastically, by a hash of the step and of its place in the whole parameter (see
`kernels/keyed.py`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from checkpoint.mean import mean_of
from checkpoint.reader import AVERAGE, UPDATES
from configs.schema import Average
from parallelisms.part import part_of
from parallelisms.ranks import local_part
from trainer.kernels.keyed import Key, blocks, key_of, random_bits, rounded

_AT_ONCE = 16
"""Tensors whose distance from the average is in memory at the same time."""


class WeightAverage(ABC):
    """The average of this rank's weights."""

    def __init__(self, config: Average, weights: Callable[[], Mapping[str, Tensor]]) -> None:
        """
        Args:
            config: [average], with an interval.
            weights: returns this rank's trained weights, by name; called each time, since FSDP may move them.
        """
        self._config = config
        self._weights = weights
        self._dtype = torch.bfloat16 if config.dtype == "bfloat16" else None

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """The tensors of a checkpoint, by name; to restore, load into them in place and call `was_loaded`."""

    @abstractmethod
    def was_loaded(self) -> None:
        """Note that something may have been loaded into `state`."""

    @property
    @abstractmethod
    def has_begun(self) -> bool:
        """Whether there is an average."""

    @abstractmethod
    def update(self, number: int, skip: Tensor) -> None:
        """Take in the weights after step `number`, if that is due; the first update copies them.

        Args:
            number: the step's.
            skip: a scalar, 1. if the step has changed nothing.
        """

    @abstractmethod
    def take_back(self, number: int) -> None:
        """Forget the update after step `number`, which changed no weight and will be computed again."""

    @abstractmethod
    def exchange(self) -> None:
        """Have the average in the place of the weights, in their own type; a second time brings them back."""

    def _copy_of_weights(self) -> dict[str, Tensor]:
        return {name: weight.to(dtype=self._dtype, copy=True) for name, weight in self._weights().items()}

    def _updates(self, size: tuple[int, ...]) -> Tensor:
        """Numbers that say what was taken in, on the device of the weights; all 0: nothing."""
        device = next((local_part(weight).device for weight in self._weights().values()), torch.device("cpu"))
        return torch.zeros(size, dtype=torch.int64, device=device)

    def _is_due(self, number: int) -> bool:
        start = self._config.start_step
        return number > start and (number - start) % self._config.interval == 0


def average_of(config: Average, weights: Callable[[], Mapping[str, Tensor]], seed: int) -> WeightAverage:
    """The average that a job keeps; arguments as of the classes."""
    return MeanOfLast(config, weights) if config.last else ExponentialAverage(config, weights, seed)


class ExponentialAverage(WeightAverage):
    """Moves by a share of its distance from the weights."""

    def __init__(self, config: Average, weights: Callable[[], Mapping[str, Tensor]], seed: int = 0) -> None:
        """`seed`: the run's, by which an average in bfloat16 is rounded."""
        super().__init__(config, weights)
        self._averages = self._copy_of_weights()
        keyed = weights() if self._dtype else {}
        self._keys = {name: key_of(seed, name, part_of(weight), "average") for name, weight in keyed.items()}
        self._is_exchanged = False
        self._count = self._updates(())
        """Updates so far; 0: what `_averages` holds is no average yet."""
        self._has_begun: bool | None = False

    def state(self) -> dict[str, Tensor]:
        return {f"{AVERAGE}{name}": average for name, average in self._averages.items()} | {UPDATES: self._count}

    def was_loaded(self) -> None:
        self._has_begun = None

    @property
    def has_begun(self) -> bool:
        if self._has_begun is None:
            self._has_begun = bool(self._count)
        return self._has_begun

    @torch.no_grad()
    def update(self, number: int, skip: Tensor) -> None:
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
        self._count += 1

    def take_back(self, number: int) -> None:
        if self._is_due(number):
            self._count -= 1
            self._has_begun = None

    @torch.no_grad()
    def exchange(self) -> None:
        # In between, the weights lie in their own type where the average was.
        self._is_exchanged = not self._is_exchanged
        for name, weight in self._weights().items():
            kept = weight.to(dtype=None if self._is_exchanged else self._dtype, copy=True)
            local_part(weight).copy_(local_part(self._averages[name]))
            self._averages[name] = kept


class MeanOfLast(WeightAverage):
    """The mean of the weights after the last updates, of which there is a copy each (LAWA, Kaddour 2022,
    arXiv:2209.14981)."""

    def __init__(self, config: Average, weights: Callable[[], Mapping[str, Tensor]]) -> None:
        super().__init__(config, weights)
        self._copies = [self._copy_of_weights() for _ in range(config.last)]
        self._numbers = self._updates((config.last,))
        """The step after which each copy was made; 0: none was."""
        self._steps: list[int] | None = [0] * config.last
        """The same; None: not known on this side of the device."""
        self._aside: dict[str, Tensor] = {}
        """The weights, while their mean has their place."""

    def state(self) -> dict[str, Tensor]:
        return {
            f"{AVERAGE}{index}.{name}": copy for index, each in enumerate(self._copies) for name, copy in each.items()
        } | {UPDATES: self._numbers}

    def was_loaded(self) -> None:
        self._steps = None

    @property
    def has_begun(self) -> bool:
        return any(self._known_steps())

    def _known_steps(self) -> list[int]:
        if self._steps is None:
            self._steps = self._numbers.tolist()
        return self._steps

    @torch.no_grad()
    def update(self, number: int, skip: Tensor) -> None:
        if self._is_due(number):
            steps = self._known_steps()
            oldest = steps.index(min(steps))
            for name, weight in self._weights().items():
                local_part(self._copies[oldest][name]).copy_(local_part(weight))
            self._note(oldest, number)

    def take_back(self, number: int) -> None:
        if number in self._known_steps():
            self._note(self._known_steps().index(number), 0)

    def _note(self, index: int, number: int) -> None:
        self._known_steps()[index] = number
        self._numbers[index] = number

    @torch.no_grad()
    def exchange(self) -> None:
        made = [copies for copies, step in zip(self._copies, self._known_steps(), strict=True) if step]
        for name, weight in self._weights().items():
            own = local_part(weight)
            if name in self._aside:
                own.copy_(self._aside.pop(name))
            else:
                self._aside[name] = own.clone()
                own.copy_(mean_of([local_part(copies[name]) for copies in made], own.dtype))


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
