"""Builds a model of the user's own, and checks that it has what techniques need (`configs.plan.PlannedModel`)."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from configs.errors import ConfigError
from configs.own_code import code_of, reason_of
from configs.plan import Plan
from configs.schema import OwnModel
from models.random_numbers import RandomListener

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def build_own(config: OwnModel) -> nn.Module:
    """Build a model of the user's own.

    Raises:
        ConfigError: its constructor raises, or what techniques need is missing.
    """
    kind = code_of(config.architecture)
    name = config.architecture
    try:
        model = kind(config.resolved)
        plan = _plan_of(model)
    except Exception as error:
        raise ConfigError(f'"{name}" cannot be built with these options: {reason_of(error)}') from None
    if not isinstance(model, nn.Module):
        raise ConfigError(f'"{name}" is no torch.nn.Module; a model of one\'s own must be one')
    if not isinstance(plan, Plan):
        raise ConfigError(
            f'"{name}" has no plan, which says how techniques may split it; give it a property plan that returns a '
            "configs.plan.Plan, such as models.own.plan_of_parts makes"
        )
    if plan.experts and config.experts_per_token is None:
        raise ConfigError(f'"{name}" has experts, but no option experts_per_token, by which its FLOPs are counted')
    for fault in (*_wrong_names(model, plan), *_wrong_values(model)):
        raise ConfigError(f'"{name}" {fault}')
    return model


def _plan_of(model: Any) -> Any:
    """The attribute `plan`, or None. What a property raises gets through: a module would say that it has no plan."""
    found = getattr(type(model), "plan", None)
    return found.fget(model) if isinstance(found, property) and found.fget else getattr(model, "plan", None)


def _wrong_names(model: nn.Module, plan: Plan) -> Iterator[str]:
    """What the plan names and the model does not have, or shares."""
    modules = dict(model.named_modules())
    parameters = dict(model.named_parameters(remove_duplicate=False))
    groups = [name for group in plan.fsdp_groups for name in group]
    of_experts = (*plan.experts, *plan.routers, *plan.counters)
    named = (*plan.blocks, *plan.before_blocks, *plan.after_blocks, *groups, *plan.attention, *plan.mixers, *of_experts)
    for name in named:
        if name not in modules:
            yield f"has no module {name}, which its plan names"
    for name in plan.tensor_parallel:
        if name not in modules and name not in parameters:
            yield f"has no module or parameter {name}, which its plan names for tensor parallelism"
    for name in plan.attention:
        if not callable(getattr(modules.get(name), "attend", None)):
            yield f"has no attribute attend in {name}, where its plan has the attention"
    if len(plan.blocks) != plan.n_blocks:
        yield f"has {len(plan.blocks)} blocks in its plan, which says that there are {plan.n_blocks}"
    if not plan.before_blocks or not plan.after_blocks:
        yield "has a plan without an embedding (before) or without a head (after)"
        return
    ends = {f"{plan.before_blocks[0]}.weight", f"{plan.after_blocks[-1]}.weight"}
    first: dict[int, str] = {}
    for name, parameter in parameters.items():
        other = first.setdefault(id(parameter), name)
        if other != name and {other, name} != ends:
            yield f"shares {other} with {name}, which techniques would separate; only embedding and head may share"


def _wrong_values(model: Any) -> Iterator[str]:
    """What keeps values from being the same on every mesh."""
    for name, module in model.named_modules():
        if isinstance(module, _DROPOUTS) and module.p > 0:
            yield f"has dropout in {name}, whose random numbers would not be the same on every mesh; set it to 0.0"
    if callable(getattr(model, "initial_values", None)):
        return
    if not callable(getattr(model, "init_std", None)):
        yield (
            "has no initial values, which may not depend on the mesh; give it a method init_std(name) that returns a "
            "standard deviation for each parameter, or derive it from models.own.CausalLm"
        )
        return
    for name, _ in model.named_parameters():
        try:
            std = model.init_std(name)
        except Exception as error:
            yield f"has an init_std that raises {reason_of(error)} for {name}"
            return
        if std is not None and not (isinstance(std, (int, float)) and std >= 0):
            yield f"has an init_std that returns {std!r} for {name}; it must be at least 0, or None for ones"
    for name, module in model.named_modules():
        buffers = dict(module.named_buffers(recurse=False))
        if buffers and not callable(getattr(module, "init_buffers", None)):
            yield (
                f"has the buffer {next(iter(buffers))} in {name or 'the model'}, which lacks the method "
                "init_buffers() to fill it after the model was built without memory"
            )


_ASKS_FOR_VALUES = (
    "; this pass is without memory, so it must not ask for values, as `if mask.any()` does, nor make shapes of them, "
    "as `x[mask]` does; every rank must issue the same operations, so compute on all rows and choose by torch.where, "
    "and experts by models.own.Experts"
)


def try_forward(model: Any, seq_len: int) -> None:
    """Run a model, or stages of a pipeline one after the other, on the meta device, without computing anything.

    Args:
        model: a model, or a list of stages, on the meta device.
        seq_len: tokens of the sequence.

    Raises:
        ConfigError: the forward pass raises, draws random numbers, or does not return what the loss returned.
    """
    stages = model if isinstance(model, list) else [model]
    seen: list[tuple[torch.Size, torch.Size]] = []
    marker = torch.zeros((), device="meta")

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        seen.append((hidden.shape, weight.shape))
        return marker

    with torch.device("meta"):
        x = torch.zeros(1, seq_len, dtype=torch.int64)
        positions = torch.arange(seq_len)[None]
    place = ""
    listener = RandomListener()
    try:
        for number, stage in enumerate(stages):
            place = f" of stage {number} of the pipeline" if len(stages) > 1 else ""
            with listener:
                x = stage(x, positions=positions, loss=loss)
    except Exception as error:
        raise ConfigError(
            f"the forward pass{place}, called as model(tokens, positions=positions, loss=loss), raises "
            f"{reason_of(error)}{_ASKS_FOR_VALUES if 'meta' in str(error).lower() else ''}"
        ) from None
    if listener.random:
        raise ConfigError(
            f"the forward pass draws random numbers ({listener.random}), as dropout does, which would not be the same "
            "on every mesh; leave them out"
        )
    whole = [(name, p.shape) for name, p in stages[-1].named_parameters(remove_duplicate=False)]
    if x is not marker:
        raise ConfigError(
            "the forward pass does not return what the loss returned; given a loss, the model must call it with its "
            "last hidden states and the head's weight, as models.own.Head does, and return its value"
        )
    hidden, weight = seen[-1]
    if len(hidden) != 3 or hidden[:2] != (1, seq_len) or weight not in [shape for _, shape in whole]:
        raise ConfigError(
            f"the loss was called with hidden states {tuple(hidden)} and a weight {tuple(weight)}; it needs (batch, "
            "seq, dim) and the head's own weight, (vocabulary, dim)"
        )
