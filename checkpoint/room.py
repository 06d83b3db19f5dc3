"""Whether a run's saves fit in each host's memory, where they are staged.

This is checked before training starts, so that it does not fail at the first save, an hour later.
"""

import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from checkpoint.store import Shard
from parallelisms.ranks import gather

MEMORY_SHARE = 0.95
"""Fraction of a host's free memory that staging may take: the writer, the loader and the page cache need some, too."""


HostsRoom = Mapping[str, tuple[int, int]]
"""The bytes that a host's ranks stage together, and its free memory, by host."""


def crowded_hosts(room: HostsRoom) -> HostsRoom:
    """The hosts without enough memory for what their ranks stage."""
    return {host: (staged, free) for host, (staged, free) in room.items() if staged > MEMORY_SHARE * free}


def too_little_room(
    shards: Mapping[str, Shard], dtype: Callable[[str, Tensor], torch.dtype], group: dist.ProcessGroup
) -> str:
    """The message to the user if a host can't stage its ranks' state; "" if all can. The arguments: `measure_room`."""
    if not (crowded := crowded_hosts(measure_room(shards, dtype, group))):
        return ""
    hosts = ", ".join(f"{host} has {free:,} of {staged:,} bytes" for host, (staged, free) in crowded.items())
    return (
        f'checkpoint.mode = "async" copies the state to host memory, of which there is too little: {hosts}. Training '
        "will wait for each save of this launch"
    )


def measure_room(
    shards: Mapping[str, Shard], dtype: Callable[[str, Tensor], torch.dtype], group: dist.ProcessGroup
) -> HostsRoom:
    """Measure on every rank of `group`; all must call it, before anything is staged. The result is the same on all.

    Args:
        shards: this rank's shards.
        dtype: maps a name and tensor to the dtype in which it is saved.
    """
    staged = sum(shard.local.numel() * dtype(name, shard.local).itemsize for name, shard in shards.items())
    hosts: dict[str, tuple[int, int]] = {}
    for host, of_rank, free in gather((socket.gethostname(), staged, free_memory()), group):
        before, least = hosts.get(host, (0, free))
        hosts[host] = (before + of_rank, min(least, free))
    return hosts


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
    limit = group / "memory.max"
    used = group / "memory.current"
    if not limit.exists() or limit.read_text().strip() == "max":
        return free
    return min(free, int(limit.read_text()) - int(used.read_text()))
