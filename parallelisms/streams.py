"""Queues of FSDP all-gathers: one per model, or one per process group.

On a GPU a queue is a CUDA stream, in which all-gathers run one after another. FSDP uses one stream for all its groups.
If groups gather over different process groups, such as experts on a separate mesh, a computation then waits for an
all-gather that itself waited behind others, over links that were free (the subject of pytorch/pytorch#116611). With
`comm.streams = "per_group"`, all-gathers queue only behind those of the same process group. Values are the same in
either mode: only waiting differs, never what is gathered or the order of issue.

A CPU has no streams: FSDP's all-gathers are complete when they return, and the key changes nothing.
`tests/distributed/gathers.py` counts there what either kind of queue costs.
"""

import os
from collections.abc import Iterable
from typing import cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from configs.schema import Comm
from parallelisms.nccl import KERNELS_IN_ORDER, configure_nccl
from parallelisms.torch_internals import stream_for_each_group


def queue_gathers(stages: Iterable[nn.Module], comm: Comm, device: torch.device) -> None:
    """Set up the queues of models whose parameters are in memory; each pipeline stage has its own."""
    if device.type == "cpu" or comm.streams == "shared":
        return
    for stage in stages:
        if isinstance(stage, FSDPModule):
            separate_streams(cast(nn.Module, stage))


def separate_streams(model: nn.Module) -> int:
    """Let the all-gathers of each process group of any FSDP model queue in a stream of their own, values unchanged.

        fully_shard(model.experts, mesh=expert_mesh)  # gathers over some of the ranks
        fully_shard(model, mesh=mesh)  # gathers over all of them
        separate_streams(model)

    FSDP queues every all-gather of a model in one stream, in which those over one process group wait for those over
    others. All ranks must call this, with modules sharded in the same order, between two steps. On a CPU, where FSDP
    waits for each all-gather, it has no effect.

    Args:
        model: the root to which `fully_shard` was applied last; its parameters must be in memory.

    Returns:
        The number of streams, one for each process group of more than one rank over which parameters are gathered.

    Raises:
        ValueError: `fully_shard` was not applied to `model` itself, its parameters are on the meta device, it is inside
            another FSDP model, or it has separate streams already.
    """
    if not isinstance(model, FSDPModule):
        raise ValueError(
            f"{type(model).__name__} is no FSDP model; apply torch.distributed.fsdp.fully_shard to it, not only to "
            "modules inside it"
        )
    on_meta = next((name for name, parameter in model.named_parameters() if parameter.is_meta), None)
    if on_meta is not None:
        raise ValueError(f"{on_meta} is on the meta device; first give the parameters memory (model.to_empty)")
    configure_nccl(KERNELS_IN_ORDER, os.environ)  # for programs other than Keel's, which has done it by now
    return stream_for_each_group(model)
