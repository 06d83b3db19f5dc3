"""Every way of spreading a step over devices runs on CUDA's side of the code, and issues the collectives it should.

Values are checked elsewhere, on CPUs (the parity table); what only a GPU's path has is checked here: streams, NCCL
groups, layouts, generated kernels, and that nothing makes the host wait.
"""

import os
from collections import Counter
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from parallelisms import expert
from parallelisms.torch_internals import has_zero_bubble
from tests.null_gpu.device import Counters
from tests.null_gpu.step import measure

_c10d = torch.ops._c10d_functional
SMALL = (
    "--model.dim 512 --model.n_layers 4 --model.n_heads 8 --model.n_kv_heads 4 --model.head_dim 64 "
    "--model.ffn_dim 1024 --model.vocab_size 4096 --model.tie_embeddings false --training.seq_len 512 "
    "--training.micro_batch_size 2 --training.global_batch_size 8 --activation_checkpoint.mode none"
)
ONE_BATCH = f"{SMALL} --training.global_batch_size 2"
"""For what the micro-batches of a step have in common."""
EXPERTS = "--model.n_experts 4 --model.experts_per_token 2"
BUFFERS = "--expert.exchange buffers"
OWNER = "--mesh.dp_replicate 2 --mesh.dp_shard 1 --fsdp.partition owner"
NARROW = "--training.dtype bfloat16 --optimizer.rounding stochastic"
MESHES = {
    # name: (ranks, words, what must be among the collectives of a step)
    "FSDP 2": (2, "", {"dp (2 ranks): allgather_base", "dp (2 ranks): reduce_scatter_base"}),
    "HSDP 2x2": (4, "--mesh.dp_replicate 2", {"shard (2 ranks): allgather_base", "replicas (2 ranks): allreduce"}),
    "DDP 2": (2, "--mesh.dp_replicate 2 --mesh.dp_shard 1", {"dp (2 ranks): allreduce"}),
    "ZeRO 1": (2, "--fsdp.zero_stage 1", {"dp (2 ranks): reduce_scatter_base"}),
    "TP 2": (2, "--mesh.tp 2", {"tp (2 ranks): allgather_into_tensor_coalesced", "tp (2 ranks): allreduce"}),
    "CP 2 gather": (2, "--mesh.cp 2", {"cp (2 ranks): allgather_into_tensor_coalesced"}),
    "CP 2 ring": (2, "--mesh.cp 2 --context.method ring", {"cp (2 ranks): send", "cp (2 ranks): recv"}),
    "CP 2 all_to_all": (2, "--mesh.cp 2 --context.method all_to_all", {"cp (2 ranks): alltoall_base"}),
    "windows, CP 2": (
        2,
        "--mesh.cp 2 --context.method ring --model.window 100 --model.window_pattern 2",
        {"cp (2 ranks): alltoall_base", "cp (2 ranks): send"},
    ),
    "states of fewer heads than ranks, CP 2": (
        2,
        '--mesh.cp 2 --model.layers ["delta","full"] --model.delta.key_heads 1 --model.delta.value_heads 2',
        {"cp (2 ranks): alltoall_base", "cp (2 ranks): allgather_into_tensor_coalesced"},
    ),
    "PP 2 gpipe": (2, "--mesh.pp 2 --pipeline.schedule gpipe", {"pp (2 ranks): send"}),
    "PP 2 1f1b": (2, "--mesh.pp 2 --pipeline.schedule 1f1b", {"pp (2 ranks): send"}),
    "PP 2 interleaved": (2, "--mesh.pp 2 --pipeline.schedule interleaved_1f1b", {"pp (2 ranks): send"}),
    "owner 2": (2, OWNER, {"dp (2 ranks): broadcast", "dp (2 ranks): allreduce"}),
    "HSDP 2x2, NorMuon": (
        4,
        "--mesh.dp_replicate 2 --optimizer.name muon --optimizer.neuron_beta 0.95",
        {"dp (4 ranks): alltoall_base", "dp (4 ranks): allreduce"},
    ),
    "owner 2, Muon": (2, f"{OWNER} --optimizer.name muon", {"dp (2 ranks): broadcast"}),
    "experts, owner 4 x EP 2": (
        4,
        f"{EXPERTS} {OWNER.replace('dp_replicate 2', 'dp_replicate 4')} --mesh.ep 2 --training.global_batch_size 16",
        {"dp (4 ranks): broadcast", "expert_replicas (2 ranks): broadcast", "expert_replicas (2 ranks): allreduce"},
    ),
    "experts, FSDP 2": (2, EXPERTS, {"dp (2 ranks): allgather_base"}),
    "experts, EP 2": (2, f"{EXPERTS} --mesh.ep 2", {"ep (2 ranks): alltoall_base"}),
    "experts, EP 2 in buffers": (2, f"{EXPERTS} --mesh.ep 2 {BUFFERS}", {"ep (2 ranks): alltoall_base"}),
    "FSDP 2 x TP 2, bfloat16 moments": (
        4,
        "--mesh.tp 2 --optimizer.moments_dtype bfloat16",
        {"tp (2 ranks): allreduce"},
    ),
    "FSDP 2 x TP 2, weights in bfloat16": (4, f"--mesh.tp 2 {NARROW}", {"tp (2 ranks): allreduce"}),
    "FSDP 2, a queue a group": (2, f"{EXPERTS} --comm.streams per_group", {"dp (2 ranks): allgather_base"}),
}
if has_zero_bubble():
    MESHES["PP 2 zero-bubble"] = (2, "--mesh.pp 2 --pipeline.schedule zero_bubble_v", {"pp (2 ranks): send"})
EAGER_ONLY = {"PP 2 zero-bubble"}  # configs/checks/mesh.py says why


def step(words: str) -> dict:
    """On a rank: the counts of a step."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return measure("llama_1b.toml", (*SMALL.split(), *words.split()), warm_up=2, timed=1)


def run(null_ranks, ranks: int, words: str) -> dict:
    """Rank 0's counts; what holds for every step is asserted of all ranks."""
    results = null_ranks(ranks, step, words)
    for result in results:
        assert result["launches"] > 100
        assert result["syncs"] == sum(result["sync_places"].values()), result["sync_places"]
        assert result["syncs"] == (8 if "mesh.ep" in words and BUFFERS not in words else 0), result["sync_places"]
    return results[0]


@pytest.mark.parametrize("name", MESHES)
def test_eager(null_ranks, name):
    ranks, words, expected = MESHES[name]
    result = run(null_ranks, ranks, f"{words} --compile.enable false")
    assert expected <= result["collectives_by_axis"].keys(), result["collectives_by_axis"]
    assert 0 < result["counts"]["launch_triton"] <= 4  # the optimizer's, of two groups: count, then update


@pytest.mark.parametrize("name", [name for name in MESHES if name not in EAGER_ONLY])
def test_compiled(null_ranks, name):
    ranks, words, expected = MESHES[name]
    result = run(null_ranks, ranks, words)
    assert expected <= result["collectives_by_axis"].keys(), result["collectives_by_axis"]
    assert result["counts"]["launch_triton"] > 50


def products_while_rows_travel(words: str) -> Counter[int]:
    """On a rank: how many products are queued between the beginning and the end of each exchange, in three steps."""
    queued: list[int] = []
    products = Counters()

    def begin(*given: Any) -> torch.Tensor:
        if torch.compiler.is_compiling():  # of the counts, which are no op of their own
            return _c10d.all_to_all_single(*given)
        queued.append(-products.read()["gemm"])
        return _c10d.all_to_all_single(*given)

    def end(rows: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return _c10d.wait_tensor(rows)
        queued[-1] += products.read()["gemm"]
        return _c10d.wait_tensor(rows)

    with patch.object(expert, "_c10d", SimpleNamespace(all_to_all_single=begin, wait_tensor=end)):
        step(words)
    return Counter(queued)


@pytest.mark.parametrize("enable", ["false", "true"])
def test_shared_experts_are_queued_while_rows_travel(null_ranks, enable):
    """Three products forward, six backward, beside the rows' way there; nothing beside their way back."""
    words = f"{EXPERTS} --model.n_shared_experts 1 --mesh.ep 2 {BUFFERS} --compile.enable {enable}"
    for found in null_ranks(2, products_while_rows_travel, words):
        assert found.keys() == {0, 3, 6}
        assert found[3] == found[6] > 0
        assert found[0] == found[3] * (2 if enable == "true" else 3)  # in eager mode also the counts


def test_one_kernel_updates_a_group(null_ranks):
    """Instead of torch's, of which each launch takes 36 tensors; in bfloat16, moments and weights take half."""
    by_torch, by_keel, halved, narrow = (
        run(null_ranks, 1, f"--model.n_layers 16 --compile.enable false {words}")
        for words in ("--optimizer.kernel torch", "", "--optimizer.moments_dtype bfloat16", NARROW)
    )
    assert by_torch["counts"]["launch_triton"] == 0
    assert by_keel["counts"]["launch_triton"] == halved["counts"]["launch_triton"] == 4
    assert by_torch["counts"]["launch_aten"] - by_keel["counts"]["launch_aten"] > 147 // 36  # of the tensors
    assert by_keel["memcpys"] <= by_torch["memcpys"] + 2  # the tables, where addresses have changed
    assert halved["launches"] == by_keel["launches"]
    assert narrow["counts"]["launch_triton"] == 4
    assert narrow["steady_peak_bytes"] < halved["steady_peak_bytes"] < by_keel["steady_peak_bytes"]


@pytest.mark.parametrize(("words", "parts"), [("", 1), ("--mesh.cp 2", 2), ("--compile.enable false", 1)])
def test_the_largest_logits_take_one_kernel_a_layer_and_no_wait(null_ranks, words, parts):
    """One for each part of the sequences that a rank has; products of the model are as many as before."""
    without, with_it = (run(null_ranks, 2, f"{words} {more}") for more in ("", "--optimizer.qk_clip 100"))
    passes = 4 * 4 // (2 // parts)  # layers, and micro-batches of two of eight sequences
    assert with_it["counts"]["launch_triton"] - without["counts"]["launch_triton"] == passes * parts
    assert with_it["syncs"] == without["syncs"] == 0
    assert with_it["counts"]["gemm"] == without["counts"]["gemm"]


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_activation_checkpointing_computes_again(null_ranks, mode):
    plain, checkpointed = (
        run(null_ranks, 2, f"--compile.enable false --activation_checkpoint.mode {each}") for each in ("none", mode)
    )
    assert checkpointed["counts"]["gemm"] + checkpointed["launches"] > plain["counts"]["gemm"] + plain["launches"]
    assert checkpointed["steady_peak_bytes"] < plain["steady_peak_bytes"]


@pytest.mark.parametrize("mode", ["full", "selective", "budget"])
def test_compiled_activation_checkpointing_keeps_less(null_ranks, mode):
    plain, checkpointed = (run(null_ranks, 2, f"--activation_checkpoint.mode {each}") for each in ("none", mode))
    assert checkpointed["steady_peak_bytes"] < plain["steady_peak_bytes"]
    assert checkpointed["counts"]["gemm"] >= plain["counts"]["gemm"]
