"""Where a value that is not finite first appears: in a weight, or in a module's forward or backward pass.

A step that went wrong is computed once more under hooks that look at each module's input and output and, in backward,
at the gradients by outputs and by weights. They see what this rank alone holds, before it is reduced or gathered: under
tensor parallelism a module's part of a sum, under FSDP a weight's gradient before other ranks' are added. So the rank
is known as well. Compiled blocks are looked at from outside: hooks in them would change what is compiled.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from configs.plan import plan_of
from parallelisms.ranks import local_part
from parallelisms.torch_internals import is_in_backward, tensors_of

_WEIGHTS, _FORWARD, _BACKWARD, _REDUCED = range(4)


class _When(NamedTuple):
    """A pass of a micro-batch through a stage; the smaller one comes first."""

    phase: int
    micro_batch: int
    place: int
    """The stage in forward; in backward negated, since the last stage begins."""


@dataclass(frozen=True, order=True)
class Finding:
    """The first value on a rank that is not finite; the smaller of two ranks' is the earlier."""

    when: _When
    event: int
    """Number of the look within `when`; equal on ranks that compute the same modules."""
    what: str
    """ "the output of layers.1.mlp.up_proj"."""
    before: str
    """What was looked at before it, and was finite; "" if nothing was."""
    rows: tuple[int, ...]
    """Rows of the micro-batch that have such values; empty if that cannot be told."""

    @property
    def micro_batch(self) -> int | None:
        """Number of the micro-batch on its rank; None for what belongs to none."""
        return self.when.micro_batch if self.when.phase in (_FORWARD, _BACKWARD) else None


def weights_not_finite(parameters: Mapping[str, Tensor]) -> Finding | None:
    """The first of this rank's parameters, or shards of them, that has such a value."""
    return _first_of(parameters, _WEIGHTS, "the weight")


class NonfiniteTracer:
    """Watches one step, which all ranks compute alike, on this rank."""

    def __init__(self, stages: Mapping[int, nn.Module], compiled: bool) -> None:
        """
        Args:
            stages: this rank's, by number.
            compiled: the plan's blocks are.
        """
        self._stages, self._compiled = stages, compiled
        self.first: Finding | None = None
        self._looks: Counter[_When] = Counter()
        self._last_finite: dict[_When, str] = {}
        self._micro_batch: Counter[int] = Counter()
        """By stage: forward passes begun."""
        self._rows = 0
        self._handles: list[Any] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around a step."""
        for number, stage in self._stages.items():
            inside = tuple(f"{block}." for block in plan_of(stage).blocks) if self._compiled else ()
            for name, module in stage.named_modules():
                if not (inside and name.startswith(inside)):
                    self._watch(number, name, module)
        try:
            yield
        finally:
            for handle in self._handles:
                handle.remove()

    def look_at_gradients(self, parameters: Mapping[str, Tensor]) -> None:
        """Look at the gradients as they are after their reduction."""
        gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        self._take(_first_of(gradients, _REDUCED, "the reduced gradient of"))

    def _watch(self, stage: int, name: str, module: nn.Module) -> None:
        # Before other hooks, which gather the parts of a sequence or add up those of a sum, and, for gradients, which
        # come the other way, after them.
        self._handles += [
            module.register_forward_pre_hook(partial(self._before, stage, name), prepend=True),
            module.register_forward_hook(partial(self._computed, stage, name), prepend=True),
            module.register_forward_hook(partial(self._returned, stage, name)),
        ]

    def _before(self, stage: int, name: str, _module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if is_in_backward():  # activation checkpointing computes again what was looked at
            return
        if name == "":
            self._micro_batch[stage] += 1
            self._rows = inputs[0].shape[0]
        when = _When(_FORWARD, self._micro_batch[stage] - 1, stage)
        for tensor in tensors_of(inputs):
            self._look(when, f"the input of {name or 'the model'}", tensor)

    def _computed(self, stage: int, name: str, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if is_in_backward():
            return
        micro_batch = self._micro_batch[stage] - 1
        for tensor in tensors_of((output,)):
            self._look(_When(_FORWARD, micro_batch, stage), f"the output of {name or 'the model'}", tensor)
        for own, parameter in module.named_parameters(recurse=False):
            self._look_at_gradient(_When(_BACKWARD, micro_batch, -stage), f"the gradient of {name}.{own}", parameter)
        self._returned(stage, name, module, inputs, output)

    def _returned(self, stage: int, name: str, _module: nn.Module, _inputs: tuple[Any, ...], output: Any) -> None:
        if is_in_backward():
            return
        when = _When(_BACKWARD, self._micro_batch[stage] - 1, -stage)
        for tensor in tensors_of((output,)):
            self._look_at_gradient(when, f"the gradient by the output of {name or 'the model'}", tensor)

    def _look_at_gradient(self, when: _When, what: str, tensor: Tensor) -> None:
        if tensor.requires_grad:
            self._handles.append(tensor.register_hook(partial(self._look, when, what)))

    def _look(self, when: _When, what: str, tensor: Tensor) -> None:
        if not tensor.is_floating_point():
            return
        self._looks[when] += 1
        if _is_finite(tensor):
            self._last_finite[when] = what
        else:
            rows = _rows(local_part(tensor), self._rows)
            self._take(Finding(when, self._looks[when], what, self._last_finite.get(when, ""), rows))

    def _take(self, finding: Finding | None) -> None:
        if finding and (self.first is None or finding < self.first):
            self.first = finding


def _first_of(tensors: Mapping[str, Tensor], phase: int, what: str) -> Finding | None:
    bad = (i for i, tensor in enumerate(tensors.values()) if not _is_finite(tensor))
    first = next(bad, None)
    return None if first is None else Finding(_When(phase, 0, 0), first, f"{what} {list(tensors)[first]}", "", ())


@torch.no_grad()
def _is_finite(tensor: Tensor) -> bool:
    """Of this rank's part."""
    return bool(local_part(tensor.detach()).isfinite().all())


@torch.no_grad()
def _rows(tensor: Tensor, n_rows: int) -> tuple[int, ...]:
    """Those with such a value, of a tensor (rows, ...); empty if its first dimension is another."""
    if tensor.ndim < 2 or tensor.shape[0] != n_rows:
        return ()
    return tuple((~tensor.isfinite()).flatten(1).any(1).nonzero().flatten().tolist())
