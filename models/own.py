"""What models of the user's own are made of: parts of Keel's that fit its techniques.

    from models.own import CausalLm, Head, Options, attend, plan_of_parts

A model is a module that is called like Keel's own, `model(tokens, positions, documents, loss)`, and has a `plan` and an
`init_std` (`configs.plan.PlannedModel`). `CausalLm` is a base that has all but the modules, the forward pass and the
plan (docs/own_models.md).
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from configs.architectures.own import Options
from configs.plan import Plan, TensorRole
from models.attention import Mask, attend, document_mask
from models.documents import Documents, has_kernel
from models.llama import Head, Loss
from models.own_experts import Experts, Router, RouterKeys

__all__ = [
    "CausalLm",
    "Documents",
    "Experts",
    "Head",
    "Loss",
    "Mask",
    "Options",
    "Router",
    "RouterKeys",
    "attend",
    "plan_of_parts",
]

_SAVE_OPS = ("aten.mm", "aten.addmm", "*._scaled_dot_product_*attention*")
_INIT_STD = 0.02


class CausalLm(nn.Module):
    """A base for models of one's own, which have the attribute `plan` and the method `forward`."""

    plan: Plan

    def __init__(self, options: Any) -> None:
        """Keep the options as `self.options`."""
        super().__init__()
        self.options = options
        self.mask = self._mask
        """Maps documents and the activations' dtype to the mask that each `attend` takes; techniques replace it."""

    def init_std(self, name: str) -> float | None:
        """Standard deviation of a parameter's initial values: 0.02 for matrices (`options.init_std`, if there is one),
        0 for biases; None, all 1, for norms, which are the other vectors."""
        if name.endswith("bias"):
            return 0.0
        return None if self.get_parameter(name).ndim == 1 else getattr(self.options, "init_std", _INIT_STD)

    def _mask(self, documents: Documents, dtype: torch.dtype) -> Mask:
        width = getattr(self.options, "head_dim", None) or self.options.dim // self.options.n_heads
        if has_kernel(documents.ids.device.type, dtype, width):
            return documents.numbered()
        return document_mask(documents.ids)


def plan_of_parts(
    model: nn.Module,
    blocks: str,
    n_blocks: int,
    before: tuple[str, ...],
    after: tuple[str, ...],
    attention: str = "",
    tensor_parallel: Mapping[str, TensorRole] | None = None,
    save_ops: tuple[str, ...] = _SAVE_OPS,
    experts: str = "",
    router: str = "",
    n_experts: int = 0,
) -> Plan:
    """The plan of a model, or of a pipeline's stage, in which parts are missing.

    Args:
        model: the whole model, or a stage.
        blocks: name of the `nn.ModuleDict` of blocks, whose keys are "0", "1", ...
        n_blocks: their number in the whole model.
        before: modules before the blocks, the embedding of the tokens first.
        after: modules after the blocks, the head last.
        attention: in each block, the module with `attend`; "": none, so that neither the sequence nor documents can be
            divided.
        tensor_parallel: roles (`configs.plan.Plan`) of modules and parameters, by their names in the blocks that have
            them; embedding, head and experts need none. None: tensor parallelism can't split the model.
        save_ops: costly ops, whose outputs selective activation checkpointing keeps.
        experts: in each block that is a mixture, the `Experts`; "": there are none.
        router: in these blocks, the `Router`; "": the model chooses experts in its own way, and balances them.
        n_experts: experts of each such block.
    """
    numbers = [name for name, _ in model.get_submodule(blocks).named_children()]
    names = tuple(f"{blocks}.{number}" for number in numbers)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    first = tuple(name for name in before if getattr(model, name, None) is not None)
    last = tuple(name for name in after if getattr(model, name, None) is not None)
    is_tied = parameters.get(f"{before[0]}.weight") is parameters.get(f"{after[-1]}.weight")
    groups = [(name,) for name in names]
    modules = dict(model.named_modules())
    is_whole = len(names) == n_blocks
    mixtures = _mixtures(modules, names, experts, n_experts)
    routers = tuple(f"{name.removesuffix(experts)}{router}" for name in mixtures if router)
    if router and not experts:
        raise ValueError("the plan names a router, but no experts; these count its tokens")
    if experts and is_whole and not mixtures:
        raise ValueError(f"no block has a module {experts}, which the plan names as experts")
    roles: dict[str, TensorRole] = {}
    if tensor_parallel is not None:
        ends: dict[str, TensorRole] = {before[0]: "whole_embedding", after[-1]: "whole_head"}
        roles |= _roles_of_blocks(names, {*modules, *parameters}, tensor_parallel, is_whole)
        roles |= _roles_of_experts(mixtures)
        roles |= {name: role for name, role in ends.items() if name in (*first, *last)}
    return Plan(
        blocks=names,
        first_block=int(numbers[0]),
        n_blocks=n_blocks,
        can_be_cut=not is_tied,
        before_blocks=first,
        after_blocks=last,
        fsdp_groups=tuple(groups if is_tied else filter(None, (first, *groups, last))),
        attention=tuple(f"{name}.{attention}" for name in names) if attention else (),
        mixers=tuple(f"{name}.{attention}" if attention else name for name in names),
        experts=tuple(mixtures),
        routers=routers,
        counters=tuple(mixtures),
        n_counted=n_experts,
        has_losses_of_layers=any(_has_loss(name, modules.get(name)) for name in routers),
        why_not_distributed="" if experts else "its plan has no stacked experts (experts)",
        tensor_parallel=roles,
        save_ops=save_ops,
        cannot_split="" if roles else "its plan has no roles of tensor parallelism (tensor_parallel)",
    )


def _roles_of_blocks(
    blocks: Sequence[str], known: Collection[str], tensor_parallel: Mapping[str, TensorRole], is_whole: bool
) -> dict[str, TensorRole]:
    """The role of each part in the blocks that have it. One that no block has is kept, for the check of names to find;
    of a stage, the other stages may have it."""
    roles: dict[str, TensorRole] = {}
    for part, role in tensor_parallel.items():
        there = [block for block in blocks if f"{block}.{part}" in known]
        roles |= {f"{block}.{part}": role for block in there or (blocks if is_whole else ())}
    return roles


def _roles_of_experts(mixtures: Mapping[str, Experts]) -> dict[str, TensorRole]:
    roles: dict[str, TensorRole] = {}
    for name, module in mixtures.items():
        roles[name] = "whole_experts"
        roles |= {f"{name}.{parameter}": role for parameter, role in module.tensor_parallel.items()}
    return roles


def _mixtures(
    modules: Mapping[str, nn.Module], blocks: Sequence[str], experts: str, n_experts: int
) -> dict[str, Experts]:
    """The experts of the blocks that have them, by name.

    Raises:
        ValueError: they are others than the plan says.
    """
    found: dict[str, Experts] = {}
    for name in [f"{block}.{experts}" for block in blocks if experts and f"{block}.{experts}" in modules]:
        module = modules[name]
        if not isinstance(module, Experts):
            raise ValueError(f"{name}, which the plan names as experts, is no models.own.Experts")
        if module.n_experts != n_experts:
            raise ValueError(f"{name} has {module.n_experts} experts, and the plan says that n_experts is {n_experts}")
        found[name] = module
    return found


def _has_loss(name: str, router: nn.Module | None) -> bool:
    if not isinstance(router, Router):
        raise ValueError(f"{name}, which the plan names as router, is no models.own.Router")
    return router.settings.has_auxiliary_loss
