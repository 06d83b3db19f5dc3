"""Whether a run's saves fit: in each host's memory, where they are staged, and on the disk.

This is checked before training starts, so that it does not fail at the first save, an hour later.
"""

import os
import shutil
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from checkpoint.store import Shard
from parallelisms.ranks import gather

MEMORY_SHARE = 0.95
"""Fraction of a host's free memory that staging may take: the writer, the loader and the page cache need some, too."""


@dataclass(frozen=True)
class Room:
    """What the next checkpoint needs, and what is free; in bytes, the same on all ranks."""

    file_bytes: int
    """Size of all its tensors."""
    free_on_disk: int
    hosts: Mapping[str, tuple[int, int]]
    """For each host, the bytes that its ranks stage together, and its free memory."""

    @property
    def is_on_disk(self) -> bool:
        """Whether a checkpoint fits on the disk."""
        return self.file_bytes <= self.free_on_disk

    def crowded_hosts(self) -> dict[str, tuple[int, int]]:
        """The hosts without enough memory for what their ranks stage."""
        return {host: (staged, free) for host, (staged, free) in self.hosts.items() if staged > MEMORY_SHARE * free}


def measure_room(
    folder: Path, shards: Mapping[str, Shard], dtype: Callable[[str, Tensor], torch.dtype], group: dist.ProcessGroup
) -> Room:
    """Measure on every rank of `group`; all must call it, before anything is staged.

    Args:
        folder: a folder on the disk to which checkpoints are written.
        shards: this rank's shards.
        dtype: maps a name and tensor to the dtype in which it is saved.
    """
    whole = {name: shard.shape.numel() * dtype(name, shard.local).itemsize for name, shard in shards.items()}
    staged = sum(shard.local.numel() * dtype(name, shard.local).itemsize for name, shard in shards.items())
    names = blake2b(repr(sorted(whole)).encode(), digest_size=8).hexdigest()
    own = (socket.gethostname(), staged, free_memory(), names, shutil.disk_usage(folder).free)
    by_rank = gather(own, group)
    # Most ranks hold parts of the same tensors, so one rank of each kind sends their sizes.
    is_first = [rank[3] for rank in by_rank].index(names) == dist.get_rank(group)
    sizes = gather(whole if is_first else {}, group)
    hosts: dict[str, tuple[int, int]] = {}
    for host, of_rank, free, _, _ in by_rank:
        before, least = hosts.get(host, (0, free))
        hosts[host] = (before + of_rank, min(least, free))
    every_tensor = {name: size for of_rank in sizes for name, size in of_rank.items()}
    return Room(sum(every_tensor.values()), by_rank[0][4], hosts)


def free_memory(root: Path = Path("/")) -> int:
    """Bytes that can be allocated now: free on this machine without swapping, within a cluster's or container's limit.

    On systems other than Linux, all memory of the machine.
    """
    if not (root / "proc/meminfo").exists():
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    lines = dict(line.split(":") for line in (root / "proc/meminfo").read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 1024
    groups = (root / "proc/self/cgroup").read_text().splitlines()
    group = root / "sys/fs/cgroup" / next((line[4:] for line in groups if line.startswith("0::/")), "")
    limit, used = group / "memory.max", group / "memory.current"
    if not limit.exists() or limit.read_text().strip() == "max":
        return free
    return min(free, int(limit.read_text()) - int(used.read_text()))
