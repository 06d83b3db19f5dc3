"""An optimizer's description, given by its file in this folder.

`optimizer.name` is the name of the file; its class `Rule` implements the one below. The rest follows from it: which
tensors a checkpoint has and under which names, their memory, row shards and owners, freezing, parameter groups.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer as TorchOptimizer

from configs.schema import Optimizer
from trainer.kernels.keyed import Key


class Rule(ABC):
    """How an optimizer updates parameters, and what it keeps of each of them."""

    hidden_matrices_only: ClassVar[bool] = False
    """Whether it updates only the matrices inside the model's blocks, and AdamW the rest. They are whole then."""

    def __init__(self, config: Optimizer, exact: bool = False, keys: Mapping[str, Key] | None = None) -> None:
        """
        Args:
            config: the optimizer's settings.
            exact: update every element by the same instructions, wherever a shard begins.
            keys: how moments in bfloat16 are rounded, by the parameter's name; otherwise None or empty.
        """
        self.config = config
        self.exact = exact
        self.keys = keys or {}

    @abstractmethod
    def state(self, parameter: Tensor) -> dict[str, Tensor]:
        """The state of a parameter that has not been updated, by the names that a checkpoint uses.

        It is allocated before the first step, so its memory is known and a checkpoint can be loaded into it in place.
        """

    @abstractmethod
    def without_state(self, groups: list[dict[str, Any]]) -> TorchOptimizer:
        """The torch optimizer over some groups: a `RowOptimizer`, unless it needs whole matrices."""

    def build(self, groups: list[dict[str, Any]]) -> Any:
        """The torch optimizer over some groups, with its state; groups with "freeze" have none."""
        optimizer = self.without_state(groups)
        for group in optimizer.param_groups:
            for parameter in () if group["freeze"] else group["params"]:
                optimizer.state[parameter] = self.state(parameter)
        return optimizer

    def skips_on_device(self, device_type: str, dtype: torch.dtype) -> bool:
        """Whether `step` takes `skip` and `divisor` (see `RowOptimizer`): then the host need not wait for a verdict."""
        return False


def rule_of(name: str) -> type[Rule]:
    """The rule of the optimizer with a name."""
    return import_module(f"trainer.optimizers.{name}").Rule


class RowOptimizer(TorchOptimizer):
    """A torch optimizer over this rank's part of every parameter, with the interface of an `OwnerPartition`.

    Its `step` may take `skip`, a float32 scalar on the device (1.: change nothing), and `divisor`, by which gradients
    are divided, if its rule `skips_on_device`.
    """

    def owned(self) -> dict[Parameter, Tensor]:
        """Like `OwnerPartition.owned`: all parameters."""
        return {parameter: parameter.detach() for group in self.param_groups for parameter in group["params"]}

    def owned_state(self, parameter: Parameter) -> dict[str, Any]:
        """Like `OwnerPartition.owned_state`."""
        return self.state.get(parameter, {})

    def owned_were_loaded(self) -> None:
        """Like `OwnerPartition.owned_were_loaded`: does nothing, since each rank has loaded what it needs."""

    def wait(self) -> None:
        """Like `OwnerPartition.wait`: does nothing, since no parameter is being sent."""
