"""Deterministic training finds a deterministic kernel for everything that a step does; torch is asked itself."""

import os
import subprocess
import sys
from unittest.mock import patch

import pytest
import torch
from torch.autograd.profiler import profile
from torch.torch_version import TorchVersion

from configs.load import load
from tests.null_gpu.device import Counters
from tests.null_gpu.step import measure
from tests.null_gpu.test_axes import EXPERTS, ONE_BATCH
from tests.null_gpu.test_document_mask import zeros
from trainer.guards.verdict import QueuedStep
from trainer.loss import _add_product_
from trainer.numerics import set_numerics

CHOICES = """
import sys, torch
from configs.load import load
from trainer.numerics import set_numerics
set_numerics(load("debug.toml", sys.argv[1:]).config.training, "cuda")
for heads, kv_heads, width, dtype in ((32, 8, 128, "bfloat16"), (32, 32, 64, "bfloat16"), (32, 32, 192, "bfloat16"),
                                      (32, 32, 128, "float32")):
    options = {"device": "cuda", "dtype": getattr(torch, dtype), "requires_grad": True}
    q, k = (torch.empty(1, n, 2048, width, **options) for n in (heads, kv_heads))
    print(torch._fused_sdp_choice(q, k, k, None, 0.0, True, enable_gqa=heads != kv_heads), end=" ")
"""
FLASH, EFFICIENT, CUDNN = 1, 2, 3  # torch.nn.attention.SDPBackend
HEADS_OF_192 = FLASH if TorchVersion(torch.__version__) >= "2.15" else CUDNN
WORKSPACE = 32 << 20  # bytes, of a product; torch 2.15 takes it from its allocator for each and gives it back


@pytest.mark.parametrize(
    ("words", "expected"),
    [((), [CUDNN, CUDNN, HEADS_OF_192, EFFICIENT]), (("--training.deterministic", "true"), [FLASH] * 3 + [EFFICIENT])],
)
def test_which_attention_torch_takes(null_gpus, words, expected):
    """cuDNN's, whose backward adds up in no fixed order, only where that may be."""
    surroundings = {name: value for name, value in null_gpus.items() if name != "TORCH_CUDNN_SDPA_DEPRIORITIZED"}
    command = [sys.executable, "-c", CHOICES, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=os.environ | surroundings)
    assert list(map(int, done.stdout.split())) == expected, done.stderr


def deterministic_step(words: str) -> dict:
    """On a rank: the counts of a step, with the calls of attention kernels, of training.deterministic."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    words += " --training.deterministic true"
    ranks = torch.distributed.get_world_size()
    plain, exact = (load("llama_1b.toml", each, ranks).config.training for each in ((), words.split()))
    set_numerics(exact, "cuda")
    try:
        with patch.object(QueuedStep, "read", zeros), profile() as profiler:
            counts = measure("llama_1b.toml", (*ONE_BATCH.split(), *words.split()), warm_up=2, timed=1)
    finally:
        set_numerics(plain, "cuda")
    return counts | {"attention": {event.key for event in profiler.key_averages() if "attention" in event.key}}


@pytest.mark.parametrize("compiled", ["false", "true"])
@pytest.mark.parametrize("words", ["", EXPERTS, "--data.document_mask true", "--mesh.cp 2", "--mesh.tp 2"])
def test_every_kernel_of_a_step_has_a_deterministic_form(null_ranks, words, compiled):
    """Torch raises an error where it has none."""
    ranks = 2 if "mesh" in words else 1
    for result in null_ranks(ranks, deterministic_step, f"{words} --compile.enable {compiled}"):
        assert any("_flash_attention_forward" in op for op in result["attention"])
        assert not any("cudnn" in op for op in result["attention"])


def head_gradient_of_chunks() -> tuple[dict, int]:
    """On a rank: what adding a chunk to the head's gradient asks of the device, and the bytes that it allocates."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    logits, hidden = torch.empty(512, 1000, device="cuda").bfloat16(), torch.empty(512, 64, device="cuda").bfloat16()
    total = torch.empty(1000, 64, device="cuda")
    _add_product_(total, logits.T, hidden)
    torch.cuda.reset_peak_memory_stats()
    before, counters = torch.cuda.memory_allocated(), Counters()
    counters.reset()
    _add_product_(total, logits.T, hidden)
    counts = {name: count for name, count in counters.read().items() if count}
    return counts, torch.cuda.max_memory_allocated() - before


def test_the_heads_gradient_is_added_up_inside_the_product(null_ranks):
    [(counts, n_bytes)] = null_ranks(1, head_gradient_of_chunks)
    assert counts == {"gemm": 1}
    assert n_bytes in (0, WORKSPACE)
