"""FLOPs and parameters by formula against torch's own count, published figures, and devices that must stay unknown."""

from fnmatch import fnmatchcase

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from configs.schema import Model, Training
from models import build_model
from trainer.planning.flops import flops_per_token, mfu, peak_flops, tflops_per_device

TOY = {"dim": 32, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 48, "vocab_size": 80}
SHAPES = [
    TOY,
    TOY | {"n_kv_heads": None, "head_dim": 16},
    TOY | {"tie_embeddings": True, "n_layers": 1},
]
LATENT = TOY | {
    "n_kv_heads": None,
    "head_dim": 12,
    "attention": "latent",
    "latent": {"query_rank": 20, "key_value_rank": 14, "rope_head_dim": 4, "value_head_dim": 6},
}
MIXTURE = TOY | {"n_experts": 5, "n_shared_experts": 2, "expert_dim": 24, "n_dense_layers": 1}
LLAMA_7B = Model(dim=4096, n_layers=32, n_heads=32, ffn_dim=11008, vocab_size=32000)


def training(dtype, tf32=False):
    return Training(steps=1, seq_len=8, global_batch_size=1, compute_dtype=dtype, tf32=tf32)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seq_len", [8, 24])
def test_the_full_formula_is_what_torch_counts(shape, seq_len):
    """The math backend does all of the scores in plain products, which the counter sees one by one."""
    config, batch = Model(**shape), 2
    model = build_model(config)
    tokens = torch.zeros(batch, seq_len, dtype=torch.long)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    assert counter.get_total_flops() == flops_per_token(config, seq_len).full * batch * seq_len


@pytest.mark.parametrize("rank", [20, None])
def test_the_zeros_beside_values_are_not_counted(rank):
    """Torch counts them: values of 6 features are as wide as keys, of 12."""
    seq_len = 16
    config = Model(**LATENT | {"latent": LATENT["latent"] | {"query_rank": rank}})
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        build_model(config)(torch.zeros(1, seq_len, dtype=torch.long)).sum().backward()
    zeros = 6 * config.n_layers * config.n_heads * (12 - 6) * seq_len
    assert counter.get_total_flops() == (flops_per_token(config, seq_len).full + zeros) * seq_len


FIRST_BLOCKS = ("embed_tokens.*", "layers.0.*", "layers.1.*")


@pytest.mark.parametrize(
    "patterns",
    [
        ("embed_tokens.*",),
        FIRST_BLOCKS,
        (*FIRST_BLOCKS, "layers.2.input_layernorm.*", "layers.2.self_attn.[qkv]_*"),
        (*FIRST_BLOCKS, "layers.2.input_layernorm.*", "layers.2.self_attn.*", "layers.2.post*", "layers.2.mlp.up*"),
        ("layers.*", "norm.*"),
        ("embed_tokens.*", "layers.*"),
        ("lm_head.*", "*.mlp.*"),
    ],
)
@pytest.mark.parametrize("keys", [{}, {"tie_embeddings": True}, {"qk_norm": "head"}], ids=str)
def test_what_is_frozen_is_not_counted(patterns, keys):
    config, seq_len = Model(**TOY, **keys), 8
    model = build_model(config)
    names = [name for name, _ in model.named_parameters()]
    frozen = {name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)}
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, seq_len, dtype=torch.long)).sum().backward()
    found = flops_per_token(config, seq_len, frozen)
    assert counter.get_total_flops() == found.full * seq_len
    assert found.causal < found.full <= flops_per_token(config, seq_len).full


def test_a_token_pays_for_its_experts_and_the_router():
    """Two experts and two shared ones, each half as wide as the dense feed-forward, cost as two of that."""
    dense, mixture = Model(**TOY), Model(**MIXTURE)
    feed_forward, router = 3 * 32 * 48, 5 * 32
    more = flops_per_token(mixture, 8).full - flops_per_token(dense, 8).full
    assert more == 6 * 2 * (feed_forward + router)


def test_the_causal_formula_halves_attention_alone():
    short, long = flops_per_token(LLAMA_7B, 2048), flops_per_token(LLAMA_7B, 4096)
    assert long.full - short.full == 12 * 32 * 4096 * 2048
    assert long.causal - short.causal == 6 * 32 * 4096 * 2048
    assert short.full - short.causal == 6 * 32 * 4096 * 2048


def test_published_utilization():
    """torchtrain PR 165: Llama 7B, 9,400 tokens/s an H100 at 2048 are 41.5%, full, with the embedding counted."""
    peak = peak_flops("NVIDIA H100 80GB HBM3", training("bfloat16"))
    flops = flops_per_token(LLAMA_7B, 2048).full + 6 * LLAMA_7B.vocab_size * LLAMA_7B.dim
    assert mfu(tflops_per_device(8 * 9400, flops, world_size=8), peak) == pytest.approx(0.415, abs=0.0005)


@pytest.mark.parametrize(
    ("name", "dtype", "tf32", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", False, 989.5),
        ("NVIDIA H100 PCIe", "bfloat16", False, 756.5),
        ("NVIDIA H200", "bfloat16", False, 989.5),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", False, 312),
        ("NVIDIA A100-SXM4-80GB", "float32", True, 156),
        ("NVIDIA A100-SXM4-80GB", "float32", False, 19.5),
        ("NVIDIA B200", "bfloat16", False, 2250),
    ],
)
def test_peaks_are_the_data_sheets_dense_ones(name, dtype, tf32, tflops):
    assert peak_flops(name, training(dtype, tf32)) == tflops * 1e12


@pytest.mark.parametrize(
    "name",
    [
        "cpu",
        "NVIDIA GH200 480GB",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA GB200",
        "NVIDIA A100-SXM-64GB",
        "Tesla T4",
    ],
)
def test_an_unknown_device_has_no_peak_and_no_mfu(name):
    assert peak_flops(name, training("bfloat16")) is None
    assert mfu(100.0, peak_flops(name, training("bfloat16"))) is None


def test_float64_has_no_peak():
    assert peak_flops("NVIDIA H100 80GB HBM3", training("float64")) is None


def test_no_speed_no_figures():
    assert tflops_per_device(None, 10, 1) is None
    assert mfu(None, 1e12) is None


def test_a_layer_with_a_state_costs_the_same_at_any_length():
    """Three products of the state with a vector for each value head, forward, and two of each backward."""
    widths = {"key_heads": 2, "value_heads": 6, "key_head_dim": 5, "value_head_dim": 7, "conv_kernel": 3}
    delta = Model(**TOY, layers=("delta",), delta=widths)
    matrices = sum(p.numel() for p in build_model(delta).parameters() if p.ndim == 2) - 80 * 32  # the embedding
    states = 3 * TOY["n_layers"] * 6 * 5 * 7
    for seq_len in (8, 1024):
        found = flops_per_token(delta, seq_len)
        assert found.causal == found.full == 6 * (matrices + states)
    hybrid = flops_per_token(Model(**TOY, layers=("delta", "delta", "full"), delta=widths), 24)
    assert hybrid.full - hybrid.causal == 6 * 4 * 8 * 24  # of the one layer with attention
