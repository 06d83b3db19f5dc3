"""A checkpoint that a run must not go on from: one message, the exit code, and nothing changed on the disk."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import xxhash

from checkpoint.manifest import MANIFEST_NAME, TRAINER_NAME, sealed, step_folder
from scripts.parity import dtype_overrides
from tests.end_to_end.launch import ROOT, launch_here, snapshot, status
from tests.unit.hf_support import TINY as MODELS
from tests.unit.hf_support import make_model, save

SAID = {"run/status.json", "run/run.log"}


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """The folder of a run of two steps; its checkpoint is `run/checkpoints/step-00000002`."""
    assert launch_here(tmp_path, "--training.steps", "2") == 0
    return tmp_path


def rewrite(checkpoint: Path, **manifest: object) -> None:
    """Change the manifest as whoever wrote the checkpoint could have written it."""
    content = json.loads((checkpoint / MANIFEST_NAME).read_text()) | manifest
    del content["seal"]
    (checkpoint / MANIFEST_NAME).write_text(sealed(json.dumps(content, indent=1)))


def of_other_data(checkpoint: Path) -> None:
    trainer = json.loads((checkpoint / TRAINER_NAME).read_text())
    trainer["data"]["sources"]["noise"]["fingerprint"] = "of other text"
    text = json.dumps(trainer).encode()
    (checkpoint / TRAINER_NAME).write_bytes(text)
    files = json.loads((checkpoint / MANIFEST_NAME).read_text())["files"]
    files[TRAINER_NAME] = {"size": len(text), "xxh3": xxhash.xxh3_128_hexdigest(text)}
    rewrite(checkpoint, files=files)


def unreadable(checkpoint: Path) -> None:
    (checkpoint / TRAINER_NAME).unlink()
    (checkpoint / TRAINER_NAME).mkdir()


FLOAT64 = dtype_overrides("float64")
ALLOWED = ("--job.allow_run_change", "true")
CASES = {
    # what is done to the checkpoint, words of the launch, exit code, what it says
    "shape": (None, ("--model.ffn_dim", "96"), 78, "model.ffn_dim: 64 -> 96"),
    "shape, allowed": (
        None,
        ("--model.ffn_dim", "96", *ALLOWED),
        78,
        "model.layers.0.mlp.down_proj.weight: [32, 64] in the",
    ),
    "dtype": (None, FLOAT64, 78, 'training.dtype: "float32" -> "float64"'),
    "dtype, allowed": (
        None,
        (*FLOAT64, *ALLOWED),
        78,
        "embed_tokens.weight: float32 [256, 32] in the checkpoint, float64 [256, 32] here",
    ),
    "length, allowed": (
        None,
        ("--training.seq_len", "8", *ALLOWED),
        78,
        "training.seq_len: 16 -> 8\nResuming in the new order",
    ),
    "tokenizer": (lambda c: rewrite(c, tokenizer_hash="ab"), (), 78, "content of the tokenizer: ab -> None"),
    "data": (of_other_data, (), 78, "source 'noise' has changed since the checkpoint"),
    "newer": (lambda c: rewrite(c, format_version=99), (), 78, "has format 99; this Keel reads 2 to 3: use a newer"),
    "missing": (lambda c: (c / "__0_0.distcp").unlink(), (), 78, "is damaged: __0_0.distcp is missing"),
    "extra": (lambda c: (c / "__7_0.distcp").touch(), (), 78, "__7_0.distcp is in the folder, but not in"),
    "unreadable": (unreadable, (), 78, "is damaged: trainer.json is no plain file"),
    "no manifest": (lambda c: (c / MANIFEST_NAME).unlink(), (), 78, "is not a checkpoint (no MANIFEST.json in it)"),
    "no such step": (None, ("--checkpoint.load", "9"), 78, "checkpoint.load = 9: no such step"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_refused(trained: Path, capsys, name: str):
    spoil, words, code, message = CASES[name]
    if spoil:
        spoil(step_folder(trained / "run" / "checkpoints", 2))
    before = snapshot(trained)
    capsys.readouterr()
    assert launch_here(trained, *words) == code
    told = capsys.readouterr().err
    assert told.count(message) == 1, told
    assert "Traceback" not in told
    after = snapshot(trained)
    assert {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)} <= SAID
    assert status(trained / "run")["state"] == "failed"


def test_weights_alone(trained: Path, capsys):
    imported = save(trained / "imported", make_model(MODELS["untied"]))
    before = snapshot(imported)
    assert launch_here(trained, "--checkpoint.load", str(imported)) == 78
    assert f'set checkpoint.init_from = "{imported}"' in capsys.readouterr().err
    assert snapshot(imported) == before


def test_what_a_checkpoint_says_of_its_run(trained: Path):
    manifest = json.loads((step_folder(trained / "run" / "checkpoints", 2) / MANIFEST_NAME).read_text())
    assert (manifest["step"], manifest["tokens"], manifest["parent"]) == (2, 2 * 8 * 16, None)
    assert manifest["data_fingerprint"] == {"noise": "synthetic, vocabulary 256"}
    assert manifest["config"]["model"]["ffn_dim"] == 64
    assert manifest["mesh"] == {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1, "pp": 1, "ep": 1}


def test_a_folder_that_another_run_has(tmp_path: Path, capsys):
    hold = "import sys, time; from pathlib import Path; from checkpoint.lock import lock; "
    hold += "lock(Path(sys.argv[1]), print); print('locked', flush=True); time.sleep(60)"
    (tmp_path / "run").mkdir()
    command = [sys.executable, "-c", hold, tmp_path / "run"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        assert launch_here(tmp_path) == 1
        holder.kill()
    assert f"run is in use by process {holder.pid} on " in " ".join(capsys.readouterr().err.split())
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]
    assert launch_here(tmp_path, "--training.steps", "1") == 0
