"""flash-linear-attention's kernels on a real GPU: Keel's recurrence, with documents and without, but for rounding."""

import pytest
import torch
import torch.nn.functional as F

from models.delta import outputs
from parallelisms.attention.delta import _outcome, by_kernels

pytest.importorskip("fla", reason="needs the package fla-core")

KEY_HEADS, SHARING, WIDTH = 4, 2, 128


@pytest.fixture(scope="module", autouse=True)
def working_kernels():
    if reason := _outcome(2, 512, KEY_HEADS, KEY_HEADS * SHARING, WIDTH, WIDTH, torch.device("cuda")):
        pytest.skip(reason)


def given(seq_len: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    heads = (2, seq_len, KEY_HEADS)
    q, k = (F.normalize(torch.randn(*heads, WIDTH, device="cuda"), dim=-1).bfloat16() for _ in range(2))
    v = torch.randn(*heads, SHARING, WIDTH, device="cuda").bfloat16()
    log_decay = -0.5 * torch.rand(*heads, SHARING, device="cuda")
    return [q * WIDTH**-0.5, k, v, log_decay, torch.rand(*heads, SHARING, device="cuda")]


def twice(kept, gained):
    """A memory before the tokens, that of the same tokens once before, which depends on all that they make of one."""
    return kept @ gained + gained


def outputs_and_gradients(rule, inputs, dtype, documents, memory, weights):
    leaves = [each.to(dtype or each.dtype).detach().requires_grad_() for each in inputs]
    out = rule(*leaves, documents, memory)
    return [out, *torch.autograd.grad(out, leaves, weights.to(out.dtype))]


@pytest.mark.parametrize("memory", [None, twice])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("mean_length", [None, 20, 3])
@pytest.mark.parametrize("seq_len", [512, 1000])
def test_kernels_compute_the_recurrence(seq_len, mean_length, compiled, memory):
    inputs = given(seq_len)
    documents = None
    if mean_length:
        documents = (torch.rand(2, seq_len, device="cuda") < 1 / mean_length).cumsum(1, dtype=torch.int32)
    weights = torch.randn_like(inputs[2])
    exact = outputs_and_gradients(outputs, inputs, torch.float64, documents, memory, weights)
    rule = torch.compile(by_kernels, fullgraph=True) if compiled else by_kernels
    found = outputs_and_gradients(rule, inputs, None, documents, memory, weights)
    for name, ours, reference in zip(("out", "q", "k", "v", "log_decay", "strength"), found, exact, strict=True):
        error = ((ours.double() - reference).norm() / reference.norm()).item()
        assert error < 0.01, f"{name}: {error}"
