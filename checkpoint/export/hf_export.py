"""Conversion of Keel's checkpoints to Hugging Face model folders; `hf_import.py` has the way back.

The whole model is never in memory: an export holds one file of the output. The optimizer is not read at all. The output
gets its name only when it is complete, and an existing folder is never touched.
"""

import os
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from checkpoint import manifest as manifests
from checkpoint.compare import described, require_same
from checkpoint.export import family
from checkpoint.export.hf_config import (
    as_written,
    checkpoint_shapes,
    copies,
    factors,
    hf_class_of,
    left_out,
    sources,
    tensor_shapes,
    to_hf,
)
from checkpoint.export.hf_folder import INDEX_NAME, SINGLE_NAME, check_count, dtype_name, dtypes_of
from checkpoint.export.model_files import model_entries, model_of, n_tensors, with_biases
from checkpoint.export.output import finish, unfinished_folder, write_bytes, write_json
from checkpoint.find import HF_CONFIG_NAME as CONFIG_NAME
from checkpoint.index import read_metadata
from checkpoint.lock import ReadLock
from checkpoint.manifest import Manifest, read_manifest
from checkpoint.tensor_stream import Counter, Progress, n_bytes, read_tensor
from checkpoint.verify import check_tensors
from configs.architectures.parts import Shape
from configs.errors import UserError
from configs.exportable import not_exportable
from configs.schema import HfModel, Model, is_described

MAX_SHARD_BYTES = 5_000_000_000
"""Hugging Face's own default for years; every file system and server accepts such files."""


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


def export_hf(
    checkpoint: Path,
    output: Path,
    tokenizer: TokenizerFiles,
    dtype: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    verify: Literal["size", "hash"] = "hash",
    progress: Progress = lambda done, total: None,
    warn: Callable[[str], None] = lambda text: None,
    own_class: bool = False,
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
        own_class: write a model that transformers has no class for as the class that was published with it.

    Raises:
        UserError: the checkpoint is damaged, or its model has no counterpart, or the output exists or can't be written.
    """
    manifest = read_manifest(checkpoint)
    metadata = read_metadata(checkpoint)
    model = model_of(manifest, checkpoint)
    if reason := not_exportable(model):
        raise UserError(f"{checkpoint}: this model can't be exported to Hugging Face format: {reason}")
    if own_class and (not is_described(model) or hf_class_of(model).in_transformers):
        raise UserError(f"{checkpoint}: transformers has a class for this model; leave --own-class out")
    whole = _exported(checkpoint, manifest, metadata, output, tokenizer, verify)
    if isinstance(model, HfModel):
        with whole as folder:
            tensors, own_dtype = _family_tensors(checkpoint, metadata, dtype, progress)
            target = getattr(torch, dtype) if dtype else own_dtype
            family.write_folder(model, tensors, folder, target, max_shard_bytes, tokenizer.marks())
        return
    assert is_described(model)
    check_count(checkpoint / manifests.MANIFEST_NAME, model, n_tensors(metadata))
    metadata = with_biases(metadata, model)
    written = as_written(model, own_class)
    if missing := left_out(written):
        warn(missing)
    repeated = copies(written)
    shapes = tensor_shapes(written)
    shapes |= {name: shapes[first] for name, first in repeated.items()}
    own_dtype = _check_tensors(checkpoint, metadata, model)
    target = getattr(torch, dtype) if dtype else own_dtype
    own_dtypes = dtypes_of(written, own_dtype) | dict.fromkeys(repeated, own_dtype)
    targets = dtypes_of(written, target) | dict.fromkeys(repeated, target)
    count = Counter(progress, sum(n_bytes(shape, own_dtypes[name]) for name, shape in shapes.items()))
    shards = _shards(shapes, targets, max_shard_bytes)
    stacks = _Stacks(checkpoint, metadata, model, written, own_dtype)

    with whole as folder:
        for name, shard in shards.items():
            _write_shard(folder / name, {tensor: count(stacks.read(tensor)).to(targets[tensor]) for tensor in shard})
        seq_len = manifest.value("training", "seq_len", int) or 0
        write_json(
            folder / CONFIG_NAME, to_hf(written, dtype_name(target), seq_len, tokenizer.bos_id, tokenizer.eos_id)
        )
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
    with ReadLock(checkpoint) as lock, unfinished_folder(output) as folder:
        if verify == "hash":
            check_tensors(checkpoint, manifest, metadata, "model.")
        yield folder
        for name, content in tokenizer.files.items():
            write_bytes(folder / name, content)
        lock.require_there()
        finish(folder, output)


def _family_tensors(
    checkpoint: Path, metadata: Metadata, dtype: str | None, progress: Progress
) -> tuple[dict[str, Tensor], torch.dtype]:
    """The tensors of a model without a description, converted, and the dtype that the first has in the checkpoint."""
    entries = model_entries(metadata)
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
        if len(place.names) == 1:
            tensor = read_tensor(self._checkpoint, self._metadata, name).view(place.hf_shape)
            return tensor * self._factors[name] if name in self._factors else tensor
        if name != self._name:
            self._name = name
            self._stack = torch.empty(0)  # freed before the next one is read
            self._stack = read_tensor(self._checkpoint, self._metadata, name)
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


def _check_tensors(checkpoint: Path, metadata: Metadata, model: Model) -> torch.dtype:
    """Check that the checkpoint has exactly the model's tensors; returns the dtype of the weights."""
    saved = model_entries(metadata)
    shapes = checkpoint_shapes(model)
    first = saved.get(next(iter(shapes)))
    dtype = first.properties.dtype if first else torch.float32
    dtypes = dtypes_of(model, dtype)
    require_same(
        f"checkpoint {checkpoint} does not hold the model that its {manifests.MANIFEST_NAME} describes",
        {name: described(entry.size, entry.properties.dtype) for name, entry in saved.items()},
        {name: described(shape, dtypes[name]) for name, shape in shapes.items()},
    )
    return dtype


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
