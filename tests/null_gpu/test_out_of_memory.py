"""An allocation that a GPU's memory cannot hold, refused by torch's own allocator, ends in Keel's one message."""

import os

import torch

from configs.load import load
from trainer.guards.out_of_memory import out_of_memory


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
