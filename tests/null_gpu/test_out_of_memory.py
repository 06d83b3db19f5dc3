"""An allocation that a GPU's memory cannot hold, refused by torch's own allocator, ends in Keel's one message."""

import os

import pytest
import torch

from configs.load import load
from trainer.guards.out_of_memory import out_of_memory
from trainer.report.metrics import memory_counts, memory_of


def message() -> str:
    """On a rank: what is said of a refused allocation."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    config = load("llama_8b.toml", ("--training.micro_batch_size", "2")).config
    kept = []
    try:
        while True:
            kept.append(torch.empty(8 << 30, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError as error:
        return str(out_of_memory(error, config, 3))


def test_the_message_names_the_rank_the_request_and_the_keys(null_ranks):
    (said,) = null_ranks(1, message)
    assert "rank 0 on host" in said
    assert "out of memory after step 3" in said
    assert "Tried to allocate 8.00 GiB" in said
    assert "training.micro_batch_size = 1 (now 2)" in said


def memory_after_running_out() -> tuple[dict, dict]:
    """On a rank: what Keel says of its memory, and what the allocator does, after an allocation that it refused."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()
    unused = torch.empty(5 << 30, dtype=torch.uint8, device="cuda")
    del unused  # stays reserved; the next allocation extends its segment
    kept = torch.empty(6 << 30, dtype=torch.uint8, device="cuda")
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
    said = vars(memory_of(memory_counts("cuda")))
    del kept
    return said, {
        "memory_peak_bytes": torch.cuda.max_memory_allocated(),
        "memory_reserved_peak_bytes": torch.cuda.max_memory_reserved(),
        "memory_percent": 100 * torch.cuda.max_memory_reserved() / torch.cuda.mem_get_info()[1],
        "allocator_retries": before["num_alloc_retries"] + 1,
        "allocator_ooms": before["num_ooms"] + 1,
    }


def test_what_is_reserved_retried_and_refused_is_the_allocators(null_ranks):
    ((said, allocators),) = null_ranks(1, memory_after_running_out)
    assert said == allocators
    # The workspaces of what this process has multiplied before are there as well.
    assert 6 <= said["memory_peak_bytes"] / 2**30 < 6.2
    assert 6 <= said["memory_reserved_peak_bytes"] / 2**30 < 6.2
    assert 4 < said["memory_percent"] < 5  # of an H200's 141 GB
