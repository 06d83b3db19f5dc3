"""Exports and imports across meshes: the mesh that saved leaves no trace, and any mesh starts from an import."""

import time

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from checkpoint.export.hf import TokenizerFiles, export_hf, import_hf
from checkpoint.manager import CheckpointManager
from checkpoint.manifest import step_folder
from configs.layout import mesh_sizes
from configs.load import load
from parallelisms.mesh import build_mesh
from tests.unit.hf_support import TINY, make_model
from tests.unit.hf_support import save as save_alone
from trainer.exports import Exports
from trainer.step import build_learner

FLOAT32 = tuple(word for key in ("dtype", "compute_dtype", "reduce_dtype") for word in (f"--training.{key}", "float32"))
UNEVEN = ("--model.ffn_dim", "102", "--model.n_layers", "2", "--model.vocab_size", "130")


def start(folder, words):
    """A learner on this mesh, started as `checkpoint.load` and `init_from` say; returns it and its manager."""
    config = load("parity.toml", (*FLOAT32, *UNEVEN, *words), dist.get_world_size()).config
    learner = build_learner(config, build_mesh(mesh_sizes(config, dist.get_world_size()), torch.device("cpu")))
    ignore = lambda line: None  # noqa: E731
    resolved = config.model_dump(mode="json")
    manager = CheckpointManager(folder, config.checkpoint, resolved, {}, lambda old, new: [], False, ignore, ignore)
    assert manager.resume(learner.state()) is None
    manager.begin_line()
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


def exports_of(folder, resumed_from):
    """Exports of a run whose checkpoints are there already, and the lines it logs and warns with."""
    words = ("--checkpoint.interval", "1", "--checkpoint.export_every", "2")
    lines, warnings = [], []
    config = load("parity.toml", words).config
    return Exports(config, folder, resumed_from, lines.append, warnings.append), lines, warnings


def settle(exports, committed):
    exports.poll(committed)
    exports.finish(lambda: False)


def a_run_of_exports(folder):
    (folder / "checkpoints").mkdir()
    (folder / "exports/step-00000008.tmp").mkdir(parents=True)
    for step in range(1, 7):
        save_alone(step_folder(folder / "checkpoints", step), make_model(TINY["tied"]))
    exports, lines, warnings = exports_of(folder, None)
    for step in (1, 2, 2, 3, 4):  # as a loop calls it, step 4 while step 2 may still be at work
        exports.poll(step)
    exports.finish(lambda: False)
    next(step_folder(folder / "checkpoints", 6).glob("*.distcp")).unlink()
    settle(exports, 6)
    made = sorted(path.name for path in (folder / "exports").iterdir())
    return made, lines, warnings


def test_exports_of_a_run(ranks, tmp_path):
    [(made, lines, warnings)] = ranks(1, a_run_of_exports, tmp_path)
    assert made == ["step-00000002", "step-00000004"]
    assert lines == [
        f"removed {tmp_path}/exports/step-00000008.tmp, which an interrupted save, export or removal has left behind",
        "export step-00000002: written",
        "export step-00000004: written",
    ]
    assert len(warnings) == 1
    assert "export step-00000006 failed, training continues: checkpoint" in warnings[0]
    assert "__0_0.distcp is missing" in warnings[0]


def stop_an_export(folder):
    (folder / "checkpoints").mkdir()
    save_alone(step_folder(folder / "checkpoints", 2), make_model(TINY["tied"]))
    exports, lines, _ = exports_of(folder, None)
    check = exports._check
    exports._check = lambda: time.sleep(0.05) or check()
    exports.poll(2)
    exports.finish(lambda: True)
    left = list((folder / "exports").iterdir())
    again, more, _ = exports_of(folder, 2)
    settle(again, 2)  # the checkpoint that the next launch goes on from
    exports_of(folder, None)  # and one that starts anew
    return left, lines, more, sorted(str(path.relative_to(folder)) for path in (folder / "exports").glob("*/*"))


def test_what_a_stop_cuts_short_is_made_by_the_next_launch(ranks, tmp_path):
    [(left, lines, more, kept)] = ranks(1, stop_an_export, tmp_path)
    assert left == []
    assert lines == ["export step-00000002: the run ends; its next launch makes it"]
    assert more == ["export step-00000002: written"]
    assert kept == ["exports/abandoned-001/step-00000002"]
