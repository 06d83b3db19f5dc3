"""The optimizer of a rank, over named parameters: its groups, its state by name, and what is frozen when."""

import difflib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer as TorchOptimizer

from configs.errors import ConfigError
from configs.schema import Config, Optimizer, ParameterGroup
from parallelisms.mesh import Mesh
from parallelisms.part import part_of
from parallelisms.sums import Sums, sums_of
from trainer.kernels.keyed import key_of
from trainer.optimizers.rule import Rule, rule_of
from trainer.optimizers.training import TrainingOptimizer, joined, set_lr

_REST = ParameterGroup(pattern="*")


class WidthScale(NamedTuple):
    """muP's factors on what the optimizer does to a parameter."""

    lr: float = 1.0
    """The factor on the learning rate, which leaves the decay as it is."""
    eps: float | None = None
    """The factor on eps; None: the optimizer has an eps of its own."""


Partition = Callable[[list[dict[str, Any]]], TrainingOptimizer]
"""Distributes parameter groups over owners (see `OwnerPartition`)."""


def build_optimizer(
    config: Optimizer,
    named_parameters: Sequence[tuple[str, Parameter]],
    hidden_matrices: Mapping[str, int] | None = None,
    partition: Partition | None = None,
    model_names: Sequence[str] = (),
    sums: Sums | None = None,
    seed: int = 0,
    mesh: Mesh | None = None,
    later: Sequence[Optimizer] = (),
    width_scales: Mapping[str, WidthScale] | None = None,
    after_step: Callable[..., None] | None = None,
) -> TrainingOptimizer:
    """Build the optimizer that the config names, with its state, all zero.

    Weight decay applies to matrices but not to vectors (norms), unless a group in `config.groups` sets it. Parameters
    with `freeze` are in groups without state.

    Args:
        hidden_matrices: the matrices inside the model's blocks, which some optimizers update alone: how many of them
            each parameter has, by name.
        partition: None updates this rank's part of every parameter.
        model_names: names of the whole model's parameters, if these are only a pipeline stage's.
        sums: the run's; None: fast ones.
        seed: the run's, by which weights and moments in bfloat16 are rounded.
        mesh: the ranks that hold the parameters' parts; None: this rank holds them whole.
        later: the configs of the run's other stages, for `set_groups`.
        width_scales: muP's factors, by name; None: all are 1.
        after_step: called with each torch optimizer after its step, before owners send what it updated.

    Raises:
        ConfigError: a group's pattern selects no parameter.
    """
    is_keyed = rounds_stochastically(config)
    keys = {name: key_of(seed, name, part_of(p)) for name, p in named_parameters} if is_keyed else {}
    stacked = hidden_matrices or {}
    groups = _groups(config, named_parameters, stacked, model_names, later, width_scales or {})
    parts_on = mesh if partition is None else None
    rules = {name: rule_of(name)(config, sums, keys, stacked, parts_on) for name in groups}
    build = {name: partial(_built, rule, after_step) for name, rule in rules.items()}
    optimizer: TrainingOptimizer
    if partition is None:
        optimizer = joined([build[name](groups[name]) for name in rules])
    else:
        settings = {
            name: {"optimizer": build[name], "whole": rule.hidden_matrices_only} for name, rule in rules.items()
        }
        optimizer = partition([group | settings[name] for name, members in groups.items() for group in members])
    set_lr(optimizer, config.lr)
    return optimizer


def _built(rule: Rule, after_step: Callable[..., None] | None, groups: list[dict[str, Any]]) -> Any:
    optimizer = rule.build(groups)
    if after_step:
        optimizer.register_step_post_hook(after_step)
    return optimizer


def plain_optimizers(
    config: Optimizer,
    named_parameters: Sequence[tuple[str, Parameter]],
    hidden_matrices: Mapping[str, int],
    width_scales: Mapping[str, WidthScale],
) -> dict[str, TorchOptimizer]:
    """Build the plain torch optimizers, by name (with Muon, "muon" and "adamw"), that equal `build_optimizer`'s."""
    groups = _groups(config, named_parameters, hidden_matrices, (), (), width_scales)
    return {name: rule_of(name)(config, stacked=hidden_matrices).build(members) for name, members in groups.items()}


def rounds_stochastically(config: Optimizer) -> bool:
    """Whether updates round what is in bfloat16 by keys: AdamW's moments, or weights as well."""
    return config.moments_dtype == "bfloat16" or config.rounding == "stochastic"


def rule_name(config: Optimizer, is_hidden_matrix: bool) -> str:
    """Name of the optimizer of a parameter."""
    takes_it = is_hidden_matrix or not rule_of(config.name).hidden_matrices_only
    return config.name if takes_it else "adamw"


def _groups(
    config: Optimizer,
    named_parameters: Sequence[tuple[str, Parameter]],
    hidden_matrices: Collection[str],
    model_names: Sequence[str],
    later: Sequence[Optimizer],
    width_scales: Mapping[str, WidthScale],
) -> dict[str, list[dict[str, Any]]]:
    """Return the parameter groups of each optimizer, by its name; members of a group are alike in `later`, too."""
    values = _values(config, named_parameters, model_names, width_scales)
    of_stages = [values, *(_values(each, named_parameters, model_names, width_scales) for each in later)]
    members: dict[tuple, list[tuple[str, Parameter]]] = {}
    for name, parameter in named_parameters:
        rule = rule_name(config, name in hidden_matrices)
        members.setdefault((rule, *(tuple(each[name].items()) for each in of_stages)), []).append((name, parameter))
    groups: dict[str, list[dict[str, Any]]] = {}
    for (rule, *_), named in members.items():
        group = {"params": named, "lr": config.lr, **values[named[0][0]]}
        groups.setdefault(rule, []).append(group)
    return groups


def _values(
    config: Optimizer,
    named_parameters: Sequence[tuple[str, Parameter]],
    model_names: Sequence[str],
    width_scales: Mapping[str, WidthScale],
) -> dict[str, dict[str, Any]]:
    """The values of each parameter's group, by the parameter's name."""
    settings = _settings_of(config.groups, model_names or [name for name, _ in named_parameters])
    values: dict[str, dict[str, Any]] = {}
    for name, parameter in named_parameters:
        decay = settings[name].weight_decay
        if decay is None:
            decay = config.weight_decay if parameter.ndim >= 2 else 0.0
        of_width = width_scales.get(name, WidthScale())
        scale = settings[name].lr_scale * of_width.lr
        if config.weight_decay_by == "lr":  # optimizers multiply by the group's rate
            decay /= of_width.lr
        elif config.lr * scale > 0:
            decay /= config.lr * scale
        values[name] = {"weight_decay": decay, "lr_scale": scale, "freeze": settings[name].freeze}
        if of_width.eps is not None:
            values[name]["eps"] = config.eps * of_width.eps
    return values


def set_groups(
    optimizer: TrainingOptimizer,
    config: Optimizer,
    named_parameters: Sequence[tuple[str, Parameter]],
    model_names: Sequence[str],
    width_scales: Mapping[str, WidthScale],
) -> None:
    """Give the groups of an optimizer the values of another stage, which `build_optimizer` was told as `later`."""
    values = _values(config, named_parameters, model_names, width_scales)
    names = {parameter: name for name, parameter in named_parameters}
    for group in optimizer.param_groups:
        group.update(values[names[group["params"][0]]])


def skips_on_device(config: Config, device: torch.device) -> bool:
    """Whether a job's optimizer reads on the device whether to skip a step, so that the host need not wait."""
    training = config.training
    rule = rule_of(config.optimizer.name)(config.optimizer, sums_of(training))
    return rule.skips_on_device(device.type, getattr(torch, training.dtype)) and not config.fsdp.cpu_offload


def saved_weights(optimizer: TrainingOptimizer, parameters: Mapping[str, Parameter]) -> dict[str, Tensor]:
    """The weights that this rank saves, by name: its shards of all parameters, or those that it owns."""
    owned = optimizer.owned()
    return {name: owned[parameter] for name, parameter in parameters.items() if parameter in owned}


def optimizer_state(optimizer: TrainingOptimizer, parameters: Mapping[str, Parameter]) -> dict[str, Tensor]:
    """The optimizer's tensors as "optimizer.<parameter>.<key>"; write into them in place to restore a state.

    The keys are those of `Rule.state`. With a partition, only parameters that this rank owns are included. A parameter
    with `freeze` has no state.
    """
    return {
        f"optimizer.{name}.{key}": tensor
        for name, parameter in parameters.items()
        for key, tensor in optimizer.owned_state(parameter).items()
    }


def frozen_until(config: Optimizer, model_names: Sequence[str]) -> dict[str, float]:
    """The parameters that `config.groups` freezes, by name, with the step after which they train; inf: never.

    Args:
        model_names: names of the whole model's parameters.

    Raises:
        ConfigError: all are frozen at first.
    """
    settings = _settings_of(config.groups, model_names)
    until = {name: math.inf if group.freeze else group.freeze_until_step for name, group in settings.items()}
    frozen = {name: step for name, step in until.items() if step > 0}
    if len(frozen) == len(settings):
        raise ConfigError("optimizer.groups: all parameters are frozen, so step 1 would train nothing; unfreeze some")
    return frozen


def _settings_of(groups: Sequence[ParameterGroup], names: Sequence[str]) -> dict[str, ParameterGroup]:
    """Map each parameter to its group: the first whose pattern matches its name, or one without settings."""
    chosen = {name: next((group for group in groups if fnmatchcase(name, group.pattern)), _REST) for name in names}
    for index, group in enumerate(groups):
        if any(setting is group for setting in chosen.values()):
            continue
        where = f'optimizer.groups[{index}]: pattern "{group.pattern}"'
        if any(fnmatchcase(name, group.pattern) for name in names):
            raise ConfigError(f"{where} selects no parameter, because earlier patterns match them all; move it up")
        nearest = ", ".join(difflib.get_close_matches(group.pattern, names, n=3, cutoff=0))
        raise ConfigError(f"{where} matches no parameter; the nearest names are {nearest}")
    return chosen
