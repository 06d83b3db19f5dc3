"""attention.delta_backend on CUDA: what computes layers of kind delta, why not, and what a step asks of a GPU."""

import os
import subprocess
import sys

import pytest

from tests.null_gpu.step import measure

pytest.importorskip("fla", reason="needs the package fla-core")

HYBRID = (
    "--mesh.dp_shard 1 --mesh.ep 1 --model.n_layers 4 --model.n_experts 16 --training.seq_len 1024 "
    "--training.micro_batch_size 2 --training.global_batch_size 2"
)
TRITON = "flash-linear-attention refuses: Triton >= 3.4.0 and < 3.7.1 on Hopper GPUs produces incorrect results"
JOBS = {
    # words: what delta_kernel says
    "": f"torch's operations, since {TRITON}",
    "--attention.delta_backend torch": 'torch\'s operations (attention.delta_backend = "torch")',
    "--attention.delta_backend fla": f'attention.delta_backend is "fla": {TRITON}',
    "--training.deterministic true": "torch's operations, since flash-linear-attention chooses kernels by their times",
    "--training.compute_dtype float32": "torch's operations, since flash-linear-attention rounds to bfloat16",
    "--model.layers full": "nothing",
}
SAID = """
import sys, torch
from configs.errors import ConfigError
from configs.load import load
from parallelisms.attention.delta import delta_kernel
given, *jobs = sys.argv[1:]
for words in jobs:
    config = load("qwen3_next_80b_a3b.toml", [*given.split(), *words.replace("full", '["full"]').split()], 1).config
    try:
        print(delta_kernel(config, torch.device("cuda"), lambda _: None) or "nothing")
    except ConfigError as error:
        print(" ".join(str(error).split()))
"""


def test_what_computes_the_layers_is_named_with_the_reason(null_gpus):
    """The package refuses the Triton of torch 2.11 on Hopper GPUs, one of which the null GPU says that it is."""
    command = [sys.executable, "-W", "ignore", "-c", SAID, HYBRID, *JOBS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=os.environ | null_gpus)
    said = done.stdout.splitlines()
    assert len(said) == len(JOBS), done.stderr
    for words, line in zip(JOBS, said, strict=True):
        assert line.startswith(JOBS[words]), words


def counts_of_a_step() -> tuple[int, int]:
    """On a rank: launches and synchronizations of a step by torch's operations."""
    found = measure("qwen3_next_80b_a3b.toml", (*HYBRID.split(), "--compile.enable", "false"), warm_up=1, timed=1)
    return found["launches"], found["syncs"]


def test_a_step_by_torchs_operations_waits_for_nothing(null_ranks):
    [(launches, syncs)] = null_ranks(1, counts_of_a_step)
    assert syncs == 0
    assert launches > 0
