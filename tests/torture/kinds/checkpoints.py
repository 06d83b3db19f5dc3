"""The files of a checkpoint."""

import io
import json
import os
import random
import shutil
import zipfile
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from checkpoint.export.hf_export import TokenizerFiles, export_hf
from checkpoint.index import read_metadata
from checkpoint.manifest import INDEX_NAME, MANIFEST_NAME, TRAINER_NAME, read_manifest, read_trainer_state, sealed
from checkpoint.tensor_stream import read_tensor
from configs.load import load
from configs.run_change import run_key_diff
from scripts import checkpoint as script
from scripts.export_hf import _tokenizer
from tests.torture.damage import make_manager, process_group, state, write_checkpoint
from tests.torture.kinds.kind import ROOT, Kind
from tests.torture.mutations import mutated_bytes, mutated_json, mutated_value
from tests.unit.hf_support import TINY, make_model, save
from trainer.guards.saved_state import check_saved_state
from trainer.report.console import Console
from trainer.saved_state import RunState


def _reseal(path: Path) -> None:
    """Make size, hash and seal of a checkpoint's files true again."""
    manifest = path.parent / MANIFEST_NAME
    if path == manifest:
        text = manifest.read_bytes().decode(errors="replace")
        body = text.rpartition(',\n "seal": ')[0] or text.removesuffix("\n}")
        manifest.write_text(sealed(body), encoding="utf-8")
        return
    content = json.loads(manifest.read_text())
    del content["seal"]
    data = path.read_bytes()
    content["files"][path.name] = {"size": len(data), "xxh3": xxhash.xxh3_128_hexdigest(data)}
    manifest.write_text(sealed(json.dumps(content, indent=1)))


def _model_checkpoint(folder: Path, name: str) -> Path:
    checkpoint = save(folder / "step-00000001", make_model(TINY["untied"]))
    (checkpoint / TRAINER_NAME).write_text(json.dumps(_TRAINER_STATE))
    _reseal(checkpoint / TRAINER_NAME)
    return checkpoint / name


_TRAINER_STATE = {
    "run": {"step": 1, "tokens": 512, "skipped_in_a_row": 0},
    "tokens": 512,
    "data": {
        "next_sample": 8,
        "sources": {
            "noise": {"fingerprint": "synthetic"},
            "text": {"fingerprint": "0" * 32, "sizes": [4, 5], "cursors": {"0": [1, 2, 3]}},
        },
    },
}


def _mutated_manifest(content: bytes, dice: random.Random) -> bytes:
    values = json.loads(content)
    del values["seal"]
    if dice.random() < 0.25:
        return mutated_bytes(content, dice)
    if dice.random() < 0.5:
        values["config"] = mutated_value(values["config"], dice)
    else:
        values = mutated_value(values, dice)
    return sealed(json.dumps(values, indent=1)).encode()


def _read_checkpoint(path: Path) -> str:
    """As a person looks at it, exports it and goes on from it."""
    checkpoint, output = path.parent, path.parent.parent / "exported"
    shown = io.StringIO()
    console = Console(out=shown, err=shown)
    for words in (("list", checkpoint.parent), ("show", checkpoint, "--tensors", "--config")):
        options = script._parser().parse_args(list(map(str, words)))
        options.command(options, console)
    manifest = read_manifest(checkpoint)
    run_key_diff(manifest.config, _resolved())
    _read_state(path)
    shutil.rmtree(output, ignore_errors=True)
    _tokenizer(checkpoint, None)
    export_hf(checkpoint, output, TokenizerFiles())
    return shown.getvalue()


def _resolved() -> dict[str, Any]:
    return load(str(ROOT / "tests/end_to_end/tiny.toml")).config.model_dump(mode="json")


def _read_state(path: Path) -> str:
    read_manifest(path.parent)
    saved = read_trainer_state(path.parent)
    check_saved_state(saved)
    return json.dumps(RunState(**saved["run"]).step)


def _mutated_index(content: bytes, dice: random.Random) -> bytes:
    if dice.random() < 0.25:
        return mutated_bytes(content, dice)
    return json.dumps(mutated_value(json.loads(content), dice)).encode()


def _mutated_tensors(content: bytes, dice: random.Random) -> bytes:
    """The first tensor's part is forged where there is room for it; sizes in the index stay as they are."""
    if dice.random() < 0.8:
        return mutated_bytes(content, dice)
    length = content.index(b"PK\x05\x06") + 22
    entry_bytes = 30 + 46 + 2 * len("archive/padding")
    return _deflated(length - len(_deflated(0)) - entry_bytes) + content[length:]


def _deflated(padding: int) -> bytes:
    """A tensor's file with 8 MB of zeros in the place of its values, compressed."""
    honest, forged = io.BytesIO(), io.BytesIO()
    torch.save(torch.zeros(50, 64), honest)
    with zipfile.ZipFile(honest) as entries, zipfile.ZipFile(forged, "w", zipfile.ZIP_DEFLATED) as file:
        for entry in entries.infolist():
            file.writestr(entry.filename, bytes(8 << 20) if "/data/" in entry.filename else entries.read(entry))
        if padding > 0:
            file.writestr("archive/padding", bytes(padding), zipfile.ZIP_STORED)
    return forged.getvalue()


@cache
def _manager(checkpoint: Path, _process: int) -> Any:
    """One for all of a process's mutations: each has process groups, whose threads stay."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return make_manager(checkpoint.parent / "other", load=str(checkpoint))


def _resume(path: Path) -> str:
    manager = _manager(path.parent, os.getpid())
    manager.find()
    manager.resume(state())
    metadata = read_metadata(path.parent)
    for name in metadata.state_dict_metadata:
        read_tensor(path.parent, metadata, name)
    return ""


def _tensor_file(folder: Path) -> Path:
    with process_group():
        return write_checkpoint(folder / "checkpoints") / "__0_0.distcp"


KINDS = (
    Kind(MANIFEST_NAME, partial(_model_checkpoint, name=MANIFEST_NAME), _mutated_manifest, _read_checkpoint, _reseal),
    Kind(TRAINER_NAME, partial(_model_checkpoint, name=TRAINER_NAME), mutated_json, _read_state, _reseal),
    Kind(INDEX_NAME, partial(_model_checkpoint, name=INDEX_NAME), _mutated_index, _read_checkpoint, _reseal),
    Kind(".distcp", _tensor_file, _mutated_tensors, _resume, _reseal),
)
