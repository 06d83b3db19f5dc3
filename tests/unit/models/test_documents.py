"""Attention within documents against a mask of all pairs, on the CPU's kernels and as CUDA's are called."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from models import documents
from models.attention import document_mask
from models.documents import Documents, attend_near, attend_to_parts, attend_within, has_kernel
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


def near(n_queries, n_keys, window):
    """Which keys a query sees, by brute force; the last query's own key is the last one."""
    before = n_keys - n_queries
    seen = [[key <= query + before < key + window for key in range(n_keys)] for query in range(n_queries)]
    return torch.tensor(seen)


@pytest.mark.usefixtures("kernel")
@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 1000),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    seq_len=st.integers(1, 33),
    window=st.integers(1, 40),
    block=st.integers(1, 40),
    packs=st.booleans(),
)
def test_a_window_is_attention_under_a_mask(seed, kv_heads, group, seq_len, window, block, packs):
    q, k, v, grad, ids = draw(seed, kv_heads * group, kv_heads, seq_len, torch.float64)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "_BLOCK", block)
        out = attend_near(*leaves, Documents.find(ids).numbered() if packs else None, window)
        gradients = torch.autograd.grad(out, leaves, grad)
    mask = near(seq_len, seq_len, window) & (document_mask(ids) if packs else torch.tensor(True))
    expected = scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    exact = [t.clone().requires_grad_() for t in (q, k, v)]
    again = scaled_dot_product_attention(*exact, attn_mask=mask, enable_gqa=True)
    for found, right in zip(gradients, torch.autograd.grad(again, exact, grad), strict=True):
        torch.testing.assert_close(found, right, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("kernel")
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), window=st.integers(1, 12), start=st.integers(0, 20), n_queries=st.integers(1, 12))
def test_queries_of_a_part_of_a_sequence(seed, window, start, n_queries):
    """As a rank of context parallelism has them: its queries, and the keys in reach of them."""
    q, k, v, grad, _ = draw(seed, 4, 2, start + n_queries, torch.float64)
    first = max(0, start - window + 1)
    n_keys = start + n_queries - first
    leaves = [t.clone().requires_grad_() for t in (q[:, :, start:], k[:, :, first:], v[:, :, first:])]
    batch = torch.arange(3, dtype=torch.int32)
    out = attend_to_parts(*leaves, batch * n_queries, batch * n_keys, torch.tensor(n_keys), window)
    gradients = torch.autograd.grad(out, leaves, grad[:, :, start:])
    exact = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    expected = scaled_dot_product_attention(*exact, attn_mask=near(n_queries, n_keys, window), enable_gqa=True)
    for found, right in zip(gradients, torch.autograd.grad(expected, exact, grad[:, :, start:]), strict=True):
        torch.testing.assert_close(found, right, rtol=0, atol=1e-12)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


def with_sinks(q, k, v, mask, sinks):
    """Attention written out: a softmax over the keys that a query sees and its head's sink."""
    k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for each in (k, v))
    shares = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~mask, -torch.inf).exp()
    return shares @ v / (shares.sum(-1, keepdim=True) + sinks.exp()[:, None, None])


@pytest.mark.usefixtures("kernel")
@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 1000),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    seq_len=st.integers(1, 33),
    window=st.integers(0, 40),
    packs=st.booleans(),
    has_kernel=st.booleans(),
)
def test_sinks_are_one_more_score_of_each_head(seed, kv_heads, group, seq_len, window, packs, has_kernel):
    q, k, v, grad, ids = draw(seed, kv_heads * group, kv_heads, seq_len, torch.float64)
    sinks = torch.randn(kv_heads * group, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    leaves = [t.clone().requires_grad_() for t in (q, k, v, sinks)]
    mask = near(seq_len, seq_len, window or seq_len) & (document_mask(ids) if packs else torch.tensor(True))
    known = (Documents.find(ids).numbered() if has_kernel else document_mask(ids)) if packs else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "has_kernel", lambda *_: has_kernel)
        out = attend_near(*leaves[:3], known, window, leaves[3])
    gradients = torch.autograd.grad(out, leaves, grad)
    exact = [t.clone().requires_grad_() for t in (q, k, v, sinks)]
    expected = with_sinks(*exact[:3], mask, exact[3])
    expected_gradients = torch.autograd.grad(expected, exact, grad)
    for found, right in zip((out, *gradients), (expected, *expected_gradients), strict=True):
        torch.testing.assert_close(found, right, rtol=0, atol=1e-12)


def test_a_window_costs_no_more_pairs_than_it_has():
    """Pairs that a CPU computes grow with seq x window; without a window they are half of the square."""
    ends = torch.tensor([0, 32_768])
    pieces = list(documents._pieces(ends, ends, 1024, torch.float32))
    pairs = sum((rows.stop - rows.start) * (keys.stop - keys.start) for rows, keys, _ in pieces)
    assert pairs <= 32_768 * (1024 + documents._BLOCK)
    assert [rows.start for rows, _, _ in pieces] == list(range(0, 32_768, documents._BLOCK))


def test_one_mask_of_pairs_where_there_is_no_kernel(monkeypatch):
    q, k, v, _, ids = draw(3, 4, 2, 16, torch.float64)
    expected = attend_near(q, k, v, Documents.find(ids).numbered(), 5)
    whole = attend_near(q, k, v, None, 5)
    monkeypatch.setattr(documents, "has_kernel", lambda *_: False)
    torch.testing.assert_close(attend_near(q, k, v, document_mask(ids), 5), expected)
    torch.testing.assert_close(attend_near(q, k, v, None, 5), whole)


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


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [0, 5])
def test_the_op_is_what_it_says(window, has_sinks):
    """Shapes, types and strides of its fake version, and its gradient's registration, as torch checks them."""
    q, k, v, _, ids = draw(1, 4, 2, 16, torch.float32)
    numbered = Documents.find(ids).numbered()
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    sinks = torch.zeros(4, requires_grad=True) if has_sinks else None
    given = (*leaves, numbered.ends, numbered.ends, numbered.longest, window, sinks)
    torch.library.opcheck(documents._document_attention, given)


def test_where_there_is_a_kernel():
    assert has_kernel("cpu", torch.float64, 7)
    assert has_kernel("cuda", torch.bfloat16, 128)
    assert not has_kernel("cuda", torch.float32, 128)
    assert not has_kernel("cuda", torch.bfloat16, 20)
    assert not has_kernel("cuda", torch.bfloat16, 264)
