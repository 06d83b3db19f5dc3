"""The kinds of files that Keel reads: a real one of each, how to forge it, and how a run or a script reads it."""

import csv
import fcntl
import gzip
import io
import json
import os
import pickle
import random
import shutil
import signal
import traceback
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from checkpoint.export.hf import INDEX_NAME, SINGLE_NAME, TokenizerFiles, export_hf, import_hf
from checkpoint.export.optimizer_import import import_optimizer
from checkpoint.lock import LOCK_NAME, lock
from checkpoint.manifest import MANIFEST_NAME, TRAINER_NAME, read_manifest, read_trainer_state, sealed
from checkpoint.safe_read import METADATA_NAME, read_metadata
from checkpoint.tensor_stream import read_tensor
from configs.display import summary
from configs.errors import UserError
from configs.load import load
from configs.reading.toml_text import table_text
from configs.run_change import run_key_diff
from scripts import checkpoint as script
from scripts.export_hf import _tokenizer
from tests.torture.damage import make_manager, process_group, state, write_checkpoint
from tests.torture.mutations import hostile, mutated_bytes, mutated_json, mutated_value
from tests.unit.hf_support import TINY, make_model, save
from trainer.data.bad_files import BadFiles
from trainer.data.hf_tokenizer import tokenizer_files
from trainer.data.listing import NAME as LIST_NAME
from trainer.data.listing import InputFile, changes, read_list, write_list
from trainer.data.prepared_folder import RECORD, Settings, described, is_finished, read_record
from trainer.data.text import documents
from trainer.data.token_file import SUFFIX, TokenFolder
from trainer.data.token_writer import TokenFileWriter
from trainer.data.tokenizer import encode_document, load_tokenizer, train_sentencepiece
from trainer.guards.saved_state import check_saved_state
from trainer.lifecycle import read_status
from trainer.report.console import Console
from trainer.report.metrics import cut_back
from trainer.saved_state import RunState

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text() * 3
SPECIAL = 0.02
"""Share of the mutations that put something in the file's place which is none, or has no end."""
SPARSE_BYTES = 100 << 20
"""Of a text that takes no room on the disk; other files are made so large that they must be refused by their size."""
RESEALED = 0.8
"""Share in which sizes, hashes and seals say the truth about what was forged."""

Mutate = Callable[[bytes, random.Random], bytes]


@dataclass
class Kind:
    """A kind of file."""

    name: str
    make: Callable[[Path], Path]
    """Writes a real one to a folder, with what belongs to it; returns its path."""
    mutate_bytes: Mutate
    read_file: Callable[[Path], str]
    """Reads it as Keel does; returns what is shown of it. Raises: KeelError."""
    after: Callable[[Path], None] = lambda path: None
    """Makes hashes elsewhere fit."""
    path: Path = Path()
    originals: dict[Path, bytes] = field(default_factory=dict)

    def prepare(self, folder: Path) -> None:
        """Make the real one, and see that it is read; in another process, for threads do not survive a fork."""
        child = os.fork()
        if child == 0:
            try:
                path = self.make(folder)
                if self.name != LOCK_NAME:
                    self.read_file(path)
                (folder / "path").write_text(str(path))
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        self.path = Path((folder / "path").read_text())
        self.originals = {path: path.read_bytes() for path in self.path.parent.iterdir() if path.is_file()}

    def mutate(self, dice: random.Random) -> int:
        """Put a forged one there; returns its size."""
        self._restore()
        if dice.random() < SPECIAL:
            dice.choice((_fifo, _folder, _device, _sparse, _missing))(self.path)
            return SPARSE_BYTES if self.path.suffix in (".jsonl", ".txt") else 0
        content = self.mutate_bytes(self.originals[self.path], dice)
        self.path.write_bytes(content)
        if dice.random() < RESEALED:
            self.after(self.path)
        return len(content)

    def read(self) -> str:
        """What is shown of it."""
        return self.read_file(self.path)

    def _restore(self) -> None:
        if self.path.is_dir() and not self.path.is_symlink():
            self.path.rmdir()
        else:
            self.path.unlink(missing_ok=True)
        for path, content in self.originals.items():
            path.write_bytes(content)


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def _sparse(path: Path) -> None:
    os.truncate(path, SPARSE_BYTES if path.suffix in (".jsonl", ".txt") else 40 << 30)


def _missing(path: Path) -> None:
    path.unlink()


# --------------------------------------------------------------------------- job files


def _job(folder: Path) -> Path:
    (folder / "base.toml").write_text((ROOT / "configs" / "debug.toml").read_text())
    path = folder / "job.toml"
    path.write_text('base = "base.toml"\n' + (ROOT / "tests/end_to_end/tiny.toml").read_text())
    return path


def _mutated_job(content: bytes, dice: random.Random) -> bytes:
    if dice.random() < 0.5:
        return dice.choice((mutated_bytes, _toml_bomb))(content, dice)
    import tomli

    values = mutated_value(tomli.loads(content.decode()), dice)
    try:
        return table_text(values).encode()
    except Exception:  # no TOML can be made of these values
        return mutated_bytes(content, dice)


def _toml_bomb(content: bytes, dice: random.Random) -> bytes:
    n = dice.choice((10, 1_000, 8_000))
    bombs = (
        "a = " + "[" * n + "]" * n,
        "a = " + "{b = " * n + "1" + "}" * n,
        ".".join(["a"] * n) + " = 1",
        "[" + ".".join(["a"] * n) + "]",
        "".join(f"key{i} = {i}\n" for i in range(n)),
        "".join(f"[table{i}]\nx = 1\n" for i in range(n)),
        "".join(f'[[data.sources]]\nname = "{i}"\nkind = "synthetic"\n' for i in range(n)),
        "a = [" + "1," * n + "]",
        f"n = {'9' * n}",
        f"n = {'9' * n}.5e{'9' * n}",
        f'"{"k" * n}" = 1',
        'base = "job.toml"',
        'base = "/etc/passwd"',
        'base = "/dev/zero"',
        "base = [1]",
    )
    text = dice.choice(bombs)
    return (text + "\n" + content.decode() if dice.random() < 0.7 else content.decode() + "\n" + text).encode()


def _read_job(path: Path) -> str:
    loaded = load(str(path), world_size=1)
    return summary(loaded, 1) + loaded.to_toml(with_origins=True)


# --------------------------------------------------------------------------- checkpoints


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


# --------------------------------------------------------------------------- Hugging Face's folders


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


# --------------------------------------------------------------------------- tokenizers


def _sentencepiece(folder: Path) -> Path:
    train_sentencepiece(iter(TEXT.splitlines()), folder / "own.model", 500)
    return folder / "own.model"


def _mutated_sentencepiece(content: bytes, dice: random.Random) -> bytes:
    from sentencepiece import sentencepiece_model_pb2

    if dice.random() < 0.5:
        return mutated_bytes(content, dice)
    model = sentencepiece_model_pb2.ModelProto.FromString(content)
    for _ in range(dice.choice((1, 3))):
        piece = dice.choice(model.pieces)
        change = dice.randrange(6)
        if change == 0:
            piece.piece = dice.choice(("", "x" * 100_000, "\x1b[2J", "\u2581", "<0xFF>", "<0xZZ>"))
        elif change == 1:
            piece.score = dice.choice((float("nan"), float("inf"), -1e38, 0.0))
        elif change == 2:
            piece.type = dice.randint(1, 6)
        elif change == 3:
            mark = dice.choice(("unk_id", "bos_id", "eos_id", "pad_id", "vocab_size", "model_type"))
            number = dice.choice((1, 2, 4)) if mark == "model_type" else dice.choice((-1, 2**31 - 1, 3))
            setattr(model.trainer_spec, mark, number)
        elif change == 4:
            model.normalizer_spec.precompiled_charsmap = dice.randbytes(dice.choice((1, 8, 400)))
        else:
            model.pieces.extend([piece] * dice.choice((1, 500)))
    return model.SerializeToString()


def _json_tokenizer(folder: Path) -> Path:
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace(" ", "\u2581")])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(tokenizers.Regex(r"\p{L}+|\p{N}{1,3}|\s+"), "isolated"), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=["<s>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator(TEXT.splitlines(), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.enable_truncation(16)
    tokenizer.enable_padding(length=32)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def _mutated_tokenizer(content: bytes, dice: random.Random) -> bytes:
    if dice.random() < 0.6:
        return mutated_json(content, dice)
    values = json.loads(content)
    replace_it = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * dice.choice((2, 1000))}
    vocabulary = values["model"]["vocab"]
    bombs: tuple[dict[str, Any], ...] = (
        {"normalizer": {"type": "Sequence", "normalizers": [replace_it] * dice.choice((1, 3, 6))}},
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "x" * 1000}] * 9}},
        {"padding": {**values["padding"], "strategy": {"Fixed": 2**30}}},
        {"padding": {**values["padding"], "pad_to_multiple_of": 0}},
        {"truncation": {**values["truncation"], "stride": 99, "max_length": dice.choice((0, 1, 2**63))}},
        {"model": {**values["model"], "vocab": {**vocabulary, "zzz": dice.choice((2**32 - 1, 2**31, 2**24))}}},
        {"model": {**values["model"], "dropout": dice.choice((0.5, 2.0))}},
        {"model": {"type": "Unigram", "unk_id": dice.choice((0, 5, None)), "vocab": [["a", 0.0]]}},
        {"model": {"type": "WordLevel", "vocab": {"a": 2**32 - 1}, "unk_token": "a"}},
        {"added_tokens": [{**values["added_tokens"][0], "id": dice.choice((0, 2**32 - 1)), "content": ""}]},
        {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(["}, "behavior": "Isolated", "invert": False}},
        {"decoder": {"type": "Sequence", "decoders": [replace_it] * 6}},
        {"post_processor": {"type": "Sequence", "processors": [values["post_processor"]] * 3}},
    )
    return json.dumps(values | dice.choice(bombs)).encode()


def _read_tokenizer(path: Path) -> str:
    """As a run and an export read it."""
    tokenizer = load_tokenizer(path)
    text = TEXT[:3_000] + "a" * 50 + "\u2581\n"
    ids = encode_document(tokenizer, text)
    assert all(0 <= i < tokenizer.vocab_size for i in ids), "an id out of range"
    assert len(ids) < 100 * len(text), "a text that has grown"
    tokenizer.decode(ids[:200])
    assert len(tokenizer.token_bytes()) == tokenizer.vocab_size
    tokenizer_files(path)
    return ""


# --------------------------------------------------------------------------- data


def _token_file(folder: Path) -> Path:
    path = folder / f"00000{SUFFIX}"
    with TokenFileWriter(path, 500, "0" * 32) as file:
        dice = random.Random(0)
        for _ in range(40):
            file.append([dice.randrange(500) for _ in range(dice.randint(1, 300))])
    return path


def _rehash_tokens(path: Path) -> None:
    """Make the header's own hash true again."""
    content = bytearray(path.read_bytes())
    if len(content) >= 80:
        content[72:80] = xxhash.xxh3_64_digest(content[:72])
        path.write_bytes(content)


def _read_tokens(path: Path) -> str:
    folder = TokenFolder(path.parent, 500)
    tokens = folder.read(0, folder.n_tokens)
    assert tokens.max() < 500
    folder.document_starts(0, folder.n_tokens)
    return ""


def _jsonl(folder: Path) -> Path:
    lines = [json.dumps({"text": text, "meta": {"id": 2**64 - 1}}) for text in TEXT.split("\n\n")[:60]]
    (folder / "a.jsonl").write_text("\n".join(lines) + "\n")
    return folder / "a.jsonl"


def _text(folder: Path) -> Path:
    (folder / "a.txt").write_text(TEXT)
    return folder / "a.txt"


def _jsonl_gz(folder: Path) -> Path:
    content = _jsonl(folder).read_bytes()
    (folder / "a.jsonl").rename(folder / "a.jsonl.gz")
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(content))
    return folder / "a.jsonl.gz"


def _json(folder: Path) -> Path:
    (folder / "a.json").write_text(json.dumps([{"text": text} for text in TEXT.split("\n\n")[:60]]))
    return folder / "a.json"


def _csv(folder: Path) -> Path:
    with (folder / "a.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["id", "text"], *enumerate(TEXT.split("\n\n")[:60])])
    return folder / "a.csv"


def _inputs(folder: Path) -> Path:
    write_list(folder, [InputFile("text", f"text/{i}.txt", i, 2**60, "0" * 32) for i in range(20)])
    return folder / LIST_NAME


def _read_inputs(path: Path) -> str:
    changed, gone = changes(read_list(path.parent) or [], ["text"])
    return "\n".join([*changed, *gone])


def _parquet(folder: Path) -> Path:
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.table({"id": list(range(60)), "text": TEXT.split("\n\n")[:60]})
    parquet.write_table(table, folder / "a.parquet", row_group_size=20)
    return folder / "a.parquet"


def _mutated_parquet(content: bytes, dice: random.Random) -> bytes:
    import pyarrow
    from pyarrow import parquet

    if dice.random() < 0.9:
        return mutated_bytes(content, dice)
    columns: tuple[Any, ...] = (
        pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 5_000), ["x" * 1_000_000]),
        [["x"]] * 100,
        [b"\xff\xfe"] * 100,
        [None] * 100,
        [2**62] * 100,
    )
    out = io.BytesIO()
    parquet.write_table(pyarrow.table({"text": dice.choice(columns)}), out, compression=dice.choice(("zstd", "none")))
    return out.getvalue()


def _read_text(path: Path) -> str:
    bad = BadFiles(3)
    for text in documents(str(path), "text", bad):
        text.encode()
    if bad.messages:
        raise UserError("\n".join(bad.messages))
    return ""


_SETTINGS = Settings(["a"], "text", "0" * 32, 500, 0.0)


def _prepared(folder: Path) -> Path:
    split = {"documents": 1, "tokens": 2, "text_bytes": 3}
    values = {"settings": _SETTINGS.__dict__, "bad_files": ["x"], "empty_documents": 0, "train": split}
    (folder / RECORD).write_text(json.dumps(values, indent=2))
    return folder / RECORD


def _read_prepared(path: Path) -> str:
    """As the command that made it is given once more."""
    if not is_finished(path.parent, _SETTINGS):
        raise UserError("it would be made anew")
    record = read_record(path.parent)
    return "\n".join([*record["bad_files"], *described(record, path.parent)])


# --------------------------------------------------------------------------- the run folder


def _metrics(folder: Path) -> Path:
    lines = [json.dumps({"step": step, "loss": 5.0 / step, "lr": 1e-3, "mfu": None}) for step in range(1, 60)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder / "metrics.jsonl"


def _read_metrics(path: Path) -> str:
    try:
        return str(cut_back(path, 20))
    except OSError as error:  # the trainer makes one message of it
        raise UserError(f"{error.filename} can't be written: {error.strerror}") from None


def _status_file(folder: Path) -> Path:
    values = {"state": "failed", "step": 7, "reason": "", "time": 1.5, "host": "a", "pid": 1}
    (folder / "status.json").write_text(json.dumps(values, indent=2) + "\n")
    return folder / "status.json"


def _read_status(path: Path) -> str:
    status = read_status(path.parent)
    return f"{status.get('state') in ('failed',)} {status.get('time', 0) >= 2.0} {status.get('step', 0):d}"


def _lock_file(folder: Path) -> Path:
    (folder / LOCK_NAME).write_text("process 12345 on somewhere\n")
    return folder / LOCK_NAME


def _read_lock(path: Path) -> str:
    """While another process has the folder."""
    reading, writing = os.pipe()
    holder = os.fork()
    if holder == 0:
        with suppress(OSError):
            fcntl.lockf(os.open(path, os.O_RDWR | os.O_CREAT), fcntl.LOCK_EX)
        os.write(writing, b"x")
        signal.pause()
        os._exit(0)
    try:
        os.read(reading, 1)
        lock(path.parent, lambda _: None)
    except OSError as error:
        raise UserError(f"the folder can't be written: {error.strerror}") from None  # as a run does
    finally:
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
        os.close(reading)
        os.close(writing)
    return ""


_ALL = (
    Kind("job.toml", _job, _mutated_job, _read_job),
    Kind(MANIFEST_NAME, partial(_model_checkpoint, name=MANIFEST_NAME), _mutated_manifest, _read_checkpoint, _reseal),
    Kind(TRAINER_NAME, partial(_model_checkpoint, name=TRAINER_NAME), mutated_json, _read_state, _reseal),
    Kind(METADATA_NAME, partial(_model_checkpoint, name=METADATA_NAME), _mutated_index, _read_checkpoint, _reseal),
    Kind(".distcp", _tensor_file, _mutated_tensors, _resume, _reseal),
    Kind("optimizer's state", _optimizer_file, _mutated_state, _import_state),
    Kind(SINGLE_NAME, partial(_hf_file, name=SINGLE_NAME), _mutated_safetensors, _import),
    Kind("safetensors index", partial(_hf_file, name=INDEX_NAME), mutated_json, _import),
    Kind("config.json", partial(_hf_file, name="config.json"), mutated_json, _import),
    Kind("tokenizer.json", _json_tokenizer, _mutated_tokenizer, _read_tokenizer),
    Kind("SentencePiece", _sentencepiece, _mutated_sentencepiece, _read_tokenizer),
    Kind("token file", _token_file, mutated_bytes, _read_tokens, _rehash_tokens),
    Kind(".txt", _text, mutated_bytes, _read_text),
    Kind(".jsonl", _jsonl, mutated_bytes, _read_text),
    Kind(".jsonl.gz", _jsonl_gz, mutated_bytes, _read_text),
    Kind(".json", _json, mutated_bytes, _read_text),
    Kind(".csv", _csv, mutated_bytes, _read_text),
    Kind(LIST_NAME, _inputs, mutated_bytes, _read_inputs),
    Kind(".parquet", _parquet, _mutated_parquet, _read_text),
    Kind(RECORD, _prepared, mutated_json, _read_prepared),
    Kind("metrics.jsonl", _metrics, mutated_bytes, _read_metrics),
    Kind("status.json", _status_file, mutated_json, _read_status),
    Kind(LOCK_NAME, _lock_file, mutated_bytes, _read_lock),
)
KINDS = {kind.name: kind for kind in _ALL}
