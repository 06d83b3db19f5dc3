"""The one message of a rank that has no memory left: what it asked for, and which keys of the job take less."""

import re
import socket

import torch

from configs.errors import UserError
from configs.schema import Config
from trainer.console import size

_CPU_REQUEST = re.compile(r"can't allocate memory: you tried to allocate (\d+) bytes")
_DETAILS = re.compile(r"Of the allocated memory .*", re.DOTALL)
"""Of torch's message about a GPU: advice on the allocator's settings, after the figures."""
_LIBRARY_FAILURES = ("CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "NCCL error: out of memory")


def out_of_memory(error: BaseException, config: Config, step: int | None) -> UserError | None:
    """What to tell the user if `error` says that memory is out, on a GPU or of this host; None if it says otherwise.

    Args:
        error: whatever has ended training.
        config: whose keys are named.
        step: the last that is complete; None before the first launch of a step.
    """
    what = _request(error)
    if what is None:
        return None
    when = "during start-up" if step is None else f"after step {step}"
    where = f"rank {torch.distributed.get_rank()}" if torch.distributed.is_initialized() else "this process"
    less = "".join(f"\n  {line}" for line in takes_less(config, on_gpu=isinstance(error, torch.OutOfMemoryError)))
    return UserError(
        f"{where} on host {socket.gethostname()} is out of memory {when}: {what}\nWhat takes less memory, the cheapest "
        f"first:{less}\n`python scripts/plan.py --config ... --ranks N` estimates a job's memory before it starts"
    )


def _request(error: BaseException) -> str | None:
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError):
        return _DETAILS.sub("", text).strip()
    if isinstance(error, MemoryError):
        return f"Python could not allocate memory of the host{f' ({text})' if text else ''}"
    if found := _CPU_REQUEST.search(text):
        return f"it could not allocate {size(int(found[1]))} of the host's memory"
    if any(failure in text for failure in _LIBRARY_FAILURES):
        return text.splitlines()[0]
    return None


def takes_less(config: Config, on_gpu: bool) -> list[str]:
    """Changes of the job that lower its memory, without those that are made already; none changes what is learned."""
    training, mesh, fsdp = config.training, config.mesh, config.fsdp
    mode = config.activation_checkpoint.mode
    changes = [
        (training.micro_batch_size > 1, f"training.micro_batch_size = 1 (now {training.micro_batch_size})"),
        (mode == "none", 'activation_checkpoint.mode = "selective" (now "none")'),
        (mode != "full", f'activation_checkpoint.mode = "full" (now "{mode}")'),
        (
            fsdp.zero_stage < 3 or fsdp.reshard_after_forward == "never",
            'fsdp.zero_stage = 3, fsdp.reshard_after_forward = "always": each rank keeps its shard alone',
        ),
        (mesh.dp_replicate > 1, f"mesh.dp_replicate = 1 (now {mesh.dp_replicate}), so that all replicas share a shard"),
        (on_gpu and not fsdp.cpu_offload, "fsdp.cpu_offload = true: parameters and optimizer state in host memory"),
        (True, "more ranks, or mesh.tp, mesh.cp and mesh.pp: each rank holds a smaller part"),
    ]
    return [text for applies, text in changes if applies]
