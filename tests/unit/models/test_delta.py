"""Gated DeltaNet in chunks against its recurrence, token by token, and torch's own convolution."""

import pytest
import torch
import torch.nn.functional as F

from configs.schema import Model
from models.delta import CHUNK, DeltaNet, Heads, convolve, delta_rule
from models.documents import Documents
from tests.unit.hf_support import TINY, make_model

BATCH, KEY_HEADS, SHARING, KEY_DIM, VALUE_DIM = 2, 3, 2, 5, 4


def one_by_one(q, k, v, log_decay, strength, documents, memory):
    """The recurrence of models/delta.py; the memory is zeros where a document begins."""
    outputs = []
    for t in range(q.shape[1]):
        if documents is not None and t > 0:
            memory = memory * (documents[:, t] == documents[:, t - 1])[:, None, None, None, None]
        memory = memory * log_decay[:, t, :, :, None, None].exp()
        held = torch.einsum("bhrkv,bhk->bhrv", memory, k[:, t])
        correction = strength[:, t, :, :, None] * (v[:, t] - held)
        memory = memory + torch.einsum("bhk,bhrv->bhrkv", k[:, t], correction)
        outputs.append(torch.einsum("bhrkv,bhk->bhrv", memory, q[:, t]))
    return torch.stack(outputs, 1), memory


def inputs(seq_len):
    torch.manual_seed(seq_len)
    heads = (BATCH, seq_len, KEY_HEADS)
    q, k = (F.normalize(torch.randn(*heads, KEY_DIM, dtype=torch.float64), dim=-1) for _ in range(2))
    v = torch.randn(*heads, SHARING, VALUE_DIM, dtype=torch.float64)
    log_decay, strength = -2 * torch.rand(*heads, SHARING).double(), torch.rand(*heads, SHARING).double()
    memory = torch.randn(BATCH, KEY_HEADS, SHARING, KEY_DIM, VALUE_DIM, dtype=torch.float64)
    return [each.requires_grad_() for each in (q, k, v, log_decay, strength, memory)]


@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize("seq_len", [1, 9, CHUNK, CHUNK + 1, 3 * CHUNK - 7])
def test_chunks_are_the_recurrence_in_outputs_state_and_gradients(seq_len, has_documents):
    given = inputs(seq_len)
    documents = (torch.rand(BATCH, seq_len) < 0.06).cumsum(1, dtype=torch.int32) if has_documents else None
    found = delta_rule(*given[:5], documents, given[5])
    expected = one_by_one(*given[:5], documents, given[5])
    weights = [torch.randn_like(each) for each in found]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)
    gradients = [
        torch.autograd.grad(sum((w * each).sum() for w, each in zip(weights, results, strict=True)), given)
        for results in (found, expected)
    ]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


def test_a_memory_that_fades_at_once_makes_no_nan():
    """ln a is so low that products of the factors vanish within a chunk, and their quotients would overflow."""
    q, k, v, log_decay, strength, _ = inputs(CHUNK + 5)
    fading = (log_decay.detach() * 400).requires_grad_()
    out, memory = delta_rule(q, k, v, fading, strength)
    expected, _ = one_by_one(q, k, v, fading, strength, None, torch.zeros_like(memory))
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-11)
    out.sum().backward()
    assert all(each.grad.isfinite().all() for each in (q, k, v, fading, strength))


@pytest.mark.parametrize("kernel", [1, 4])
def test_the_convolution_is_torchs_of_each_document(kernel):
    torch.manual_seed(0)
    rows = torch.randn(1, 11, KEY_HEADS, 6, dtype=torch.float64)
    filters = torch.randn(KEY_HEADS, 6, kernel, dtype=torch.float64)

    def alone(part):
        channels = F.pad(part.flatten(2).transpose(1, 2), (kernel - 1, 0))
        out = F.conv1d(channels, filters.flatten(0, 1)[:, None], groups=KEY_HEADS * 6)
        return F.silu(out).transpose(1, 2).unflatten(2, (KEY_HEADS, 6))

    torch.testing.assert_close(convolve(rows, filters, None, None)[0], alone(rows), rtol=0, atol=1e-13)
    documents = torch.tensor([[0] * 2 + [1] * 8 + [2]])
    expected = torch.cat([alone(part) for part in rows.split([2, 8, 1], 1)], 1)
    torch.testing.assert_close(convolve(rows, filters, documents, None)[0], expected, rtol=0, atol=1e-13)


def test_a_state_goes_on_where_the_tokens_end():
    torch.manual_seed(0)
    layer = DeltaNet(TINY["qwen3_next"]).double()
    for parameter in layer.parameters():
        parameter.data.normal_()
    rows, gates = (torch.randn(2, 80, 2, n, dtype=torch.float64) for n in (2 * 8 + 2 * 12, 4))
    heads: Heads = layer._heads()
    whole, end = layer.continued(rows, gates, heads, None)
    state, parts = None, []
    for part in (slice(0, 1), slice(1, 3), slice(3, 70), slice(70, 80)):
        out, state = layer.continued(rows[:, part], gates[:, part], heads, state)
        parts.append(out)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-12)
    torch.testing.assert_close(state, end, rtol=0, atol=1e-12)


def test_nothing_passes_from_a_document_or_a_sequence_to_another():
    """In the loss's gradients neither: those of embeddings are of the tokens of one document."""
    keys = TINY["qwen3_next"].model_dump() | {"delta": TINY["qwen3_next"].delta.model_copy(update={"conv_kernel": 3})}
    model = make_model(Model(**keys), torch.float64)
    lengths = [70, 1, 9]
    first, second = torch.randint(0, 48, (1, sum(lengths))), torch.randint(48, 96, (1, sum(lengths)))
    ids = torch.tensor([[number for number, length in enumerate(lengths) for _ in range(length)]] * 2)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    packed = model(torch.cat((first, second)), positions, Documents.find(ids))
    apart = [torch.cat([model(part) for part in row.split(lengths, 1)], 1) for row in (first, second)]
    torch.testing.assert_close(packed, torch.cat(apart), rtol=0, atol=1e-11)
    packed[1, 71:].sum().backward()
    reached = model.embed_tokens.weight.grad.abs().sum(1)
    seen = (reached > 1e-10 * reached.max()).nonzero().flatten().tolist()
    assert set(seen) == set(second[0, 71:].tolist())
