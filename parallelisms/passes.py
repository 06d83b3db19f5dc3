"""The forward and backward passes of a step's micro-batches: one after the other here, interleaved in `pipeline.py`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from configs.schema import Config
from parallelisms.fsdp import prepare_backward, reshard
from parallelisms.ranges import named_range
from parallelisms.sums.fast import Reduction


class Call(NamedTuple):
    """The model's inputs for one micro-batch."""

    tokens: Tensor
    """(micro_batch, seq)."""
    arguments: dict[str, Any]
    """Keyword arguments; among them `loss`, so that the model returns the micro-batch's loss, a scalar."""


Prepare = Callable[[Call], Call]
"""What happens to a micro-batch before its forward pass in training, such as a teacher's forward pass."""


def as_it_is(call: Call) -> Call:
    """Prepare nothing."""
    return call


class Passes(Protocol):
    """The passes of this data-parallel rank's micro-batches; both methods return the same value on all model ranks."""

    def train(self, calls: Sequence[Call], scale: Tensor) -> Tensor:
        """Add the gradients of `scale` times the losses to the parameters; returns the losses, (calls,) float64."""

    def evaluate(self, calls: Sequence[Call]) -> Tensor:
        """Compute the sum of the losses (float64), without gradients."""


@dataclass(frozen=True)
class OneByOne:
    """Runs each micro-batch forward and backward through the whole model before the next."""

    model: nn.Module
    config: Config
    reduction: Reduction
    prepare: Prepare = as_it_is

    def train(self, calls: Sequence[Call], scale: Tensor) -> Tensor:
        """Implement `Passes.train`."""
        losses = []
        for number, given in enumerate(calls, 1):
            is_last = number == len(calls)
            call = self.prepare(given)
            prepare_backward(self.model, self.config, is_last)
            loss = self.model(call.tokens, **call.arguments)
            with named_range("backward"), self.reduction.of_micro_batch(is_last):
                (loss * scale).backward()
            losses.append(loss.detach().double())
        return torch.stack(losses)

    @torch.no_grad()
    def evaluate(self, calls: Sequence[Call]) -> Tensor:
        """Implement `Passes.evaluate`."""
        losses = [self.model(call.tokens, **call.arguments) for call in calls]
        reshard(self.model)
        return torch.stack(losses).sum(dtype=torch.float64)
