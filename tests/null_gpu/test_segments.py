"""Expandable segments, with which every command of Keel's allocates, and a driver that refuses them."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from parallelisms.torch_internals import settle_segments

GROWING = "expandable_segments:True"
NAME = "PYTORCH_CUDA_ALLOC_CONF"


@contextmanager
def configured(refuses: bool) -> Iterator[None]:
    """A process that has allocated nothing yet, on a driver that may refuse."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.cuda.empty_cache()
    before = os.environ[NAME]
    os.environ[NAME] = f"max_split_size_mb:512,{GROWING}"
    torch._C._accelerator_setAllocatorSettings(os.environ[NAME])
    library = ctypes.CDLL(os.environ["LD_PRELOAD"])
    library.null_gpu_refuse_mapping(int(refuses))
    try:
        yield
    finally:
        library.null_gpu_refuse_mapping(0)
        torch.cuda.empty_cache()
        os.environ[NAME] = before
        torch._C._accelerator_setAllocatorSettings(before)


def allocated(refuses: bool) -> tuple[list[str], list[bool], str, int]:
    """On a rank: warnings, whether each segment can grow, the setting that child processes find, and bytes reserved."""
    warnings: list[str] = []
    with configured(refuses):
        settle_segments(warnings.append)
        kept = torch.ones(64 << 20, device="cuda")
        segments = [segment["is_expandable"] for segment in torch.cuda.memory_snapshot() if segment["active_size"]]
        return warnings, segments, os.environ[NAME], torch.cuda.memory_reserved() - kept.nbytes


def raw_error(refuses: bool) -> str:
    """On a rank: the error of the first allocation if nobody has settled before."""
    with configured(refuses):
        try:
            torch.ones(64 << 20, device="cuda")
        except RuntimeError as error:
            return str(error)
    return ""


def test_segments_grow_where_the_driver_maps_memory(fresh_null_rank):
    ((warnings, segments, setting, more),) = fresh_null_rank(1, allocated, False)
    assert warnings == []
    assert segments
    assert all(segments)
    assert GROWING in setting
    assert more < 64 << 20


def test_a_driver_that_refuses_is_a_warning(fresh_null_rank):
    assert "CUDA driver error" in fresh_null_rank(1, raw_error, True)[0]
    ((warnings, segments, setting, _),) = fresh_null_rank(1, allocated, True)
    (warning,) = warnings
    assert "the GPU's driver refuses expandable segments (CUDA driver error" in warning
    assert segments
    assert not any(segments)
    assert setting == "max_split_size_mb:512,expandable_segments:False"


def freed_bytes() -> tuple[int, int]:
    """On a rank: free bytes of the device that an allocation takes, and that emptying the cache gives back."""
    with configured(refuses=False):
        free = torch.cuda.mem_get_info()[0]
        kept = torch.ones(64 << 20, device="cuda")
        least = torch.cuda.mem_get_info()[0]
        del kept
        torch.cuda.empty_cache()
        return free - least, torch.cuda.mem_get_info()[0] - least


def test_memory_is_mapped_and_given_back(fresh_null_rank):
    ((taken, given_back),) = fresh_null_rank(1, freed_bytes)
    assert 256 << 20 <= taken < 320 << 20
    assert given_back == taken
