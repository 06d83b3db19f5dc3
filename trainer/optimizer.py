"""AdamW over named parameters, sharded or not.

One fused kernel walks through parameters, gradients and both moments at once: on a 10M-parameter model and 2 CPU
threads 6 ms a step where `foreach` takes 24 (with DTensors, as `fully_shard` makes them; without 5 and 21). The state
is there from the start, so its memory is known before the first step and a checkpoint can be read into it in place.
"""

import difflib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import AdamW
from torch.optim import Optimizer as TorchOptimizer

from configs.errors import ConfigError
from configs.schema import Optimizer, ParameterGroup

_FUSED_DEVICES = ("cpu", "cuda")
_REST = ParameterGroup(pattern="*")


def build_optimizer(
    config: Optimizer, named_parameters: Sequence[tuple[str, Parameter]], model_names: Sequence[str] = ()
) -> AdamW:
    """AdamW (Loshchilov and Hutter 2019, algorithm 2) with its state, all zero.

    Only matrices decay, vectors (norms) do not, unless a group in `config.groups` says otherwise for them.
    `model_names`: of the whole model's parameters, where these are only a pipeline stage's.

    Raises:
        ConfigError: a group's pattern gets no parameter.
    """
    owners = _owners(config.groups, model_names or [name for name, _ in named_parameters])
    members: dict[tuple[float, float], list[Parameter]] = {}
    for name, parameter in named_parameters:
        group = owners[name]
        decay = group.weight_decay
        if decay is None:
            decay = config.weight_decay if parameter.ndim >= 2 else 0.0
        members.setdefault((group.lr_scale, decay), []).append(parameter)
    optimizer = AdamW(
        [
            {"params": parameters, "weight_decay": weight_decay, "lr_scale": lr_scale}
            for (lr_scale, weight_decay), parameters in members.items()
        ],
        betas=(config.betas[0], config.betas[1]),
        eps=config.eps,
        fused=all(parameter.device.type in _FUSED_DEVICES for _, parameter in named_parameters),
    )
    set_lr(optimizer, config.lr)
    _create_state(optimizer)
    return optimizer


def set_lr(optimizer: TorchOptimizer, lr: float) -> None:
    """Set the learning rate of the next update; each group's `lr_scale` multiplies it."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]


def optimizer_state(optimizer: TorchOptimizer, parameters: Mapping[str, Parameter]) -> dict[str, Tensor]:
    """The optimizer's own tensors as "optimizer.<parameter>.<key>"; writing into them in place restores a state.

    The keys are AdamW's: `exp_avg` and `exp_avg_sq`, shaped and sharded as the parameter, and the scalar `step`.
    """
    return {
        f"optimizer.{name}.{key}": tensor
        for name, parameter in parameters.items()
        for key, tensor in optimizer.state[parameter].items()
    }


def _owners(groups: Sequence[ParameterGroup], names: Sequence[str]) -> dict[str, ParameterGroup]:
    """The group of each parameter: the first whose pattern matches its name, else one without settings."""
    owners = {name: next((group for group in groups if fnmatchcase(name, group.pattern)), _REST) for name in names}
    for index, group in enumerate(groups):
        if any(owner is group for owner in owners.values()):
            continue
        where = f'optimizer.groups[{index}]: pattern "{group.pattern}"'
        if any(fnmatchcase(name, group.pattern) for name in names):
            raise ConfigError(f"{where} gets no parameter, since earlier patterns match all of its own; move it up")
        nearest = ", ".join(difflib.get_close_matches(group.pattern, names, n=3, cutoff=0))
        raise ConfigError(f"{where} matches no parameter; the nearest names are {nearest}")
    return owners


def _create_state(optimizer: AdamW) -> None:
    """Make what AdamW would make at its first step (a step with zero gradients would decay the weights)."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                # The fused kernel counts on the device; the others read the count on the CPU.
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device if group["fused"] else "cpu"),
                "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            }
