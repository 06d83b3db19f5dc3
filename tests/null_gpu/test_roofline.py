"""The work of a step is counted as the model has it, and the estimate follows from it."""

import pytest

from configs.layout import active_matrices, parameter_count
from tests.null_gpu import roofline
from tests.null_gpu.step import load_job, measure
from tests.null_gpu.test_axes import SMALL


def counts(words: str) -> dict:
    return measure("llama_1b.toml", (*SMALL.split(), *words.split()), warm_up=2, timed=1, count_work=True)["work"]


def test_the_work_of_a_step_is_that_of_the_model(null_ranks):
    (compiled,), (eager,) = (null_ranks(1, counts, f"--compile.enable {word}") for word in ("true", "false"))
    job = load_job("llama_1b.toml", SMALL.split(), 1)
    tokens, model = 8 * 512, job.model
    matrices = sum(active_matrices(model, layer) for layer in range(4)) + model.vocab_size * model.dim
    attention = 2 * 4 * 512 * 512 * tokens  # layers, heads x head size, keys seen on average, x 2 products
    for work in (compiled, eager):
        assert work["gemm_flops"] == 6 * matrices * tokens
        assert work["attention_flops_forward"] == attention
        assert work["attention_flops_backward"] == 2.5 * attention
        assert work["update_bytes"] == 28 * parameter_count(model)
    assert "generated_bytes" not in eager
    # SwiGLU alone: forward reads gate and up and writes their product; backward reads three and writes two.
    assert compiled["generated_bytes"] > 4 * tokens * 1024 * 2 * (3 + 5)
    assert compiled["generated_bytes"] + compiled["operator_bytes"] < 0.8 * eager["operator_bytes"]


def test_the_estimate_adds_the_parts_of_a_step():
    work = {"gemm_flops": 0.86 * 790e12, "attention_flops_forward": 33e12, "attention_flops_backward": 25e12}
    work |= {"generated_bytes": 0.88 * 4.3e11, "operator_bytes": 0, "update_bytes": 0.88 * 4.3e11}
    result = {"work": work, "launches": 10_000, "syncs": 1}
    guess = roofline.estimate(result, "llama_1b.toml", 1, ["--training.global_batch_size", "32"])
    parts = [1000.0, 200.0, 100.0, 0.0, 100.0, 19.0]  # attention: heads of 64, 2,048 tokens
    assert list(guess.milliseconds.values()) == pytest.approx(parts)
    assert guess.tokens_per_second == pytest.approx(32 * 2048 / 1.419)
    flops = 6 * 1_235_746_816 + 6 * 16 * 2048 * 2048 / 2 * 2  # matrices with the head; attention's causal half
    assert guess.mfu == pytest.approx(guess.tokens_per_second * flops / 989.5e12, rel=0.01)


def test_a_table_has_both_figures_where_they_differ():
    name = "1B, 1 GPU"
    work = {"gemm_flops": 1e15, "attention_flops_forward": 1e12, "attention_flops_backward": 1e12, "update_bytes": 1e9}
    now = {"work": work, "launches": 1000, "syncs": 0, "nccl_calls": 0, "host_ms": 10.0}
    now |= {"peak_allocated_bytes": 2**30, "peak_reserved_bytes": 2**31}
    text = roofline.table({name: now}, {name: now | {"launches": 3000}})
    row = text.splitlines()[2]
    assert row.startswith(f"| {name} | 3,000 → 1,000 | 0 | 0 | 0.0 | 0.0 | 1.0 | 10 | 1.00 / 2.00 | ")
