"""What a process may use of its machine: memory and cores, within the limits of a cluster's job or a container.

A limit may stand at the process's control group or at one around it (Slurm's are at the job and the step, its tasks
have none).
"""

import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from configs.files import exists

_V2 = ""
"""The controllers of version 2, in /proc/self/cgroup: there, the groups of all are the same."""
_MEMORY_FILES = {
    _V2: ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""A group's limit, its use, and what of that is files' old pages, by controller."""


def free_memory(root: Path = Path("/")) -> int:
    """Bytes that can be allocated now, without swapping. On systems other than Linux, all memory of the machine."""
    if not exists(root / "proc/meminfo"):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    lines = dict(line.split(":") for line in (root / "proc/meminfo").read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 1024
    for controllers, group in _groups(root):
        if controllers in _MEMORY_FILES:
            free = min(free, _left_in(group, *_MEMORY_FILES[controllers]))
    return free


def available_cores(root: Path = Path("/")) -> int:
    """CPU cores that this process may use: those that it is bound to, or fewer where a group has a quota of their time.

    Python's `os.cpu_count` is all of the machine's: starting a process on each, a job that has 8 of 128 starts 128.
    """
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([bound, *(_quota(controllers, group) for controllers, group in _groups(root))])


def _groups(root: Path) -> Iterator[tuple[str, Path]]:
    """This process's control groups and those around them, each after the names of its controllers."""
    listed = root / "proc/self/cgroup"
    for line in listed.read_text().splitlines() if exists(listed) else ():
        _, controllers, name = line.split(":", 2)
        top = root / "sys/fs/cgroup" / controllers
        own = top / name.lstrip("/")
        for group in (own, *own.parents):
            if group.is_relative_to(top):
                yield controllers, group


def _left_in(group: Path, limit: str, used: str, old_pages: str) -> int:
    """Bytes below a control group's limit; pages of files that nobody has read lately make room when it is reached."""
    file = group / limit
    text = file.read_text().strip() if exists(file) else "max"
    if text == "max":
        return sys.maxsize
    stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    return int(text) - int((group / used).read_text()) + int(stat[old_pages])


def _quota(controllers: str, group: Path) -> int:
    """How many cores' time a control group may take, rounded up."""
    if controllers == _V2:
        files = [group / "cpu.max"]
    elif "cpu" in controllers.split(","):
        files = [group / "cpu.cfs_quota_us", group / "cpu.cfs_period_us"]
    else:
        return sys.maxsize
    if not all(exists(file) for file in files):
        return sys.maxsize
    quota, period = " ".join(file.read_text() for file in files).split()
    return sys.maxsize if quota in ("max", "-1") else math.ceil(int(quota) / int(period))
