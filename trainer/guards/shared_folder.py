"""A check that all ranks see the same run folder, before anything depends on it.

Where they do not (a path on each host's own disk, a relative path, a container without the mount), every rank would
write its part of a checkpoint to a disk of its own, and only the first save would show it. Host names tell nothing:
containers on one host may have different disks, and hosts may have mounted one. So rank 0 creates a file with a new
name, and each rank looks for it. A new name is in no cache; the folder is read again for some seconds, since a network
file system may still show an older list.
"""

import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import torch.distributed as dist

from configs.errors import ConfigError, listed
from parallelisms.ranks import gather, on_rank_zero

MARK = ".shared-"
"""How the names of these files begin; each is removed at once."""
_PATIENCE_SECONDS = 3.0
_POLL_SECONDS = 0.1


class NotShared(ConfigError):
    """The ranks see different run folders; raised on all. Rank 0 reports it, since others may not see its report."""


def require_shared(folder: Path) -> None:
    """Check that all ranks see rank 0's run folder, which exists; all must call it.

    Raises:
        NotShared: some do not.
    """
    if dist.get_world_size() == 1:
        return
    name = on_rank_zero(None, lambda: _mark(folder))
    lacks = bool(name) and not _sees(folder, name)
    here = (socket.gethostname(), str(folder.absolute()), os.path.isdir(folder)) if lacks else None
    ranks: dict[tuple[str, str, bool], list[int]] = {}
    for rank, other in enumerate(gather(here)):
        if other:
            ranks.setdefault(tuple(other), []).append(rank)
    if name and dist.get_rank() == 0:
        with suppress(OSError):
            (folder / name).unlink()
    if not ranks:
        return
    place = on_rank_zero(None, lambda: f"{folder.absolute()} on host {socket.gethostname()}")
    lacking = [_line(*other, those) for other, those in ranks.items()]
    raise NotShared(
        f"not all ranks see rank 0's run folder, {place}:\n  {listed(lacking)}\nSet job.output_dir to a path on a "
        "disk that all hosts share, mounted at the same place in each container; a relative path begins at the "
        "current folder of each rank"
    )


def _mark(folder: Path) -> str:
    """Create the file that all are to see; "" if the disk refuses, as later writes will say."""
    name = f"{MARK}{uuid4().hex}"
    try:
        (folder / name).touch()
    except OSError:
        return ""
    return name


def _sees(folder: Path, name: str) -> bool:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        with suppress(OSError):
            if name in os.listdir(folder):  # opening the folder makes NFS ask the server
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)


def _line(host: str, path: str, exists: bool, ranks: list[int]) -> str:
    who = f"rank{'s' * (len(ranks) > 1)} {listed(list(map(str, ranks)), ', ')}"
    return f"{who} on host {host}: {path} {'is another folder' if exists else 'does not exist'}"
