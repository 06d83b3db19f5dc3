"""Checkpoints and safetensors files, one tensor at a time: converting a model takes the memory of its largest tensor.

torch.distributed.checkpoint reads and writes a whole state at once, and safetensors' own functions a whole file, so
converting with them would take as much memory as the model. All that is needed is where each tensor is, which both
formats record in an index.
"""

import json
import pickle
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import IO, Any, cast

import torch
import xxhash
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

from checkpoint.manifest import FileEntry, damaged
from checkpoint.safe_read import METADATA_NAME, require_stored
from configs.files import synced

SAFETENSORS_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
}
"""The floating-point dtypes of models, by safetensors' names."""

Progress = Callable[[int, int], Any]
"""Called after each tensor with the bytes so far and in total; an exception that it raises ends the work."""


def read_tensor(folder: Path, metadata: Metadata, name: str) -> Tensor:
    """Read the whole tensor `name` of the checkpoint in `folder`, however many ranks have written it.

    Takes the memory of the tensor and, if several ranks have written it, of one rank's part of it.

    Args:
        folder: the checkpoint.
        metadata: its index (`safe_read.read_metadata`).
        name: the tensor's name.

    Raises:
        UserError: a part can't be read, or is not what the index says.
    """
    entry = entry_of(metadata, name)
    if len(entry.chunks) == 1:
        return read_part(folder, metadata, name, entry.chunks[0])
    whole = torch.empty(entry.size, dtype=entry.properties.dtype)
    for chunk in entry.chunks:
        box = tuple(slice(start, start + length) for start, length in zip(chunk.offsets, chunk.sizes, strict=True))
        whole[box] = read_part(folder, metadata, name, chunk)
    return whole


def entry_of(metadata: Metadata, name: str) -> TensorStorageMetadata:
    """The index's entry of a tensor."""
    entry = metadata.state_dict_metadata[name]
    assert isinstance(entry, TensorStorageMetadata)  # safe_read ensures it
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


def write_tensors(folder: Path, *files: Iterable[tuple[str, Tensor]]) -> dict[str, FileEntry]:
    """Write tensors to `folder` as torch.distributed.checkpoint would, one file for each of `files`, as for one rank.

    The iterables may create the tensors on the fly.

    Returns:
        The files written, which are synced.

    Raises:
        OSError: a file can't be written. Anything that one of `files` raises is raised as well.
    """
    index = Metadata(state_dict_metadata={}, storage_data={})
    written = {}
    for number, tensors in enumerate(files):
        name = f"__{number}_0.distcp"
        written[name] = _write_file(folder / name, tensors, index)
    with synced_file(folder / METADATA_NAME) as file:
        file.write(pickle.dumps(index))
    return {**written, METADATA_NAME: file.entry()}


def _write_file(path: Path, tensors: Iterable[tuple[str, Tensor]], index: Metadata) -> FileEntry:
    """Write one file, and record its content in `index`."""
    with synced_file(path) as file:
        for name, tensor in tensors:
            start, origin = file.tell(), torch.Size([0] * tensor.dim())
            _save(tensor, file)
            chunk = ChunkStorageMetadata(offsets=origin, sizes=tensor.shape)
            properties = TensorProperties(dtype=tensor.dtype)
            index.state_dict_metadata[name] = TensorStorageMetadata(properties, tensor.shape, [chunk])
            index.storage_data[MetadataIndex(name, origin)] = _StorageInfo(path.name, start, file.tell() - start)
            del tensor  # otherwise it would be alive while the next one is created
    return file.entry()


def _save(tensor: Tensor, file: "SyncedFile") -> None:
    try:
        torch.save(tensor, file)  # type: ignore[arg-type]
    except RuntimeError:  # torch's "unexpected pos 704 vs 598" when the disk refuses
        if file.error:
            raise file.error from None
        raise


def write_safetensors(
    path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, tensor_of: Callable[[str], Tensor]
) -> None:
    """Write a safetensors file of the tensors named in `shapes`; `tensor_of` is called for one after the other.

    Format: huggingface.co/docs/safetensors. Eight bytes hold the length of a JSON header, which records where each
    tensor's values begin and end after it, so it can be written before the first tensor exists.

    Raises:
        OSError: the file can't be written. Anything that `tensor_of` raises is raised as well.
    """
    header: dict[str, dict[str, Any]] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + n_bytes(shape, dtype)
        header[name] = {"dtype": SAFETENSORS_DTYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligns the values
    with synced_file(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in shapes:
            # No name is bound to the tensor, which would keep it alive while the next one is read.
            file.write(tensor_of(name).to(dtype).contiguous().view(torch.uint8).numpy().data)


def n_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes of a tensor's values."""
    return prod(shape) * dtype.itemsize


class Counter:
    """Passes tensors through and reports their bytes."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0

    def __call__(self, tensor: Tensor) -> Tensor:
        self._done += tensor.nbytes
        self._progress(self._done, self._total)
        return tensor


class SyncedFile:
    """A file open for sequential writing that hashes what is written and remembers the first error of a write."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._hash, self._size = file, xxhash.xxh3_128(), 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            self._file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise
        self._hash.update(data)
        n_bytes = memoryview(data).nbytes
        self._size += n_bytes
        return n_bytes

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        """Do nothing: torch calls this after every tensor, and `synced_file` flushes once."""

    def close(self) -> None:
        """Do nothing: `synced_file` closes the file."""

    def entry(self) -> FileEntry:
        """The size and hash of what was written."""
        return FileEntry(self._size, self._hash.hexdigest())


@contextmanager
def synced_file(path: Path) -> Generator[SyncedFile, None, None]:
    """Open a new file for writing that is on the disk at the end of the context."""
    with synced(path) as file:
        yield SyncedFile(file)
