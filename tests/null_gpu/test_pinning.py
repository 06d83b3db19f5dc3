"""The memory that a save copies to: pinned in pieces, before it is needed, unless the host refuses."""

import ctypes
import os
import time

import pytest
import torch

from checkpoint import staging
from checkpoint.shards import shards_of
from checkpoint.staging import Stager
from tests.null_gpu.device import Counters


def staged(refuses: bool) -> tuple[list[str], list[int], bool]:
    """On a rank: the warnings of two saves, the bytes staged, and whether the device still takes work after them."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    library = ctypes.CDLL(os.environ["LD_PRELOAD"])
    library.null_gpu_refuse_pinning(int(refuses))
    warnings: list[str] = []
    stager = Stager(warnings.append)
    state = {"weights": torch.ones(1 << 10, device="cuda")}
    copies = [stager.stage(shards_of(state))["weights"].local for _ in range(2)]
    library.null_gpu_refuse_pinning(0)
    torch.ones(4, device="cuda").sum()
    return warnings, [copy.nbytes for copy in copies], all(copy.device.type == "cpu" for copy in copies)


def test_a_save_without_pinned_memory_is_a_warning(null_ranks):
    ((warnings, sizes, on_cpu),) = null_ranks(1, staged, True)
    assert sizes == [4096, 4096]
    assert on_cpu
    (warning,) = warnings
    assert "this host cannot pin 4,096 bytes of those that a checkpoint is copied to" in warning
    assert null_ranks(1, staged, False)[0][0] == []


def pinned_in_pieces(free_bytes: int) -> tuple[list[str], int, list[int]]:
    """On a rank of a host with so much free memory: warnings, how often memory is pinned, and the bytes staged."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    warnings: list[str] = []
    stager = Stager(warnings.append)
    state = {f"weights {number}": torch.ones(1 << 10, device="cuda") for number in range(10)}
    counters = Counters()
    counters.reset()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging, "PIECE_BYTES", 3 * 4096)
        patch.setattr(staging, "free_memory", lambda: free_bytes)
        stager.prepare(shards_of(state))
        staged = stager.stage(shards_of(state))
    return warnings, counters.read()["pinned_allocation"], [shard.local.nbytes for shard in staged.values()]


def test_memory_is_pinned_in_pieces_while_there_is_enough(null_ranks):
    assert null_ranks(1, pinned_in_pieces, 1 << 30) == [([], 4, [4096] * 10)]
    (([warning], pinned, sizes),) = null_ranks(1, pinned_in_pieces, 10000)
    assert "cannot pin 12,288 bytes of those that a checkpoint is copied to (it has 10,000 bytes left)" in warning
    assert (pinned, sizes) == (0, [4096] * 10)


def waits_for_slow_pinning() -> tuple[float, float]:
    """On a rank: seconds that `prepare` takes, and the save after it."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    ctypes.CDLL(os.environ["LD_PRELOAD"]).null_gpu_pin_slowly(2000)
    stager = Stager(pytest.fail)
    shards = shards_of({"weights": torch.ones(1 << 10, device="cuda")})
    began = time.monotonic()
    stager.prepare(shards)
    prepared = time.monotonic()
    stager.stage(shards)
    return prepared - began, time.monotonic() - prepared


def test_training_goes_on_while_memory_is_pinned(null_ranks):
    """The thread that pins gives the interpreter's lock away, or `prepare` would not return before it is done."""
    ((preparing, saving),) = null_ranks(1, waits_for_slow_pinning)
    assert preparing < 1.5
    assert preparing + saving > 1.9
