"""A job's model without memory: the names and shapes of its parameters, and its plan.

They are read from the model itself, built on the meta device, so that an estimate cannot describe another architecture.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, cached_property
from itertools import accumulate
from math import prod

import torch

from configs.layout import parameter_count
from configs.plan import Plan, plan_of
from configs.schema import Model
from models import build_model

Shape = tuple[int, ...]

_CUT_DIMENSIONS = {"embedding": -2, "head": -2, "column": -2, "row": -1, "part_column": -2, "part_row": -1}
"""The dimension along which tensor parallelism shards the parameters of a role; other roles are not sharded."""


@dataclass(frozen=True)
class Skeleton:
    """The facts of a model that are known before it has memory."""

    shapes: Mapping[str, Shape]
    """Shapes of the parameters, by name; a tied parameter has one name."""
    plan: Plan

    @cached_property
    def _blocks(self) -> dict[str, int]:
        return {name: self.plan.first_block + i for i, name in enumerate(self.plan.blocks)}

    @cached_property
    def _fsdp_groups(self) -> dict[str, str]:
        """The last module of the group, for each module that a group names."""
        return {module: group[-1] for group in self.plan.fsdp_groups for module in group}

    @cached_property
    def _tp_dimensions(self) -> dict[str, int]:
        """The dimension that is sharded, by module or parameter, for those that have one."""
        names = {*self.shapes, *(name.rpartition(".")[0] for name in self.shapes)}
        found: dict[str, int] = {}
        for pattern, role in self.plan.tensor_parallel.items():
            if role in _CUT_DIMENSIONS:
                matches = [pattern] if pattern in names else [name for name in names if fnmatchcase(name, pattern)]
                found |= dict.fromkeys(matches, _CUT_DIMENSIONS[role])
        return found

    def block_of(self, name: str) -> int | None:
        """Number of the block that contains a parameter; None if no block does."""
        return next((self._blocks[module] for module in _modules_of(name) if module in self._blocks), None)

    def fsdp_group_of(self, name: str) -> str:
        """The last module of the group that gathers a parameter; "root" if no group names it."""
        return next((self._fsdp_groups[module] for module in _modules_of(name) if module in self._fsdp_groups), "root")

    def tp_dimension(self, name: str) -> int | None:
        """The dimension along which tensor parallelism shards a parameter, -1 or -2; None: each rank has all of it."""
        cut = self._tp_dimensions
        return cut.get(name, cut.get(name.rpartition(".")[0]))

    def is_of_experts(self, name: str) -> bool:
        """Whether a parameter stacks a matrix of each expert."""
        return name.rpartition(".")[0] in self.plan.experts

    def is_before_blocks(self, name: str) -> bool:
        """Whether a parameter belongs to a pipeline's first stage, but not to a block."""
        return any(module in self.plan.before_blocks for module in _modules_of(name))


def _modules_of(name: str) -> list[str]:
    """The modules that contain a parameter, outermost first: "a.b.weight" -> ["a", "a.b"]."""
    return list(accumulate(name.split(".")[:-1], "{}.{}".format))


def skeleton(model: Model) -> Skeleton:
    """The skeleton of the model that `[model]` describes."""
    return _skeleton(model.model_dump_json())


@cache
def _skeleton(model: str) -> Skeleton:
    config = Model.model_validate_json(model)
    with torch.device("meta"):
        built = build_model(config)
    shapes = {name: tuple(p.shape) for name, p in built.named_parameters()}
    counted = parameter_count(config)
    has = sum(map(prod, shapes.values()))
    if counted != has:  # FLOPs and the balance of pipeline stages depend on this arithmetic
        raise NotImplementedError(
            f"configs/layout.py counts {counted:,} parameters of this {config.architecture}, which has {has:,}: teach "
            "parameter_count and active_matrices the architecture"
        )
    return Skeleton(shapes, plan_of(built))
