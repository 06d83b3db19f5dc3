"""The mesh: how the ranks are arranged, and the few collectives that the trainer needs on it.

Axes, outermost first: `pp` (pipeline stages), `dp_replicate` (copies of the sharded model), `dp_shard` (FSDP), `tp`
(tensor parallel). The innermost axis talks most, so its ranks are neighbours, on one machine where there are several.
Every axis exists at every size, 1 included: one path through the code serves a laptop and a cluster.
"""

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from configs.layout import MeshSizes


@dataclass(frozen=True)
class Mesh:
    """The ranks' arrangement, seen from one of them."""

    sizes: MeshSizes
    device: torch.device
    fsdp: DeviceMesh
    """(dp_shard,), or (dp_replicate, dp_shard) where there are replicas: what `fully_shard` takes."""
    tp: DeviceMesh
    pp: DeviceMesh
    dp: DeviceMesh
    """All data-parallel ranks in one dimension: those that see different samples."""

    @property
    def dp_rank(self) -> int:
        """Which share of every global batch this rank computes."""
        return self.dp.get_local_rank()

    def sum_over_dp(self, tensor: Tensor) -> Tensor:
        """Add `tensor` up over the data-parallel ranks, in place."""
        dist.all_reduce(tensor, group=self.dp.get_group())
        return tensor

    def sum_over_pp(self, tensor: Tensor) -> Tensor:
        """Add `tensor` up over the ranks of the pipeline, in place."""
        dist.all_reduce(tensor, group=self.pp.get_group())
        return tensor

    def max_over_all(self, tensor: Tensor) -> Tensor:
        """Element-wise maximum over all ranks, in place."""
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor


def start_process_group(device_type: str, timeout_seconds: int) -> torch.device:
    """Join torchrun's process group, or form one of a single process; returns this rank's device.

    CPU tensors go over gloo also on GPU machines: checkpoints and agreement on a stop must not wait in GPU queues.
    """
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_seconds)
    device = torch.device(device_type)
    if device_type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    return device


def build_mesh(sizes: MeshSizes, device: torch.device) -> Mesh:
    """Arrange the ranks of the process group as `sizes` says."""
    mesh = init_device_mesh(
        device.type,
        (sizes.pp, sizes.dp_replicate, sizes.dp_shard, sizes.tp),
        mesh_dim_names=("pp", "dp_replicate", "dp_shard", "tp"),
    )
    replicated = mesh["dp_replicate", "dp_shard"]
    return Mesh(
        sizes=sizes,
        device=device,
        fsdp=replicated if sizes.dp_replicate > 1 else mesh["dp_shard"],
        tp=mesh["tp"],
        pp=mesh["pp"],
        dp=replicated._flatten("dp"),
    )
