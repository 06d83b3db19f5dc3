"""Attention block by block against softmax written out over all keys at once, with autograd's gradients."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from parallelisms.attention import backend
from parallelisms.attention import blocked as blocked_attention
from parallelisms.attention.blocked import DocumentPairs, attend, attend_backward, merge_
from tests.unit.packed_flash import PackedFlash


def plain(q, k, v, allowed):
    """Softmax attention; allowed: (batch, 1, queries, keys)."""
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~allowed, -math.inf)
    return scores.softmax(-1) @ v


def tensors(seed, kv_heads, group, queries, keys, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)

    def draw(heads, length):
        return torch.randn(2, heads, length, 8, generator=generator, dtype=torch.float64).to(dtype)

    q, grad = draw(kv_heads * group, queries), draw(kv_heads * group, queries)
    return q, draw(kv_heads, keys), draw(kv_heads, keys), grad


def pairs(queries, keys, slots):
    """Documents by their numbers, (batch, queries) and (batch, keys), in each row from 0; `slots` a row."""
    rows = torch.arange(len(queries))[:, None] * slots
    lengths = [(numbers == number).sum(-1).max() for numbers in (queries, keys) for number in range(slots)]
    return DocumentPairs((queries + rows).int(), (keys + rows).int(), len(queries) * slots + 3, int(max(lengths)))


@pytest.fixture(params=["kernel", "packed", "written out"])
def kernel(request, monkeypatch):
    """The CPU's kernels, those for packed sequences, and what stands in where there is none."""
    if request.param == "packed":
        monkeypatch.setattr(blocked_attention, "_takes_packed", lambda q: True)
        monkeypatch.setattr(blocked_attention, "aten", PackedFlash())
    if request.param == "written out":
        monkeypatch.setattr(blocked_attention, "flash_takes", lambda q: False)
        monkeypatch.setattr(blocked_attention, "_takes_bias", lambda q: False)
    monkeypatch.setattr(blocked_attention, "_TILE_ELEMENTS", 64)  # several tiles, the last one smaller


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("with_documents", [False, True])
@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 1000),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    earlier=st.integers(1, 21),
    queries=st.integers(1, 21),
)
def test_an_earlier_and_the_own_block_are_the_whole(with_documents, seed, kv_heads, group, earlier, queries):
    keys = earlier + queries
    q, k, v, grad = tensors(seed, kv_heads, group, queries, keys)
    positions = torch.arange(keys)
    allowed = (positions[earlier:, None] >= positions)[None, None].expand(2, -1, -1, -1)
    ids = own_ids = earlier_ids = None
    if with_documents:
        ids = torch.randint(0, 3, (2, keys), generator=torch.Generator().manual_seed(seed)).sort(dim=1).values
        allowed = allowed & (ids[:, earlier:, None] == ids[:, None, :])[:, None]
        own_ids, earlier_ids = (
            pairs(ids[:, earlier:], ids[:, earlier:], 3),
            pairs(ids[:, earlier:], ids[:, :earlier], 3),
        )
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    expected = plain(*leaves, allowed)
    expected_gradients = torch.autograd.grad(expected, leaves, grad)

    own, before = (k[:, :, earlier:], v[:, :, earlier:]), (k[:, :, :earlier], v[:, :, :earlier])
    out, logsumexp = attend(q, *own, own_ids, causal=True)
    merge_(out, logsumexp, *attend(q, *before, earlier_ids, causal=False))
    torch.testing.assert_close(out, expected.detach(), rtol=0, atol=1e-13)

    by_own = attend_backward(grad, q, *own, out, logsumexp, own_ids, causal=True)
    by_before = attend_backward(grad, q, *before, out, logsumexp, earlier_ids, causal=False)
    torch.testing.assert_close(by_own[0] + by_before[0], expected_gradients[0], rtol=0, atol=1e-12)
    for mine, theirs, whole in zip(by_own[1:], by_before[1:], expected_gradients[1:], strict=True):
        torch.testing.assert_close(torch.cat((theirs, mine), dim=2), whole, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("kernel")
def test_a_query_that_sees_nothing_counts_for_nothing():
    q, k, v, grad = tensors(0, 1, 2, queries=4, keys=4)
    others = pairs(torch.zeros(2, 4, dtype=torch.long), torch.ones(2, 4, dtype=torch.long), 2)
    out, logsumexp = attend(q, k, v, others, causal=False)
    assert not out.any()
    assert (logsumexp == -math.inf).all()
    whole, whole_logsumexp = attend(q, k, v, None, causal=False)
    before = whole.clone()
    merge_(whole, whole_logsumexp, out, logsumexp)
    assert torch.equal(whole, before)
    gradients = attend_backward(grad, q, k, v, whole, whole_logsumexp, others, causal=False)
    assert not any(gradient.any() for gradient in gradients)


@pytest.mark.usefixtures("kernel")
def test_half_types_are_summed_in_float32():
    q, k, v, _ = tensors(1, 1, 2, 16, 16, torch.bfloat16)
    out, logsumexp = attend(q[:, :, 8:], k[:, :, 8:], v[:, :, 8:], None, causal=True)
    out = out.to(logsumexp.dtype)
    merge_(out, logsumexp, *attend(q[:, :, 8:], k[:, :, :8], v[:, :, :8], None, causal=False))
    assert (out.dtype, logsumexp.dtype) == (torch.float32, torch.float32)
    exact = plain(*(t.double() for t in (q, k, v)), torch.ones(16, 16, dtype=torch.bool).tril()[None, None])
    torch.testing.assert_close(out.double(), exact[:, :, 8:], rtol=0, atol=0.02)


@pytest.mark.parametrize("kernel", ["auto", "cudnn"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_calls_of_the_cuda_kernels_fit_and_give_these_shapes(dtype, kernel):
    """Without a GPU: fake tensors check the arguments of the kernels, not what they compute."""
    with FakeTensorMode():
        q, grad = (torch.empty(2, 4, 16, 8, dtype=dtype, device="cuda") for _ in range(2))
        k, v = (torch.empty(2, 2, 16, 8, dtype=dtype, device="cuda") for _ in range(2))
        out, logsumexp = attend(q, k, v, None, True, kernel)
        gradients = attend_backward(grad, q, k, v, out, logsumexp, None, True, kernel)
    assert (out.shape, logsumexp.shape) == (q.shape, q.shape[:3])
    assert [g.shape for g in gradients] == [q.shape, k.shape, v.shape]
    assert logsumexp.dtype == torch.float32
    assert {t.dtype for t in (out, *gradients)} == {dtype}  # written in half the bytes; the sums are in float32


class Recording:
    """Operators of torch that note the logsumexp they are called with."""

    def __init__(self):
        self.logsumexps = []

    def __getattr__(self, name):
        operator = getattr(torch.ops.aten, name)
        if not name.endswith("_backward"):
            return operator

        def noted(grad, q, k, v, out, logsumexp, *others, **named):
            self.logsumexps.append(logsumexp)
            return operator(grad, q, k, v, out, logsumexp, *others, **named)

        return noted


def test_flash_attention_gets_a_logsumexp_without_gaps(monkeypatch):
    """CUDA's backward reads it by a bare pointer, where strides would be wrong gradients; the CPU's does not."""
    aten = Recording()
    monkeypatch.setattr(backend, "aten", aten)
    q, k, v, grad = tensors(0, 2, 2, 6, 6)
    out, logsumexp = attend(q, k, v, None, causal=True)
    rows = slice(3, None)  # as context parallelism hands over the second half of a rank's queries
    attend_backward(grad[:, :, rows], q[:, :, rows], k, v, out[:, :, rows], logsumexp[:, :, rows], None, causal=False)
    assert not logsumexp[:, :, rows].is_contiguous()
    assert aten.logsumexps
    assert all(each.is_contiguous() for each in aten.logsumexps)
