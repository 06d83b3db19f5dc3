"""What `torch.save` writes, a tensor at a time: a file larger than the memory that there is to make it.

First torch saves the content with tensors that have a shape and no memory, and leaves room for each; then every tensor
is made when its turn comes, and written to its room. The file is like any other of torch's: `torch.load` reads it, with
`weights_only=True`, and with `mmap=True` as sparingly as it was written. (Room is left by `skip_data` and found by
loading under `FakeTensorMode`, both public but young; only this file knows of them.)
"""

import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.serialization import skip_data


@dataclass(frozen=True)
class Later:
    """In the place of a tensor that does not exist yet."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]
    """Called once; the tensor is forgotten before the next is made."""


def write_torch_file(path: Path, content: Any) -> None:
    """Write `content`, of dicts and lists, with a `Later` in the place of every tensor that has values.

    Tensors on the meta device stay what they are: a shape and a type. The file is on the disk at the end.
    Raises: OSError if the disk refuses, and whatever a `Later` raises.
    """
    with FakeTensorMode(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Serializing tensors on the meta device")
        with skip_data(materialize_fake_tensors=True):
            torch.save(_without_memory(content), path)
        rooms = torch.load(path, weights_only=True)
    with path.open("r+b") as file:
        for tensor, room in _pairs(content, rooms):
            _write(file, tensor, room)
        file.flush()
        os.fsync(file.fileno())


def _without_memory(content: Any) -> Any:
    """To be called under FakeTensorMode."""
    if isinstance(content, dict):
        return {key: _without_memory(value) for key, value in content.items()}
    if isinstance(content, list):
        return [_without_memory(value) for value in content]
    return torch.empty(content.shape, dtype=content.dtype) if isinstance(content, Later) else content


def _pairs(content: Any, rooms: Any) -> Iterator[tuple[Later, Tensor]]:
    """Each tensor with its counterpart in the file."""
    if isinstance(content, Later):
        yield content, rooms
    elif isinstance(content, dict):
        for key, value in content.items():
            yield from _pairs(value, rooms[key])
    elif isinstance(content, list):
        for value, room in zip(content, rooms, strict=True):
            yield from _pairs(value, room)


def _write(file: IO[bytes], later: Later, room: Tensor) -> None:
    tensor = later.make()
    if (tuple(tensor.shape), tensor.dtype) != (tuple(room.shape), room.dtype):
        raise ValueError(f"a {tensor.dtype} of {list(tensor.shape)} has no room where {room} was announced")
    offset = room.untyped_storage()._checkpoint_offset
    assert offset is not None
    file.seek(offset)
    file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
