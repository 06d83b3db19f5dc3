"""Whether an optimizer of the user's own updates each element by itself, tried on a CPU.

Ranks hold parts of parameters, so an update that depends on other elements (a norm, a mean, a matrix) would compute
something else on each mesh. A small parameter is updated whole and in parts, and the bits are compared. Gradients
differ in size between parts and between steps, so that a limit on a norm shows, too. Parts fill whole vectors of a
processor, since torch rounds elements that do not fill one in another way.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer as TorchOptimizer

from configs.errors import ConfigError
from configs.own_code import reason_of
from trainer.optimizers.from_torch import NOT_ELEMENTWISE, REMEDY, TorchRule
from trainer.optimizers.rule import Rule

_SHAPE = (16, 64)
_STEPS = 8
_RESUMED_AT = 4
_SETTINGS = {"lr": 0.01, "lr_scale": 1.0, "weight_decay": 0.1, "freeze": False}
_PARTS: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "two halves": lambda whole: whole.chunk(2),
    "a vector": lambda whole: (whole.reshape(-1),),
    "rows for columns": lambda whole: (whole.reshape(_SHAPE[::-1]),),
}
"""Ways to cut a parameter, each into parts whose elements are in the same order."""


def require_elementwise(rule: Rule, dtype: torch.dtype) -> None:
    """Check that a rule computes the same on parts of a parameter, and that its state is all that a checkpoint needs.

    Raises:
        ConfigError: it doesn't, or raises.
    """
    name = rule.config.name
    try:
        found = _first_difference(rule, dtype)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f'"{name}" raises {reason_of(error)} (tried on a small parameter)') from None
    if found:
        raise ConfigError(f'"{name}" {found}')


def _first_difference(rule: Rule, dtype: torch.dtype) -> str:
    draws = torch.Generator().manual_seed(0)
    weight = torch.randn(_SHAPE, generator=draws).to(dtype)
    sizes = 10 ** torch.empty(_STEPS, _SHAPE[0], 1).uniform_(-3, 1, generator=draws)
    gradients = list((torch.randn(_STEPS, *_SHAPE, generator=draws) * sizes).to(dtype))
    expected = _updated(rule, weight, gradients)
    for kind, cut in _PARTS.items():
        parts = zip(cut(weight), *map(cut, gradients), strict=True)
        found = [_updated(rule, part, of_part) for part, *of_part in parts]
        if not _equal(torch.cat([part.reshape(-1) for part in found]), expected.reshape(-1)):
            return f"{NOT_ELEMENTWISE}: a small matrix, and the same as {kind}, differ after {_STEPS} updates. {REMEDY}"
    if not _equal(_updated(rule, weight, gradients, is_resumed=True), expected):
        return (
            f"does not go on from its state: resumed after update {_RESUMED_AT}, it computes something else. A "
            "checkpoint has what it keeps in state[parameter], and nothing of its groups or attributes"
        )
    if isinstance(rule, TorchRule) and not _equal(_updated_by_class(rule, weight, gradients), expected):
        return (
            "computes something else in Keel than alone: it must write updates into the parameter's memory and take lr "
            "and weight_decay from its groups"
        )
    return ""


def _updated(rule: Rule, weight: Tensor, gradients: list[Tensor], is_resumed: bool = False) -> Tensor:
    """The weight after updates by a rule, beside a parameter without a gradient."""
    parameter = Parameter(weight.clone())
    optimizer = _built(rule, parameter)
    for number, gradient in enumerate(gradients):
        if is_resumed and number == _RESUMED_AT:
            state = optimizer.state[parameter]
            optimizer = _built(rule, parameter)
            for key, value in optimizer.state[parameter].items():
                value.copy_(state[key])
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach()


def _built(rule: Rule, parameter: Parameter) -> Any:
    named = [("weight", parameter), ("idle", Parameter(torch.ones_like(parameter)))]
    return rule.build([{"params": named, **_SETTINGS}])


def _updated_by_class(rule: TorchRule, weight: Tensor, gradients: list[Tensor]) -> Tensor:
    """The weight after updates by an optimizer of torch itself."""
    parameter = Parameter(weight.clone())
    optimizer: TorchOptimizer = rule.instance([{"params": [parameter], **rule.settings(_SETTINGS)}])
    for gradient in gradients:
        parameter.grad = gradient.clone()
        with torch.no_grad():
            optimizer.step()
    return parameter.detach()


def _equal(some: Tensor, others: Tensor) -> bool:
    return torch.allclose(some, others, rtol=0, atol=0, equal_nan=True)
