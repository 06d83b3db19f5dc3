"""The partition by owner as a library, over a group that exchanges GPU tensors alone: the CPU's travel, too."""

import os

import torch
import torch.distributed as dist
from torch.nn import Parameter
from torch.optim import AdamW

from parallelisms.owner_partition import OwnerPartition


def gather_and_load():
    """Where the partition's state is, and the exported one's: AdamW that is not fused counts its steps on the CPU."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    group = dist.new_group(backend="nccl")
    parameter = Parameter(torch.zeros(8, 8, device="cuda"))
    optimizer = OwnerPartition([parameter], group, torch.bfloat16, optim=AdamW, fused=False)
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    steps = [state["step"].device.type for state in optimizer.state.values()]
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    tensors = [*state["state"][0].values(), *state["masters"].values()]
    return steps, sorted({tensor.device.type for tensor in tensors})


def test_state_of_a_group_of_nccl(null_ranks):
    [(counts, exported)] = null_ranks(1, gather_and_load)
    assert counts == ["cpu"]
    assert exported == ["cpu"]
