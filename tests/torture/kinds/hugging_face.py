"""The files of a Hugging Face folder."""

import random
import shutil
from functools import partial
from pathlib import Path

from checkpoint.export.hf_export import TokenizerFiles, export_hf
from checkpoint.export.hf_folder import INDEX_NAME, SINGLE_NAME
from checkpoint.export.hf_import import import_hf
from tests.torture.kinds.kind import Kind
from tests.torture.mutations import mutated_bytes, mutated_json
from tests.unit.hf_support import TINY, make_model, save


def _hf_file(folder: Path, name: str) -> Path:
    checkpoint = save(folder / "checkpoint", make_model(TINY["untied"]))
    export_hf(checkpoint, folder / "hf", TokenizerFiles(), max_shard_bytes=20_000 if name == INDEX_NAME else 1 << 30)
    if name == SINGLE_NAME:
        (folder / "hf" / INDEX_NAME).unlink()
    return folder / "hf" / name


def _import(path: Path) -> str:
    output = path.parent.parent / "imported"
    shutil.rmtree(output, ignore_errors=True)
    import_hf(path.parent, output, None)
    return (output / "model.toml").read_text()


def _mutated_safetensors(content: bytes, dice: random.Random) -> bytes:
    length = int.from_bytes(content[:8], "little")
    header, rest = content[8 : 8 + length], content[8 + length :]
    kind = dice.randrange(4)
    if kind == 0:
        return mutated_bytes(content, dice)
    if kind == 1:
        n_bytes = dice.choice((0, 7, 2**31, 2**62, 2**64 - 1, 99_000_000))
        return n_bytes.to_bytes(8, "little") + header + rest
    header = mutated_json(header, dice)
    return len(header).to_bytes(8, "little") + header + rest


KINDS = (
    Kind(SINGLE_NAME, partial(_hf_file, name=SINGLE_NAME), _mutated_safetensors, _import),
    Kind("safetensors index", partial(_hf_file, name=INDEX_NAME), mutated_json, _import),
    Kind("config.json", partial(_hf_file, name="config.json"), mutated_json, _import),
)
