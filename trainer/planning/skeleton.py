"""A job's model without memory: the names and shapes of its parameters, and its plan.

They are read from the model itself, built on the meta device, so that an estimate cannot describe another architecture.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate

import torch

from configs.architectures import LOAD
from configs.plan import TENSOR_PARALLEL_DIM, Plan, plan_of, routers_of
from configs.schema import AnyModel
from models import build_model

Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Skeleton:
    """The facts of a model that are known before it has memory."""

    shapes: Mapping[str, Shape]
    """Shapes of the parameters, by name; a tied parameter has one name."""
    plan: Plan
    saved: Mapping[str, Shape]
    """Shapes of what a checkpoint has of the model, by name: parameters, and buffers such as routers' biases."""
    balance: dict[str, float]
    """What a checkpoint has of the balance of experts, by its name there: the value of each that changes nothing. A run
    may begin with these where its checkpoint has none, since it was trained without, or with another balance."""

    @cached_property
    def _blocks(self) -> dict[str, int]:
        return {name: self.plan.first_block + i for i, name in enumerate(self.plan.blocks)}

    @cached_property
    def _fsdp_groups(self) -> dict[str, str]:
        """The last module of the group, for each module that a group names."""
        return {module: group[-1] for group in self.plan.fsdp_groups for module in group}

    @cache  # noqa: B019 - skeletons are kept as long as the process
    def block_of(self, name: str) -> int | None:
        """Number of the block that contains a parameter; None if no block does."""
        return next((self._blocks[module] for module in _modules_of(name) if module in self._blocks), None)

    @cached_property
    def _parameters_of_blocks(self) -> dict[int, list[str]]:
        found: dict[int, list[str]] = {}
        for name in self.shapes:
            block = self.block_of(name)
            if block is not None:
                found.setdefault(block, []).append(name)
        return found

    def of_block(self, block: int) -> list[str]:
        """Names of a block's parameters."""
        return self._parameters_of_blocks[block]

    @cache  # noqa: B019 - skeletons are kept as long as the process
    def kind_of_block(self, block: int, frozen: frozenset[str]) -> tuple:
        """The same for blocks with the same parameters, of which the same are frozen."""
        prefix = len(self.plan.blocks[block - self.plan.first_block])
        return tuple((name[prefix:], self.shapes[name], name in frozen) for name in self.of_block(block))

    def first_of_kind(self, block: int, frozen: frozenset[str]) -> int:
        """The first block that is of the same kind."""
        kind = self.kind_of_block(block, frozen)
        return next(each for each in self._parameters_of_blocks if self.kind_of_block(each, frozen) == kind)

    @property
    def is_tied(self) -> bool:
        """Whether embedding and head share one matrix, which then has one name."""
        return f"{self.plan.after_blocks[-1]}.weight" not in self.shapes

    def fsdp_group_of(self, name: str) -> str:
        """The last module of the group that gathers a parameter; "root" if no group names it."""
        return next((self._fsdp_groups[module] for module in _modules_of(name) if module in self._fsdp_groups), "root")

    def tp_dimension(self, name: str) -> int | None:
        """The dimension along which tensor parallelism shards a parameter, -1 or -2; None: each rank has all of it."""
        roles = self.plan.tensor_parallel
        role = roles.get(name) or roles.get(name.rpartition(".")[0])
        dim = TENSOR_PARALLEL_DIM.get(role) if role else None
        if dim is not None and len(self.shapes[name]) == 1:  # a bias: split as the output features are
            return None if role in ("row", "whole_row", "whole_row_own_part") else -1
        return dim

    def is_of_experts(self, name: str) -> bool:
        """Whether a parameter stacks a matrix of each expert."""
        return name.rpartition(".")[0] in self.plan.experts

    def is_before_blocks(self, name: str) -> bool:
        """Whether a parameter belongs to a pipeline's first stage, but not to a block."""
        return any(module in self.plan.before_blocks for module in _modules_of(name))


def _modules_of(name: str) -> list[str]:
    """The modules that contain a parameter, outermost first: "a.b.weight" -> ["a", "a.b"]."""
    return list(accumulate(name.split(".")[:-1], "{}.{}".format))


@cache
def skeleton(model: AnyModel) -> Skeleton:
    """The skeleton of the model that `[model]` describes."""
    with torch.device("meta"):
        built = build_model(model)
    shapes = {name: tuple(parameter.shape) for name, parameter in built.named_parameters()}
    state = built.state_dict()
    buffers = {name: tuple(buffer.shape) for name, buffer in built.named_buffers() if name in state}
    routers = routers_of(built)
    biases = {f"model.{name}.bias": 0.0 for name, router in routers.items() if router.bias is not None}
    loads = {f"{LOAD}{name}": 1.0 for name, router in routers.items() if router.frequency is not None}
    return Skeleton(shapes, plan_of(built), shapes | buffers, biases | loads)
