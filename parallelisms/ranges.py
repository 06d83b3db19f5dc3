"""Named ranges in a profiler's trace: which part of a step an operator belongs to.

FSDP names its own work, with the module: `FSDP::all_gather (layers.3)`, `FSDP::post_backward_reduce (layers.3)`. What
is named here are the other parts of a step, and only while a trace is recorded.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.profiler import record_function
from torch.utils.hooks import RemovableHandle

from configs.plan import plan_of


def named_range(name: str) -> AbstractContextManager[Any]:
    """A context whose operators are under `name` in the trace that is being recorded; without one, it does nothing."""
    return record_function(name) if torch.autograd._profiler_enabled() else nullcontext()


class NamedStage(PipelineStage):
    """A pipeline's stage whose backward passes are named; 1F1B names none."""

    def backward_maybe_with_nosync(self, *arguments: Any, **settings: Any) -> Any:
        """Run a backward pass, whole or of the inputs or weights alone."""
        with named_range("backward"):
            return super().backward_maybe_with_nosync(*arguments, **settings)


class ForwardRanges:
    """Ranges "forward <block>" around the forward pass of each block of some stages, until they are removed.

    Hooks open and close them outside of what is compiled, gathered or recomputed: inside FSDP's own hooks.
    """

    def __init__(self, stages: Iterable[nn.Module]) -> None:
        self._hooks: list[RemovableHandle] = []
        for stage in stages:
            for name in plan_of(stage).blocks:
                self._watch(stage.get_submodule(name), f"forward {name}")

    def remove(self) -> None:
        """Name no further passes."""
        for hook in self._hooks:
            hook.remove()

    def _watch(self, block: nn.Module, name: str) -> None:
        under_way: list[record_function] = []
        self._hooks += [
            block.register_forward_pre_hook(partial(_begin, name, under_way)),
            block.register_forward_hook(partial(_end, under_way), prepend=True),
        ]


def _begin(name: str, under_way: list[record_function], *_: Any) -> None:
    under_way.append(record_function(name))
    under_way[-1].__enter__()


def _end(under_way: list[record_function], *_: Any) -> None:
    under_way.pop().__exit__(None, None, None)
