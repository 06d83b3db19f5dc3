"""Rules for FSDP and its communication."""

from collections.abc import Iterator

from configs.checks.rule import Problem, Rule
from configs.errors import ConfigError
from configs.layout import FSDP_DIMENSIONS, mesh_sizes, smallest_world_size
from configs.schema import Config, Simulate


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


def _comm(config: Config, _: int | None) -> Iterator[Problem]:
    names = [group.shards_over for group in config.comm.simulate.groups]
    for index, name in enumerate(names):
        key = f"comm.simulate.groups.{index}.shards_over"
        if name not in FSDP_DIMENSIONS:
            known = ", ".join(f'"{dimension}"' for dimension in FSDP_DIMENSIONS)
            yield key, f'no FSDP group is sharded over "{name}", only over {known}'
        elif name in names[:index]:
            yield key, f'duplicate delays for "{name}"; give them once'


def _buffers(config: Config, _: int | None) -> Iterator[Problem]:
    """What replaces FSDP's collectives knows no other buffers."""
    buffers = config.comm.fsdp_buffers
    if buffers == "default":
        return
    key, start = "comm.fsdp_buffers", f'fsdp_buffers "{buffers}" needs FSDP\'s own collectives, but '
    if config.training.reduction == "exact":
        yield key, f'{start}training.reduction "exact" replaces them; set fsdp_buffers = "default"'
    simulate = config.comm.simulate
    if simulate != Simulate():
        yield key, f'{start}[comm.simulate] replaces them; set fsdp_buffers = "default", or leave [comm.simulate] out'
    if config.comm.async_tp and buffers != "registered":
        yield (
            key,
            "torch takes symmetric memory from one library for all of a process: async_tp from CUDA, fsdp_buffers "
            f'"{buffers}" from NCCL; set fsdp_buffers = "registered", or async_tp = false',
        )


RULES: tuple[Rule, ...] = (_owner_partition, _comm, _buffers)
