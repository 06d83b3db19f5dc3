"""How fast one rank saves and resumes, in a bucket and on a disk: python -m tests.bucket.speed [MB]

The server is Ceph's on this machine. Prints MB/s, and for how long training waits for a save.
"""

import os
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist

from checkpoint.bucket import Bucket
from checkpoint.bucket_launch import claim_in
from checkpoint.bucket_storage import BucketStorage
from checkpoint.manager import CheckpointManager
from checkpoint.reader import Description, Log
from configs.schema import Checkpoint
from tests.bucket.ceph import PACKAGES, Ceph
from tests.bucket.server import make_bucket
from tests.debian import unpacked


def main(megabytes: int) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ceph = Ceph(unpacked("ceph", *PACKAGES), folder / "ceph")
        stack.callback(ceph.stop)
        ceph.start()
        os.environ.update(ceph.environment)
        make_bucket()
        for where in ("disk", "bucket", "disk", "bucket"):
            disk = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            url = f"s3://keel/{disk.name}" if where == "bucket" else None
            saved, waited = _save(disk / "a", url, megabytes)
            resumed = _resume(disk / ("b" if url else "a"), url, megabytes)
            rates = f"save {megabytes / saved:.0f} MB/s, resume {megabytes / resumed:.0f} MB/s"
            print(f"{where}: {rates}; training waited {waited:.3f} s", flush=True)
    dist.destroy_process_group()


def _save(folder: Path, url: str | None, megabytes: int) -> tuple[float, float]:
    """Seconds of a second save, whose plan and memory are there, and those that training waits."""
    manager, storage = _manager(folder, url)
    state = _state(megabytes)
    manager.resume(state)
    manager.begin_lineage()
    manager.check_memory(state)
    for step in (1, 2):
        waited = manager.save(step, state, {"tokens": step})
        manager.wait()
    manager.close()
    if storage:
        storage.claim.end()
    assert manager.save_seconds is not None
    return manager.save_seconds, waited


def _resume(folder: Path, url: str | None, megabytes: int) -> float:
    """Seconds from an empty disk, or from the system's cache of a full one, with all checks."""
    state = _state(megabytes)
    started = time.perf_counter()
    manager, _ = _manager(folder, url)
    assert manager.resume(state)
    return time.perf_counter() - started


def _manager(folder: Path, url: str | None) -> tuple[CheckpointManager, BucketStorage | None]:
    folder.mkdir(exist_ok=True)
    storage = None
    claim = None
    if url:
        claim = claim_in(Bucket(url), folder, {}, print)
        storage = BucketStorage(Bucket(url), folder, claim)
        storage.fetch()
    run = Description({}, {})
    manager = CheckpointManager(folder / "checkpoints", Checkpoint(), run, Log(warning=print), claim, storage)
    return manager, storage


def _state(megabytes: int) -> dict[str, torch.Tensor]:
    """Tensors of 4 MB, each of other values."""
    return {f"model.{number}": torch.full((1000, 1000), float(number)) for number in range(megabytes // 4)}


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 512)
