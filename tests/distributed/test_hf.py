"""Exports and imports across meshes: the mesh that saved leaves no trace, and any mesh starts from an import."""

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from checkpoint.export.hf_export import TokenizerFiles, export_hf
from checkpoint.export.hf_import import import_hf
from checkpoint.manager import CheckpointManager
from checkpoint.manifest import step_folder
from checkpoint.reader import Description, Log
from configs.layout import mesh_sizes
from configs.load import load
from parallelisms.mesh import build_mesh
from trainer.step import build_learner

FLOAT32 = tuple(word for key in ("dtype", "compute_dtype", "reduce_dtype") for word in (f"--training.{key}", "float32"))
UNEVEN = ("--model.ffn_dim", "102", "--model.n_layers", "2", "--model.vocab_size", "130")


def start(folder, words):
    """A learner on this mesh, started as `checkpoint.load` and `init_from` say; returns it and its manager."""
    config = load("parity.toml", (*FLOAT32, *UNEVEN, *words), dist.get_world_size()).config
    learner = build_learner(config, build_mesh(mesh_sizes(config, dist.get_world_size()), torch.device("cpu")))
    run = Description(config.model_dump(mode="json"), {})
    manager = CheckpointManager(folder, config.checkpoint, run, Log())
    assert manager.resume(learner.state()) is None
    manager.begin_lineage()
    return learner, manager


def save(folder, words):
    learner, manager = start(folder, words)
    manager.save(1, learner.state(), {"tokens": 0})
    manager.close()


def weights_from(folder, init_from, words):
    learner, manager = start(folder, ("--checkpoint.init_from", str(init_from), *words))
    manager.close()
    state = learner.state()
    weights = {name: tensor for name, tensor in state.items() if name.startswith("model.")}
    return {name: t.full_tensor() if isinstance(t, DTensor) else t.clone() for name, t in weights.items()}


def test_the_mesh_leaves_no_trace(ranks, tmp_path):
    ranks(1, save, tmp_path / "one", ())
    ranks(4, save, tmp_path / "four", ("--mesh.tp", "2"))
    for name in ("one", "four"):
        export_hf(step_folder(tmp_path / name, 1), tmp_path / f"{name}-hf", TokenizerFiles(), max_shard_bytes=60_000)
    files = sorted(path.name for path in (tmp_path / "one-hf").iterdir())
    assert sum(name.endswith(".safetensors") for name in files) > 3
    assert files == sorted(path.name for path in (tmp_path / "four-hf").iterdir())
    for name in files:
        assert (tmp_path / "one-hf" / name).read_bytes() == (tmp_path / "four-hf" / name).read_bytes(), name


def test_any_mesh_starts_from_an_import(ranks, tmp_path):
    ranks(1, save, tmp_path / "run", ("--model.tie_embeddings", "true"))
    export_hf(step_folder(tmp_path / "run", 1), tmp_path / "hf", TokenizerFiles(), dtype="bfloat16")
    import_hf(tmp_path / "hf", tmp_path / "imported", None)
    words = ("--training.seed", "5", "--model.tie_embeddings", "true")
    expected = ranks(1, weights_from, tmp_path / "a", step_folder(tmp_path / "run", 1), words)[0]
    for n, mesh in ((1, ()), (4, ("--mesh.tp", "2"))):
        weights = ranks(n, weights_from, tmp_path / f"mesh{n}", tmp_path / "imported", (*words, *mesh))[0]
        assert weights.keys() == expected.keys()
        for name, tensor in weights.items():
            assert tensor.dtype == torch.float32
            assert torch.equal(tensor, expected[name].bfloat16().float()), name
