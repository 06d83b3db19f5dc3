"""Rules for FSDP and its communication."""

from collections.abc import Iterator

from configs.checks.rule import Problem, Rule
from configs.errors import ConfigError
from configs.layout import mesh_sizes, smallest_world_size
from configs.schema import Config


def _owner_partition(config: Config, world_size: int | None) -> Iterator[Problem]:
    fsdp = config.fsdp
    if fsdp.partition == "rows":
        return
    try:
        sizes = mesh_sizes(config, world_size or smallest_world_size(config.mesh))
    except ConfigError:
        return  # reported by the mesh's own rule
    if sizes.dp_shard > 1:
        yield (
            "fsdp.partition",
            f'partition "owner" needs whole parameters, but dp_shard {sizes.dp_shard} cuts them (on {sizes.world_size} '
            f"ranks, dp_replicate {sizes.dp_replicate}); set mesh.dp_replicate = {sizes.dp} and mesh.dp_shard = 1",
        )


RULES: tuple[Rule, ...] = (_owner_partition,)
