"""The index of a checkpoint's tensors: shape and type of each, and where its parts are.

torch.distributed.checkpoint (DCP) stores its index, `.metadata`, as a pickle, and reads it with `pickle.load`: the
author of the file could run any command on the machine that loads it. So Keel writes the same as JSON next to it, and
reads only that. `.metadata` is there for torch's own tools (`dcp.load`, `dcp_to_torch_save`).

In the file, "tensors" maps each name to dtype, shape and parts; a part is [offsets, sizes, file, first byte, bytes].
"""

import json
import pickle
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, TypeAdapter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from checkpoint.manifest import FileEntry, is_plain_name, readable
from checkpoint.storage import HashedFile
from configs.untrusted import read_file

INDEX_NAME = "index.json"
METADATA_NAME = ".metadata"
"""The same for torch's own tools."""
MAX_INDEX_BYTES = 4 << 30
"""Limit on the index, which has about 100 bytes for each part of a tensor that a rank has written."""

Count = Annotated[int, Field(ge=0, lt=2**63)]
Part = tuple[list[Count], list[Count], str, Count, Count]
"""Offsets and sizes in the whole tensor, one number per dimension; the file; the first byte in it, and how many."""


@dataclass(frozen=True)
class _Tensor:
    dtype: str
    shape: list[Count]
    parts: list[Part]


@dataclass(frozen=True)
class _Index:
    tensors: dict[str, _Tensor]


_INDEX = TypeAdapter(_Index)


def index_text(metadata: Metadata) -> bytes:
    """The content of the index, from DCP's."""
    tensors: dict[str, Any] = {}
    for name, entry in metadata.state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata)  # Keel saves nothing else
        parts = []
        for chunk in entry.chunks:
            place = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
            parts.append((list(chunk.offsets), list(chunk.sizes), place.relative_path, place.offset, place.length))
        dtype = str(entry.properties.dtype).removeprefix("torch.")
        tensors[name] = {"dtype": dtype, "shape": list(entry.size), "parts": parts}
    return json.dumps({"tensors": tensors}, separators=(",", ":")).encode()


def put_index(put: Callable[[str], AbstractContextManager[HashedFile]], metadata: Metadata) -> dict[str, FileEntry]:
    """Put the index of a checkpoint, as Keel and as torch's own tools read it, and return the files.

    `put` opens a file of the checkpoint by its name, for writing.
    """
    files = {}
    for name, content in ((INDEX_NAME, index_text(metadata)), (METADATA_NAME, pickle.dumps(metadata))):
        with put(name) as file:
            file.write(content)
        files[name] = file.entry()
    return files


def read_metadata(folder: Path) -> Metadata:
    """Read the index of the checkpoint in `folder`, as DCP's own class.

    Raises:
        UserError: the index can't be read, or has anything but whole tensors in files of this folder.
    """
    with readable(folder, INDEX_NAME):
        metadata = metadata_of(read_file(folder / INDEX_NAME, MAX_INDEX_BYTES))
        _check_sizes(metadata, folder)
        return metadata


def metadata_of(text: str | bytes) -> Metadata:
    """The inverse of `index_text`.

    Raises:
        ValueError: the text is no index, or does not describe whole tensors in files of one folder.
    """
    metadata = Metadata({}, storage_data={}, storage_meta=StorageMeta())
    for name, tensor in _INDEX.validate_json(text, strict=True).tensors.items():
        dtype = getattr(torch, tensor.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{name} has an unknown type")
        chunks = []
        for offsets, sizes, file, start, length in tensor.parts:
            _check_part(name, tensor, offsets, sizes)
            if not is_plain_name(file):
                raise ValueError(f"{file} is not a file of the checkpoint's folder")
            if prod(sizes) * dtype.itemsize > length:
                raise ValueError(f"a part of {name} is larger than its place in {file}")
            chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            chunks.append(chunk)
            metadata.storage_data[MetadataIndex(name, chunk.offsets)] = _StorageInfo(file, start, length)
        n_elements = sum(prod(chunk.sizes) for chunk in chunks)
        if len({chunk.offsets for chunk in chunks}) < len(chunks) or n_elements != prod(tensor.shape):
            raise ValueError(f"parts of {name} are missing or duplicated")
        properties = TensorProperties(dtype=dtype)
        metadata.state_dict_metadata[name] = TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
    return metadata


def _check_sizes(metadata: Metadata, folder: Path) -> None:
    """Raise ValueError unless the files are long enough for their tensors."""
    used = Counter[str]()
    for place in metadata.storage_data.values():
        used[place.relative_path] += place.length
    for file, length in used.items():
        if length > (folder / file).lstat().st_size:
            raise ValueError(f"{file} is shorter than its tensors")


def _check_part(name: str, tensor: _Tensor, offsets: list[int], sizes: list[int]) -> None:
    """Raise ValueError unless the part is inside its tensor."""
    if not len(offsets) == len(tensor.shape) == len(sizes):
        raise ValueError(f"a part of {name} has other dimensions than the tensor")
    for offset, length, whole in zip(offsets, sizes, tensor.shape, strict=True):
        if offset + length > whole:
            raise ValueError(f"a part of {name} is outside of it")
