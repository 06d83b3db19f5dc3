"""Tiny models of Hugging Face's families, as config.json files, and their training in plain transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from configs.load import load
from configs.reading.hf_config import is_too_old
from models import build_model
from parallelisms.init import materialize
from scripts.parity_reference import Trajectory, batches, copied, each_document_alone
from trainer.data.loader import MicroBatch
from trainer.lr_schedule import learning_rate

NEEDS_TRANSFORMERS = pytest.mark.skipif(is_too_old(), reason="the installed transformers is older than Keel needs")
VOCABULARY = 160
_ALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# torch has no grouped matrix products in float64 on a CPU.
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "experts_implementation": "eager"}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"tie_word_embeddings": True},
    "gemma3_text": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "olmo2": {},
    "granite": {"logits_scaling": 8.0},
    "olmoe": {"num_experts": 4, **_EXPERTS},
    "gpt_oss": {
        "num_local_experts": 4,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        **_EXPERTS,
    },
    "mixtral": {"num_local_experts": 4, **_EXPERTS},
    "qwen3_moe": {"num_experts": 4, **_EXPERTS},
    "deepseek_v3": {
        **{"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4},
        **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16},
        **{"head_dim": 8, **_EXPERTS},
    },
    "gpt_neox": {"hidden_dropout": 0.0, "attention_dropout": 0.0},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}


def write_config(folder: Path, family: str, **fields: Any) -> Path:
    """Write a family's config.json; returns the folder."""
    folder.mkdir(exist_ok=True)
    values = {"model_type": family} | _ALL | FAMILIES.get(family, {}) | fields
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def words(folder: Path, *more: str) -> tuple[str, ...]:
    """The command line that trains the model of a folder with the job of the parity table."""
    return ("--model.architecture", "hf", "--model.hf", str(folder), *more)


def trained_by_transformers(overrides: tuple[str, ...]) -> Trajectory:
    """Train in plain transformers and PyTorch, whole batches and logits in one process, from Keel's initial weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = load("parity.toml", overrides, world_size=1).config
    with torch.device("meta"):
        ours = build_model(config.model).double()
    materialize(ours, torch.device("cpu"), config.training.seed)
    fields = dict(config.model.fields)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(fields.pop("model_type"), **fields), dtype=torch.float64
    )
    missing = model.load_state_dict(dict(ours.named_parameters()), strict=False).missing_keys
    buffers = {name for name, _ in model.named_buffers()}
    assert all(name.startswith("lm_head") or name in buffers for name in missing), missing
    model.tie_weights()
    optimizer = torch.optim.AdamW(
        model.parameters(),
        betas=config.optimizer.betas,
        eps=config.optimizer.eps,
        weight_decay=0.0,
    )
    found = Trajectory(initial=copied(_tensors(model, ours)))
    for step, micro_batches in enumerate(batches(config, 0, 1)):
        tokens = torch.cat([batch.tokens for batch in micro_batches])
        targets = torch.cat([batch.targets for batch in micro_batches])
        loss = F.cross_entropy(_logits(model, tokens, micro_batches).flatten(0, 1), targets.flatten())
        loss.backward()
        if step == 0:
            found.gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.training.max_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config.lr_schedule, config.optimizer.lr, step)
        optimizer.step()
        model.zero_grad()
        found.losses.append(loss.item())
        found.norms.append(norm.item())
    parameters = dict(model.named_parameters())
    found.weights = {name: p.detach() for name, p in parameters.items()}
    found.buffers = {name: b for name, b in _tensors(model, ours).items() if name not in parameters}
    return found


def _logits(model: Any, tokens: torch.Tensor, micro_batches: list[MicroBatch]) -> torch.Tensor:
    """Of whole sequences, or of each document alone."""
    document_ids = [ids for batch in micro_batches if (ids := batch.document_ids) is not None]
    if not document_ids:
        return model(input_ids=tokens, use_cache=False).logits
    return each_document_alone(lambda alone: model(alone, use_cache=False).logits, tokens, torch.cat(document_ids))


def _tensors(model: torch.nn.Module, ours: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers of a model, those of the buffers that Keel's has as well."""
    buffers = {name for name, _ in ours.named_buffers()}
    return dict(model.named_parameters()) | {n: b for n, b in model.named_buffers() if n in buffers}
