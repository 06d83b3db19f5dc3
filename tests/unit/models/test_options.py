"""The options of [model] against transformers' families, in loss and gradients, or written out where none has them."""

import random

import pytest
import torch
import torch.nn.functional as F

from checkpoint.export.hf_export import TokenizerFiles, export_hf
from configs.architectures.llama_keys import RopeScaling
from configs.schema import Model
from models import build_model
from models.documents import Documents
from models.rotary import RotaryEmbedding, rotate
from tests.hf_families import NEEDS_TRANSFORMERS
from tests.unit.hf_support import TINY, make_model, of_transformers, save, skip_what_is_too_old

SHAPE = {"dim": 32, "n_layers": 1, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 48, "vocab_size": 96}


@pytest.mark.parametrize("name", sorted(TINY))
def test_loss_and_gradients_are_those_of_transformers(tmp_path, name):
    """In float64, but for what their classes cast to float32: norms, and softmax of attention and router."""
    skip_what_is_too_old(name)
    ours = make_model(TINY[name], torch.float64)
    ours.rotary.init_buffers()  # angles in float32, as in transformers
    if ours.window_rotary:
        ours.window_rotary.init_buffers()
    export_hf(save(tmp_path / "step-00000001", ours), tmp_path / "out", TokenizerFiles())
    theirs = of_transformers(ours.config, tmp_path / "out")
    tokens, targets = torch.randint(3, 96, (2, 2, 40))  # some families train no embedding of padding, token 0 or 1
    losses = [
        F.cross_entropy(logits.flatten(0, 1), targets.flatten()) for logits in (ours(tokens), theirs(tokens).logits)
    ]
    bound = 1e-12 if "delta" in ours.config.layers else 1e-6
    torch.testing.assert_close(*losses, rtol=bound, atol=0)
    for loss in losses:
        loss.backward()
    gradients = apart({name.removeprefix("model."): p.grad for name, p in theirs.named_parameters()}, ours.config)
    compared = 0
    for parameter_name, parameter in ours.named_parameters():
        if ".experts." in parameter_name:  # stacked
            continue
        renamed = parameter_name.replace("router", "gate")
        if renamed not in gradients:
            renamed = renamed.replace("shared_experts", "shared_expert")
        expected = gradients[renamed].double()  # theirs has some routers in float32
        scale = expected.abs().max()
        assert scale > 0
        torch.testing.assert_close(parameter.grad, expected, rtol=0, atol=100 * bound * float(scale))
        compared += 1
    assert compared == len(gradients) - sum(".experts." in each for each in gradients)


def apart(gradients, config):
    """Matrices of Qwen3-Next that are several of Keel's: queries and gates, head by head; filters one after another."""
    delta = config.delta
    keys, values = delta.key_heads * delta.key_head_dim, delta.value_heads * delta.value_head_dim
    found = {}
    for name, gradient in gradients.items():
        place = name.rpartition("self_attn.q_proj")[0] or name.removesuffix("conv1d.weight")
        if name.endswith("q_proj.weight") and config.attention_gate:
            both = gradient.unflatten(0, (config.n_heads, 2, -1)).unbind(1)
            found |= {
                f"{place}self_attn.{each}_proj.weight": g.flatten(0, 1)
                for each, g in zip(["q", "gate"], both, strict=True)
            }
        elif name.endswith("conv1d.weight"):
            parts = gradient[:, 0].split([keys, keys, values])
            found |= {f"{place}{each}_conv": part for each, part in zip("qkv", parts, strict=True)}
        else:
            found[name] = gradient
    return found


def test_a_gate_scales_each_feature_of_the_heads():
    model = make_model(Model(**SHAPE, attention_gate=True), torch.float64)
    attention = model.layers["0"].self_attn
    x = torch.randn(2, 7, 32, dtype=torch.float64)
    cos, sin = model.rotary(torch.arange(7)[None])
    heads = []
    attention.o_proj.register_forward_pre_hook(lambda _, given: heads.append(given[0]))
    attention(x, cos, sin, None)
    gate = attention.gate_proj
    attention.gate_proj = None
    attention(x, cos, sin, None)
    gated, plain = heads
    torch.testing.assert_close(gated, plain / (1 + torch.exp(-x @ gate.weight.T)), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("n_experts", [None, 3])
def test_squared_relu_has_no_gate(n_experts):
    """Every expert gets each token here, so that the mixture is a weighted sum of feed-forwards."""
    experts = {"n_experts": n_experts, "experts_per_token": n_experts} if n_experts else {}
    model = make_model(Model(**SHAPE, activation="relu_squared", **experts), torch.float64)
    mlp = model.layers["0"].mlp
    x = torch.randn(2, 7, 32, dtype=torch.float64)
    if n_experts is None:
        expected = (x @ mlp.up_proj.weight.T).clamp(min=0) ** 2 @ mlp.down_proj.weight.T
        found = mlp(x)
    else:
        shares = (x @ mlp.router.weight.T).softmax(-1)
        outputs = [
            (x @ up.T).clamp(min=0) ** 2 @ down.T
            for up, down in zip(mlp.experts.up_proj, mlp.experts.down_proj, strict=True)
        ]
        expected = sum(shares[..., i, None] * output for i, output in enumerate(outputs))
        found = mlp(x)[0]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert not any("gate_proj" in name for name, _ in model.named_parameters())


def test_only_the_first_features_are_rotated():
    """A pair of features is a complex number, which turns by position times frequency."""
    model = build_model(Model(**SHAPE, head_dim=16, rope_fraction=0.5))
    cos, sin = model.rotary(torch.arange(9)[None])
    x = torch.randn(2, 9, 3, 16, dtype=torch.float64)
    turns = torch.polar(torch.ones(9, 4), torch.arange(9)[:, None] * 1e4 ** (-torch.arange(4) / 4)).to(torch.complex128)
    turned = torch.complex(x[..., :4], x[..., 4:8]) * turns[:, None]
    expected = torch.cat((turned.real, turned.imag, x[..., 8:]), dim=-1)
    torch.testing.assert_close(rotate(x, cos.double(), sin.double()), expected, rtol=0, atol=1e-6)


def test_windows_and_documents_together():
    """Packed documents give what each gives alone; the window does not reach across their border."""
    torch.manual_seed(0)
    model = make_model(Model(**(SHAPE | {"n_layers": 3}), window=4, window_pattern=3), torch.float64)
    first, second = torch.randint(0, 96, (1, 9)), torch.randint(0, 96, (1, 6))
    positions = torch.cat((torch.arange(9), torch.arange(6)))[None]
    with torch.no_grad():
        packed = model(torch.cat((first, second), dim=1), positions, Documents.find(torch.tensor([[0] * 9 + [1] * 6])))
        apart = torch.cat((model(first), model(second)), dim=1)
    torch.testing.assert_close(packed, apart, rtol=1e-12, atol=1e-12)


@NEEDS_TRANSFORMERS
@pytest.mark.parametrize("kind", ["llama3", "yarn", "linear"])
def test_scaled_frequencies_are_those_of_transformers(kind):
    """Also with lengths so short that no frequency turns as often as beta_slow or beta_fast."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    dice = random.Random(0)
    for _ in range(100):
        features, theta = 2 * dice.randint(1, 64), dice.choice([50.0, 1e4, 5e5])
        given = {"factor": dice.uniform(1, 40), "original_max_position_embeddings": 2 ** dice.randint(0, 14)}
        if kind == "linear":
            del given["original_max_position_embeddings"]
        if kind == "llama3":
            given |= {"low_freq_factor": dice.uniform(0.5, 2), "high_freq_factor": dice.uniform(2.1, 8)}
        if kind == "yarn":
            given |= {"beta_slow": dice.uniform(0.5, 4), "beta_fast": dice.uniform(4, 64)}
        config = LlamaConfig(head_dim=features, rope_parameters={"rope_type": kind, "rope_theta": theta, **given})
        theirs, factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
        fields = {"original_seq_len" if name.startswith("original") else name: given[name] for name in given}
        cos, sin = (rotary := RotaryEmbedding(features, theta, RopeScaling(kind=kind, **fields)))(torch.zeros(1, 1))
        torch.testing.assert_close(rotary.inv_freq, theirs, rtol=1e-5, atol=0)
        assert (cos.mean().item(), sin.mean().item()) == (pytest.approx(factor), 0.0)
