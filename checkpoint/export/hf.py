"""Conversion of Keel's checkpoints to Hugging Face model folders, and back.

The whole model is never in memory: an export holds one file of the output, an import one tensor of the checkpoint. The
optimizer is not read at all. The output gets its name only when it is complete, and an existing folder is never
touched. From a stranger's folder only safetensors and JSON are read, neither of which can contain code.
"""

import json
import os
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from checkpoint import manifest as manifests
from checkpoint.compare import described, require_same
from checkpoint.export import family
from checkpoint.export.hf_config import (
    Source,
    as_written,
    checkpoint_shapes,
    copies,
    factors,
    left_out,
    longest_sequence,
    seq_len_of,
    sources,
    tensor_shapes,
    to_hf,
    to_keel,
    unknown_fields,
)
from checkpoint.export.output import finish, unfinished_folder, write_bytes, write_json
from checkpoint.find import HF_CONFIG_NAME as CONFIG_NAME
from checkpoint.index import read_metadata
from checkpoint.lock import ReadLock
from checkpoint.manifest import Manifest, damaged, is_plain_name, read_manifest
from checkpoint.storage import FolderStorage, commit
from checkpoint.tensor_stream import (
    Counter,
    Progress,
    entry_of,
    n_bytes,
    read_tensor,
    write_tensors,
)
from checkpoint.verify import check_tensors
from configs.architectures import HF_CLASSES, own_weights, stored_tensors
from configs.architectures.llama import MultiToken
from configs.architectures.parts import Shape
from configs.errors import UserError
from configs.exportable import not_exportable
from configs.reading import hf_config
from configs.reading.toml_text import table_text
from configs.schema import AnyModel, HfModel, Model, OwnModel, is_described, table_of_model
from configs.untrusted import MAX_JSON_BYTES, link_out_of, parse_json, read_file, require_64_bits, shortened

MAX_SHARD_BYTES = 5_000_000_000
"""Hugging Face's own default for years; every file system and server accepts such files."""

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MODEL_TOML = "model.toml"

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}
"""The floating-point dtypes of models, by safetensors' names."""


@dataclass(frozen=True)
class TokenizerFiles:
    """The tokenizer's part of a Hugging Face folder."""

    files: Mapping[str, bytes] = field(default_factory=dict)
    """Content by file name."""
    bos_id: int | None = None
    eos_id: int | None = None

    def marks(self) -> dict[str, int]:
        """The ids of the special tokens that it has, by transformers' names."""
        ids = {"bos_token_id": self.bos_id, "eos_token_id": self.eos_id}
        return {key: token for key, token in ids.items() if token is not None}


@dataclass(frozen=True)
class ModelFiles:
    """A model on disk, in Keel's or in Hugging Face's format."""

    model: AnyModel
    seq_len: int
    """Tokens of the longest sequence that it is made for."""
    dtype: torch.dtype
    tensors: Mapping[str, str]
    """The shapes of its tensors, described, by their names in a checkpoint."""
    read: Callable[[str], Tensor]
    """Reads one of them, whole."""


def checkpoint_files(checkpoint: Path) -> ModelFiles:
    """Open the model in a checkpoint, whatever mesh has saved it.

    Raises:
        UserError: the checkpoint is damaged.
    """
    manifest = read_manifest(checkpoint)
    metadata = read_metadata(checkpoint)
    model = _model_of(manifest, checkpoint)
    _check_count(checkpoint / manifests.MANIFEST_NAME, model, _n_tensors(metadata))
    trained = manifest.value("training", "seq_len", int) or 0
    seq_len = _longest_sequence(model, trained)
    entries = _entries(metadata)
    return ModelFiles(
        model,
        seq_len,
        reduce(torch.promote_types, (entry.properties.dtype for entry in entries.values())),
        {name: described(entry.size) for name, entry in entries.items()},
        lambda name: read_tensor(checkpoint, metadata, name),
    )


def hf_files(source: Path) -> ModelFiles:
    """Open the model in a Hugging Face folder: in Keel's own modules, or as it is where Keel has none for its family.

    Raises:
        UserError: it can't be read, or neither has modules for it.
    """
    if str(_read_json(source / CONFIG_NAME).get("model_type")) not in HF_CLASSES:
        return _family_files(source)
    config, model, tensors = _open(source)
    shapes = checkpoint_shapes(model)
    names = sources(model)
    dtype = _common_dtype(model, tensors)
    dtypes = _dtypes(model, dtype)
    return ModelFiles(
        model,
        seq_len_of(config),
        dtype,
        {name: described(shape) for name, shape in shapes.items()},
        lambda name: _read_source(names[name], shapes[name], tensors, dtypes[name]),
    )


def _family_files(source: Path) -> ModelFiles:
    """Open a model without a description, which is then in memory, whole."""
    model, tensors = _read_family(source, None)
    return ModelFiles(
        model,
        family.seq_len_of(model),
        reduce(torch.promote_types, (tensor.dtype for tensor in tensors.values())),
        {f"model.{name}": described(tensor.shape) for name, tensor in tensors.items()},
        lambda name: tensors[name.removeprefix("model.")],
    )


# ------------------------------------------------------------------ export


def export_hf(
    checkpoint: Path,
    output: Path,
    tokenizer: TokenizerFiles,
    dtype: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    verify: Literal["size", "hash"] = "hash",
    progress: Progress = lambda done, total: None,
    warn: Callable[[str], None] = lambda text: None,
    gates_shared: bool = False,
) -> None:
    """Write the model of a checkpoint as a Hugging Face folder, in one process, whatever mesh has saved it.

    Args:
        checkpoint: the checkpoint's folder.
        output: the folder to create.
        tokenizer: its files are added to the output.
        dtype: dtype of the weights; None: as in the checkpoint.
        max_shard_bytes: tensors share a file up to this size; a larger tensor gets a separate file.
        verify: "hash": first compare the content of the files that are read with their hashes.
        progress: called after each tensor.
        warn: called with what the format has no place for.
        gates_shared: give shared experts without a gate one that changes nothing, for a class that has it.

    Raises:
        UserError: the checkpoint is damaged, or its model has no counterpart, or the output exists or can't be written.
    """
    manifest = read_manifest(checkpoint)
    metadata = read_metadata(checkpoint)
    model = _model_of(manifest, checkpoint)
    written = as_written(model, gates_shared) if is_described(model) else model
    if gates_shared and written == model:
        raise UserError(
            f"{checkpoint}: this model has no shared experts without a gate; leave --gate-shared-experts out"
        )
    if reason := not_exportable(written):
        raise UserError(f"{checkpoint}: this model can't be exported to Hugging Face format: {reason}")
    whole = _exported(checkpoint, manifest, metadata, output, tokenizer, verify)
    if isinstance(model, HfModel):
        with whole as folder:
            tensors, own_dtype = _family_tensors(checkpoint, metadata, dtype, progress)
            target = getattr(torch, dtype) if dtype else own_dtype
            family.write_folder(model, tensors, folder, target, max_shard_bytes, tokenizer.marks())
        return
    assert is_described(model)
    assert is_described(written)
    _check_count(checkpoint / manifests.MANIFEST_NAME, model, _n_tensors(metadata))
    if missing := left_out(written):
        warn(missing)
    repeated = copies(written)
    shapes = tensor_shapes(written)
    shapes |= {name: shapes[first] for name, first in repeated.items()}
    own_dtype = _check_tensors(checkpoint, metadata, model)
    target = getattr(torch, dtype) if dtype else own_dtype
    own_dtypes = _dtypes(written, own_dtype) | dict.fromkeys(repeated, own_dtype)
    targets = _dtypes(written, target) | dict.fromkeys(repeated, target)
    count = Counter(progress, sum(n_bytes(shape, own_dtypes[name]) for name, shape in shapes.items()))
    shards = _shards(shapes, targets, max_shard_bytes)
    stacks = _Stacks(checkpoint, metadata, model, written, own_dtype)

    with whole as folder:
        for name, shard in shards.items():
            _write_shard(folder / name, {tensor: count(stacks.read(tensor)).to(targets[tensor]) for tensor in shard})
        seq_len = manifest.value("training", "seq_len", int) or 0
        write_json(folder / CONFIG_NAME, to_hf(written, _name(target), seq_len, tokenizer.bos_id, tokenizer.eos_id))
        write_json(folder / INDEX_NAME, _index(shards, targets))
        write_json(folder / "generation_config.json", tokenizer.marks())


@contextmanager
def _exported(
    checkpoint: Path,
    manifest: Manifest,
    metadata: Metadata,
    output: Path,
    tokenizer: TokenizerFiles,
    verify: Literal["size", "hash"],
) -> Generator[Path, None, None]:
    """A folder for the model of a checkpoint; it gets the tokenizer's files and its name at the end."""
    with ReadLock(checkpoint), unfinished_folder(output) as folder:
        if verify == "hash":
            check_tensors(checkpoint, manifest, metadata, "model.")
        yield folder
        for name, content in tokenizer.files.items():
            write_bytes(folder / name, content)
        finish(folder, output)


def _family_tensors(
    checkpoint: Path, metadata: Metadata, dtype: str | None, progress: Progress
) -> tuple[dict[str, Tensor], torch.dtype]:
    """The tensors of a model without a description, converted, and the dtype that the first has in the checkpoint."""
    entries = _entries(metadata)
    count = Counter(progress, sum(n_bytes(entry.size, entry.properties.dtype) for entry in entries.values()))
    tensors = {}
    for name in entries:
        tensor = count(read_tensor(checkpoint, metadata, name))
        if dtype and tensor.is_floating_point():
            tensor = tensor.to(getattr(torch, dtype))
        tensors[name.removeprefix("model.")] = tensor
    return tensors, next(iter(entries.values())).properties.dtype


class _Stacks:
    """Reads tensors by Hugging Face's names; a stack of experts is read once for all of them, which are consecutive.

    A tensor that several of the checkpoint's share is joined.
    """

    def __init__(self, checkpoint: Path, metadata: Metadata, model: Model, written: Model, dtype: torch.dtype) -> None:
        self._checkpoint = checkpoint
        self._metadata = metadata
        self._dtype = dtype
        self._sources = sources(written)
        self._copies = copies(written)
        self._factors = {f"model.{name}": factor for name, factor in factors(model, written).items()}
        self._holders: dict[str, list[str]] = {}
        for name, place in self._sources.items():
            for source in place.names:
                self._holders.setdefault(source, []).append(name)
        self._name = ""
        self._stack = torch.empty(0)

    def read(self, source: str) -> Tensor:
        source = self._copies.get(source, source)
        first, *others = self._holders[source]
        if not others:
            return self._part(first, source)
        parts = self._sources[first].parts
        tensors = [self._part(name, source).unflatten(0, (parts, -1)) for name in (first, *others)]
        return torch.cat(tensors, 1).flatten(0, 1)

    def _part(self, name: str, source: str) -> Tensor:
        place = self._sources[name]
        if name not in self._metadata.state_dict_metadata:  # a gate that `as_written` adds
            return torch.zeros(place.hf_shape, dtype=self._dtype)
        if name != self._name:
            self._name = name
            self._stack = torch.empty(0)  # freed before the next one is read
            tensor = read_tensor(self._checkpoint, self._metadata, name)
            if len(place.names) == 1:
                tensor = tensor.view(place.hf_shape)
                return tensor * self._factors[name] if name in self._factors else tensor
            self._stack = tensor
        return self._stack[place.names.index(source)].clone()  # safetensors refuses tensors that share memory


def _write_shard(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a safetensors file, and sync it.

    Raises:
        OSError: the disk refuses.
    """
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(str(error)) from None
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _model_of(manifest: Manifest, checkpoint: Path) -> AnyModel:
    try:
        table = manifest.in_effect.get("model")
        return table_of_model(table).model_validate(table)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, ("config", "model", *first["loc"])))
        raise damaged(checkpoint, f"{manifests.MANIFEST_NAME}: {place}: {first['msg']}") from None


def _longest_sequence(model: AnyModel, trained: int) -> int:
    """Tokens of the longest sequence that a model is made for, which was trained with so many."""
    if isinstance(model, OwnModel):
        return model.max_seq_len or trained
    return longest_sequence(model, trained) if is_described(model) else family.seq_len_of(model, trained)


def _entries(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    """The tensors of the model in a checkpoint, by name."""
    names = [name for name in metadata.state_dict_metadata if name.startswith("model.")]
    return {name: entry_of(metadata, name) for name in names}


def _n_tensors(metadata: Metadata) -> int:
    """The number of tensors that a checkpoint's tensors become in Hugging Face's format, where experts are separate."""
    entries = [entry_of(metadata, name) for name in metadata.state_dict_metadata]
    return sum(entry.size[0] if len(entry.size) == 3 else 1 for entry in entries)


def _check_count(path: Path, model: AnyModel, n_tensors: int) -> None:
    """Raise UserError if a model has more layers and experts than tensors: listing its tensors might never end."""
    if model.n_layers * (model.n_experts or 1) > n_tensors:
        experts = f" with {model.n_experts} experts each" if model.n_experts else ""
        raise UserError(f"{path} describes {model.n_layers} layers{experts}, and there are only {n_tensors} tensors")


def _check_tensors(checkpoint: Path, metadata: Metadata, model: Model) -> torch.dtype:
    """Check that the checkpoint has exactly the model's tensors; returns the dtype of the weights."""
    saved = _entries(metadata)
    shapes = checkpoint_shapes(model)
    first = saved.get(next(iter(shapes)))
    dtype = first.properties.dtype if first else torch.float32
    dtypes = _dtypes(model, dtype)
    require_same(
        f"checkpoint {checkpoint} does not hold the model that its {manifests.MANIFEST_NAME} describes",
        {name: described(entry.size, entry.properties.dtype) for name, entry in saved.items()},
        {name: described(shape, dtypes[name]) for name, shape in shapes.items()},
    )
    return dtype


def _dtypes(model: Model, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The dtype of each tensor, by its names in a checkpoint and in Hugging Face's format: that of the weights is
    `dtype`, and buffers are in float32."""
    return {
        name: torch.float32 if weight.is_buffer else dtype
        for weight in stored_tensors(model)
        for name in (f"model.{weight.name}", *weight.hf_names)
    }


def _shards(
    shapes: Mapping[str, Shape], dtypes: Mapping[str, torch.dtype], max_bytes: int
) -> dict[str, dict[str, Shape]]:
    """Divide the tensors, in order, into files; by file name, as transformers names them."""
    groups: list[dict[str, Shape]] = [{}]
    size = 0
    for name, shape in shapes.items():
        if groups[-1] and size + n_bytes(shape, dtypes[name]) > max_bytes:
            groups.append({})
            size = 0
        groups[-1][name] = shape
        size += n_bytes(shape, dtypes[name])
    if len(groups) == 1:
        return {SINGLE_NAME: groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, 1)}


def _index(shards: Mapping[str, Mapping[str, Shape]], dtypes: Mapping[str, torch.dtype]) -> dict[str, Any]:
    """The index; also written for a single file, so that a reader of exports needs to know only one form."""
    size = sum(n_bytes(shape, dtypes[name]) for shard in shards.values() for name, shape in shard.items())
    weight_map = {name: file for file, shard in shards.items() for name in shard}
    return {"metadata": {"total_size": size}, "weight_map": weight_map}


# ------------------------------------------------------------------ import


@dataclass(frozen=True)
class _SourceTensor:
    """A tensor in a safetensors file."""

    path: Path
    shape: Shape
    dtype: torch.dtype


def import_hf(
    source: Path,
    output: Path,
    tokenizer: Path | None,
    dtype: str | None = None,
    progress: Progress = lambda done, total: None,
    as_it_is: bool = False,
) -> None:
    """Write the model in a Hugging Face folder as a checkpoint: weights only, for `checkpoint.init_from`.

    The output also gets `model.toml`, a base for job files with the model's shape, and a copy of the tokenizer.

    Args:
        source: the Hugging Face folder.
        output: the folder to create.
        tokenizer: the tokenizer's file, in the form for Keel to use; None: no tokenizer.
        dtype: dtype of the weights; None: as in the source. float16, and mixed dtypes, become the narrowest dtype that
            represents all of them exactly.
        progress: called after each tensor.
        as_it_is: for architecture "hf", whatever the family; otherwise for Keel's own modules.

    Raises:
        UserError: the source can't be read, or Keel can't train its model, or the output exists or can't be written.
    """
    if as_it_is:
        _import_family(source, output, tokenizer, dtype, progress)
        return
    config, model, tensors = _open(source)
    shapes = tensor_shapes(model)
    target = getattr(torch, dtype) if dtype else _common_dtype(model, tensors)
    dtypes = _dtypes(model, target)
    count = Counter(progress, sum(n_bytes(shape, dtypes[name]) for name, shape in shapes.items()))
    names = sources(model)
    to_write = checkpoint_shapes(model).items()
    stream = ((name, count(_read_source(names[name], shape, tensors, dtypes[name]))) for name, shape in to_write)
    _write_import(source, output, tokenizer, model, seq_len_of(config), target, stream)


def unread(source: Path) -> list[str]:
    """What an import into Keel's own modules leaves out: fields of config.json and tensors, as sentences."""
    path = source / CONFIG_NAME
    config = _read_json(path)
    found = []
    if fields := unknown_fields(config, path):
        found.append(f"{path} has fields that Keel does not know; the import is without them: {', '.join(fields)}")
    if tensors := [name for name in _tensors_in(source) if _is_left_out(name, config)]:
        found.append(
            f"{source} has modules that predict further tokens, which Keel does not have in such a model; the import "
            f"is without their {len(tensors)} tensors, such as {tensors[0]}"
        )
    return found


def _is_left_out(name: str, config: Mapping[str, Any]) -> bool:
    prefix = HF_CLASSES[str(config["model_type"])].left_out
    return bool(prefix) and name.startswith(prefix)


def _import_family(source: Path, output: Path, tokenizer: Path | None, dtype: str | None, progress: Progress) -> None:
    """Import a model to train as it is."""
    model, tensors = _read_family(source, getattr(torch, dtype) if dtype else None)
    target = next(iter(tensors.values())).dtype
    count = Counter(progress, sum(n_bytes(tensor.shape, target) for tensor in tensors.values()))
    stream = ((f"model.{name}", count(tensor)) for name, tensor in tensors.items())
    _write_import(source, output, tokenizer, model, family.seq_len_of(model), target, stream)


def _read_family(source: Path, dtype: torch.dtype | None) -> tuple[HfModel, dict[str, Tensor]]:
    """The model of a folder as it is, and its tensors: transformers reads them."""
    table = {"architecture": "hf", "hf_config": json.dumps(_read_json(source / CONFIG_NAME))}
    if faults := [message for _, message in hf_config.resolve(table)]:
        raise UserError(f"{source / CONFIG_NAME}: {faults[0]}")
    model = HfModel.model_validate(table)
    return model, family.read_folder(model, source, dtype)


def _write_import(
    source: Path,
    output: Path,
    tokenizer: Path | None,
    model: AnyModel,
    seq_len: int,
    target: torch.dtype,
    stream: Iterator[tuple[str, Tensor]],
) -> None:
    with unfinished_folder(output) as folder:
        storage = FolderStorage()
        files = write_tensors(storage, folder, stream)
        tables: dict[str, Any] = {"model": model.model_dump()}
        if tokenizer:
            files[tokenizer.name] = write_bytes(folder / tokenizer.name, tokenizer.read_bytes())
            tables["tokenizer"] = {"path": str(output.resolve() / tokenizer.name)}
        toml = _toml_heading(source, output) + table_text(tables)
        files[MODEL_TOML] = write_bytes(folder / MODEL_TOML, toml.encode())
        training = {"dtype": _name(target), "seq_len": seq_len}
        tokenizer_hash = files[tokenizer.name].xxh3 if tokenizer else None
        commit(storage, folder, output, _draft(tables | {"training": training}, tokenizer_hash), files, "{}")


def _open(source: Path) -> tuple[dict[str, Any], Model, dict[str, _SourceTensor]]:
    """The config.json of a Hugging Face folder, the model that it describes, and the model's tensors."""
    config = _read_json(source / CONFIG_NAME)
    model = to_keel(config, source / CONFIG_NAME)
    tensors = {name: tensor for name, tensor in _tensors_in(source).items() if not _is_left_out(name, config)}
    _check_count(source / CONFIG_NAME, model, len(tensors))
    if not any(name.startswith(f"model.layers.{model.n_layers}.") for name in tensors):
        # transformers leaves the modules that predict further tokens out, and keeps their number in config.json.
        model = model.model_copy(update={"multi_token": MultiToken()})
    _check_tied_head(model, tensors)
    _check_copies(model, tensors)
    require_same(
        f"{source} does not hold the model that its {CONFIG_NAME} describes",
        {name: described(tensor.shape) for name, tensor in tensors.items()},
        {name: described(shape) for name, shape in tensor_shapes(model).items()},
    )
    return config, model, tensors


def _toml_heading(source: Path, output: Path) -> str:
    return (
        f"# The shape of the model that was imported from {source}. To continue training it, in a job file:\n"
        f'#   base = "{output.resolve() / MODEL_TOML}", and in [checkpoint] init_from = "{output.resolve()}"\n\n'
    )


def _draft(config: dict[str, Any], tokenizer_hash: str | None) -> Manifest:
    return Manifest(
        step=0,
        tokens=0,
        config=config,
        config_hash=manifests.config_hash(config),
        mesh={},
        torch_version=torch.__version__,
        run_id=uuid4().hex,
        parent=None,
        run_changes=[],
        files={},
        tokenizer_hash=tokenizer_hash,
    )


def _tensors_in(source: Path) -> dict[str, _SourceTensor]:
    """The tensors of all safetensors files, by name.

    Raises:
        UserError: there are none, or one can't be read.
    """
    names = _file_names(source)
    tensors: dict[str, _SourceTensor] = {}
    for name in names:
        tensors |= _tensors_of(source / name)
    # Exports from 2023 contain this buffer, which follows from the config.
    return {name: tensor for name, tensor in tensors.items() if not name.endswith("rotary_emb.inv_freq")}


def _file_names(source: Path) -> list[str]:
    index = source / INDEX_NAME
    if index.is_file():
        weight_map = _read_json(index).get("weight_map")
        names = sorted({str(name) for name in weight_map.values()}) if isinstance(weight_map, dict) else []
        outside = [name for name in names if not is_plain_name(name)]
        if not names or outside:
            outer = f"{shortened(repr(outside[0]), 300)}, outside of the folder" if outside else "no files"
            raise UserError(f"{index}: names {outer}")
        return names
    if (source / SINGLE_NAME).is_file():
        return [SINGLE_NAME]
    pickles = sorted(path.name for pattern in ("*.bin", "*.pth", "*.pt") for path in source.glob(pattern))
    if not pickles:
        raise UserError(f"{source} has no safetensors: neither {INDEX_NAME} nor {SINGLE_NAME}")
    raise UserError(
        f"{source} has its weights only in {pickles[0]}, a pickle, which can run code when it is read. Keel reads "
        'safetensors; if you trust the folder, convert it once: python -c "import transformers; '
        f"transformers.AutoModelForCausalLM.from_pretrained('{source}', dtype='auto').save_pretrained('NEW_FOLDER')\""
    )


def _tensors_of(path: Path) -> dict[str, _SourceTensor]:
    tensors = {}
    with _opened(path) as file:
        for name in file.keys():  # noqa: SIM118 (it is not a dict)
            entry = file.get_slice(name)
            if entry.get_dtype() not in _DTYPES:
                raise UserError(f"{path}: {name} is of type {entry.get_dtype()}; Keel imports {', '.join(_DTYPES)}")
            tensors[name] = _SourceTensor(path, tuple(entry.get_shape()), _DTYPES[entry.get_dtype()])
    return tensors


def _read(name: str, tensor: _SourceTensor, dtype: torch.dtype) -> Tensor:
    """Read the tensor into its own memory, and close the mapped file."""
    with _opened(tensor.path) as file:
        return file.get_tensor(name).to(dtype, copy=True)


def _read_source(place: Source, shape: Shape, tensors: Mapping[str, _SourceTensor], dtype: torch.dtype) -> Tensor:
    """Read what a checkpoint stores as one tensor of this shape: a tensor, rows of one, or all experts', stacked."""
    names = place.names
    if len(names) == 1:
        tensor = _read(names[0], tensors[names[0]], dtype)
        if place.parts:
            tensor = tensor.unflatten(0, (place.parts, -1))[:, place.rows].flatten(0, 1)
        return tensor.view(shape)
    stack = torch.empty(shape, dtype=dtype)
    for number, name in enumerate(names):
        stack[number] = _read(name, tensors[name], dtype)
    return stack


def require_inside(path: Path) -> None:
    """Raise UserError if a file of a Hugging Face folder is a link that leads out of it."""
    if problem := link_out_of(path):
        raise UserError(problem)


@contextmanager
def _opened(path: Path) -> Generator[Any, None, None]:
    require_inside(path)
    if path.exists() and not path.is_file():  # opening a pipe would wait for a writer
        raise UserError(f"{path} can't be read: it is not a regular file")
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, MemoryError, SafetensorError) as error:  # MemoryError: the process may not map that much
        raise UserError(f"{path} can't be read: {error}") from None


def _check_tied_head(model: Model, tensors: dict[str, _SourceTensor]) -> None:
    """Drop the head of a tied model, if the folder has one; it must equal the embedding."""
    head = "lm_head.weight"
    embedding = "model.embed_tokens.weight"
    if not model.tie_embeddings or not {head, embedding} <= tensors.keys():
        return
    if not torch.equal(*(_read(name, tensors[name], tensors[name].dtype) for name in (head, embedding))):
        raise UserError(
            f"{tensors[head].path}: {head} is not {embedding}, although tie_word_embeddings is true in {CONFIG_NAME}; "
            "if the head is right, set that to false"
        )
    del tensors[head]


def _check_copies(model: Model, tensors: dict[str, _SourceTensor]) -> None:
    """Drop the embedding and the head of modules that predict further tokens; they must equal the model's own."""
    for name, first in copies(model).items():
        if name not in tensors or first not in tensors:
            continue
        if not torch.equal(*(_read(each, tensors[each], tensors[each].dtype) for each in (name, first))):
            raise UserError(
                f"{tensors[name].path}: {name} is not {first}, which Keel's modules that predict further tokens share; "
                f"to import the model without them, set num_nextn_predict_layers to 0 in {CONFIG_NAME} and leave out "
                f"the tensors of layer {model.n_layers} and later ones"
            )
        del tensors[name]


def _common_dtype(model: Model, tensors: Mapping[str, _SourceTensor]) -> torch.dtype:
    """The narrowest of Keel's dtypes that represents all weights exactly."""
    weights = (name for weight in own_weights(model) for name in weight.hf_names)
    dtype = reduce(torch.promote_types, (tensors[name].dtype for name in weights))
    return torch.float32 if dtype == torch.float16 else dtype


# ------------------------------------------------------------------ both


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _read_json(path: Path) -> dict[str, Any]:
    require_inside(path)
    try:
        content = parse_json(read_file(path, MAX_JSON_BYTES))
        require_64_bits(content)
    except FileNotFoundError:
        raise UserError(f"{path.parent} is not a Hugging Face model folder: it has no {path.name}") from None
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{path} can't be read: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} holds a {type(content).__name__} instead of an object")
    return content
