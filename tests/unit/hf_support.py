"""Small models and their checkpoints, as the tests of export and import need them."""

from pathlib import Path

import torch

from checkpoint import manifest as manifests
from checkpoint.storage import FolderStorage, commit
from checkpoint.tensor_stream import write_tensors
from configs.architectures.llama import RopeScaling
from configs.schema import Model
from models import build_model

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
    "mixtral": Model(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=48, vocab_size=96, n_experts=6),
}


def make_model(config, dtype=torch.float32):
    """Weights that matter: the norms' are no ones, and attention is far from uniform."""
    torch.manual_seed(0)
    model = build_model(config).to(dtype)
    for parameter in model.parameters():
        parameter.data.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.2)
    return model


def save(folder, model, **training):
    """A checkpoint of the model as a run of one rank leaves it, with optimizer state."""
    state = dict(model.named_parameters())
    tensors = {f"model.{name}": parameter.detach() for name, parameter in state.items()}
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
