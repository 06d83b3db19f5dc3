"""AdamW over named parameters, sharded or not; or Muon for the hidden matrices and AdamW for the rest.

One fused kernel processes parameters, gradients and both moments at once: for a 10M-parameter model on 2 CPU threads it
takes 6 ms per step where `foreach` takes 24 (with the DTensors of `fully_shard`; without them 5 and 21). The state is
allocated at once, so its memory is known before the first step and a checkpoint can be loaded into it in place.

On a CPU the fused kernel computes a tensor's last elements, those that do not fill a vector, by other instructions than
the rest, which round differently. Which elements these are depends on the shards, so exact runs fill them up to a
vector (`kernels/padded.py`).

On a GPU, Keel's own kernel (`kernels/adamw.py`) takes the place of torch's where Triton is installed. Moments in
bfloat16 are updated by that kernel or, elsewhere, by separate operations that compute the same bits.

Muon (Jordan 2024, kellerjordan.github.io/posts/muon; Liu et al. 2025, arXiv 2502.16982) replaces a matrix's momentum by
the nearest orthogonal matrix. This needs the whole matrix, so Muon runs where whole parameters have owners. AdamW
updates the norms, and also the embedding and the head, whose rows are looked up or compared one by one.
"""

import difflib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Muon
from torch.optim import Optimizer as TorchOptimizer

from configs.errors import ConfigError
from configs.schema import Optimizer, ParameterGroup
from parallelisms.owner_partition import OwnerPartition
from parallelisms.part import part_of
from trainer.kernels.keyed import Key, key_of
from trainer.kernels.row_adamw import RowAdamW, kernel_of_adamw

_REST = ParameterGroup(pattern="*")


TrainingOptimizer = RowAdamW | OwnerPartition

Partition = Callable[[list[dict[str, Any]]], OwnerPartition]
"""Distributes parameter groups over owners (see `OwnerPartition`)."""


def build_optimizer(
    config: Optimizer,
    named_parameters: Sequence[tuple[str, Parameter]],
    hidden_matrices: Collection[str] = (),
    partition: Partition | None = None,
    model_names: Sequence[str] = (),
    exact: bool = False,
    seed: int = 0,
) -> TrainingOptimizer:
    """Build AdamW (Loshchilov and Hutter 2019, algorithm 2), or Muon and AdamW, with its state, all zero.

    Weight decay applies to matrices but not to vectors (norms), unless a group in `config.groups` sets it. Parameters
    with `freeze` are in groups without state.

    Args:
        hidden_matrices: names of the parameters that Muon updates, if `config.name` says so.
        partition: None updates this rank's part of every parameter; Muon needs a partition.
        model_names: names of the whole model's parameters, if these are only a pipeline stage's.
        exact: update every element by the same instructions, wherever a shard begins.
        seed: the run's, by which moments in bfloat16 are rounded.

    Raises:
        ConfigError: a group's pattern selects no parameter.
    """
    of_muon = set(hidden_matrices) if config.name == "muon" else set()
    named_groups = _groups(config, named_parameters, of_muon, model_names)
    is_keyed = config.moments_dtype == "bfloat16"
    keys = {name: key_of(seed, name, part_of(p)) for name, p in named_parameters} if is_keyed else {}
    make_adamw = partial(_adamw, config, exact=exact, keys=keys)
    optimizer: TrainingOptimizer
    if partition is not None:
        makers = {False: make_adamw, True: partial(_muon, config)}
        optimizer = partition(
            [{**group, "optimizer": makers[is_muon], "whole": is_muon} for is_muon, group in named_groups]
        )
    else:
        assert not of_muon, "Muon needs whole matrices, and so a partition by owner"
        optimizer = make_adamw([group for _, group in named_groups])
    set_lr(optimizer, config.lr)
    return optimizer


def plain_optimizers(
    config: Optimizer, named_parameters: Sequence[tuple[str, Parameter]], hidden_matrices: Collection[str]
) -> dict[str, TorchOptimizer]:
    """Build the plain torch optimizers, by name ("muon", then "adamw"), that equal `build_optimizer`'s together."""
    of_muon = set(hidden_matrices) if config.name == "muon" else set()
    groups = _groups(config, named_parameters, of_muon, model_names=())
    muons, adamws = ([group for is_muon, group in groups if is_muon is wanted] for wanted in (True, False))
    optimizers: dict[str, TorchOptimizer] = {"muon": _muon(config, muons)} if muons else {}
    return optimizers | ({"adamw": _adamw(config, adamws)} if adamws else {})


def _groups(
    config: Optimizer,
    named_parameters: Sequence[tuple[str, Parameter]],
    of_muon: Collection[str],
    model_names: Sequence[str],
) -> list[tuple[bool, dict[str, Any]]]:
    """Return the parameter groups, each with whether Muon updates it."""
    settings = _settings_of(config.groups, model_names or [name for name, _ in named_parameters])
    members: dict[tuple[bool, float, float, bool], list[tuple[str, Parameter]]] = {}
    for name, parameter in named_parameters:
        decay = settings[name].weight_decay
        if decay is None:
            decay = config.weight_decay if parameter.ndim >= 2 else 0.0
        key = (name in of_muon, settings[name].lr_scale, decay, settings[name].freeze)
        members.setdefault(key, []).append((name, parameter))
    return [
        (is_muon, {"params": named, "weight_decay": decay, "lr_scale": scale, "freeze": frozen, "lr": config.lr})
        for (is_muon, scale, decay, frozen), named in members.items()
    ]


def _adamw(
    config: Optimizer, groups: list[dict[str, Any]], exact: bool = False, keys: Mapping[str, Key] | None = None
) -> RowAdamW:
    parameters = [named[1] if isinstance(named, tuple) else named for group in groups for named in group["params"]]
    kinds = {(parameter.device.type, parameter.dtype) for parameter in parameters} or {("cpu", torch.float32)}
    kernels = {kernel_of_adamw(config, device_type, dtype, exact) for device_type, dtype in kinds}
    kernel = kernels.pop() if len(kernels) == 1 else "separate"
    betas = config.betas[0], config.betas[1]
    optimizer = RowAdamW(groups, kernel, keys or {}, betas=betas, eps=config.eps)
    dtype = torch.bfloat16 if config.moments_dtype == "bfloat16" else None
    for parameter, _ in _trained(optimizer):
        # What AdamW creates in its first step; a step with zero gradients instead would decay the weights.
        optimizer.state[parameter] = {
            # Kernels count on the device; separate operations read the count on the CPU.
            "step": torch.zeros((), dtype=torch.float32, device="cpu" if kernel == "separate" else parameter.device),
            "exp_avg": torch.zeros_like(parameter, dtype=dtype, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(parameter, dtype=dtype, memory_format=torch.preserve_format),
        }
    return optimizer


def _muon(config: Optimizer, groups: list[dict[str, Any]]) -> Muon:
    optimizer = Muon(
        groups, momentum=config.momentum, ns_steps=config.newton_schulz_steps, adjust_lr_fn=config.muon_lr_adjustment
    )
    for parameter, _ in _trained(optimizer):
        optimizer.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter)}
    return optimizer


def _members(optimizer: TorchOptimizer) -> list[tuple[Parameter, dict[str, Any]]]:
    return [(parameter, group) for group in optimizer.param_groups for parameter in group["params"]]


def _trained(optimizer: TorchOptimizer) -> list[tuple[Parameter, dict[str, Any]]]:
    return [(parameter, group) for parameter, group in _members(optimizer) if not group["freeze"]]


def set_lr(optimizer: TorchOptimizer, lr: float) -> None:
    """Set the learning rate of the next update; each group's `lr_scale` multiplies it."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]


def saved_weights(optimizer: TrainingOptimizer, parameters: Mapping[str, Parameter]) -> dict[str, Tensor]:
    """The weights that this rank saves, by name: its shards of all parameters, or those that it owns."""
    owned = optimizer.owned()
    return {name: owned[parameter] for name, parameter in parameters.items() if parameter in owned}


def optimizer_state(optimizer: TrainingOptimizer, parameters: Mapping[str, Parameter]) -> dict[str, Tensor]:
    """The optimizer's tensors as "optimizer.<parameter>.<key>"; write into them in place to restore a state.

    The keys are AdamW's `exp_avg` and `exp_avg_sq`, shaped and sharded like the parameter, and the scalar `step`; or
    Muon's `momentum_buffer`. With a partition, only parameters that this rank owns are included. A parameter with
    `freeze` has no state.
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
