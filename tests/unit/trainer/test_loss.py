"""The chunked loss against the plain one: values, gradients, memory, compilation."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainer import loss as loss_module
from trainer.data.loader import IGNORED
from trainer.loss import CrossEntropy, chunk_rows


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of at most 7 rows of 50 logits in float64."""
    _limit_chunks(monkeypatch, rows=7, row_bytes=50 * 8)


def _limit_chunks(monkeypatch: pytest.MonkeyPatch, rows: int, row_bytes: int) -> None:
    monkeypatch.setattr(loss_module, "_MIN_CHUNK_ROWS", 1)
    monkeypatch.setattr(loss_module, "_CPU_CHUNK_BYTES", rows * row_bytes)


def _inputs(batch: int, seq: int, dim: int, vocab: int, dtype: torch.dtype = torch.float64, ignored: float = 0.3):
    generator = torch.Generator().manual_seed(7)
    hidden = torch.randn(batch, seq, dim, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocab, dim, generator=generator, dtype=torch.float64)
    targets = torch.randint(vocab, (batch, seq), generator=generator)
    targets[torch.rand(batch, seq, generator=generator) < ignored] = IGNORED
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets


def _plain(hidden: Tensor, weight: Tensor, targets: Tensor, z_loss_weight: float = 0.0) -> Tensor:
    logits = F.linear(hidden, weight).flatten(0, 1)
    nll = F.cross_entropy(logits, targets.flatten(), reduction="sum", ignore_index=IGNORED)
    z = logits.logsumexp(-1)[targets.flatten() != IGNORED]
    return nll + z_loss_weight * z.square().sum()


def _with_gradients(loss: Tensor, hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """The loss, and the gradients of what the trainer sends back: the loss divided by a number."""
    return loss.detach(), *torch.autograd.grad(loss / 13, (hidden, weight))


def _expected(hidden: Tensor, weight: Tensor, targets: Tensor, z_loss_weight: float) -> tuple[Tensor, ...]:
    """The cross-entropy, and gradients with the z-loss."""
    _, *gradients = _with_gradients(_plain(hidden, weight, targets, z_loss_weight), hidden, weight)
    return _plain(hidden, weight, targets).detach(), *gradients


def _assert_equal(ours: tuple[Tensor, ...], expected: tuple[Tensor, ...], bound: float) -> None:
    for a, b in zip(ours, expected, strict=True):
        assert (a - b).abs().max() <= bound * max(1.0, b.abs().max().item())


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3), st.integers(1, 20), st.integers(1, 60), st.integers(1, 25), st.sampled_from([0.0, 0.1]),
    st.sampled_from([0.0, 0.4, 1.0]),
)  # fmt: skip
def test_exact_in_float64(batch: int, seq: int, vocab: int, rows: int, z_loss_weight: float, ignored: float):
    hidden, weight, targets = _inputs(batch, seq, 5, vocab, ignored=ignored)
    with pytest.MonkeyPatch.context() as monkeypatch:
        _limit_chunks(monkeypatch, rows, vocab * 8)
        ours = _with_gradients(CrossEntropy(z_loss_weight)(hidden, weight, targets), hidden, weight)
    _assert_equal(ours, _expected(hidden, weight, targets, z_loss_weight), 1e-12)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_bias_and_softcap_are_part_of_the_logits(small_chunks: None, softcap: float):
    hidden, weight, targets = _inputs(2, 9, 5, 23)
    bias = torch.randn(23, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).requires_grad_()
    logits = F.linear(hidden, weight, bias).flatten(0, 1)
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    expected = F.cross_entropy(logits, targets.flatten(), reduction="sum", ignore_index=IGNORED)
    found = CrossEntropy()(hidden, weight, targets, bias=bias, softcap=softcap)
    tensors = (hidden, weight, bias)
    ours = (found.detach(), *torch.autograd.grad(found / 13, tensors))
    _assert_equal(ours, (expected.detach(), *torch.autograd.grad(expected / 13, tensors)), 1e-12)


def test_nothing_valid_is_zero_with_zero_gradients():
    hidden, weight, targets = _inputs(2, 10, 4, 50, ignored=1.0)
    for tensor in _with_gradients(CrossEntropy(0.1)(hidden, weight, targets), hidden, weight):
        assert not tensor.any()


@pytest.mark.usefixtures("small_chunks")
def test_large_logits_do_not_overflow():
    hidden, weight, targets = _inputs(1, 9, 4, 50)
    ours = _with_gradients(CrossEntropy()(hidden * 1e4, weight, targets), hidden, weight)
    _assert_equal(ours, _with_gradients(_plain(hidden * 1e4, weight, targets), hidden, weight), 1e-12)


@pytest.mark.usefixtures("small_chunks")
def test_evaluation_gives_the_same_value():
    hidden, weight, targets = _inputs(2, 10, 4, 50)
    with torch.no_grad():
        value = CrossEntropy(0.1)(hidden, weight, targets)
    assert not value.requires_grad
    assert value == CrossEntropy(0.1)(hidden, weight, targets)


@pytest.mark.parametrize(
    ("dtype", "value_bound", "gradient_bound"), [(torch.float32, 1e-6, 2e-6), (torch.bfloat16, 1e-3, 1e-2)]
)
def test_lower_precision(dtype: torch.dtype, value_bound: float, gradient_bound: float):
    hidden, weight, targets = _inputs(2, 300, 32, 500, dtype)
    ours = _with_gradients(CrossEntropy()(hidden, weight, targets), hidden, weight)
    exact_inputs = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    expected = _with_gradients(_plain(*exact_inputs, targets), *exact_inputs)
    assert [tensor.dtype for tensor in ours] == [torch.float32, dtype, dtype]
    for tensor, exact, bound in zip(ours, expected, (value_bound, gradient_bound, gradient_bound), strict=True):
        assert (tensor.double() - exact).norm() <= bound * exact.norm()


def test_many_chunks_are_as_precise_as_one_in_bfloat16(monkeypatch: pytest.MonkeyPatch):
    hidden, weight, targets = _inputs(1, 1024, 16, 64, torch.bfloat16, ignored=0.0)
    exact_inputs = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    exact = _with_gradients(_plain(*exact_inputs, targets), *exact_inputs)[2]
    errors = []
    for rows in (1024, 4):
        _limit_chunks(monkeypatch, rows, 64 * 4)
        ours = _with_gradients(CrossEntropy()(hidden, weight, targets), hidden, weight)[2]
        errors.append(((ours.double() - exact).norm() / exact.norm()).item())
    assert errors[1] < 1.2 * errors[0]


def test_a_second_backward_is_an_error():
    hidden, weight, targets = _inputs(1, 4, 4, 9)
    value = CrossEntropy()(hidden, weight, targets)
    value.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


@pytest.mark.parametrize(
    ("tokens", "row_bytes"), list(itertools.product((1, 255, 2048, 6000, 65536), (400, 32768, 513024)))
)
@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_chunks_cover_the_tokens_evenly_within_the_budget(tokens: int, row_bytes: int, device_type: str):
    rows = chunk_rows(tokens, row_bytes, device_type)
    chunks = -(-tokens // rows)
    assert rows <= 256 or rows * row_bytes <= {"cpu": 16 * 2**20, "cuda": 2 * 2**30}[device_type]
    assert chunks * rows - tokens < chunks  # no chunk is short by more than rounding makes it


class _LargestTensor(TorchDispatchMode):
    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.numel = max(self.numel, *sizes, 0)
        return result


def test_full_logits_never_exist():
    hidden, weight, targets = _inputs(2, 1024, 8, 8192, torch.float32)
    with _LargestTensor() as ours:
        CrossEntropy(1e-4)(hidden, weight, targets).backward()
    with _LargestTensor() as plain:
        _plain(hidden, weight, targets).backward()
    assert plain.numel == 2048 * 8192
    assert ours.numel == 512 * 8192  # 16 MiB


@pytest.mark.slow
def test_compiled_is_exact_without_breaks_or_recompilation(monkeypatch: pytest.MonkeyPatch):
    _limit_chunks(monkeypatch, rows=8, row_bytes=50 * 8)
    torch._dynamo.reset()
    counters.clear()
    for step in range(3):
        hidden, weight, targets = _inputs(2, 16, 4, 50, ignored=0.1 * step)
        with torch._dynamo.config.patch(error_on_recompile=step > 0):
            ours = _with_gradients(CrossEntropy(0.1, compile=True)(hidden, weight, targets), hidden, weight)
            with torch.no_grad():
                assert CrossEntropy(0.1, compile=True)(hidden, weight, targets) == ours[0]
        _assert_equal(ours, _expected(hidden, weight, targets, 0.1), 1e-12)
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]
