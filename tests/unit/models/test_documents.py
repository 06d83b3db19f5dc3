"""Attention within documents against a mask of all pairs, on the CPU's kernels and as CUDA's are called."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from models import documents
from models.documents import Documents, attend_within, has_kernel
from models.llama import document_mask
from tests.unit.packed_flash import PackedFlash


@pytest.fixture(params=["one by one", "packed"])
def kernel(request, monkeypatch):
    if request.param == "packed":
        monkeypatch.setattr(documents, "_flash_takes_packed", lambda q: True)
        monkeypatch.setattr(documents, "aten", PackedFlash())


def draw(seed, heads, kv_heads, seq_len, dtype):
    """q, k, v and a gradient, laid out as projections leave them, and ascending document ids."""
    generator = torch.Generator().manual_seed(seed)
    made = [
        torch.randn(2, seq_len, n, 8, generator=generator, dtype=torch.float64).to(dtype).transpose(1, 2)
        for n in (heads, kv_heads, kv_heads, heads)
    ]
    ids = torch.randint(0, 2, (2, seq_len), generator=generator).cumsum(1)
    return *made, ids // torch.randint(1, 5, (1,), generator=generator)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1000), kv_heads=st.integers(1, 2), group=st.integers(1, 3), seq_len=st.integers(1, 33))
def test_it_is_attention_under_a_mask(dtype, tolerance, seed, kv_heads, group, seq_len):
    q, k, v, grad, ids = draw(seed, kv_heads * group, kv_heads, seq_len, dtype)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out = attend_within(*leaves, Documents.find(ids).numbered())
    gradients = torch.autograd.grad(out, leaves, grad)
    exact = [t.double().requires_grad_() for t in (q, k, v)]
    expected = scaled_dot_product_attention(*exact, attn_mask=document_mask(ids), enable_gqa=True)
    expected_gradients = torch.autograd.grad(expected, exact, grad.double())
    for found, right in zip((out, *gradients), (expected, *expected_gradients), strict=True):
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), right, rtol=0, atol=tolerance)


def test_documents_are_counted():
    ids = torch.tensor([[0, 0, 0, 1, 2, 2], [0, 0, 0, 0, 0, 0]])
    found = Documents.find(ids)
    assert (found.slots, found.longest) == (4, 6)  # of 8, which no window has room for
    numbered = found.numbered()
    assert numbered.numbers.tolist() == [[0, 0, 0, 1, 2, 2], [3, 3, 3, 3, 3, 3]]
    assert numbered.ends.tolist() == [0, 3, 4, 6, 12]
    five = Documents.find(torch.tensor([[0, 1, 2, 3, 4, 4, 4, 4, 4, 4, 4, 4]]))
    assert (five.slots, five.longest) == (8, 8)
    assert five.numbered().ends.tolist() == [0, 1, 2, 3, 4, 12, 12, 12, 12]


def test_one_graph_serves_any_number_of_documents():
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(attend_within, fullgraph=True, backend=count)
    q, k, v, _, _ = draw(0, 4, 2, 64, torch.float32)
    for length in (64, 32, 16, 5, 1):
        found = Documents.find((torch.arange(64) // length).expand(2, -1))
        expected = attend_within(q, k, v, found.numbered())
        torch.testing.assert_close(compiled(q, k, v, found.numbered()), expected)
    assert len(graphs) == 1


@pytest.mark.parametrize("window", [0, 5])
def test_the_op_is_what_it_says(window):
    """Shapes, types and strides of its fake version, and its gradient's registration, as torch checks them."""
    q, k, v, _, ids = draw(1, 4, 2, 16, torch.float32)
    numbered = Documents.find(ids).numbered()
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    torch.library.opcheck(
        documents._document_attention, (*leaves, numbered.ends, numbered.ends, numbered.longest, window)
    )


def test_where_there_is_a_kernel():
    assert has_kernel("cpu", torch.float64, 7)
    assert has_kernel("cuda", torch.bfloat16, 128)
    assert not has_kernel("cuda", torch.float32, 128)
    assert not has_kernel("cuda", torch.bfloat16, 20)
    assert not has_kernel("cuda", torch.bfloat16, 264)
