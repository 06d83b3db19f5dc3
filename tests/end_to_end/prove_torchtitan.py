"""torchtitan's Llama 3 by its own parallelize_llama: torchrun --nproc-per-node 4 prove_torchtitan.py.

Keel comes before packages that may have the names of its own, and the device before the rest of torchtitan.
"""
# ruff: noqa: E402, I001

from keel import prove

import copy
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor.parallel import loss_parallel
from torchtitan.tools import utils

utils.device_type = "cpu"  # before the rest is imported; leave it out on GPUs
from torchtitan.config import TORCH_DTYPE_MAP, CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models import llama3
from torchtitan.models.common.attention import ScaledDotProductAttention

TORCH_DTYPE_MAP["float64"] = torch.float64
dist.init_process_group("gloo")
parallelism = ParallelismConfig(tensor_parallel_degree=2, spmd_backend="partial_dtensor")
config = llama3.model_registry("debugmodel").model
for layer in config.layers:  # its default, FlexAttention, has no backward pass on a CPU
    layer.attention.inner_attention = ScaledDotProductAttention.Config()
config.update_from_config(config=SimpleNamespace(parallelism=parallelism))
torch.manual_seed(0)
reference = config.build()
reference.init_states()
reference.double()
dims = ParallelDims.from_config(parallelism, dist.get_world_size())
dims.build_mesh()
parallel = llama3.parallelize_llama(
    copy.deepcopy(reference),
    parallel_dims=dims,
    training=TrainingConfig(mixed_precision_param="float64", mixed_precision_reduce="float64"),
    parallelism=parallelism,
    compile_config=CompileConfig(enable=False),
    ac_config=None,
    dump_folder="",
)


def loss(model, batch):
    tokens, targets = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def step(model, batch):  # this rank's sequences; torchtitan lets FSDP add gradients up, so the loss is divided
    part = [each.chunk(dims.dp_shard)[dist.get_rank() // dims.tp] for each in batch]
    with loss_parallel():
        value = loss(model, part) / dims.dp_shard
        value.backward()
    total = value.full_tensor().detach()
    dist.all_reduce(total)
    return total / dims.tp


report = prove(reference, parallel, torch.randint(2048, (2, 4, 32)).unbind(), loss=loss, step=step)
if dist.get_rank() == 0:
    print(report)
dist.destroy_process_group()
assert report.is_equal
