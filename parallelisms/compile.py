"""torch.compile, block by block.

The blocks run the same code, so one compiled graph serves them all: compiling takes as long for 126 layers as for
one. FSDP's work between blocks (all-gathers, reductions, prefetching) stays eager, outside the graphs. The loss, the
other expensive part, compiles its own kernels (`trainer/loss.py`).

A block is compiled again where another set of its parameters is frozen, and without gradients for validation. All
blocks share torch's limit of graphs for the same code, which is 8 unless it is raised; beyond it, a run fails. Each
stage of the run may have sequences of another length, and so as many graphs as a run without stages.
"""

import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from threading import RLock
from typing import Any

import torch
import torch._inductor
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed, FailOnRecompileLimitHit, TorchDynamoException
from torch._inductor.exc import CppCompileError

from configs.errors import ConfigError, OutageError
from configs.plan import plan_of
from configs.schema import Compile

MOST_GRAPHS = 64
"""Limit for the same code, for each stage of the run. More would mean that each step compiles something again, which
must not go unnoticed."""

_OF_THE_HOST = (CppCompileError, OSError)
"""What a compiler fails by that is killed, as by a signal to the process group, or a disk that is full."""


def compiler_options(config: Compile) -> dict[str, Any]:
    """The settings of `torch._inductor.config` that Keel needs, and those that the job's mode stands for."""
    # Inductor's own launcher holds the interpreter's lock while a launch waits for room in the device's queue. If the
    # device hangs, that is for good, and no other thread could report it: not the watchdog, nor the one that saves.
    # Triton's launcher releases the lock. It costs 12 ms of host time for 452 launches, which a full queue hides.
    needed = {"use_static_cuda_launcher": False}
    return needed | torch._inductor.list_mode_options(config.mode)


def apply_compile(model: nn.Module, options: dict[str, Any]) -> None:
    """Compile each of the plan's blocks; a graph break is an error, since it would lose speed silently.

    Args:
        model: the model or stage.
        options: further settings of the compiler (`torch._inductor.config`).

    Raises:
        ConfigError, OutageError: in the first step, as `compiled`.
    """
    allow_graphs(n_stages=1)
    plan = plan_of(model)
    for name in (*plan.blocks, *plan.further_blocks):
        block = model.get_submodule(name)
        block.forward = compiled(block.forward, name, options)


def allow_graphs(n_stages: int) -> None:
    """Raise torch's limits to what a run of so many stages may have of the same code."""
    most = n_stages * MOST_GRAPHS
    limits = torch.compiler.config
    limits.recompile_limit = max(limits.recompile_limit, most)
    limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, most)


def compiled(function: Callable, name: str, options: dict[str, Any] | None) -> Callable:
    """Compile a function as one graph for each shape of its inputs; errors name it by `name`.

    Raises:
        ConfigError: when it is called, if torch can't compile it, or has compiled it too often.
        OutageError: when it is called, if a compiler or a disk of this host fails.
    """
    _bar_without_semaphore()
    # Torch 2.15 warns of what it calls itself, where the compiler lowers a diagonal, as layers with a state have.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\._inductor\.")
    # Sequences of another length, in another stage of the run, get a graph of their own. By default, torch would then
    # compile one for all lengths, whose bits a resumed run, which sees one length alone, would not have.
    graphs = torch.compile(function, fullgraph=True, dynamic=False, options=options or None)

    @wraps(function)
    def compiled_or_refused(*args: Any, **kwargs: Any) -> Any:
        try:
            return graphs(*args, **kwargs)
        except FailOnRecompileLimitHit as error:
            raise ConfigError(
                f"compile.enable: {name} has been compiled {torch.compiler.config.recompile_limit} times, as if every "
                "step computed something else; set compile.enable = false"
            ) from error
        except TorchDynamoException as error:
            reason = " ".join(str(error).strip().partition("\n\n")[0].split())
            if isinstance(error, BackendCompilerFailed) and isinstance(error.inner_exception, _OF_THE_HOST):
                raise OutageError(
                    f"this host could not compile {name}: {reason}; the same command tries again, "
                    "and --compile.enable false does without"
                ) from error
            message = f"compile.enable: torch can't compile {name} as one graph: {reason}; set compile.enable = false"
            raise ConfigError(message) from error

    return compiled_or_refused


def _bar_without_semaphore() -> None:
    """Give tqdm, whose progress bar inductor makes, a lock of threads.

    Its own holds a semaphore. A training process ends without the interpreter's shutdown (train.py), and Python 3.14
    then warns that the semaphore is leaked.
    """
    with suppress(ImportError):
        from tqdm import tqdm

        tqdm.set_lock(RLock())
