"""torch.compile, block by block.

The blocks run the same code, so one compiled graph serves them all: compiling takes as long for 126 layers as for
one. FSDP's work between blocks (gathers, reductions, prefetching) stays eager, outside the graphs. The loss, the
other expensive part, compiles its own kernels (`trainer/loss.py`).

A block is compiled again where another set of its parameters is frozen, and without gradients for validation. All
blocks share torch's limit of graphs for the same code, which is 8 unless it is raised; beyond it, a run would fail.
"""

from typing import Any

import torch
from torch import nn

from configs.plan import plan_of

MOST_GRAPHS = 64
"""Of the same code. More would mean that something is compiled again in each step, which must not go unnoticed."""


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
