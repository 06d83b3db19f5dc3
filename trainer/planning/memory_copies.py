"""Estimate of what copies of the state in hosts' memory take (`checkpoint.memory_copies`), made before they exist.

The ranks of a pipeline stage, or of the whole model without a pipeline, write equal shares of its state. A host
writes the shares of its own ranks: W bytes. Of each copy it sends W to each of the next `memory_copies` hosts, and
holds its own W and those of as many hosts before it. It holds two copies, since one is made while the newest is kept.
What `checkpoint.memory_copies.MemoryCopies.check_room` measures at the start is the same, from the ranks' own tensors.
"""

from dataclasses import dataclass

from checkpoint.memory_copies import AT_ONCE, TENSOR_BYTES
from checkpoint.room import MEMORY_SHARE
from configs.layout import MeshSizes
from configs.schema import Config
from trainer.planning.memory import RankMemory
from trainer.planning.states import saved_bytes
from trainer.report.units import size


@dataclass(frozen=True)
class HostCopies:
    """Bytes on the host that has the most, for each figure."""

    ranks: int
    """Of a host."""
    copies: int
    """Other hosts to which it sends its part: fewer than `memory_copies` where there are fewer hosts."""
    sent: int
    """For each copy."""
    held: int
    """By all copies that are there at once."""
    staged: int
    """By its ranks while a copy or a checkpoint is written, beside the copies."""

    def __str__(self) -> str:
        of = {0: "itself alone", 1: "itself and the host before it"}
        parts = of.get(self.copies, f"itself and the {self.copies} hosts before it")
        return (
            f"a host of {self.ranks} rank{'s' * (self.ranks > 1)} holds {size(self.held)} in /dev/shm (two copies at "
            f"once, of {parts}), sends {size(self.sent)} for each, and stages {size(self.staged)} (estimate)"
        )

    def do_not_fit(self, host_bytes: int) -> str:
        """The warning if they exceed /dev/shm or the memory of a host, as far as neither holds anything else; or ""."""
        for place, needed, room in (
            ("a host's /dev/shm, half of its memory unless mounted otherwise", self.held, host_bytes // 2),
            ("a host's memory, with what is staged", self.held + self.staged, int(MEMORY_SHARE * host_bytes)),
        ):
            if needed > room:
                return (
                    f"copies take about {size(needed)} of {place}, of which {size(room)} are usable: a launch would be "
                    "refused. Use more hosts, a smaller checkpoint.memory_copies, or 0"
                )
        return ""


def host_copies(config: Config, sizes: MeshSizes, ranks_per_host: int) -> HostCopies | None:
    """Estimate the copies on hosts of so many ranks, in the order of ranks; None if the job makes none."""
    if not config.checkpoint.memory_copies:
        return None
    of_stage = sizes.world_size // sizes.pp
    writes: list[float] = []  # bytes of each rank
    stages: list[float] = []
    for pipeline_rank in range(sizes.pp):
        names = RankMemory(config, sizes, "cpu", pipeline_rank).shapes.keys()
        parameters, optimizer, sharded, whole = saved_bytes(config, names)
        overhead = TENSOR_BYTES * (sharded * of_stage // sizes.replicas + whole)
        writes += of_stage * [(parameters + optimizer + overhead) / of_stage]
        of_replicas = parameters * sizes.replicas + optimizer * (1 if sizes.by_owner else sizes.replicas)
        stages += of_stage * [of_replicas / of_stage]
    starts = range(0, sizes.world_size, ranks_per_host)
    written, staged = ([sum(each[start : start + ranks_per_host]) for start in starts] for each in (writes, stages))
    copies = min(config.checkpoint.memory_copies, len(written) - 1)
    held = [sum(written[host - distance] for distance in range(copies + 1)) for host in range(len(written))]
    ranks = min(ranks_per_host, sizes.world_size)
    return HostCopies(ranks, copies, int(copies * max(written)), int(AT_ONCE * max(held)), int(max(staged)))
