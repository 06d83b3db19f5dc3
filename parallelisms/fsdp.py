"""Fully sharded data parallelism (FSDP2, Zhao et al. 2023; per-parameter sharding), HSDP and DDP.

Parameters, gradients and optimizer state are sharded by rows over `dp_shard` x `cp` and replicated over `dp_replicate`;
a group's parameters are gathered before it computes. DDP is the case `dp_shard = 1`. So is the partition by owner
(`owner_partition.py`): its replicas are all ranks that hold different tokens, and of experts those that hold the same.
FSDP is applied at degree 1 as well, because compute_dtype and reduce_dtype are implemented by it and must mean the same
at every degree. It is left out only on a single rank that has nothing to convert, or computes with copies
(`compute_copies.py`): there it would just copy each parameter and gradient, which takes 3-5% of a step on a CPU.

The ZeRO stages (Rajbhandari et al. 2020, section 5) differ in what is unsharded while a step computes; between steps
a rank holds only its shards, at every stage. With P parameters over N ranks, in elements:

    stage   parameters            gradients                      all-gathers, reductions per step of m micro-batches
    3       P / N + some groups   P / N                          2 m, m
    2       P / N + P             P / N                          m, m
    1       P / N + P             P / N + P between micro-batches   1, 1
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard

from configs.layout import cut_dim, reduces_once, reshard_after_forward, zero_stage
from configs.plan import plan_of
from configs.schema import Comm, Config, Fsdp, Training
from parallelisms.compute_copies import computes_with_copies
from parallelisms.mesh import Mesh
from parallelisms.ranks import local_part
from parallelisms.torch_internals import compute_within, find_gradient_types, fsdp_modules, has_pending_gather


def apply_fsdp(model: nn.Module, mesh: Mesh, config: Fsdp, training: Training) -> None:
    """Shard each of the plan's groups, then the remaining parameters with the root.

    Under expert parallelism, experts are sharded separately from their group, over the ranks that hold the same ones.
    By default a pipeline stage does not reshard after forward, which would gather its parameters again for every
    micro-batch.
    """
    plan = plan_of(model)
    for names in plan.fsdp_groups:
        # The last group's backward directly follows its forward: resharding in between would only gather it twice.
        is_freed = names is not plan.fsdp_groups[-1] and mesh.sizes.pp == 1
        reshard = {"default": is_freed, "always": True, "never": False}[reshard_after_forward(config)]
        shard = partial(_shard, reshard=reshard, config=config, training=training)
        modules = [model.get_submodule(name) for name in names]
        apart = _inside(plan.experts, names) if mesh.sizes.ep > 1 else ()
        experts = [shard([model.get_submodule(name)], mesh.expert_fsdp) for name in apart]
        shard(modules, mesh.fsdp)
        for module in experts:
            compute_within(module, modules[0])
    _shard([model], mesh.fsdp, reshard=False, config=config, training=training)


def _inside(names: Sequence[str], outer: Sequence[str]) -> tuple[str, ...]:
    """The modules among `names` that lie within a module of `outer`."""
    return tuple(name for name in names if name.startswith(tuple(f"{module}." for module in outer)))


def _shard(modules: list[nn.Module], mesh: DeviceMesh, reshard: bool, config: Fsdp, training: Training) -> FSDPModule:
    """Shard the parameters of `modules` as one group; returns the first module, whose forward pass gathers them."""
    n_shards = mesh.size(mesh.ndim - 1)

    def placement(parameter: nn.Parameter) -> Shard:
        local = local_part(parameter)
        return Shard(cut_dim(local.shape, n_shards))

    fully_shard(
        modules if len(modules) > 1 else modules[0],
        mesh=mesh,
        # The inputs are not cast: the embedding already has the compute type, and the rotary angles need float32.
        mp_policy=MixedPrecisionPolicy(
            param_dtype=getattr(torch, training.compute_dtype),
            reduce_dtype=getattr(torch, training.reduce_dtype),
            cast_forward_inputs=False,
        ),
        offload_policy=CPUOffloadPolicy(torch.cuda.is_available()) if config.cpu_offload else OffloadPolicy(),
        reshard_after_forward=reshard,
        shard_placement_fn=placement,
    )
    group = cast(FSDPModule, modules[0])
    if mesh.size() > 1:
        _add_up_gradients(group)
    return group


def _add_up_gradients(group: FSDPModule) -> None:
    """Make the group's reductions sum gradients; by default FSDP averages them over the group's ranks.

    The loss is already divided by the tokens of the global batch. An average would divide an expert's gradient by fewer
    ranks than a dense matrix's gradient, since the expert sees the tokens of all `ep` ranks.
    """
    group.set_gradient_divide_factor(1.0)
    group.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM


def is_needed(world_size: int, config: Config) -> bool:
    """Whether FSDP has anything to shard, reduce or convert."""
    if computes_with_copies(world_size, config):
        return False
    training = config.training
    fsdp = config.fsdp
    converts = len({training.dtype, training.compute_dtype, training.reduce_dtype}) > 1
    return world_size > 1 or converts or fsdp.cpu_offload or fsdp.partition == "owner"


def apply_prefetch(model: nn.Module, comm: Comm) -> None:
    """Issue the all-gathers of the next groups before a group computes, in forward and in backward.

    FSDP's default is one group ahead in backward; in forward it gathers ahead only as far as the CPU runs ahead of the
    device. Modules inside a group that are sharded separately, such as experts, are gathered with the group, after its
    own parameters. This holds in backward as well, since FSDP gathers a module's parameters before those inside it.
    """
    if not isinstance(model, FSDPModule):
        return
    groups = [_sharded_inside(model, names) for names in plan_of(model).fsdp_groups]
    for i, (group, *inside) in enumerate(groups):
        if comm.prefetch:
            ahead = chain.from_iterable(groups[i + 1 : i + 1 + comm.prefetch])
            group.set_modules_to_forward_prefetch([*inside, *ahead])
        # With an empty list FSDP follows its default, by which, from the second micro-batch on, the first group gathers
        # the last one needlessly. A list of the group itself costs nothing, since it is already gathered.
        ahead = chain.from_iterable(groups[max(0, i - comm.prefetch) : i][::-1])
        group.set_modules_to_backward_prefetch(([*inside, *ahead] if comm.prefetch else []) or [group])
        for module in inside:
            module.set_modules_to_backward_prefetch([module])
    if not comm.prefetch:
        model.set_modules_to_backward_prefetch([model])


def _sharded_inside(model: nn.Module, names: Sequence[str]) -> list[FSDPModule]:
    """A group's first module, on which FSDP keeps the group, then the separately sharded modules inside the group."""
    modules = [model.get_submodule(name) for name in names]
    inside = [m for module in modules for m in module.modules() if m is not module and isinstance(m, FSDPModule)]
    return [cast(FSDPModule, modules[0]), *inside]


def prepare_backward(model: nn.Module, config: Config, is_last_micro_batch: bool) -> None:
    """Configure a micro-batch's backward pass: whether it is the step's last, and so whether it reduces gradients.

    If gradients are reduced once per step, earlier micro-batches keep them unsharded, in reduce_dtype; ZeRO stage 1
    also keeps the parameters gathered.
    """
    if not isinstance(model, FSDPModule):
        return
    model.set_is_last_backward(is_last_micro_batch)
    if reduces_once(config):
        model.set_requires_gradient_sync(is_last_micro_batch)
    if zero_stage(config.fsdp) == 1:
        model.set_reshard_after_backward(is_last_micro_batch)


def freeze(models: Iterable[nn.Module], parameters: Mapping[str, nn.Parameter], frozen: Collection[str]) -> None:
    """Freeze the parameters named in `frozen`, and unfreeze all others; call it between two steps.

    Args:
        models: the pipeline stages of this rank.
        parameters: their parameters by name, as they are between two steps (FSDP's shards, or the masters of copies).
        frozen: names of the parameters to freeze.
    """
    for name, parameter in parameters.items():
        parameter.requires_grad_(name not in frozen)
    for model in models:
        for name, held in model.named_parameters():
            held.requires_grad_(name not in frozen)
        for module in fsdp_modules(model):
            find_gradient_types(module)


def keep_head(model: nn.Module) -> None:
    """Let a model that is never trained free each group's parameters after their forward pass, but for the head's.

    Those stay gathered from the first forward pass on: what multiplies by them does so later.
    """
    if not isinstance(model, FSDPModule):
        return
    plan = plan_of(model)
    model.set_reshard_after_forward(True)
    if plan.after_blocks:
        last = [names for names in plan.fsdp_groups if set(names) & set(plan.after_blocks)]
        for module in (model, *(model.get_submodule(names[0]) for names in last)):
            cast(FSDPModule, module).set_reshard_after_forward(False, recurse=False)


def reshard(model: nn.Module) -> None:
    """Free the parameters that a forward pass without a backward pass left gathered, or gathered ahead in vain.

    Modules that predict further tokens are gathered ahead, but run in training only. Left pending, that gather would
    serve the next step, whatever the weights are by then.
    """
    finish_gathers(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def finish_gathers(model: nn.Module) -> None:
    """Free the parameters that a forward pass gathered ahead and did not use."""
    for module in model.modules():
        if isinstance(module, FSDPModule) and has_pending_gather(module):
            module.unshard()  # waits for it
            module.reshard()
