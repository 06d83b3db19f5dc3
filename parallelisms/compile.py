"""torch.compile, block by block.

The blocks run the same code, so one compiled graph serves them all: compiling takes as long for 126 layers as for
one. FSDP's work between blocks (all-gathers, reductions, prefetching) stays eager, outside the graphs. The loss, the
other expensive part, compiles its own kernels (`trainer/loss.py`).

A block is compiled again where another set of its parameters is frozen, and without gradients for validation. All
blocks share torch's limit of graphs for the same code, which is 8 unless it is raised; beyond it, a run would fail.
"""

import difflib
from typing import Any, cast

import torch
import torch._inductor
from torch import nn

from configs.errors import ConfigError
from configs.plan import plan_of
from configs.schema import Compile

MOST_GRAPHS = 64
"""Limit for the same code. More would mean that each step compiles something again, which must not go unnoticed."""


def compiler_options(config: Compile) -> dict[str, Any]:
    """The settings of `torch._inductor.config` that a job asks for, by its mode or its options.

    Raises:
        ConfigError: the compiler has no such option, or one of another type.
    """
    known = torch._inductor.list_options()
    for name in config.options:
        if name.replace("-", "_") not in known:
            near = difflib.get_close_matches(name, known, 1, 0.6)
            hint = f'did you mean "{near[0]}"?' if near else "torch._inductor.list_options() lists them"
            raise ConfigError(f'torch {torch.__version__} has no compiler option "{name}"; {hint}')
    try:
        torch.compile(_nothing, options=cast(dict[str, Any], config.options))
    except RuntimeError as error:
        raise ConfigError(f"a compiler option has the wrong type: {error}") from None
    return {**torch._inductor.list_mode_options(config.mode), **config.options}


def _nothing() -> None:
    """Compiled only for the sake of the options, which torch then checks."""


def apply_compile(model: nn.Module, options: dict[str, Any]) -> None:
    """Compile each of the plan's blocks; a graph break is an error, since it would lose speed silently.

    Args:
        model: the model or stage.
        options: further settings of the compiler (`torch._inductor.config`).
    """
    torch.compiler.config.recompile_limit = max(torch.compiler.config.recompile_limit, MOST_GRAPHS)
    for name in plan_of(model).blocks:
        block = model.get_submodule(name)
        block.forward = torch.compile(block.forward, fullgraph=True, options=options or None)
