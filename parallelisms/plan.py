"""What the techniques ask a model: its plan, in names of its modules (`models/plan.py` says what each part means)."""

from collections.abc import Mapping
from typing import Protocol, cast

from torch import nn


class Plan(Protocol):
    """The plan as the techniques see it; they know no model, and import none."""

    @property
    def blocks(self) -> tuple[str, ...]:
        """Names of the repeated blocks, in forward order."""

    @property
    def first_block(self) -> int:
        """Number of the first of `blocks` in the whole model."""

    @property
    def n_blocks(self) -> int:
        """Blocks of the whole model."""

    @property
    def before_blocks(self) -> tuple[str, ...]:
        """Modules of a pipeline's first stage."""

    @property
    def after_blocks(self) -> tuple[str, ...]:
        """Modules of a pipeline's last stage."""

    @property
    def fsdp_groups(self) -> tuple[tuple[str, ...], ...]:
        """Modules gathered together, in forward order."""

    @property
    def attention(self) -> tuple[str, ...]:
        """Names of the modules whose `attend` alone looks at other tokens."""

    @property
    def experts(self) -> tuple[str, ...]:
        """Names of the modules that hold the weights of experts."""

    @property
    def routers(self) -> tuple[str, ...]:
        """Names of the modules that choose among experts."""

    @property
    def tensor_parallel(self) -> Mapping[str, str]:
        """Pattern of module or parameter names -> role."""

    @property
    def save_ops(self) -> tuple[str, ...]:
        """Patterns of the ops worth keeping for backward."""


def plan_of(model: nn.Module) -> Plan:
    """The model's plan."""
    return cast(Plan, model.plan)
