"""attention.backend on CUDA: torch is asked what it can run, and a step calls the kernel that is named."""

import os
import subprocess
import sys

import pytest
import torch
from torch.autograd.profiler import profile

from configs.errors import ConfigError
from configs.load import load
from parallelisms.attention.backend import attention_kernel
from tests.null_gpu.step import measure
from tests.null_gpu.test_axes import ONE_BATCH

JOBS = {
    # words: what attention_kernel says, or a part of why it refuses
    "": 'cuDNN (attention.backend = "auto")',
    "--training.deterministic true": 'FlashAttention 2 (attention.backend = "auto")',
    "--data.document_mask true": 'FlashAttention 2 (attention.backend = "auto")',
    "--mesh.cp 2": 'FlashAttention 2 (attention.backend = "auto")',
    "--attention.backend cudnn": "cuDNN",
    "--attention.backend flash2": "FlashAttention 2",
    "--attention.backend flex": "flex attention, compiled",
    "--attention.backend flash3": 'attention.backend is "flash3": the package flash_attn_interface (FlashAttention 3)',
    "--attention.backend flash2 --training.compute_dtype float32": "Expected query, key and value to all be of dtype",
    "--attention.backend flash2 --model.head_dim 512": "less than or equal to 256",
}
SAID = """
import sys, torch
from configs.errors import ConfigError
from configs.load import load
from parallelisms.attention.backend import attention_kernel
from trainer.numerics import set_numerics
for words in sys.argv[1:]:
    config = load("llama_1b.toml", words.split(), 2 if "cp" in words else 1).config
    set_numerics(config.training, "cuda")
    try:
        print(attention_kernel(config, torch.device("cuda")))
    except ConfigError as error:
        print(" ".join(str(error).split()))
"""


def test_what_torch_can_run_is_named_and_the_rest_refused_with_its_reason(null_gpus):
    surroundings = {name: value for name, value in null_gpus.items() if name != "TORCH_CUDNN_SDPA_DEPRIORITIZED"}
    command = [sys.executable, "-c", SAID, *JOBS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=os.environ | surroundings)
    said = done.stdout.splitlines()
    assert len(said) == len(JOBS), done.stderr
    for words, line in zip(JOBS, said, strict=True):
        assert JOBS[words] in line, words


def attention_of_a_step(words: str) -> set[str]:
    """On a rank: the attention kernels that a step calls."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    with profile() as profiler:
        measure("llama_1b.toml", (*ONE_BATCH.split(), *words.split()), warm_up=2, timed=1)
    return {event.key for event in profiler.key_averages() if "attention" in event.key}


@pytest.mark.parametrize("compiled", ["false", "true"])
@pytest.mark.parametrize("words", ["", "--mesh.cp 2 --context.method all_to_all", "--mesh.tp 2"])
def test_a_step_calls_flash_attention(null_ranks, words, compiled):
    named = f"{words} --attention.backend flash2 --compile.enable {compiled}"
    for called in null_ranks(2 if "mesh" in words else 1, attention_of_a_step, named):
        assert any("_flash_attention_forward" in op for op in called)
        assert not any("cudnn" in op for op in called)


def test_a_step_with_flex_compiles_for_the_device(null_ranks):
    [called] = null_ranks(1, attention_of_a_step, "--attention.backend flex --compile.enable true")
    assert not any("_flash_attention_forward" in op for op in called)


def test_a_cpu_has_none_of_them():
    config = load("llama_1b.toml", ("--attention.backend", "cudnn")).config
    with pytest.raises(ConfigError, match="this run is on a CPU"):
        attention_kernel(config, torch.device("cpu"))
