"""Writes what `torch.save` writes, one tensor at a time, so that a file may be larger than memory.

Torch first saves the content with fake tensors, which have a shape but no memory, and reserves space for each. Then
each tensor is computed and written to its space in turn. The result is an ordinary torch file: `torch.load` reads it
with `weights_only=True`, and with `mmap=True` in as little memory. (`skip_data` reserves the space and loading under
`FakeTensorMode` finds it; both are public but new, and used only in this file.)
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
    """A placeholder for a tensor that is computed later."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]
    """Called once; the tensor is freed before the next is made."""


def write_torch_file(path: Path, content: Any) -> None:
    """Write `content`, made of dicts and lists, with a `Later` in place of each tensor that has values.

    Tensors on the meta device are written as they are: a shape and a type. The file is synced to disk.

    Raises:
        OSError: the disk refuses. Anything that a `Later` raises is raised as well.
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
    """Replace each `Later` with a fake tensor; call it under FakeTensorMode."""
    if isinstance(content, dict):
        return {key: _without_memory(value) for key, value in content.items()}
    if isinstance(content, list):
        return [_without_memory(value) for value in content]
    return torch.empty(content.shape, dtype=content.dtype) if isinstance(content, Later) else content


def _pairs(content: Any, rooms: Any) -> Iterator[tuple[Later, Tensor]]:
    """Yield each `Later` with its fake tensor in the file."""
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
