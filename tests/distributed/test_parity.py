"""A part of the parity table (all of it: `python scripts/parity.py`), and what the table does not hold."""

import pytest

from configs.load import load
from parallelisms.torch_internals import has_zero_bubble
from scripts.parity import dtype_overrides, refusals, run_rows
from scripts.parity_rows import (
    BOUNDS,
    REFUSED,
    Row,
    ademamix_rows,
    attention_rows,
    auto_rows,
    float8_rows,
    further_rows,
    lion_rows,
    memory_rows,
    moments_rows,
    muon_rows,
    option_rows,
    qk_clip_rows,
    qk_norm_rows,
    state_rows,
    table,
    tied_rows,
    torch_rows,
    words,
)
from tests.marked import marked
from trainer.planning.by_memory import planned_choice

CONFIG = "parity.toml"
THREE_STEPS = ("--training.steps", "3")  # of the table's eight: enough for Adam's state and clipping to count
ROWS_OF_KEYS = (memory_rows, attention_rows, moments_rows, lion_rows, muon_rows, float8_rows, qk_norm_rows)
ROWS_OF_KEYS += (auto_rows, ademamix_rows, torch_rows, qk_clip_rows, tied_rows, further_rows, option_rows, state_rows)
ROWS = {row.name: row for row in table()}
CHOSEN = [
    "1 process, none, eager, accumulation 1",
    "DDP 2, full, eager, accumulation 2",
    "FSDP 2, selective, eager, accumulation 1",
    "FSDP 4, none, eager, accumulation 2",
    "HSDP 2x2, full, eager, accumulation 1",
    "TP 2, selective, eager, accumulation 2",
    "FSDP 2 x TP 2, none, eager, accumulation 1",
    "1 process, selective, compiled, accumulation 2",
    "FSDP 2, full, compiled, accumulation 2",
    "HSDP 2x2, none, compiled, accumulation 1",
    "TP 2, none, compiled, accumulation 1",
    "FSDP 2 x TP 2, selective, compiled, accumulation 2",
    "PP 2 gpipe, selective, eager, accumulation 1",
    "PP 2 interleaved, none, eager, accumulation 2",
    "PP 2 of 3 + 1 layers, full, eager, accumulation 1",
    "PP 4, selective, eager, accumulation 2",
    "PP 2 x FSDP 2, selective, compiled, accumulation 2",
    "PP 2 x FSDP 2 zero-bubble, none, eager, accumulation 2",
    "PP 2 x DDP 2, none, eager, accumulation 1",
    "PP 2 x TP 2, selective, eager, accumulation 2",
    "ZeRO 1, 4 ranks",
    "ZeRO 2, HSDP 2x2, compiled",
    "CP 4, gather, eager",
    "CP 2, ring, eager, documents",
    "CP 2 x FSDP 2, gather, compiled, documents",
    "CP 2 x DDP 2, ring, eager",
    "CP 2 x TP 2, all_to_all, eager, documents",
    "CP 2, all_to_all, compiled, documents",
    "PP 2 x CP 2, selective, eager",
    "DDP 2 x TP 2, selective, eager",
    "owner 2 x PP 2, AdamW, eager",
    "owner 2 x CP 2, AdamW, eager",
    "owner 2 x TP 2, Muon, eager",
    "owner over dp_replicate 2 x PP 2 interleaved, AdamW",
    "owner over cp 2 x PP 2 zero-bubble, Muon",
    "PP 2 x CP 2 x FSDP 2, selective, eager",
    "memory limit, FSDP 2, eager",
    "memory limit, PP 2, compiled",
    "chosen by little memory, FSDP 2",
    "Lion, FSDP 2 x TP 2",
    "AdEMAMix, FSDP 2 x TP 2, cautious",
    "torch's Adagrad, owner 2 x TP 2",
    "torch's Adagrad, EP 2",
    "torch's Adagrad, HSDP 2x2",
    "Muon, FSDP 4, eager",
    "Muon, FSDP 2 x TP 2, eager",
    "Muon, PP 2, eager",
    "Muon, options, FSDP 2 x TP 2, eager",
    "Muon, HSDP 2x2, eager",
    "Muon, FSDP 2 x TP 2, compiled",
    "Muon, PP 2 x FSDP 2 interleaved, eager",
    "Muon, experts, EP 2 x FSDP 2, eager",
    "qk_norm, TP 2, eager",
    "qk_norm, TP 2, compiled",
    "qk_norm, CP 2, eager",
    "qk_norm, FSDP 2 x TP 2, eager",
    "qk_norm, owner 2 x TP 2, Muon, eager",
    "attention by flash2, TP 2",
    "attention by flash2, CP 2, all_to_all",
    "qk_norm over all heads, TP 2",
    "norms before and after, TP 2",
    "attention gate, TP 2",
    "window, documents, CP 2",
    "tied, PP 2 interleaved, eager",
    "tied, PP 2 x TP 2, eager",
    "tied, owner 2 x PP 2 interleaved, Muon, eager",
    "tied, PP 2 x FSDP 2, compiled",
    "muP, TP 2",
    "muP, gate of shared experts, TP 2",
    "muP, latent attention, tied, PP 2",
    "muP, Muon, split heads, experts, further tokens, FSDP 2",
    "muP, Muon, split heads, experts, further tokens, CP 2",
    "further tokens, TP 2",
    "further tokens, CP 2",
    "further, PP 2 interleaved, eager",
    "further, PP 2 x TP 2, eager",
    "further, PP 2 x CP 2, documents, eager",
    "further, FSDP 2 x TP 2, full, compiled",
    "DeepSeek-V3, EP 2 x PP 2, eager",
    "Gemma 3, FSDP 2 x TP 2, eager",
    "Gemma 3, CP 2 x TP 2, compiled",
    "OLMo 3, CP 4, eager",
    "OLMo 3, CP 2 all_to_all, eager",
    "gate, squared relu, experts, window, CP 2 x TP 2, eager",
    "Qwen3 with experts, PP 2 x FSDP 2, compiled",
    "delta, TP 2",
    "delta, PP 2",
    "delta, documents over chunks, CP 2",
    "Qwen3-Next, CP 2 x TP 2, eager",
    "Qwen3-Next, FSDP 2 x TP 2, compiled",
]
CHOSEN_OF_THE_LONGEST = [
    "FSDP 2 x TP 2 x PP 2, selective, eager",
    "FSDP 2 x CP 2 x TP 2, selective, eager",
    "HSDP 2x2 x TP 2, selective, eager",
]
MORE = {
    # name: (ranks, overrides of the run, overrides of the machine)
    # Widths that the ranks do not divide: FSDP pads, and some ranks own nothing of the norms.
    "uneven shards": (4, {"model.dim": 66, "model.head_dim": 10, "model.ffn_dim": 130}, {}),
    "always reshard, prefetch 3": (
        2,
        {},
        {"fsdp.reshard_after_forward": "always", "comm.prefetch": 3},
    ),
    "never reshard": (2, {}, {"fsdp.reshard_after_forward": "never"}),
    "every second layer": (2, {}, {"activation_checkpoint.mode": "full", "activation_checkpoint.every_nth_layer": 2}),
    "tied embedding, FSDP 2 x TP 2": (4, {"model.tie_embeddings": "true"}, {"mesh.tp": 2}),
    "tied embedding, compiled": (2, {"model.tie_embeddings": "true"}, {"compile.enable": "true"}),
    "inf norm, PP 2 x FSDP 2": (4, {"training.norm_type": "inf", "training.max_norm": 0.01}, {"mesh.pp": 2}),
    "always reshard, PP 2 x FSDP 2": (4, {}, {"mesh.pp": 2, "fsdp.reshard_after_forward": "always"}),
    "inf norm, FSDP 2 x TP 2": (4, {"training.norm_type": "inf", "training.max_norm": 0.01}, {"mesh.tp": 2}),
}


def assert_parity(ranks, rows, dtype="float64", overrides=()):
    class Pool:
        run = staticmethod(ranks)

    for row, difference in run_rows(Pool(), CONFIG, rows, THREE_STEPS + dtype_overrides(dtype) + overrides):
        assert difference.passes(dtype), (row.name, difference, BOUNDS[dtype])


def test_the_table_is_whole():
    without_zero_bubble, zero_bubble = 17, 3  # the latter neither compiled nor with selective checkpointing
    dense = without_zero_bubble * 3 * 2 * 2 + zero_bubble * 2 * 2
    zero_stages, context, mixed, mixtures, experts = 9, 5 * 3 * 2 * 2, 6 * 2, 7 * 2 * 2, 16 * 2 + 11 * 2
    owner, documents, frozen = 4 * 2 * 3 + 3 * 2 * 2 + 2 * 2 * 2, 4 * 2 + 1, 27
    rest = owner + mixtures + experts + documents + frozen + sum(len(list(rows())) for rows in ROWS_OF_KEYS)
    assert len(ROWS) == dense + zero_stages + context + mixed + rest


@pytest.mark.parametrize(
    "name",
    marked(
        CHOSEN,
        slow=[
            "TP 2, selective, eager, accumulation 2",
            "FSDP 2 x TP 2, none, eager, accumulation 1",
            "FSDP 2, full, compiled, accumulation 2",
            "TP 2, none, compiled, accumulation 1",
            "PP 4, selective, eager, accumulation 2",
            "PP 2 x FSDP 2, selective, compiled, accumulation 2",
            "PP 2 x DDP 2, none, eager, accumulation 1",
            "ZeRO 2, HSDP 2x2, compiled",
            "CP 4, gather, eager",
            "CP 2 x DDP 2, ring, eager",
            "CP 2, all_to_all, compiled, documents",
            "owner 2 x CP 2, AdamW, eager",
            "torch's Adagrad, owner 2 x TP 2",
            "torch's Adagrad, EP 2",
            "Muon, HSDP 2x2, eager",
            "Muon, PP 2 x FSDP 2 interleaved, eager",
            "qk_norm, CP 2, eager",
            "attention by flash2, TP 2",
            "muP, TP 2",
            "muP, gate of shared experts, TP 2",
            "muP, latent attention, tied, PP 2",
            "muP, Muon, split heads, experts, further tokens, FSDP 2",
            "Muon, FSDP 2 x TP 2, eager",
            "Muon, PP 2, eager",
            "Muon, experts, EP 2 x FSDP 2, eager",
            "further tokens, CP 2",
            "further, PP 2 x CP 2, documents, eager",
            "tied, owner 2 x PP 2 interleaved, Muon, eager",
            "Gemma 3, FSDP 2 x TP 2, eager",
            "OLMo 3, CP 4, eager",
            "OLMo 3, CP 2 all_to_all, eager",
            "gate, squared relu, experts, window, CP 2 x TP 2, eager",
            "delta, TP 2",
            "delta, PP 2",
            "delta, documents over chunks, CP 2",
            "qk_norm, TP 2, eager",
            "qk_norm over all heads, TP 2",
            "window, documents, CP 2",
            "owner over cp 2 x PP 2 zero-bubble, Muon",
            "attention by flash2, CP 2, all_to_all",
            "chosen by little memory, FSDP 2",
            "ZeRO 1, 4 ranks",
        ],
        # Each of their axes has another row, and `parity.py --random`, which .ci/run has as well, draws them all.
        long=[
            "Qwen3-Next, CP 2 x TP 2, eager",
            "Qwen3-Next, FSDP 2 x TP 2, compiled",
            "further, FSDP 2 x TP 2, full, compiled",
            "DeepSeek-V3, EP 2 x PP 2, eager",
            "1 process, selective, compiled, accumulation 2",
            "HSDP 2x2, none, compiled, accumulation 1",
            "FSDP 2 x TP 2, selective, compiled, accumulation 2",
            "CP 2 x FSDP 2, gather, compiled, documents",
            "CP 2 x TP 2, all_to_all, eager, documents",
            "DDP 2 x TP 2, selective, eager",
            "PP 2 x CP 2 x FSDP 2, selective, eager",
            "memory limit, PP 2, compiled",
            "tied, PP 2 x FSDP 2, compiled",
            "Gemma 3, CP 2 x TP 2, compiled",
            "Qwen3 with experts, PP 2 x FSDP 2, compiled",
            "AdEMAMix, FSDP 2 x TP 2, cautious",
            "torch's Adagrad, HSDP 2x2",
            "Muon, FSDP 2 x TP 2, compiled",
            "Muon, options, FSDP 2 x TP 2, eager",
            "qk_norm, TP 2, compiled",
            "further tokens, TP 2",
            "further, PP 2 x TP 2, eager",
            "muP, Muon, split heads, experts, further tokens, CP 2",
            "qk_norm, owner 2 x TP 2, Muon, eager",
            "qk_norm, FSDP 2 x TP 2, eager",
            "norms before and after, TP 2",
            "owner 2 x TP 2, Muon, eager",
            "Lion, FSDP 2 x TP 2",
            "attention gate, TP 2",
            "tied, PP 2 x TP 2, eager",
            "PP 2 x TP 2, selective, eager, accumulation 2",
        ],
    ),
)
def test_chosen_rows_in_float64(ranks, name):
    if "zero-bubble" in name and not has_zero_bubble():
        with pytest.raises(RuntimeError, match=r"zero_bubble_v.* needs torch 2.13"):
            assert_parity(ranks, [ROWS[name]])
    else:
        assert_parity(ranks, [ROWS[name]])


@pytest.mark.slow
@pytest.mark.parametrize("name", marked([row.name for row in memory_rows()], slow=["memory limit, TP 2, compiled"]))
def test_the_memory_limits_of_rows_fall_on_some_layers(name):
    row = ROWS[name]
    config = load(CONFIG, row.overrides, row.ranks).config
    choice = planned_choice(config, row.ranks, None)
    assert choice
    assert choice.job.activation_checkpoint.mode != "none"
    assert choice.job.activation_checkpoint.layers


@pytest.mark.long
@pytest.mark.parametrize("name", CHOSEN_OF_THE_LONGEST)
def test_the_longest_rows_in_float64(ranks, name):
    assert_parity(ranks, [ROWS[name]])


@pytest.mark.slow
def test_the_same_in_float32(ranks):
    names = [
        "FSDP 4, selective, eager, accumulation 2",
        "FSDP 2 x TP 2, full, eager, accumulation 1",
        "FSDP 2, none, compiled, accumulation 1",
    ]
    assert_parity(ranks, [ROWS[name] for name in names], "float32")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    marked(
        MORE,
        slow=[
            "always reshard, prefetch 3",
            "tied embedding, compiled",
            "inf norm, PP 2 x FSDP 2",
            "inf norm, FSDP 2 x TP 2",
        ],
        long=["tied embedding, FSDP 2 x TP 2", "always reshard, PP 2 x FSDP 2"],
    ),
)
def test_other_options(ranks, name):
    n_ranks, run, machine = MORE[name]
    assert_parity(ranks, [Row(name, n_ranks, words(machine))], overrides=words(run))


def test_what_cannot_work_is_refused_with_the_reason():
    assert [name for name, reason in refusals(CONFIG, REFUSED) if not reason] == []
