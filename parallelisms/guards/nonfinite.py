"""Where a non-finite value first appears: in a weight, or in a module's forward or backward pass.

A failed step is repeated under hooks that look at each module's input and output and, in backward, at the gradients of
outputs and weights. They see what this rank alone holds, before it is reduced or gathered: under tensor parallelism a
module's term of a sum, under FSDP a weight's gradient before other ranks' gradients are added. This identifies the rank
as well. Compiled blocks are observed from outside, since hooks inside would change what is compiled.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
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
    """A pass of a micro-batch through a stage, ordered by time."""

    phase: int
    micro_batch: int
    place: int
    """The stage in forward; its negative in backward, where the last stage comes first."""


@dataclass(frozen=True, order=True)
class Finding:
    """The first non-finite value on a rank; of two ranks' findings, the smaller is the earlier."""

    when: _When
    event: int
    """Index of the observation within `when`; equal on ranks that compute the same modules."""
    what: str
    """ "the output of layers.1.mlp.up_proj"."""
    before: str
    """The last observation before it that was finite; "" if there was none."""
    rows: tuple[int, ...]
    """Rows of the micro-batch that contain such values; empty if unknown."""

    @property
    def micro_batch(self) -> int | None:
        """The micro-batch's number on its rank; None for findings that belong to no micro-batch."""
        return self.when.micro_batch if self.when.phase in (_FORWARD, _BACKWARD) else None


def finding_of(told: Sequence[Any]) -> Finding:
    """The inverse of `dataclasses.astuple`, after a journey as JSON."""
    when, event, what, before, rows = told
    return Finding(_When(*when), event, what, before, tuple(rows))


def weights_not_finite(parameters: Mapping[str, Tensor]) -> Finding | None:
    """The first of this rank's parameters, or shards of parameters, with a non-finite value."""
    return _first_of(parameters, _WEIGHTS, "the weight")


class NonfiniteTracer:
    """Watches, on this rank, one step that all ranks repeat in the same way."""

    def __init__(self, stages: Mapping[int, nn.Module], compiled: bool) -> None:
        """
        Args:
            stages: this rank's stages, by number.
            compiled: whether the plan's blocks are compiled.
        """
        self._stages = stages
        self._compiled = compiled
        self.first: Finding | None = None
        self._looks: Counter[_When] = Counter()
        self._last_finite: dict[_When, str] = {}
        self._micro_batch: Counter[int] = Counter()
        """Forward passes begun, by stage."""
        self._rows = 0
        self._handles: list[Any] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the step that runs inside this context."""
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
        """Look at the gradients after their reduction."""
        gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        self._take(_first_of(gradients, _REDUCED, "the reduced gradient of"))

    def _watch(self, stage: int, name: str, module: nn.Module) -> None:
        # These hooks run before other forward hooks, which gather a sequence's parts or sum terms, so the values are
        # still local. Gradients pass the hooks in reverse order, hence a second hook after all others.
        self._handles += [
            module.register_forward_pre_hook(partial(self._before, stage, name), prepend=True),
            module.register_forward_hook(partial(self._computed, stage, name), prepend=True),
            module.register_forward_hook(partial(self._returned, stage, name)),
        ]

    def _before(self, stage: int, name: str, _module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if is_in_backward():  # activation checkpointing recomputes what was already looked at
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
    """Whether this rank's part of the tensor is finite."""
    return bool(local_part(tensor).isfinite().all())


@torch.no_grad()
def _rows(tensor: Tensor, n_rows: int) -> tuple[int, ...]:
    """The rows of a tensor (rows, ...) with a non-finite value; empty if its first dimension is not the rows."""
    if tensor.ndim < 2 or tensor.shape[0] != n_rows:
        return ()
    return tuple((~tensor.isfinite()).flatten(1).any(1).nonzero().flatten().tolist())
