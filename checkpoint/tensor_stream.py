"""Reads and writes checkpoints one tensor at a time, in the memory of the largest one.

torch.distributed.checkpoint reads and writes a whole state at once, so converting with it would take as much memory as
the model. All that is needed is where each tensor is, which the index records.
"""

import os
import struct
from collections.abc import Callable, Iterable
from math import prod
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.utils import _create_file_view

from checkpoint.frame import TensorFile
from checkpoint.index import index_text, put_index
from checkpoint.manifest import FileEntry, damaged
from checkpoint.storage import FolderStorage

_END = struct.Struct("<4s4H2IH")
_END_64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR_64 = struct.Struct("<4sIQI")
_ENTRY = struct.Struct("<4s6H3I5H2I")

FILE_NAME = "__0_0.distcp"
"""The file of the first rank."""
Progress = Callable[[int, int], Any]
"""Called after each tensor with the bytes so far and in total; an exception that it raises ends the work."""


def read_tensor(folder: Path, metadata: Metadata, name: str) -> Tensor:
    """Read the whole tensor `name` of a checkpoint, however many ranks have written it; zeros if none has.

    Takes the memory of the tensor and, if several ranks have written it, of one rank's part of it.

    Args:
        folder: the checkpoint.
        metadata: its index (`index.read_metadata`).
        name: the tensor's name.

    Raises:
        UserError: a part can't be read, or is not what the index says.
    """
    entry = entry_of(metadata, name)
    if len(entry.chunks) == 1:
        return read_part(folder, metadata, name, entry.chunks[0])
    whole = torch.zeros(entry.size, dtype=entry.properties.dtype)
    for chunk in entry.chunks:
        box = tuple(slice(start, start + length) for start, length in zip(chunk.offsets, chunk.sizes, strict=True))
        whole[box] = read_part(folder, metadata, name, chunk)
    return whole


def entry_of(metadata: Metadata, name: str) -> TensorStorageMetadata:
    """The index's entry of a tensor."""
    entry = metadata.state_dict_metadata[name]
    assert isinstance(entry, TensorStorageMetadata)  # checkpoint.index ensures it
    return entry


def read_part(folder: Path, metadata: Metadata, name: str, chunk: ChunkStorageMetadata) -> Tensor:
    """Read one of a tensor's parts in the index.

    Raises:
        UserError: as in `read_tensor`.
    """
    place = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
    dtype = entry_of(metadata, name).properties.dtype
    try:
        with (folder / place.relative_path).open("rb") as file:
            view = _create_file_view(file, place.offset, place.length)
            require_stored(cast(IO[bytes], view))
            part = torch.load(view, map_location="cpu", weights_only=True)  # type: ignore[arg-type]
        if not isinstance(part, Tensor) or (part.shape, part.dtype) != (chunk.sizes, dtype):
            raise ValueError("its shape or dtype is not what the index says")
    # Damaged bytes may fail in any way, so every kind of exception means the same here.
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise damaged(folder, f"{place.relative_path} can't be read at {name}: {reason}") from error
    return part


def require_stored(file: IO[bytes]) -> None:
    """Raise ValueError if anything in a file of `torch.save` is compressed: a few bytes could expand to many.

    torch never compresses, but reads compressed entries. Format: pkware.com/appnote, 4.3.12 to 4.3.16; the directory is
    searched where torch's own reader does. Leaves the file at its beginning.
    """
    file.seek(0, os.SEEK_END)
    length = file.tell()  # torch's view of a part of a file returns the whole file's position from `seek`

    def record(form: struct.Struct, at: int, signature: bytes = b"") -> tuple[Any, ...]:
        if not 0 <= at <= length - form.size:
            raise ValueError("it is not a file of torch.save")
        file.seek(at)
        fields = form.unpack(file.read(form.size))
        if signature not in (b"", fields[0]):
            raise ValueError("it is not a file of torch.save")
        return fields

    *_, n_bytes, start, _ = record(_END, length - _END.size, b"PK\5\6")
    locator = record(_LOCATOR_64, length - _END.size - _LOCATOR_64.size)
    if locator[0] == b"PK\6\7":
        *_, n_bytes, start = record(_END_64, locator[2], b"PK\6\6")
    at = start
    while at < start + n_bytes:
        entry = record(_ENTRY, at, b"PK\1\2")
        if entry[4]:
            raise ValueError("it is compressed, which neither Keel nor torch ever writes")
        at += _ENTRY.size + sum(entry[10:13])
    file.seek(0)


def write_tensors(storage: FolderStorage, folder: Path, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, FileEntry]:
    """Put tensors into an unfinished checkpoint, as one rank would by torch.distributed.checkpoint, one at a time.

    DCP itself holds all tensors of a file until the file is complete.

    Args:
        storage: where the checkpoint is.
        folder: the unfinished checkpoint.
        tensors: by name; the iterable may create them on the fly.

    Returns:
        The files.

    Raises:
        OSError: a file can't be written. Anything that `tensors` raises is raised as well.
    """
    index = Metadata(state_dict_metadata={}, storage_data={})
    with storage.put(folder / FILE_NAME) as file:
        written = TensorFile(file)
        for name, tensor in tensors:
            origin = torch.Size([0] * tensor.dim())
            start, length = written.write(tensor)
            chunk = ChunkStorageMetadata(offsets=origin, sizes=tensor.shape)
            properties = TensorProperties(dtype=tensor.dtype)
            index.state_dict_metadata[name] = TensorStorageMetadata(properties, tensor.shape, [chunk])
            index.storage_data[MetadataIndex(name, origin)] = _StorageInfo(FILE_NAME, start, length)
            del tensor  # otherwise it would be alive while the next one is created
    return {FILE_NAME: file.entry()} | put_index(lambda name: storage.put(folder / name), index_text(index), index)


def n_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes of a tensor's values."""
    return prod(shape) * dtype.itemsize


class Counter:
    """Passes tensors through and reports their bytes."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress = progress
        self._total = total
        self._done = 0

    def __call__(self, tensor: Tensor) -> Tensor:
        self._done += tensor.nbytes
        self._progress(self._done, self._total)
        return tensor
