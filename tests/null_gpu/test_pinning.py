"""A save on a host that refuses to pin memory."""

import ctypes
import os

import torch

from checkpoint.shards import shards_of
from checkpoint.staging import Stager


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
    assert "this host cannot pin the 4,096 bytes" in warning
    assert null_ranks(1, staged, False)[0][0] == []
