"""The copies of a state in CPU memory, from which it is written while training continues.

Whether a host has enough memory for them is checked before training starts, not at the first save, an hour later.
"""

import mmap
import socket
import threading
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from checkpoint.frame import bytes_of
from checkpoint.shards import Shard
from checkpoint.store import SaveFailed, places
from configs.errors import listed
from configs.machine import free_memory
from parallelisms.ranks import gather

ALIGNMENT = 64
"""Bytes in a cache line."""
PIECE_BYTES = 256 << 20
"""Memory is allocated and pinned in pieces of about this size, so that a step never waits long for the driver."""
MEMORY_SHARE = 0.95
"""Fraction of a host's free memory that staging may take: the writer, the loader and the page cache need some, too."""


class Stager:
    """Copies shards to CPU memory, so that training can continue while they are written.

    The memory is kept from one save to the next, which is safe because at most one save is in flight. It takes as many
    bytes of CPU memory as the rank's state. (Torch's own pinned memory is allocated in powers of two, which takes half
    as much again for a 7B model's feed-forwards.) The system gives memory when it is first touched or pinned, which
    takes seconds for some gigabytes; a thread does that during the first steps.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        """
        Args:
            warn: told, perhaps in another thread, if the memory cannot be pinned.
        """
        self._warn = warn
        self._buffers: Future[dict[str, Tensor]] | None = None

    def prepare(self, shards: Mapping[str, Shard]) -> None:
        """Begin to allocate memory for shards of these names, shapes and dtypes, in another thread."""
        buffers: Future[dict[str, Tensor]] = Future()
        self._buffers = buffers
        needed = {name: torch.empty_like(shard.local, device="meta") for name, shard in shards.items()}
        gpu = next((shard.local.device for shard in shards.values() if shard.local.is_cuda), None)

        def allocate() -> None:
            try:
                buffers.set_result(self._allocate(needed, gpu))
            except BaseException as error:
                buffers.set_exception(error)

        threading.Thread(target=allocate, name="staging", daemon=True).start()

    def stage(self, shards: Mapping[str, Shard]) -> dict[str, Shard]:
        """Copy the shards to CPU memory; later changes of the originals do not affect the copies.

        Names, shapes and dtypes must be the same at each call, and those that were prepared.
        """
        if self._buffers is None:
            self.prepare(shards)
        assert self._buffers is not None
        buffers = self._buffers.result()
        staged = {
            name: replace(shard, local=buffers[name].copy_(shard.local, non_blocking=True))
            for name, shard in shards.items()
        }
        if any(shard.local.device.type != "cpu" for shard in shards.values()):
            torch.accelerator.current_stream().synchronize()
        return staged

    def _allocate(self, needed: Mapping[str, Tensor], gpu: torch.device | None) -> dict[str, Tensor]:
        """Allocate a tensor like each of those needed, in a few pieces of memory, and let the system give it.

        A tensor is in one piece, since CUDA may refuse a copy to memory that was pinned in two.
        """
        if gpu is not None:
            torch.cuda.set_device(gpu)  # a thread begins with the first
        pins = gpu is not None
        buffers = {}
        for names in _pieces({name: each.nbytes for name, each in needed.items()}):
            size = sum(_aligned(needed[name].nbytes) for name in names)
            memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            raw = torch.frombuffer(memory, dtype=torch.uint8)
            pins = pins and self._pin(raw)
            if not pins and raw.nbytes <= MEMORY_SHARE * free_memory():
                raw.zero_()
            start = 0
            for name in names:
                buffers[name] = _tensor_in(memory, start, needed[name])
                start += _aligned(needed[name].nbytes)
        return buffers

    def _pin(self, raw: Tensor) -> bool:
        """Lock the memory's pages, so that the GPU can write to it asynchronously; returns whether it was possible."""
        free = free_memory()
        if raw.nbytes > MEMORY_SHARE * free:
            reason = f"it has {free:,} bytes left"
        else:
            try:
                torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(raw.data_ptr(), raw.nbytes, 0))
            except RuntimeError as error:  # some sandboxes and virtual machines, and a limit on locked memory
                with suppress(RuntimeError):
                    torch.ones(1, device="cuda")  # CUDA keeps the error for the next launch, which would fail with it
                reason = str(error)
            else:
                weakref.finalize(self, _unpin, raw)
                return True
        self._warn(
            f"this host cannot pin {raw.nbytes:,} bytes of those that a checkpoint is copied to ({reason}): each save "
            "copies through pageable memory, for which training waits longer"
        )
        return False


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT


def _pieces(sizes: Mapping[str, int]) -> list[list[str]]:
    """The names in order, in lists of at least `PIECE_BYTES`, but for the last."""
    pieces: list[list[str]] = []
    left = 0
    for name, size in sizes.items():
        if left <= 0:
            pieces.append([])
            left = PIECE_BYTES
        pieces[-1].append(name)
        left -= size
    return pieces


def _tensor_in(memory: mmap.mmap, start: int, like: Tensor) -> Tensor:
    if like.numel() == 0:
        return torch.empty(like.shape, dtype=like.dtype)
    return torch.frombuffer(memory, dtype=like.dtype, count=like.numel(), offset=start).view(like.shape)


def _unpin(raw: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(raw.data_ptr())


def hashes(shards: Mapping[str, Shard]) -> dict[str, int]:
    """Hash the bytes of each staged shard, by name. If a hash differs after the write, memory has changed.

    xxhash's functions of one call hold the interpreter's lock in some versions (3.4.1: 0.12 s for 0.8 GB).
    """
    return {name: xxhash.xxh3_64(bytes_of(shard.local)).intdigest() for name, shard in shards.items()}


def require_unchanged(
    shards: Mapping[str, Shard], staged: Mapping[str, int], name: str, group: dist.ProcessGroup
) -> None:
    """Raise SaveFailed on all ranks if staged memory has changed while the checkpoint `name` was written.

    The files' hashes are computed from the bytes as they are written, so they cannot reveal a bit that flipped in
    memory before: it is in both the file and its hash.
    """
    now = hashes(shards)
    if changed := places([shard for shard, value in staged.items() if now[shard] != value], group):
        raise SaveFailed(
            f"checkpoint {name} is not kept: memory that nothing writes to has changed during the save, in "
            f"{listed(changed)}; if that host is named again, stop using it"
        )


HostsMemory = Mapping[str, tuple[int, int]]
"""The bytes that a host's ranks stage together, and its free memory, by host."""


def too_little_memory(shards: Mapping[str, Shard], group: dist.ProcessGroup) -> str:
    """The message to the user if a host can't stage its ranks' state; "" if all can. Arguments: `measure_memory`."""
    crowded = crowded_hosts(measure_memory(shards, group))
    if not crowded:
        return ""
    hosts = ", ".join(f"{host} has {free:,} of {staged:,} bytes" for host, (staged, free) in crowded.items())
    return (
        f'checkpoint.mode = "async" copies the state to host memory, of which there is too little: {hosts}. Training '
        "will wait for each save of this launch"
    )


def crowded_hosts(memory: HostsMemory) -> HostsMemory:
    """The hosts without enough memory for what their ranks stage."""
    return {host: (staged, free) for host, (staged, free) in memory.items() if staged > MEMORY_SHARE * free}


def measure_memory(shards: Mapping[str, Shard], group: dist.ProcessGroup) -> HostsMemory:
    """Measure on every rank of `group`; all must call it, before anything is staged. The result is the same on all."""
    staged = sum(shard.local.nbytes for shard in shards.values())
    hosts: dict[str, tuple[int, int]] = {}
    for host, of_rank, free in gather((socket.gethostname(), staged, free_memory()), group):
        before, least = hosts.get(host, (0, free))
        hosts[host] = (before + of_rank, min(least, free))
    return hosts
