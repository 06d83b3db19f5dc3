"""The files of a checkpoint, and an optimizer's state."""

import io
import json
import os
import pickle
import random
import shutil
import zipfile
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from checkpoint.export.hf import TokenizerFiles, export_hf
from checkpoint.export.optimizer_import import import_optimizer
from checkpoint.manifest import MANIFEST_NAME, TRAINER_NAME, read_manifest, read_trainer_state, sealed
from checkpoint.safe_read import METADATA_NAME, read_metadata
from checkpoint.tensor_stream import read_tensor
from configs.load import load
from configs.run_change import run_key_diff
from scripts import checkpoint as script
from scripts.export_hf import _tokenizer
from tests.torture.damage import make_manager, process_group, state, write_checkpoint
from tests.torture.kinds.kind import ROOT, Kind
from tests.torture.mutations import hostile, mutated_bytes, mutated_json, mutated_value
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
    kind = dice.randrange(4)
    if kind == 0:
        return mutated_bytes(content, dice)
    if kind == 1:
        return _pickle_bomb(content, dice)
    index = pickle.loads(content)
    entries, places = list(index.state_dict_metadata.values()), list(index.storage_data.values())
    targets = [index, *entries, *places, *(e.properties for e in entries), *(c for e in entries for c in e.chunks)]
    for _ in range(dice.choice((1, 1, 2))):
        target = dice.choice(targets)
        name = dice.choice(list(vars(target)))
        value = dice.choice((hostile(dice), torch.Size([2**40, 2**20]), torch.Size([0]), torch.Size([]), torch.float64))
        target.__dict__[name] = value
    try:
        return pickle.dumps(index, protocol=4)
    except Exception:  # a memory format that is none
        return mutated_bytes(content, dice)


def _pickle_bomb(content: bytes, dice: random.Random) -> bytes:
    pairs = b")" + b"".join(b"\x94h" + bytes([i]) + b"h" + bytes([i]) + b"\x86" for i in range(100))
    keys = b"}" + pairs + b"Ns."
    bombs = (
        b"\x80\x04Nr\xff\xff\xff\x07.",
        b"\x80\x04Nr\xff\xff\xff\xff.",
        b"\x80\x04\x95" + b"\xff" * 7 + b"\x7f" + content,
        b"\x80\x04\x8d" + (3 << 30).to_bytes(8, "little") + b"x.",
        b"\x80\x05\x96" + (3 << 30).to_bytes(8, "little") + b"x.",
        b"\x80\x04X" + (4 << 30).to_bytes(5, "little")[:4] + b"x.",
        b"\x80\x04\x8b" + (2**31 - 1).to_bytes(4, "little") + b"x.",
        b"\x80\x04\x8a\xff" + b"\xff" * 10 + b".",
        b"\x80\x04)" + b"\x85" * 200_000 + b".",
        b"\x80\x04}" + b")" + b"\x85" * 200_000 + b"Ns.",
        b"\x80\x04" + keys,
        b"\x80\x04" + b"]" * 200_000 + b"a" * 199_999 + b".",
        b"\x80\x04N" + b"2" * 200_000 + b".",
        b"\x80\x04" + b"(" * 200_000 + b".",
        content[:-1] + b"0" + pairs + b".",
        content[:-1] + pairs + b"\x86.",
        content.replace(b"float32", b"_tensor", 1),
        b"\x80\x04cos\nsystem\n(S'true'\ntR.",
    )
    bomb = dice.choice(bombs)
    if dice.random() < 0.3:
        start = dice.randrange(len(content))
        return content[:start] + bomb[2:-1] + content[start:]
    return bomb


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


def _optimizer_state(meta: bool = False) -> dict[str, Any]:
    """Of AdamW over a model, as its `state_dict` returns it."""
    model = make_model(TINY["untied"])
    optimizer = torch.optim.AdamW(model.named_parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    found = optimizer.state_dict()
    for entry in found["state"].values() if meta else ():
        entry.update({key: tensor.to("meta") for key, tensor in entry.items()})
    return found


def _optimizer_file(folder: Path) -> Path:
    _model_checkpoint(folder, TRAINER_NAME)
    (folder / "state").mkdir()
    torch.save(_optimizer_state(), folder / "state" / "adamw.pt")
    return folder / "state" / "adamw.pt"


def _mutated_state(content: bytes, dice: random.Random) -> bytes:
    """Bytes, numbers and settings, or a tensor that is another, is larger than its memory, or lies over itself."""
    if dice.random() < 0.4:
        return mutated_bytes(content, dice)
    values, forged = torch.load(io.BytesIO(content), weights_only=True), io.BytesIO()
    if dice.random() < 0.5:
        values["param_groups"] = mutated_value(values["param_groups"], dice)
    else:
        entry = values["state"][dice.choice(list(values["state"]))]
        key = dice.choice(list(entry))
        whole = entry[key]
        others = (torch.zeros(1 << 20), torch.zeros(1).expand(1 << 40), torch.zeros(3, 3).to_sparse(), "text", None)
        entry[key] = dice.choice((*others, whole.to("meta"), whole * torch.nan, torch.zeros(()).expand(whole.shape)))
    torch.save(values, forged)
    return forged.getvalue()


def _import_state(path: Path) -> str:
    output = path.parent.parent / "imported"
    shutil.rmtree(output, ignore_errors=True)
    checkpoint = path.parent.parent / "step-00000001"
    return "\n".join(import_optimizer(checkpoint, path, output, {"adamw": _described_state()}))


@cache
def _described_state() -> dict[str, Any]:
    return _optimizer_state(meta=True)


KINDS = (
    Kind(MANIFEST_NAME, partial(_model_checkpoint, name=MANIFEST_NAME), _mutated_manifest, _read_checkpoint, _reseal),
    Kind(TRAINER_NAME, partial(_model_checkpoint, name=TRAINER_NAME), mutated_json, _read_state, _reseal),
    Kind(METADATA_NAME, partial(_model_checkpoint, name=METADATA_NAME), _mutated_index, _read_checkpoint, _reseal),
    Kind(".distcp", _tensor_file, _mutated_tensors, _resume, _reseal),
    Kind("optimizer's state", _optimizer_file, _mutated_state, _import_state),
)
