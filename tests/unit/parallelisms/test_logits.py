"""The largest logits of heads, against all products of queries and keys, and what scaling weights does to them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.load import load
from models import build_model
from models.documents import Documents
from parallelisms.attention import logits
from parallelisms.attention.logits import NotedLogits
from parallelisms.init import materialize
from scripts.parity_options import LATENT
from scripts.parity_rows import words


class _Attention:
    """What `NotedLogits` wraps."""

    def __init__(self, window):
        self.window = window
        self.attend = lambda q, k, v, mask: q


def _largest(q, k, is_seen):
    """By all products, in float64."""
    keys = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    found = torch.einsum("bhqd,bhkd->bhqk", q, keys) / q.shape[-1] ** 0.5
    return found.where(is_seen, torch.tensor(-torch.inf, dtype=found.dtype)).amax((0, 2, 3))


@given(
    seed=st.integers(0, 1000),
    seq_len=st.integers(1, 20),
    groups=st.integers(1, 3),
    window=st.sampled_from([None, 1, 3, 50]),
    document=st.sampled_from([0, 1, 4, 7]),
    as_pairs=st.booleans(),
    tile=st.sampled_from([1, 100, 1 << 24]),
)
@settings(max_examples=150, deadline=None)
def test_they_are_the_largest_of_all_products(seed, seq_len, groups, window, document, as_pairs, tile):
    torch.manual_seed(seed)
    batch, n_keys = 2, 2
    q = torch.randn(batch, n_keys * groups, seq_len, 4, dtype=torch.float64, requires_grad=True)
    k = torch.randn(batch, n_keys, seq_len, 4, dtype=torch.float64)
    at = torch.arange(seq_len)
    is_seen = (at <= at[:, None]) & (at > at[:, None] - (window or seq_len))
    mask = None
    if document:
        ids = (at // document).expand(batch, -1)
        same = ids[:, :, None] == ids[:, None, :]
        is_seen = (is_seen & same)[:, None]
        mask = (same.tril())[:, None] if as_pairs else Documents.find(ids).numbered()
    noted = NotedLogits(_Attention(window), n_keys * groups, ("", "gather"))
    noted.init_buffers()
    before, logits._TILE_ELEMENTS = logits._TILE_ELEMENTS, tile
    try:
        with torch.no_grad():
            noted(q * 100, k, k, mask)  # an evaluation
        noted(q, k, k, mask)
        noted(q / 2, k, k, mask)  # a further micro-batch, whose logits are smaller
    finally:
        logits._TILE_ELEMENTS = before
    found = _largest(q, k, is_seen)
    torch.testing.assert_close(noted.largest, torch.maximum(found, found / 2), rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    "keys",
    [
        {"model.n_kv_heads": 8, "model.attention_bias": "true"},
        {"model.n_kv_heads": 2},
        {"model.rope_fraction": 0.5},
        {"model.query_scale": 3.0},
        LATENT,
        LATENT | {"model.latent": "{key_value_rank = 20, rope_head_dim = 4, value_head_dim = 6}"},
    ],
    ids=["keys of each head", "shared keys", "partly rotated", "query scale", "latents", "latents, whole queries"],
)
def test_row_factors_scale_the_logits_of_each_head(keys):
    config = load("parity.toml", words(keys | {"model.init_std": 0.3}), world_size=1).config
    with torch.device("meta"):
        model = build_model(config.model).double()
    materialize(model, torch.device("cpu"), seed=1)
    attention = model.layers["0"].self_attn
    seen = []

    def attend(q, k, v, mask):
        seen.append((q @ k.repeat_interleave(q.shape[1] // k.shape[1], dim=1).transpose(2, 3), v))
        return v.repeat_interleave(q.shape[1] // k.shape[1], dim=1)

    attention.attend = attend
    x = torch.randn(2, 9, config.model.dim, dtype=torch.float64)
    angles = model.rotary(torch.arange(9)[None])
    factors = torch.rand(config.model.n_heads, dtype=torch.float64)
    with torch.no_grad():
        attention(x, *angles, None)
        for name, rows in attention.row_factors(factors).items():
            weight = attention.get_parameter(name)
            weight *= rows.view(-1, *[1] * (weight.ndim - 1))
        attention(x, *angles, None)
    (before, values), (after, same_values) = seen
    torch.testing.assert_close(after, before * factors[:, None, None], rtol=1e-12, atol=1e-14)
    assert torch.equal(values, same_values)
