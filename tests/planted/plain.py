"""A plain model, ways to parallelize it with torch alone, right and with mistakes, and what `keel.prove` says.

The names of torch's own tools are used as a trainer without Keel uses them.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from scripts.proving.equal import Report, prove


class Block(nn.Module):
    def __init__(self, dim: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(dim)
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.dropout(F.silu(self.up(self.norm(x)))))


class Plain(nn.Module):
    def __init__(self, dropout: float = 0.0, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList([Block(16, dropout), Block(16, dropout)])
        self.head = nn.Linear(16, 32, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    tokens, targets = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def batch_of(padded: bool = False) -> tuple[Tensor, Tensor]:
    """Tokens and targets, (4, 8); with padding, the sequences have different numbers of targets."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(32, (4, 8), generator=generator)
    targets = torch.randint(32, (4, 8), generator=generator)
    if padded:
        targets[0, 3:] = -100
    return tokens, targets


def step_on_part(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """A data-parallel step: each rank takes its sequences, and FSDP or DDP averages the gradients."""
    rank = dist.get_rank()
    part = tuple(each.chunk(dist.get_world_size())[rank] for each in batch)
    value = loss(model, part)  # type: ignore[arg-type]
    value.backward()
    total = value.detach().clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def fsdp(model: Any) -> nn.Module:
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def tp(model: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def _models(**options: Any) -> tuple[Plain, Plain]:
    torch.manual_seed(0)
    reference = Plain(**options).double()
    return reference, copy.deepcopy(reference)


# --------------------------------------------------------------------------- right


def right_fsdp() -> Report:
    reference, model = _models()
    return prove(reference, fsdp(model), batch_of(), loss=loss, step=step_on_part)


def right_tp() -> Report:
    reference, model = _models()
    return prove(reference, tp(model), batch_of(), loss=loss)


def right_ddp() -> Report:
    reference, model = _models(tied=True)
    return prove(reference, DistributedDataParallel(model), batch_of(), loss=loss, step=step_on_part)


# --------------------------------------------------------------------------- mistakes


def mean_of_means() -> Report:
    """Each rank averages over its own targets, of which it has fewer or more (transformers 34191)."""
    reference, model = _models()
    return prove(reference, fsdp(model), batch_of(padded=True), loss=loss, step=step_on_part)


def called_past_its_wrapper() -> Report:
    """The step calls the module inside of DDP, so nothing is reduced."""
    reference, model = _models()
    wrapped = DistributedDataParallel(model)
    return prove(reference, wrapped, batch_of(), loss=loss, step=lambda _, batch: step_on_part(wrapped.module, batch))


def bias_of_every_rank() -> Report:
    """Each rank adds the whole bias before the sum over ranks (torchtitan 4245)."""
    reference, model = _models()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in tp(model).blocks:  # type: ignore[union-attr]
        block.down.forward = _row_with_bias(block.down, mesh)
        block.down._forward_hooks.clear()
        block.down._forward_pre_hooks.clear()
    return prove(reference, model, batch_of(), loss=loss)


def _row_with_bias(down: Any, mesh: Any) -> Callable[[Any], Tensor]:
    def forward(x: Any) -> Tensor:
        own = x.to_local() if isinstance(x, DTensor) else x
        part = F.linear(own, down.weight.to_local(), down.bias.to_local())
        return DTensor.from_local(part, mesh, [Partial()], run_check=False).full_tensor()

    return forward


def gradient_of_an_input_is_one_ranks() -> Report:
    """A column-parallel matrix without the sum of its input's gradient (SkyRL 1886)."""
    reference, model = _models()
    tp(model)
    for block in model.blocks:
        block.up._forward_pre_hooks.clear()
        block.up._forward_hooks.clear()
        block.up.forward = _column_alone(block.up)
    return prove(reference, model, batch_of(), loss=loss)


def _column_alone(up: Any) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        return F.linear(x, up.weight.to_local(), up.bias.to_local())

    return forward


def other_seeds() -> Report:
    """Replicas that each rank draws from its own stream."""
    reference, _ = _models()
    torch.manual_seed(dist.get_rank())
    return prove(reference, tp(Plain().double()), batch_of(), loss=loss)


def unkeyed_dropout() -> Report:
    """Dropout that ranks draw as they come (seed_oss in transformers' default)."""
    reference, model = _models(dropout=0.1)
    torch.manual_seed(dist.get_rank())
    return prove(reference, fsdp(model), batch_of(), loss=loss, step=step_on_part)


def norm_counts_replicas() -> Report:
    """A clipping norm to which every rank adds what it holds, replicas included (Transformer Engine, ROCm, 715)."""
    reference, model = _models()

    def step(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        value = loss(model, batch)
        value.backward()
        held = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]
        squares = torch.stack([grad.square().sum() for grad in held if grad is not None]).sum()
        dist.all_reduce(squares)
        return value.detach(), squares.sqrt()

    return prove(reference, tp(model), batch_of(), loss=loss, step=step)


def reentrant_checkpoint() -> Report:
    """A block that is checkpointed, whose input needs no gradient since the embedding is frozen: it gets none."""
    reference, model = _models()
    reference.embed.weight.requires_grad_(False)
    model.embed.weight.requires_grad_(False)
    first = model.blocks[0].forward
    model.blocks[0].forward = lambda x: checkpoint(first, x, use_reentrant=True)
    return prove(reference, fsdp(model), batch_of(), loss=loss, step=step_on_part)


def untied_after_the_meta_device() -> Report:
    """`to_empty` gives each of two tied names its own memory; both are then drawn (torch)."""
    reference, model = _models(tied=True)
    weights = copy.deepcopy(model.state_dict())
    with torch.device("meta"):
        model = Plain(tied=True).double()
    model.to_empty(device="cpu")
    model.head.weight = nn.Parameter(torch.empty_like(model.head.weight))
    model.load_state_dict(weights)
    return prove(reference, fsdp(model), batch_of(), loss=loss, step=step_on_part)


def replicated_gradient_is_a_term() -> Report:
    """A norm on a slice of the sequence, whose gradient is not added over ranks (Megatron-LM 1446, gpt-neox 1259)."""
    reference, model = _models()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in tp(model).blocks:  # type: ignore[union-attr]
        block.norm.weight = nn.Parameter(distribute_tensor(block.norm.weight, mesh, [Replicate()]))
        block.norm.forward = _norm_of_slice(block.norm, mesh)
    return prove(reference, model, batch_of(), loss=loss)


def _norm_of_slice(norm: Any, mesh: Any) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        whole = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
        part = whole.redistribute(placements=[Shard(1)]).to_local()
        normed = F.rms_norm(part, norm.normalized_shape, norm.weight.to_local(grad_placements=[Replicate()]))
        return DTensor.from_local(normed, mesh, [Shard(1)], run_check=False).full_tensor()

    return forward
