"""The one message of a rank that runs out of memory: what it requested, and which keys of the job take less."""

import re
import socket

import torch

from configs.errors import UserError
from configs.schema import Config
from trainer.planning.takes_less import takes_less
from trainer.report.units import size

_CPU_REQUEST = re.compile(r"can't allocate memory: you tried to allocate (\d+) bytes")
_DETAILS = re.compile(r"Of the allocated memory .*", re.DOTALL)
"""The end of torch's message about a GPU: advice on the allocator's settings, after the figures."""
_LIBRARY_FAILURES = ("CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "NCCL error: out of memory")


def out_of_memory(error: BaseException, config: Config, step: int | None) -> UserError | None:
    """The message for the user if `error` means that memory ran out, on a GPU or on this host; otherwise None.

    Args:
        error: what ended training.
        config: the job, whose keys the message names.
        step: the last completed step; None before the first step of a launch.
    """
    what = _request(error)
    if what is None:
        return None
    when = "during start-up" if step is None else f"after step {step}"
    where = f"rank {torch.distributed.get_rank()}" if torch.distributed.is_initialized() else "this process"
    less = "".join(f"\n  {line}" for line in takes_less(config, on_gpu=isinstance(error, torch.OutOfMemoryError)))
    return UserError(
        f"{where} on host {socket.gethostname()} is out of memory {when}: {what}\nWhat takes less memory, cheapest "
        f"first:{less}\n`python scripts/plan.py --config ... --ranks N --memory-gib 80` says in advance what fits"
    )


def _request(error: BaseException) -> str | None:
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError):
        return _DETAILS.sub("", text).strip()
    if isinstance(error, MemoryError):
        return f"Python could not allocate host memory{f' ({text})' if text else ''}"
    if found := _CPU_REQUEST.search(text):
        return f"it could not allocate {size(int(found[1]))} of host memory"
    if any(failure in text for failure in _LIBRARY_FAILURES):
        return text.splitlines()[0]
    return None
