"""Float8 matmuls on CUDA: every recipe's step runs through its kernels and makes nothing wait."""

import os

import pytest
import torch
from torch.autograd.profiler import profile

from tests.null_gpu.step import measure
from tests.null_gpu.test_axes import BUFFERS, EXPERTS, SMALL

pytest.importorskip("torchao", reason="needs the package torchao")

GATHER = "--float8.fsdp_all_gather true"
JOBS = {
    # name: (ranks, words)
    "tensorwise, FSDP 2, gathered in 8 bits": (2, f"--float8.recipe tensorwise {GATHER} --compile.enable false"),
    "tensorwise, TP 2": (2, "--float8.recipe tensorwise --mesh.tp 2 --compile.enable false"),
    "rowwise, FSDP 2, compiled": (2, "--float8.recipe rowwise"),
}
"""Not rowwise and eager: the scales' log2 is a kernel that torch compiles for the device when it is called."""


IN_FLOAT8 = "--float8.recipe rowwise_with_gw_hp --float8.experts true"
OF_EXPERTS = {
    # name: (ranks, words); eager ones have no dense matrices in 8 bits, for the reason above
    "FSDP 2, eager": (2, '--compile.enable false --float8.skip ["*.self_attn.*"]'),
    "FSDP 2, compiled, dense matrices too": (2, ""),
    "EP 2, eager": (2, '--mesh.ep 2 --compile.enable false --float8.skip ["*.self_attn.*"]'),
    "EP 2, compiled": (2, '--mesh.ep 2 --float8.skip ["*.self_attn.*"]'),
    "EP 2 in buffers, compiled": (2, f'--mesh.ep 2 {BUFFERS} --float8.skip ["*.self_attn.*"]'),
    "TP 2, eager": (2, '--mesh.tp 2 --compile.enable false --float8.skip ["*.self_attn.*"]'),
    "TP 2, compiled": (2, '--mesh.tp 2 --float8.skip ["*.self_attn.*"]'),
}


def step(words: str) -> dict:
    """On a rank: the counts of a step, and how often each operator ran in it and those before it."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    with profile() as profiler:
        counts = measure("llama_1b.toml", (*SMALL.split(), *words.split()), warm_up=2, timed=1)
    return counts | {"operators": {event.key: event.count for event in profiler.key_averages()}}


@pytest.mark.parametrize("name", JOBS)
def test_a_step_multiplies_in_8_bits_without_waiting(null_ranks, name):
    ranks, words = JOBS[name]
    for result in null_ranks(ranks, step, words):
        assert result["syncs"] == 0, result["sync_places"]
        assert "aten::_scaled_mm" in result["operators"]


@pytest.mark.parametrize("name", OF_EXPERTS)
def test_experts_multiply_in_8_bits_forward_and_for_the_gradients_of_their_rows(null_ranks, name):
    """Three projections each; the gradients of the weights are products in 16 bits."""
    ranks, words = OF_EXPERTS[name]
    for result in null_ranks(ranks, step, f"{EXPERTS} {IN_FLOAT8} {words}"):
        waits = 8 if "mesh.ep" in words and BUFFERS not in words else 0
        assert result["syncs"] == waits, result["sync_places"]
        operators = result["operators"]
        assert operators["aten::_scaled_grouped_mm_v2"] == 2 * operators["aten::_grouped_mm"] > 0
        assert ("aten::_scaled_mm" in operators) == ("dense" in name)
