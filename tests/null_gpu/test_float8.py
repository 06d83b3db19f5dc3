"""Float8 matmuls on CUDA: every recipe's step runs through its kernels and makes nothing wait."""

import os

import pytest
import torch
from torch.autograd.profiler import profile

from tests.null_gpu.step import measure
from tests.null_gpu.test_axes import SMALL

pytest.importorskip("torchao", reason="needs the package torchao")

GATHER = "--float8.fsdp_all_gather true"
JOBS = {
    # name: (ranks, words)
    "tensorwise, FSDP 2, gathered in 8 bits": (2, f"--float8.recipe tensorwise {GATHER} --compile.enable false"),
    "tensorwise, TP 2": (2, "--float8.recipe tensorwise --mesh.tp 2 --compile.enable false"),
    "rowwise, FSDP 2, compiled": (2, "--float8.recipe rowwise"),
}
"""Not rowwise and eager: the scales' log2 is a kernel that torch compiles for the device when it is called."""


def step(words: str) -> dict:
    """On a rank: the counts of a step, and which operators multiplied."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    with profile() as profiler:
        counts = measure("llama_1b.toml", (*SMALL.split(), *words.split()), warm_up=2, timed=1)
    return counts | {"operators": {event.key for event in profiler.key_averages()}}


@pytest.mark.parametrize("name", JOBS)
def test_a_step_multiplies_in_8_bits_without_waiting(null_ranks, name):
    ranks, words = JOBS[name]
    for result in null_ranks(ranks, step, words):
        assert result["syncs"] == 0, result["sync_places"]
        assert "aten::_scaled_mm" in result["operators"]
