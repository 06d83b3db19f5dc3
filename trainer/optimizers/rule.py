"""An optimizer's description, given by its file in this folder.

`optimizer.name` is the name of the file; its class `Rule` implements the one below, as does a class of the
user's own. The rest follows from it: which tensors a checkpoint has and under which names, their memory, row shards and
owners, freezing, parameter groups.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer as TorchOptimizer

from configs.own_code import code_of, is_import_path
from configs.schema import Optimizer
from parallelisms.mesh import Mesh
from parallelisms.sums import Sums
from trainer.kernels.keyed import Key


class Rule(ABC):
    """How an optimizer updates parameters, and what it keeps of each of them."""

    hidden_matrices_only: ClassVar[bool] = False
    """Whether it updates only the matrices inside the model's blocks, and AdamW the rest. A partition by owner makes
    them whole; one by rows is refused, except for Muon, which exchanges parts."""

    def __init__(
        self,
        config: Optimizer,
        sums: Sums | None = None,
        keys: Mapping[str, Key] | None = None,
        stacked: Mapping[str, int] | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        """
        Args:
            config: the optimizer's settings.
            sums: the run's; None: fast ones.
            keys: how what is in bfloat16 is rounded stochastically, by the parameter's name; otherwise None or empty.
            stacked: how many matrices each parameter inside the blocks has, by name.
            mesh: the ranks that hold the parameters' parts; None: parameters are whole.
        """
        self.config = config
        self.sums = sums or Sums()
        self.keys = keys or {}
        self.stacked = stacked or {}
        self.mesh = mesh

    @abstractmethod
    def state(self, parameter: Tensor) -> dict[str, Tensor]:
        """The state of a parameter that has not been updated, by the names that a checkpoint uses.

        It is allocated before the first step, so its memory is known and a checkpoint can be loaded into it in place.
        """

    @abstractmethod
    def without_state(self, groups: list[dict[str, Any]]) -> TorchOptimizer:
        """The torch optimizer over some groups: a `TrainingOptimizer`, unless a partition by owner makes them whole."""

    def build(self, groups: list[dict[str, Any]]) -> Any:
        """The torch optimizer over some groups, with its state; groups with "freeze" have none."""
        optimizer = self.without_state(groups)
        for group in optimizer.param_groups:
            for parameter in () if group["freeze"] else group["params"]:
                optimizer.state[parameter] = self.state(parameter)
        return optimizer

    def skips_on_device(self, device_type: str, dtype: torch.dtype) -> bool:
        """Whether `step` takes `skip` and `divisor` (see `TrainingOptimizer`), so that the host need not wait."""
        return False


def rule_of(name: str) -> type[Rule]:
    """The rule of the optimizer with a name, or of the user's own: a rule, or a class of torch optimizers."""
    if not is_import_path(name):
        return import_module(f"trainer.optimizers.{name}").Rule
    found = code_of(name)
    if issubclass(found, TorchOptimizer):
        return import_module("trainer.optimizers.from_torch").rule_over(found)
    return found
