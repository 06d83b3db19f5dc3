"""What a block takes is measured on any block, against what autograd keeps of a real one, and remembered."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from configs.layout import MeshSizes
from configs.load import load
from tests.end_to_end.launch import TINY
from trainer.planning import activations
from trainer.planning.activations import measure_blocks
from trainer.planning.block_memory import BlockMemory, measure_eager, worst


class UnknownBlock(nn.Module):
    """None of Keel's."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up = nn.Linear(32, 96)
        self.down = nn.Linear(96, 32)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def test_a_block_that_keel_does_not_know_is_measured():
    block = UnknownBlock()
    given = {p.untyped_storage().data_ptr() for p in block.parameters()}
    x = torch.randn(2, 64, 32, requires_grad=True)
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = block(x)
    kept[output.untyped_storage().data_ptr()] = output.nbytes
    expected = sum(size for storage, size in kept.items() if storage not in {*given, x.untyped_storage().data_ptr()})
    with FakeTensorMode(allow_non_fake_inputs=True):
        memory = measure_eager(UnknownBlock(), (torch.empty(2, 64, 32, requires_grad=True),))
    assert memory.kept == expected
    weights = sum(p.nbytes for p in block.parameters())
    ends = max(memory.moments, key=lambda moment: moment[1])
    assert ends[1] == weights
    assert x.nbytes <= ends[0] < memory.backward(1) < expected + 4 * 2 * 64 * 96 * 4


def test_only_moments_that_can_be_the_worst_are_kept():
    assert worst([(1, 5), (3, 2), (2, 2), (3, 1), (1, 4)]) == ((3, 2), (1, 5))


@pytest.mark.parametrize("change", ["", "--training.seq_len=64", "--activation_checkpoint.mode=full"])
def test_an_answer_is_remembered_until_what_it_depends_on_changes(monkeypatch, tmp_path, change):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(activations, "_answers", {})
    config = load(str(TINY), [], 1).config
    one = MeshSizes(1, 1, 1)
    first = measure_blocks(config, [0], one, on_gpu=False)
    monkeypatch.setattr(activations, "_answers", {})  # as in another process
    measured = []
    monkeypatch.setattr(activations, "_measure", lambda *_: measured.append(first[0]) or first[0])
    again = measure_blocks(load(str(TINY), change.split(), 1).config, [0], one, on_gpu=False)
    assert again == first
    assert len(measured) == bool(change)


def test_a_tensor_parallel_rank_keeps_half_of_the_stream_in_the_compute_dtype():
    words = ["--training.compute_dtype=bfloat16", "--activation_checkpoint.mode=full", "--mesh.tp=2"]
    config = load(str(TINY), words, 2).config
    (memory,) = measure_blocks(config, [0], MeshSizes(1, 1, 2), on_gpu=False).values()
    assert memory.kept == config.training.seq_len * config.model.dim * 2 // 2


@pytest.mark.slow
@pytest.mark.parametrize("compiled", ["false", "true"])
def test_what_computes_attention_in_this_process_changes_nothing(monkeypatch, tmp_path, compiled):
    config = load("parity.toml", ["--compile.enable", compiled], 1).config
    found = []
    for backends in ([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], SDPBackend.MATH):
        monkeypatch.setattr(activations, "_answers", {})
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / str(len(found))))
        with sdpa_kernel(backends):
            found.append(measure_blocks(config, [0], MeshSizes(1, 1, 1), on_gpu=False))
    assert found[0] == found[1]


@pytest.mark.parametrize(("fuses", "keeps_scores"), [(False, True), (True, False)])
def test_float32_scores_are_kept_where_no_kernel_of_a_gpu_takes_grouped_queries(
    monkeypatch, tmp_path, fuses, keeps_scores
):
    """Up to torch 2.13; 2.14's memory-efficient attention takes them."""
    monkeypatch.setattr(activations, "_answers", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(activations, "fuses_grouped_queries_in_float32", lambda: fuses)
    config = load(str(TINY), ["--training.seq_len=512", "--activation_checkpoint.mode=none"], 1).config
    kept = [measure_blocks(config, [0], MeshSizes(1, 1, 1), on_gpu=on_gpu)[0].kept for on_gpu in (True, False)]
    scores = config.model.n_heads * config.training.seq_len**2 * 4
    assert (kept[0] - kept[1] > 0.9 * scores) == keeps_scores  # the other kernels keep a sum for each query


def test_a_kind_of_block_is_measured_once_whatever_the_layers(monkeypatch, tmp_path):
    """Ranks of a pipeline have different layers."""
    monkeypatch.setattr(activations, "_answers", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measured = []
    monkeypatch.setattr(activations, "_measure", lambda asked, _: measured.append(asked.layer) or BlockMemory(1, ()))
    config = load("qwen3_next_80b_a3b.toml", [], 8).config  # a layer of kind full after three of kind delta
    for layers in ([6, 7], [4, 5], [0, 3], [1, 2]):
        measure_blocks(config, layers, MeshSizes(1, 1, 1), on_gpu=True)
    assert measured == [0, 3]
