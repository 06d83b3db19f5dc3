"""Float8 products of groups of rows, against a loop over the groups with a second implementation's rounding."""

import pytest
import torch
from torch.testing import assert_close

from models.grouped_mm import _grouped_mm_float8, grouped_mm
from parallelisms.float8_experts import multiply
from scripts.parity_float8 import E4M3, rounded

COUNTS = [3, 0, 5, 1, 0]
TOLERANCES = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2**-8}


def factors(counts, dtype, n_in=32, n_out=48):
    """Rows, weights and gradients, whose sizes differ from row to row."""
    torch.manual_seed(0)
    n = sum(counts)
    rows = torch.randn(n, n_in, dtype=dtype) * torch.logspace(-6, 6, n, dtype=dtype)[:, None]
    weights = torch.randn(len(counts), n_out, n_in, dtype=dtype) * torch.logspace(-2, 2, n_in, dtype=dtype)
    return rows.requires_grad_(), weights.requires_grad_(), torch.randn(n, n_out, dtype=dtype)


def by_a_loop(rows, weights, grad, counts):
    """Output, gradient of the rows and gradient of the weights, in float64."""
    outputs, of_rows, of_weights = [], [], []
    for x, w, g in zip(rows.split(counts), weights, grad.split(counts), strict=True):
        outputs.append(rounded(x, E4M3, 1).double() @ rounded(w, E4M3, 1).double().T)
        of_rows.append(rounded(g, E4M3, 1).double() @ rounded(w, E4M3, 0).double())
        of_weights.append(g.double().T @ x.double())
    return torch.cat(outputs), torch.cat(of_rows), torch.stack(of_weights)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("counts", [COUNTS, [0] * 5, [0, 9, 0]])
def test_products_are_those_of_a_loop(dtype, counts):
    rows, weights, grad = factors(counts, dtype)
    out = multiply(rows, weights, torch.tensor(counts), emulate=True)
    found = (out, *torch.autograd.grad(out, (rows, weights), grad))
    for ours, theirs in zip(found, by_a_loop(rows.detach(), weights.detach(), grad, counts), strict=True):
        assert ours.dtype == dtype
        # Sums of rows of other sizes: each element has the error of the largest of its row.
        scale = theirs.abs().amax(-1, keepdim=True).clamp(min=1e-300)
        assert_close(ours.double() / scale, theirs / scale, rtol=0, atol=TOLERANCES[dtype])


def test_a_row_of_zeros_stays_zero():
    rows, weights, grad = factors(COUNTS, torch.float32)
    with torch.no_grad():
        rows[4] = 0
        weights[2, 7] = 0
        grad[5] = 0
    out = multiply(rows, weights, torch.tensor(COUNTS), emulate=True)
    (of_rows,) = torch.autograd.grad(out, rows, grad)
    assert not out[4].any()
    assert not out[3:8, 7].any()
    assert not of_rows[5].any()
    assert out.isfinite().all()
    assert of_rows.isfinite().all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_values_that_are_not_finite_are_in_all_of_their_row_alone(bad):
    rows, weights, _ = factors(COUNTS, torch.float32)
    with torch.no_grad():
        rows[4, 0] = bad
    out = multiply(rows, weights, torch.tensor(COUNTS), emulate=True)
    assert out[4].isnan().all()
    assert out[[0, 1, 2, 3, 5, 6, 7, 8]].isfinite().all()


def test_rows_that_a_smaller_group_leaves_change_nothing():
    """What fills a buffer of expert parallelism is behind the groups' rows."""
    rows, weights, grad = factors(COUNTS, torch.float32)
    more, more_grad = (torch.cat((each.detach(), torch.full((3, each.shape[1]), 1e4))) for each in (rows, grad))
    more.requires_grad_()
    plain, padded = (multiply(each, weights, torch.tensor(COUNTS), emulate=True) for each in (rows, more))
    assert torch.equal(padded[:9], plain)
    of_plain = torch.autograd.grad(plain, (rows, weights), grad)
    of_padded = torch.autograd.grad(padded, (more, weights), more_grad)
    assert torch.equal(of_padded[0][:9], of_plain[0])
    assert torch.equal(of_padded[1], of_plain[1])


def test_the_error_is_that_of_three_bits():
    rows, weights, grad = factors(COUNTS, torch.float32)
    counts = torch.tensor(COUNTS)
    out, exact = multiply(rows, weights, counts, emulate=True), grouped_mm(rows, weights, counts)
    found, wide = (torch.autograd.grad(each, (rows, weights), grad) for each in (out, exact))
    for ours, theirs in ((out, exact), (found[0], wide[0])):
        assert 0.005 < (ours - theirs).norm() / theirs.norm() < 0.06
    assert torch.equal(found[1], wide[1])


@pytest.mark.slow
def test_compiled_products_have_the_gradients_of_eager_ones():
    """Those of the op itself, of which a CPU has no kernel but this one."""

    def on_a_cpu(rows, row_units, weights, weight_units, counts, fast_sums):
        wide = (rows.float() * row_units[:, None], weights.float() * weight_units[..., None])
        return grouped_mm(*wide, counts).bfloat16()

    _grouped_mm_float8.register_kernel("cpu")(on_a_cpu)
    rows, weights, grad = factors(COUNTS, torch.bfloat16)
    found = []
    for way in (multiply, torch.compile(multiply, fullgraph=True, backend="aot_eager")):
        out = way(rows, weights, torch.tensor(COUNTS), emulate=False)
        found.append((out, *torch.autograd.grad(out, (rows, weights), grad)))
    assert found[0][1].any()
    assert_close(found[1], found[0], rtol=0, atol=0)
