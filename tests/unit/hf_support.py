"""Small models and their checkpoints, as the tests of export and import need them."""

import re
import sys
from functools import cache
from math import log
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from checkpoint import manifest as manifests
from checkpoint.storage import FolderStorage, commit
from checkpoint.tensor_stream import write_tensors
from configs.architectures.llama_keys import Delta, Latent, RopeScaling, Router
from configs.plan import routers_of
from configs.reading.hf_config import is_too_old
from configs.schema import Model
from models import build_model
from parallelisms.init import materialize
from trainer.stages import saved_buffers

_SIZES: dict[str, Any] = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 48, "vocab_size": 96}
_HYBRID: dict[str, Any] = {
    "dim": 32,
    "n_layers": 4,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 16,
    "vocab_size": 96,
    "layers": ("delta", "delta", "full"),
    "delta": Delta(key_heads=2, value_heads=4, key_head_dim=8, value_head_dim=12),
    "qk_norm": "head",
    "attention_gate": True,
    "norm_offset": True,
    "norm_eps": 1e-6,
    "rope_fraction": 0.5,
}
TINY = {
    "untied": Model(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=48, vocab_size=96),
    "tied": Model(dim=32, n_layers=2, n_heads=4, ffn_dim=48, vocab_size=96, tie_embeddings=True, norm_eps=1e-3),
    "stretched": Model(
        dim=32,
        n_layers=1,
        n_heads=2,
        n_kv_heads=1,
        head_dim=24,
        ffn_dim=40,
        vocab_size=96,
        rope_theta=5000.0,
        rope_scaling=RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_seq_len=16),
        tie_embeddings=True,
    ),
    "qwen3": Model(
        dim=32,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        head_dim=24,
        ffn_dim=48,
        vocab_size=96,
        qk_norm="head",
        rope_theta=1e6,
        norm_eps=1e-6,
        tie_embeddings=True,
    ),
    "mixtral": Model(**_SIZES, n_experts=6),
    "qwen2": Model(**_SIZES, attention_bias=True),
    "qwen3_moe": Model(**_SIZES, n_experts=6, qk_norm="head", router=Router(renormalize=False)),
    "qwen2_moe": Model(
        **_SIZES,
        n_experts=6,
        n_shared_experts=2,
        shared_expert_gate=True,
        expert_dim=24,
        n_dense_layers=1,
        attention_bias=True,
        router=Router(renormalize=False),
    ),
    "mistral": Model(**_SIZES, head_dim=16, window=9),
    "olmo2": Model(**_SIZES, norm_position="after", qk_norm="full"),
    "olmo3": Model(
        **_SIZES,
        norm_position="after",
        qk_norm="full",
        window=9,
        window_pattern=2,
        window_rope_theta=1e4,
        rope_theta=1e4,
        rope_scaling=RopeScaling(kind="yarn", factor=4.0, original_seq_len=16),
    ),
    "smollm3": Model(**_SIZES, no_rope_every=2, tie_embeddings=True),
    "gemma3": Model(
        **_SIZES,
        head_dim=16,
        qk_norm="head",
        query_scale=24.0,
        norm_position="both",
        norm_offset=True,
        activation="geglu",
        embedding_scale="sqrt_dim",
        window=9,
        window_pattern=2,
        window_rope_theta=1e3,
        rope_theta=1e5,
        rope_scaling=RopeScaling(kind="linear", factor=8.0),
        tie_embeddings=True,
    ),
    "deepseek_v3": Model(
        dim=32,
        n_layers=3,
        n_heads=4,
        head_dim=20,
        attention="latent",
        latent=Latent(query_rank=24, key_value_rank=12, rope_head_dim=8, value_head_dim=16),
        ffn_dim=48,
        vocab_size=96,
        n_experts=8,
        experts_per_token=3,
        n_shared_experts=2,
        expert_dim=24,
        n_dense_layers=1,
        router=Router(
            scoring="sigmoid",
            n_groups=4,
            groups_per_token=2,
            scaling_factor=2.5,
            load_balance="bias_and_auxiliary_loss",
        ),
        query_scale=20 / (0.1 * log(8) + 1) ** 4,
        rope_scaling=RopeScaling(kind="yarn", factor=8.0, original_seq_len=16, attention_factor=1.0),
    ),
    "moonlight": Model(
        dim=32,
        n_layers=2,
        n_heads=4,
        head_dim=16,
        attention="latent",
        latent=Latent(key_value_rank=12, rope_head_dim=4, value_head_dim=8),
        ffn_dim=48,
        vocab_size=96,
        n_experts=6,
        n_shared_experts=1,
        router=Router(scoring="sigmoid", renormalize=False, load_balance="bias"),
    ),
    "qwen3_next": Model(**_HYBRID, ffn_dim=48),
    "qwen3_next_moe": Model(
        **_HYBRID,
        ffn_dim=48,
        n_experts=6,
        experts_per_token=3,
        n_shared_experts=2,
        shared_expert_gate=True,
        expert_dim=24,
        n_dense_layers=1,
    ),
    "long": Model(**_SIZES, rope_scaling=RopeScaling(kind="yarn", factor=8.0, original_seq_len=16, beta_fast=4.0)),
}


def skip_what_is_too_old(name):
    """transformers 5.0 gives all layers of OLMo 3 one rotary embedding, scaled or not."""
    if name == "olmo3" and is_too_old():
        pytest.skip("the installed transformers computes another OLMo 3")


def make_model(config, dtype=torch.float32):
    """Weights that matter: the norms' are no ones, and attention is far from uniform.

    Layers with a state amplify round-off, so their model has initial weights, each moved a little.
    """
    torch.manual_seed(0)
    model = build_model(config).to(dtype)
    if "delta" in config.layers:
        materialize(model, torch.device("cpu"), 0)
    for parameter in model.parameters():
        if "delta" in config.layers:
            parameter.data += torch.randn_like(parameter) / 20
        else:
            parameter.data.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.2)
    for router in routers_of(model).values():
        router.init_buffers()
        if router.bias is not None:
            router.bias.copy_(torch.linspace(0, 0.3, len(router.bias)))
    return model


def save(folder, model, **training):
    """A checkpoint of the model as a run of one rank leaves it, with optimizer state."""
    state = dict(model.named_parameters())
    tensors = {f"model.{name}": tensor.detach() for name, tensor in [*state.items(), *saved_buffers(model)]}
    tensors |= {f"optimizer.{name}.exp_avg": parameter.detach() * 2 for name, parameter in state.items()}
    return write_checkpoint(folder, tensors.items(), model.config, **training)


def write_checkpoint(folder, tensors, config, **training):
    storage = FolderStorage()
    unfinished = storage.begin(Path(folder))
    files = write_tensors(storage, unfinished, tensors)
    resolved = {"model": config.model_dump(mode="json"), "training": {"seq_len": 64, **training}}
    draft = manifests.Manifest(
        step=1,
        tokens=1,
        config=resolved,
        config_hash=manifests.config_hash(resolved),
        mesh={},
        torch_version=torch.__version__,
        run_id="0",
        parent=None,
        run_changes=[],
        files={},
    )
    commit(storage, unfinished, Path(folder), draft, files, "{}")
    return Path(folder)


def of_transformers(model, folder):
    """transformers' own model of an export, in float64 but for what its class casts to float32."""
    from transformers import AutoModelForCausalLM

    kind = without_casts() if "delta" in model.layers else AutoModelForCausalLM
    return kind.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )


@cache
def without_casts():
    """transformers' own Qwen3NextForCausalLM, but for its casts to float32, whose round-off a state would amplify.

    The angles of the rotary embedding stay in float32.
    """
    from transformers.models.qwen3_next import modeling_qwen3_next as plain

    source = Path(plain.__file__).read_text()
    before, rotary, after = re.split(r"(class \w+RotaryEmbedding.*?)(?=class \w+RMSNorm\()", source, flags=re.DOTALL)
    before, after = (re.sub(r"torch\.float32|torch\.float\b", "torch.float64", each) for each in (before, after))
    text = before.replace(".float()", ".double()") + rotary + after.replace(".float()", ".double()")
    module = ModuleType(f"{plain.__package__}.without_casts")
    vars(module).update(__file__=plain.__file__, __package__=plain.__package__)
    sys.modules[module.__name__] = module
    exec(compile(text, plain.__file__, "exec"), vars(module))
    return module.Qwen3NextForCausalLM
