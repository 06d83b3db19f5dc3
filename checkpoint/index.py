"""The index of a checkpoint's tensors: shape and type of each, and where its parts are.

torch.distributed.checkpoint (DCP) stores its index, `.metadata`, as a pickle, and reads it with `pickle.load`: the
author of the file could run any command on the machine that loads it. So Keel writes the same as JSON next to it, and
reads only that. `.metadata` is there for torch's own tools (`dcp.load`, `dcp_to_torch_save`), unless the checkpoint has
so many parts that writing it would take long.

What one process has written has one index, `index.json`: "tensors" maps each name to dtype, shape and parts; a part is
[offsets, sizes, file, first byte, bytes]. (Until format 2, what several ranks have written had that, too.) With several
ranks, `index.json` is a *directory*, and each rank has an index next to its file of tensors, which is read when a part
in that file is asked for. "groups" in the directory has the tensors with the same dtype, shape and parts; a part is
[offsets, sizes, number of the file in "files"]. "places" in a rank's index maps each name to [first byte, bytes]: a
rank writes one part of a tensor.
"""

import json
import pickle
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from checkpoint.manifest import INDEX_NAME, Count, FileEntry, is_plain_name, readable
from checkpoint.storage import HashedFile
from configs.untrusted import read_file

METADATA_NAME = ".metadata"
"""The same for torch's own tools."""
MOST_PARTS = 20_000
"""Parts of all tensors up to which `.metadata` is written: creating it takes the first rank 30 us for each."""
MAX_INDEX_BYTES = 4 << 30
"""Limit on an index, which has about 100 bytes for each part of a tensor."""

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

Box = tuple[list[Count], list[Count]]
"""Offsets and sizes in the whole tensor."""


@dataclass(frozen=True)
class Group:
    """Tensors of which the same ranks have written the same parts."""

    names: list[str]
    dtype: str
    shape: list[Count]
    parts: list[tuple[list[Count], list[Count], Count]]
    """Offsets and sizes in the whole tensor, and the number of the file."""


@dataclass(frozen=True)
class Directory:
    """Which file has which parts of which tensors."""

    groups: list[Group]
    files: list[str]

    @property
    def n_parts(self) -> int:
        """Parts of all tensors."""
        return sum(len(group.names) * len(group.parts) for group in self.groups)

    def text(self) -> bytes:
        """The content of index.json."""
        return json.dumps(asdict(self), separators=(",", ":")).encode()


@dataclass(frozen=True)
class _Places:
    places: dict[str, tuple[Count, Count]]


_DIRECTORY = TypeAdapter(Directory)
_PLACES = TypeAdapter(_Places)
_IS_DIRECTORY = re.compile(rb'\s*\{\s*"groups"')


def index_of(file: str) -> str:
    """The name of the index of a rank's file of tensors."""
    return file.removesuffix(".distcp") + ".json"


def places_text(places: Mapping[str, tuple[int, int]]) -> bytes:
    """The content of a rank's index, from first byte and number of bytes of each tensor's part."""
    return json.dumps({"places": places}, separators=(",", ":")).encode()


class Places(Mapping[MetadataIndex, _StorageInfo]):
    """Where each part is: DCP's `storage_data`, of which the ranks' indexes are read when they are needed.

    Looking a part up raises Damaged if its rank's index can't be read, or says nothing of it.
    """

    def __init__(self, folder: Path, directory: Directory) -> None:
        """`folder`: the checkpoint."""
        self._folder = folder
        self._directory = directory
        self._group_of = {name: number for number, group in enumerate(directory.groups) for name in group.names}
        self._numbers: dict[int, dict[tuple[int, ...], tuple[int, int]]] = {}
        self._read: dict[int, dict[str, tuple[int, int]]] = {}

    def __getitem__(self, part: MetadataIndex) -> _StorageInfo:
        number = self._group_of[part.fqn]
        if number not in self._numbers:
            group = self._directory.groups[number]
            itemsize = getattr(torch, group.dtype).itemsize
            parts = group.parts
            self._numbers[number] = {tuple(at): (file, prod(sizes) * itemsize) for at, sizes, file in parts}
        file, least = self._numbers[number][tuple(part.offset or ())]
        if file not in self._read:
            self._read[file] = self._places_in(self._directory.files[file])
        with readable(self._folder, index_of(self._directory.files[file])):
            if part.fqn not in self._read[file]:
                raise ValueError(f"it has no part of {part.fqn}")
            start, length = self._read[file][part.fqn]
            if least > length:
                raise ValueError(f"a part of {part.fqn} is larger than its place in {self._directory.files[file]}")
        return _StorageInfo(self._directory.files[file], start, length)

    def __iter__(self) -> Iterator[MetadataIndex]:
        for group in self._directory.groups:
            for name in group.names:
                for offsets, _, _ in group.parts:
                    yield MetadataIndex(name, torch.Size(offsets))

    def __len__(self) -> int:
        return self._directory.n_parts

    def files_of(self, prefixes: tuple[str, ...]) -> set[str]:
        """The files with parts of the tensors whose names start with one of `prefixes`, and their indexes."""
        numbers = {
            file
            for group in self._directory.groups
            if any(name.startswith(prefixes) for name in group.names)
            for _, _, file in group.parts
        }
        files = [self._directory.files[number] for number in numbers]
        return {*files, *map(index_of, files)}

    def _places_in(self, file: str) -> dict[str, tuple[int, int]]:
        name = index_of(file)
        with readable(self._folder, name):
            places = _PLACES.validate_json(read_file(self._folder / name, MAX_INDEX_BYTES), strict=True).places
            if sum(length for _, length in places.values()) > (self._folder / file).lstat().st_size:
                raise ValueError(f"{file} is shorter than its tensors")
        return places


def files_of(metadata: Metadata, prefixes: tuple[str, ...]) -> set[str]:
    """The files that say or hold the tensors whose names start with one of `prefixes`."""
    places = metadata.storage_data
    if isinstance(places, Places):
        return {INDEX_NAME, *places.files_of(prefixes)}
    return {INDEX_NAME, *(place.relative_path for index, place in places.items() if index.fqn.startswith(prefixes))}


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


def text_for_torch(metadata: Metadata) -> bytes:
    """The content of `.metadata`, which torch's own tools read."""
    return pickle.dumps(metadata)


Put = Callable[[str], AbstractContextManager[HashedFile]]
"""Opens a file of the checkpoint by its name, for writing."""


def put_index(put: Put, index: bytes, metadata: Metadata | None) -> dict[str, FileEntry]:
    """Put the index as Keel and as torch's own tools read it; returns the files.

    Args:
        put: opens a file.
        index: the content of index.json.
        metadata: where all parts are, as DCP's class; None: writing it would take too long.
    """
    files = {}
    for name, content in ((INDEX_NAME, index), (METADATA_NAME, metadata and text_for_torch(metadata))):
        if content is None:
            continue
        with put(name) as file:
            file.write(content)
        files[name] = file.entry()
    return files


def read_metadata(folder: Path) -> Metadata:
    """Read the index of the checkpoint in `folder`, as DCP's own class.

    The indexes of ranks are read when `storage_data` is asked for a part.

    Raises:
        UserError: the index can't be read, or has anything but whole tensors in files of this folder.
    """
    metadata = metadata_of(read_index(folder), folder)
    if not isinstance(metadata.storage_data, Places):
        with readable(folder, INDEX_NAME):
            _check_sizes(metadata, folder)
    return metadata


def read_index(folder: Path) -> bytes:
    """Read the file `index.json` of the checkpoint in `folder`, unchecked.

    Raises:
        Damaged: it can't be read.
    """
    with readable(folder, INDEX_NAME):
        return read_file(folder / INDEX_NAME, MAX_INDEX_BYTES)


def metadata_of(text: bytes, folder: Path) -> Metadata:
    """The content of `index.json` of the checkpoint in `folder`, as DCP's own class.

    Raises:
        Damaged: the text is no index, or does not describe whole tensors in files of one folder.
    """
    with readable(folder, INDEX_NAME):
        if _IS_DIRECTORY.match(text):
            directory = _DIRECTORY.validate_json(text, strict=True)
            return Metadata(_entries_of(directory), storage_data=Places(folder, directory), storage_meta=StorageMeta())
        return _complete(text)


def complete_metadata(directory: Directory, places: list[dict[str, tuple[int, int]]]) -> Metadata:
    """What `.metadata` says, from the directory and the content of each rank's index, in rank order."""
    metadata = Metadata(
        _entries_of(directory), storage_data={}, storage_meta=StorageMeta(), version=CURRENT_DCP_VERSION
    )
    for group in directory.groups:
        for offsets, _, number in group.parts:
            at = torch.Size(offsets)
            for name in group.names:
                start, length = places[number][name]
                metadata.storage_data[MetadataIndex(name, at)] = _StorageInfo(directory.files[number], start, length)
    return metadata


def _entries_of(directory: Directory) -> dict[str, STORAGE_TYPES]:
    """Shape, dtype and parts of each tensor; the tensors of a group share the list of parts.

    Raises:
        ValueError: the directory does not describe whole tensors in files of one folder.
    """
    for file in directory.files:
        if not is_plain_name(file):
            raise ValueError(f"{file} is not a file of the checkpoint's folder")
    entries: dict[str, STORAGE_TYPES] = {}
    for group in directory.groups:
        first = group.names[0] if group.names else "a tensor"
        dtype = _dtype_of(group.dtype, first)
        chunks = []
        for offsets, sizes, file_number in group.parts:
            _check_part(first, group.shape, offsets, sizes)
            if file_number >= len(directory.files):
                raise ValueError(f"a part of {first} is in no file")
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
        _check_whole(first, group.shape, chunks)
        for name in group.names:
            if name in entries:
                raise ValueError(f"{name} is there twice")
            entries[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(group.shape), chunks)
    return entries


def _complete(text: bytes) -> Metadata:
    """The inverse of `index_text`.

    Raises:
        ValueError: the text is no index, or does not describe whole tensors in files of one folder.
    """
    metadata = Metadata({}, storage_data={}, storage_meta=StorageMeta())
    for name, tensor in _INDEX.validate_json(text, strict=True).tensors.items():
        dtype = _dtype_of(tensor.dtype, name)
        chunks = []
        for offsets, sizes, file, start, length in tensor.parts:
            _check_part(name, tensor.shape, offsets, sizes)
            if not is_plain_name(file):
                raise ValueError(f"{file} is not a file of the checkpoint's folder")
            if prod(sizes) * dtype.itemsize > length:
                raise ValueError(f"a part of {name} is larger than its place in {file}")
            chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            chunks.append(chunk)
            metadata.storage_data[MetadataIndex(name, chunk.offsets)] = _StorageInfo(file, start, length)
        _check_whole(name, tensor.shape, chunks)
        properties = TensorProperties(dtype=dtype)
        metadata.state_dict_metadata[name] = TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
    return metadata


def _dtype_of(text: str, name: str) -> torch.dtype:
    dtype = getattr(torch, text, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} has an unknown type")
    return dtype


def _check_whole(name: str, shape: list[int], chunks: list[ChunkStorageMetadata]) -> None:
    """Raise ValueError unless the parts have as many elements as the tensor, and begin at different places."""
    n_elements = sum(prod(chunk.sizes) for chunk in chunks)
    if len({chunk.offsets for chunk in chunks}) < len(chunks) or n_elements != prod(shape):
        raise ValueError(f"parts of {name} are missing or duplicated")


def _check_sizes(metadata: Metadata, folder: Path) -> None:
    """Raise ValueError unless the files are long enough for their tensors."""
    used = Counter[str]()
    for place in metadata.storage_data.values():
        used[place.relative_path] += place.length
    for file, length in used.items():
        if length > (folder / file).lstat().st_size:
            raise ValueError(f"{file} is shorter than its tensors")


def _check_part(name: str, shape: list[int], offsets: list[int], sizes: list[int]) -> None:
    """Raise ValueError unless the part is inside its tensor."""
    if not len(offsets) == len(shape) == len(sizes):
        raise ValueError(f"a part of {name} has other dimensions than the tensor")
    for offset, length, whole in zip(offsets, sizes, shape, strict=True):
        if offset + length > whole:
            raise ValueError(f"a part of {name} is outside of it")
