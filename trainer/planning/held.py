"""The parameters that a rank holds, their shards, and the groups in which FSDP gathers them.

A search asks the same of many jobs that differ in something else, so the answers are kept.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import ceil, prod

from configs.layout import MeshSizes, cut_dim
from trainer.planning.skeleton import Shape, Skeleton


@dataclass(frozen=True)
class Group:
    """Parameters that FSDP gathers together."""

    name: str
    elements: int
    """Elements on one tensor-parallel rank."""
    trained: int
    """Elements on one tensor-parallel rank that have gradients."""
    trained_shard: int
    """Elements of the largest FSDP shard of these."""
    replicated: int
    """Elements of these that other ranks hold as well."""
    part: float
    """Elements of the part that a rank adds up, if replicas divide the sums among themselves."""
    apart: int
    """Elements of experts that ranks share out, which FSDP shards apart."""
    apart_shard: int
    """Elements of the largest FSDP shards of those that have gradients."""
    largest: int
    """Elements of the largest parameter that has a gradient."""
    gathered_bytes: int
    """Bytes of its parameters as FSDP gathers them."""
    names: Sequence[str]
    """Names of its parameters."""
    layer: int | None = None
    """The block's number, if the group is a block."""


@dataclass(frozen=True)
class Held:
    """What one rank of the pipeline holds, or any rank without a pipeline."""

    model: Skeleton
    sizes: MeshSizes
    layers: tuple[int, ...]
    """Numbers of its blocks."""
    has_first_stage: bool
    has_head: bool
    frozen: frozenset[str]
    """The whole model's parameters that never train."""
    in_8_bits: frozenset[str]
    """The parameters that FSDP all-gathers in float8."""
    compute_bytes: int
    """Bytes of an element as modules compute with it."""

    @cached_property
    def shapes(self) -> Mapping[str, Shape]:
        """Shapes of its parameters as FSDP gathers them, sharded by tensor and expert parallelism."""
        return {name: self._own_shape(name) for name in self.model.shapes if self._holds(name)}

    def _holds(self, name: str) -> bool:
        block = self.model.block_of(name)
        if block is not None:
            return block in self.layers
        if not self.model.is_before_blocks(name):
            return self.has_head
        also_at_the_end = self.model.is_tied or len(self.model.plan.further_blocks) > 0
        return self.has_first_stage or (self.has_head and also_at_the_end)

    def _own_shape(self, name: str) -> Shape:
        """The part that FSDP gathers: a tensor-parallel rank's, and of experts an expert-parallel rank's."""
        shape = list(self.model.shapes[name])
        cut = self.model.tp_dimension(name)
        if cut is not None:
            shape[cut] = ceil(shape[cut] / self.sizes.tp)
        if self.model.is_of_experts(name):
            shape[0] //= self.sizes.ep
        return tuple(shape)

    @cached_property
    def shards(self) -> Mapping[str, int]:
        """Elements of each parameter's largest FSDP shard."""
        return {name: self._shard(name) for name in self.shapes}

    def _shard(self, name: str) -> int:
        shape = self.shapes[name]
        n_shards = self.sizes.expert_shard if self.model.is_of_experts(name) else self.sizes.fsdp_shard
        cut = cut_dim(shape, n_shards)
        return ceil(shape[cut] / n_shards) * prod(shape) // shape[cut]

    @cached_property
    def elements(self) -> int:
        """Elements of all shards."""
        return sum(self.shards.values())

    @cached_property
    def groups(self) -> list[Group]:
        """FSDP's groups in forward order; in a tied model the root's group has both ends, gathered throughout."""
        members: dict[str, list[str]] = {}
        for name in self.shapes:
            members.setdefault(self.model.fsdp_group_of(name), []).append(name)
        return [self._group(key, names) for key, names in members.items()]

    def _group(self, key: str, names: Sequence[str]) -> Group:
        elements = {name: prod(self.shapes[name]) for name in names}
        trained = [name for name in names if name not in self.frozen]
        return Group(
            key,
            elements=sum(elements.values()),
            trained=sum(elements[name] for name in trained),
            trained_shard=sum(self.shards[name] for name in trained),
            replicated=sum(self.shards[name] for name in trained if self._replicas(name) > 1),
            part=sum(self.shards[name] / self._replicas(name) for name in trained),
            apart=sum(elements[name] for name in names if self._is_apart(name)),
            apart_shard=sum(self.shards[name] for name in trained if self._is_apart(name)),
            largest=max((elements[name] for name in trained), default=0),
            gathered_bytes=sum(
                n * (1 if name in self.in_8_bits else self.compute_bytes) for name, n in elements.items()
            ),
            names=names,
            layer=self.model.block_of(names[0]),
        )

    @cached_property
    def apart(self) -> int:
        """Elements of the shards of experts that ranks share out."""
        return sum(size for name, size in self.shards.items() if self._is_apart(name))

    def _is_apart(self, name: str) -> bool:
        """Whether a parameter is one of experts that ranks share out, and that FSDP shards apart."""
        return self.sizes.ep > 1 and self.model.is_of_experts(name)

    @cached_property
    def optimizer_bytes(self) -> dict[str, int]:
        """Bytes of optimizer state that were found, by the keys that they depend on."""
        return {}

    def _replicas(self, name: str) -> int:
        """Ranks that hold the same shard of a parameter."""
        return self.sizes.expert_replicas if self.model.is_of_experts(name) else self.sizes.replicas


held = lru_cache(maxsize=512)(Held)
