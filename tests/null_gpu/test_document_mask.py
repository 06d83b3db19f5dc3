"""Documents are kept apart by FlashAttention's kernels, without a mask of all pairs and without a wait for the host."""

import os
from contextlib import ExitStack
from unittest.mock import patch

import pytest
import torch
from torch.autograd.profiler import profile

from tests.null_gpu import step as null_step
from tests.null_gpu.test_axes import SMALL
from trainer.guards.verdict import QueuedStep, StepResult

SOURCES = '[{name = "documents", kind = "synthetic", document_length = 100}]'
FORWARD, BACKWARD = "aten::_flash_attention_forward", "aten::_flash_attention_backward"
LAYERS, SEQ_LEN = 4, 2048
STEPS = 4  # two that warm up, one that is timed, and one whose waits are looked at
MESHES = {
    "1 GPU": (1, ""),
    "FSDP 2": (2, ""),
    "HSDP 2x2": (4, "--mesh.dp_replicate 2 --training.global_batch_size 8"),
    "TP 2": (2, "--mesh.tp 2"),
    "CP 2 gather": (2, "--mesh.cp 2"),
    "CP 2 ring": (2, "--mesh.cp 2 --context.method ring"),
    "CP 2 all_to_all": (2, "--mesh.cp 2 --context.method all_to_all"),
    "selective": (1, "--activation_checkpoint.mode selective"),
    "full": (1, "--activation_checkpoint.mode full"),
    "PP 2": (2, "--mesh.pp 2"),
}


def zeros(_verdict: QueuedStep) -> StepResult:
    """As if the numbers were zeros: memory that ids were copied to may be theirs now."""
    return StepResult(0.0, 0.0, False, False, False, False, False, 0.0, 0.0)


def step(words: str, documents: str = "true") -> dict:
    """On a rank: the counts of a step, and how often each attention kernel was called in all of `STEPS`."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    config = (*SMALL.split(), "--training.seq_len", str(SEQ_LEN), "--training.global_batch_size", "4", *words.split())
    profiler = profile()
    build = null_step.build
    with ExitStack() as stack:

        def build_then_profile(job) -> tuple:
            built = build(job)  # this may run blocks on fake tensors, to see what they keep
            stack.enter_context(profiler)
            return built

        stack.enter_context(patch.object(null_step, "SYNTHETIC", SOURCES))
        stack.enter_context(patch.object(null_step, "build", build_then_profile))
        stack.enter_context(patch.object(QueuedStep, "read", zeros))
        words_of_job = (*config, "--data.document_mask", documents)
        counts = null_step.measure("llama_1b.toml", words_of_job, warm_up=2, timed=1)
    calls = {event.key: event.count for event in profiler.key_averages() if "attention" in event.key}
    return counts | {"attention": calls}


@pytest.mark.parametrize("compiled", ["false", "true"])
@pytest.mark.parametrize("name", MESHES)
def test_flash_attention_keeps_documents_apart(null_ranks, name, compiled):
    ranks, words = MESHES[name]
    n_layers = LAYERS // (2 if "pp" in words else 1)
    for result in null_ranks(ranks, step, f"{words} --compile.enable {compiled}"):
        assert not any("_scaled_dot_product_" in op and op.startswith("aten") for op in result["attention"])
        assert result["attention"][FORWARD] >= STEPS * n_layers
        assert result["attention"][BACKWARD] >= STEPS * n_layers
        if name == "selective":  # its pattern for what is kept matches the op
            assert result["attention"][FORWARD] == result["attention"][BACKWARD]
        assert result["syncs"] == 0, result["sync_places"]


@pytest.mark.parametrize("documents", ["false", "true"])
@pytest.mark.parametrize("mesh", ["", "--mesh.tp 2", *(words for name, (_, words) in MESHES.items() if "CP" in name)])
@pytest.mark.parametrize("compiled", ["false", "true"])
def test_flash_attention_computes_windows(null_ranks, mesh, compiled, documents):
    """In every layer; one of four sees all earlier tokens, which torch's own attention computes without documents."""
    words = f"--model.window 512 --model.window_pattern 4 {mesh} --compile.enable {compiled}"
    for result in null_ranks(2 if mesh else 1, step, words, documents):
        n_windows = LAYERS - LAYERS // 4
        assert result["attention"][FORWARD] >= STEPS * n_windows
        assert result["attention"][BACKWARD] >= STEPS * n_windows
        assert result["syncs"] == 0, result["sync_places"]


def test_no_mask_of_all_pairs_takes_memory(null_ranks):
    ((with_documents,), (without,)) = (null_ranks(1, step, "", documents) for documents in ("true", "false"))
    pairs = 2 * SEQ_LEN**2  # a byte each, for the micro-batch's sequences
    assert with_documents["peak_allocated_bytes"] - without["peak_allocated_bytes"] < pairs / 2
