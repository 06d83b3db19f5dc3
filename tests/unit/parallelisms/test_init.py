"""Initial weights: their distribution, and the check that none was forgotten."""

import math

import pytest
import torch
from torch import nn

from configs.schema import Model
from models import build_model
from parallelisms.init import BLOCK_ELEMENTS, TRUNCATION, check_initialized, materialize

CONFIG = Model(dim=128, n_layers=3, n_heads=4, ffn_dim=384, vocab_size=10_000)


def built(seed=0, config=CONFIG, dtype=torch.float32):
    with torch.device("meta"):
        model = build_model(config).to(dtype)
    materialize(model, torch.device("cpu"), seed)
    return model


def test_weights_follow_the_truncated_normal_of_their_depth():
    model = built()
    truncated_std = _std_of_truncated_normal(TRUNCATION)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            assert (parameter == 1).all(), name
            continue
        std = CONFIG.init_std
        if "o_proj" in name or "down_proj" in name:
            std /= math.sqrt(2 * (int(name.split(".")[1]) + 1))
        assert parameter.abs().max() <= TRUNCATION * std
        tolerance = 5 / math.sqrt(parameter.numel())  # five standard errors
        assert parameter.mean().abs() <= tolerance * std, name
        assert parameter.std().item() == pytest.approx(truncated_std * std, rel=tolerance), name


def test_weights_depend_on_seed_and_name_alone():
    first, again, other = built(0), built(0), built(1)
    for (name, a), b, c in zip(first.named_parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert a.ndim == 1 or not torch.equal(a, c), name
    matrices = [p for p in first.parameters() if p.shape == (128, 128)]
    assert not any(torch.equal(a, b) for i, a in enumerate(matrices) for b in matrices[:i])


def test_every_version_of_torch_draws_the_same_weights():
    """Recorded with torch 2.13; 2.11's nn.init.trunc_normal_ would draw others."""
    layer = nn.Linear(192, 4096, bias=False, device="meta")
    layer.init_std = lambda name: 0.02
    materialize(layer, torch.device("cpu"), seed=0)
    first = torch.tensor([-0.031267818, 0.016145207, -0.019900156, -0.0045826985])
    torch.testing.assert_close(layer.weight[0, :4], first)
    assert layer.weight.double().sum().item() == pytest.approx(-27.3214407, abs=1e-5)


def test_blocks_of_a_matrix_are_drawn_apart():
    weight = built().embed_tokens.weight
    rows = BLOCK_ELEMENTS // 128
    assert weight.shape[0] > rows + 100  # more than one block, or this test shows nothing
    assert not torch.equal(weight[:100], weight[rows : rows + 100])


def test_the_type_does_not_change_the_values():
    for single, double in zip(built().parameters(), built(dtype=torch.float64).parameters(), strict=True):
        assert torch.equal(single.double(), double)


def test_tied_weights_stay_tied():
    model = built(config=CONFIG.model_copy(update={"tie_embeddings": True}))
    assert model.lm_head.weight is model.embed_tokens.weight


def test_rotary_frequencies_stay_float32_in_a_bfloat16_model():
    model = built(dtype=torch.bfloat16)
    assert model.rotary.inv_freq.dtype == torch.float32
    assert torch.equal(model.rotary.inv_freq, build_model(CONFIG).rotary.inv_freq)


class Forgetful(nn.Module):
    """A module whose buffer nobody fills."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 4))
        self.inner = nn.Linear(4, 4, bias=False)
        self.register_buffer("table", torch.ones(3), persistent=False)

    def init_std(self, name):
        return 0.02


def test_a_forgotten_buffer_is_named():
    with torch.device("meta"):
        model = Forgetful()
    with pytest.raises(RuntimeError, match=r"never initialized: table$"):
        materialize(model, torch.device("cpu"), 0)


def test_a_parameter_of_zeros_or_with_a_nan_is_named():
    model = Forgetful()
    with torch.no_grad():
        model.weight.zero_()
        model.inner.weight.fill_(1)[3, 3] = float("nan")
    with pytest.raises(RuntimeError, match=r"never initialized: weight, inner\.weight$"):
        check_initialized(model)


def _std_of_truncated_normal(limit):
    """Standard deviation of a unit normal cut off at +-limit."""
    density = math.exp(-(limit**2) / 2) / math.sqrt(2 * math.pi)
    return math.sqrt(1 - 2 * limit * density / math.erf(limit / math.sqrt(2)))
