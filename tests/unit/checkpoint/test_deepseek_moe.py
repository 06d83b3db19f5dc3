"""The first DeepSeekMoE, of which transformers has no class: its folder there and back, and its logits by a formula."""

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from checkpoint.export.hf_config import to_keel, unknown_fields
from checkpoint.export.hf_export import TokenizerFiles, export_hf
from checkpoint.export.model_files import checkpoint_files
from configs.architectures.llama_keys import Router
from configs.errors import UserError
from configs.layout import parameter_count
from configs.load import load
from models import build_model
from scripts import import_hf as script

PUBLISHED = {
    "architectures": ["DeepseekForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekForCausalLM"},
    "aux_loss_alpha": 0.001,
    "bos_token_id": 100000,
    "eos_token_id": 100001,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 10944,
    "max_position_embeddings": 4096,
    "model_type": "deepseek",
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 28,
    "num_key_value_heads": 16,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000,
    "scoring_func": "softmax",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1",
    "use_cache": True,
    "vocab_size": 102400,
}
"""The fields of deepseek-ai/deepseek-moe-16b-base's config.json."""
SMALL = PUBLISHED | {
    "hidden_size": 32,
    "intermediate_size": 72,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_attention_heads": 4,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "vocab_size": 96,
}
EXPERTS_ONLY = SMALL | {"first_k_dense_replace": 0, "n_shared_experts": None, "intermediate_size": 24}  # of no layer


def tensors_of(config):
    """Random weights by the published names."""
    torch.manual_seed(0)
    dim, n_experts = config["hidden_size"], config["n_routed_experts"]
    keys = dim // config["num_attention_heads"] * config["num_key_value_heads"]
    found = {"model.embed_tokens.weight": (config["vocab_size"], dim), "lm_head.weight": (config["vocab_size"], dim)}

    def feed_forward(name, inner):
        found.update({f"{name}.{each}_proj.weight": (inner, dim) for each in ("gate", "up")})
        found[f"{name}.down_proj.weight"] = (dim, inner)

    for layer in range(config["num_hidden_layers"]):
        block = f"model.layers.{layer}"
        for name, rows in (("q", dim), ("k", keys), ("v", keys), ("o", dim)):
            found[f"{block}.self_attn.{name}_proj.weight"] = (rows, dim)
        found |= {f"{block}.{name}_layernorm.weight": (dim,) for name in ("input", "post_attention")}
        if layer < config["first_k_dense_replace"]:
            feed_forward(f"{block}.mlp", config["intermediate_size"])
            continue
        found[f"{block}.mlp.gate.weight"] = (n_experts, dim)
        for expert in range(n_experts):
            feed_forward(f"{block}.mlp.experts.{expert}", config["moe_intermediate_size"])
        if config["n_shared_experts"]:
            feed_forward(f"{block}.mlp.shared_experts", config["n_shared_experts"] * config["moe_intermediate_size"])
    found["model.norm.weight"] = (dim,)
    return {
        name: torch.randn(shape, dtype=torch.float64) / 5 + (len(shape) == 1) for name, shape in sorted(found.items())
    }


def logits_of(config, tensors, tokens):
    """The model of Dai et al. 2024 (arXiv:2401.06066), sections 2 and 3, token by token where experts are chosen."""

    def norm(x, name):
        return x * (x.square().mean(-1, keepdim=True) + config["rms_norm_eps"]).rsqrt() * tensors[f"{name}.weight"]

    def feed_forward(x, name):
        gate, up, down = (tensors[f"{name}.{each}_proj.weight"] for each in ("gate", "up", "down"))
        return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T

    def attention(x, name):
        n_heads = config["num_attention_heads"]
        width = config["hidden_size"] // n_heads
        frequencies = 1.0 / config["rope_theta"] ** (torch.arange(0, width, 2).float() / width)  # as in DeepSeek's code
        angles = torch.outer(torch.arange(x.shape[1]).double(), frequencies.double())
        turn = torch.complex(angles.cos(), angles.sin())
        heads = [(x @ tensors[f"{name}.{each}_proj.weight"].T).unflatten(-1, (-1, width)) for each in "qkv"]
        q, k = (torch.complex(*each.transpose(1, 2).chunk(2, -1)) * turn for each in heads[:2])
        k, v = (each.repeat_interleave(n_heads // each.shape[1], 1) for each in (k, heads[2].transpose(1, 2)))
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        scores = (q @ k.mH).real / width**0.5
        mixed = scores.masked_fill(later, -torch.inf).softmax(-1) @ v
        return mixed.transpose(1, 2).flatten(2) @ tensors[f"{name}.o_proj.weight"].T

    def experts(x, name):
        scores = (x @ tensors[f"{name}.gate.weight"].T).softmax(-1)
        out = feed_forward(x, f"{name}.shared_experts") if config["n_shared_experts"] else torch.zeros_like(x)
        for place in torch.cartesian_prod(*map(torch.arange, x.shape[:2])).tolist():
            batch, token = place
            best = scores[batch, token].topk(config["num_experts_per_tok"])
            for weight, expert in zip(best.values, best.indices.tolist(), strict=True):
                out[batch, token] += weight * feed_forward(x[batch, token], f"{name}.experts.{expert}")
        return out

    x = tensors["model.embed_tokens.weight"][tokens]
    for layer in range(config["num_hidden_layers"]):
        block = f"model.layers.{layer}"
        x = x + attention(norm(x, f"{block}.input_layernorm"), f"{block}.self_attn")
        mlp = feed_forward if layer < config["first_k_dense_replace"] else experts
        x = x + mlp(norm(x, f"{block}.post_attention_layernorm"), f"{block}.mlp")
    return norm(x, "model.norm") @ tensors["lm_head.weight"].T


def write(folder, config, tensors):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("config", [SMALL, EXPERTS_ONLY], ids=["as published", "experts only"])
def test_a_folder_computes_the_published_model_and_comes_back_bit_equal(tmp_path, config, capsys):
    tensors = tensors_of(config)
    source = write(tmp_path / "hf", config, tensors)
    assert script.main([str(source), str(tmp_path / "keel")]) == 0
    assert "does not know" not in capsys.readouterr().err
    files = checkpoint_files(tmp_path / "keel")
    model = build_model(files.model).double()
    model.load_state_dict({name.removeprefix("model."): files.read(name) for name in files.tensors})
    tokens = torch.randint(0, 96, (2, 24))
    expected = logits_of(config, tensors, tokens)
    with torch.no_grad():
        assert (model(tokens) - expected).abs().max() < 1e-10 * expected.abs().max()
    export_hf(tmp_path / "keel", tmp_path / "back", TokenizerFiles(), own_class=True)
    back = load_file(tmp_path / "back/model.safetensors")
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())
    written = json.loads((tmp_path / "back/config.json").read_text())
    without_effect = {"auto_map", "aux_loss_alpha", "seq_aux", "pretraining_tp", "transformers_version"}
    of_tokenizer = {"bos_token_id", "eos_token_id", "torch_dtype"}
    for field in config.keys() - without_effect - of_tokenizer:
        assert written[field] == config[field], field
    assert to_keel(written, "config.json") == files.model


def test_the_published_config_is_the_job():
    found = to_keel(PUBLISHED, "config.json")
    job = load("deepseek_moe_16b").config.model
    assert unknown_fields(PUBLISHED, "config.json") == []
    assert parameter_count(found) == 16_375_728_128
    length = PUBLISHED["max_position_embeddings"]
    assert found == job.model_copy(
        update={"init_std": 0.02, "router": Router(renormalize=False), "max_seq_len": length}
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [("scoring_func", "sigmoid"), ("norm_topk_prob", True), ("moe_layer_freq", 2), ("attention_bias", True)],
)
def test_another_model_is_refused_by_its_field(field, value):
    with pytest.raises(UserError, match=f"{field} = {value!r} is not supported; Keel's DeepSeekMoE has"):
        to_keel(PUBLISHED | {field: value}, "config.json")
