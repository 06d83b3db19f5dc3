"""The index of a checkpoint's tensors (`.metadata`), and the tensors themselves, read without trusting them.

torch.distributed.checkpoint keeps the index as a pickle and reads it with plain `pickle.load`: whoever wrote the file
could run any command on the machine that loads it. Here an unpickler knows the few classes that such an index consists
of, and nothing else; what comes out is then checked: tensors only (no pickled objects), whole tensors, in files of this
folder that are long enough for them. The tensors themselves are read by torch with `weights_only=True`.

That no code runs is not all: a pickle of nine bytes can claim gigabytes (its table of earlier values is as long as it
says), one of a kilobyte can hold tuples in tuples whose hash takes years. So the unpickler is Python's own in Python,
whose table is a dict, knows the instructions that an index is made of, and hashes nothing but names. It takes about as
long as the one in C: what takes time is making the objects.
"""

import gc
import io
import os
import pickle
import struct
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from types import NoneType
from typing import IO, Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from checkpoint.manifest import damaged, is_plain_name
from configs.untrusted import read_file

METADATA_NAME = ".metadata"
MAX_INDEX_BYTES = 4 << 30
"""Of `.metadata`: about 200 bytes for each part of a tensor that a rank has written."""

_ALLOWED = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "Metadata",
            "MetadataIndex",
            "TensorStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        )
    ),
}


_OBJECTS = (
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
    ChunkStorageMetadata,
    TensorProperties,
    StorageMeta,
    _StorageInfo,
)
"""Of what an index is made; each object is made empty and then given its fields."""

_OPCODES = (
    *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.MEMOIZE, pickle.BINGET, pickle.LONG_BINGET),
    *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1),
    *(pickle.BINUNICODE, pickle.SHORT_BINUNICODE, pickle.STACK_GLOBAL),
    *(pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
    *(pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS, pickle.EMPTY_DICT),
)
"""The instructions of an index that do no more than make a value; those with effects are below."""


class _IndexUnpickler(pickle._Unpickler):  # type: ignore[name-defined]
    """Knows the classes and instructions of an index; calls nothing but their constructors, with plain values."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _ALLOWED:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, which has no place in a checkpoint")

    def load_reduce(self) -> None:
        """A shape, a layout or a memory format, of a name, a number or a tuple of numbers."""
        [argument] = self.stack.pop()
        if type(argument) not in (str, int) and not _is_numbers(argument):
            raise pickle.UnpicklingError("it makes something of what is neither a name nor numbers")
        self.stack[-1] = self.stack[-1](argument)

    def load_newobj(self) -> None:
        if self.stack.pop() != ():
            raise pickle.UnpicklingError("it makes an object in a way that no index does")
        self.stack[-1] = object.__new__(_one_of(_OBJECTS, self.stack[-1]))

    def load_build(self) -> None:
        fields = self.stack.pop()
        made = self.stack[-1]
        _one_of(_OBJECTS, type(made))
        if type(made) is TensorProperties:
            made.__setstate__(fields)
        else:
            made.__dict__.update(_with_names(fields))

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set(key, value)

    def load_setitems(self) -> None:
        items = self.pop_mark()
        for key, value in zip(items[::2], items[1::2], strict=True):
            self._set(key, value)

    def _set(self, key: Any, value: Any) -> None:
        if type(key) is MetadataIndex:
            name, offset, index = (getattr(key, field, None) for field in ("fqn", "offset", "index"))
            if type(name) is not str or type(offset) is not torch.Size or type(index) not in (int, NoneType):
                raise pickle.UnpicklingError("it places a part of a tensor in a way that no index does")
        elif type(key) is not str:
            raise pickle.UnpicklingError(f"it holds something under a {type(key).__name__} instead of a name")
        self.stack[-1][key] = value

    dispatch = {  # noqa: RUF012 (as its base has it)
        **{opcode[0]: pickle._Unpickler.dispatch[opcode[0]] for opcode in _OPCODES},  # type: ignore[attr-defined]
        pickle.REDUCE[0]: load_reduce,
        pickle.NEWOBJ[0]: load_newobj,
        pickle.BUILD[0]: load_build,
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
    }


def _is_numbers(value: Any) -> bool:
    return type(value) is tuple and all(type(item) is int for item in value)


def _one_of(classes: tuple[type, ...], found: Any) -> Any:
    if not any(found is cls for cls in classes):
        raise pickle.UnpicklingError("it makes something that is no part of an index")
    return found


def _with_names(fields: Any) -> dict[str, Any]:
    if type(fields) is not dict or not all(type(name) is str for name in fields):
        raise pickle.UnpicklingError("it gives an object no fields")
    return fields


def read_metadata(folder: Path) -> Metadata:
    """The index of the checkpoint in `folder`; no code in it is run, whoever wrote it.

    Raises: UserError if the index can't be read, or holds anything but whole tensors in files of this folder.
    """
    path = folder / METADATA_NAME
    try:
        content = io.BytesIO(read_file(path, MAX_INDEX_BYTES))
        with _without_collection():
            metadata = _IndexUnpickler(content).load()
        _check(metadata, folder)
    except OSError as error:
        raise damaged(folder, f"{path.name} can't be read: {error.strerror}") from None
    # A damaged pickle fails in whatever way its bytes lead to, so every kind of exception means the same here.
    except Exception as error:
        raise damaged(folder, f"{path.name} can't be read: {_reason(error)}") from error
    return metadata


def _reason(error: Exception) -> str:
    """A KeyError is an instruction that no index has; what else there is says what it is."""
    if isinstance(error, KeyError):
        return "it is no index of tensors"
    return str(error) or type(error).__name__


@contextmanager
def _without_collection() -> Generator[None, None, None]:
    """Without looking for garbage after every so many new objects, none of which is: it takes as long as the rest."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _check(metadata: Any, folder: Path) -> None:
    """Raise ValueError unless `metadata` describes whole tensors that lie in files beside it."""
    if type(metadata) is not Metadata:
        raise ValueError(f"it holds a {type(metadata).__name__} instead of an index of tensors")
    if type(metadata.state_dict_metadata) is not dict or type(metadata.storage_data) is not dict:
        raise ValueError("it lists no tensors")
    if metadata.planner_data is not None:
        raise ValueError("it was planned in a way that Keel does not plan")
    metadata.storage_meta = StorageMeta()
    _check_places(metadata.storage_data, folder)
    for name, entry in metadata.state_dict_metadata.items():
        if type(entry) is not TensorStorageMetadata:
            raise ValueError(f"{name} is no tensor")
        if type(entry.size) is not torch.Size or not isinstance(entry.properties.dtype, torch.dtype):
            raise ValueError(f"{name} has no shape or no type")
        if sum(prod(chunk.sizes) for chunk in entry.chunks) != prod(entry.size):
            raise ValueError(f"parts of {name} are missing or doubled")
        for chunk in entry.chunks:
            _check_part(name, entry, chunk, metadata.storage_data)


def _check_places(places: dict[Any, Any], folder: Path) -> None:
    """Raise ValueError unless each place is in a file beside the index, all together no longer than the files."""
    used: Counter[str] = Counter()
    for place in places.values():
        if type(place) is not _StorageInfo or not is_plain_name(place.relative_path):
            name = getattr(place, "relative_path", None)
            raise ValueError(f"{name if type(name) is str else 'a place'} is no file of the checkpoint's folder")
        if place.transform_descriptors is not None:
            raise ValueError(f"{place.relative_path} is encoded in a way that Keel does not write")
        if type(place.offset) is not int or type(place.length) is not int or place.offset < 0 or place.length <= 0:
            raise ValueError(f"a place in {place.relative_path} is none")
        used[place.relative_path] += place.length
    for name, length in used.items():
        if length > (folder / name).lstat().st_size:
            raise ValueError(f"{name} is shorter than what it is to hold")


def _check_part(name: str, entry: TensorStorageMetadata, chunk: Any, places: dict[Any, Any]) -> None:
    """Raise ValueError unless the part is inside its tensor, and its place has room for it."""
    if type(chunk) is not ChunkStorageMetadata or not len(chunk.offsets) == len(entry.size) == len(chunk.sizes):
        raise ValueError(f"a part of {name} is none")
    for offset, length, whole in zip(chunk.offsets, chunk.sizes, entry.size, strict=True):
        if not 0 <= offset <= offset + length <= whole:
            raise ValueError(f"a part of {name} is outside of it")
    place = places.get(MetadataIndex(name, chunk.offsets))
    if place is None:
        raise ValueError(f"the place of a part of {name} is missing")
    if prod(chunk.sizes) * entry.properties.dtype.itemsize > place.length:
        raise ValueError(f"a part of {name} is larger than its place in {place.relative_path}")


_END = struct.Struct("<4s4H2IH")
_END_64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR_64 = struct.Struct("<4sIQI")
_ENTRY = struct.Struct("<4s6H3I5H2I")


def require_stored(file: IO[bytes]) -> None:
    """Raise ValueError unless nothing in a file of `torch.save` is compressed: a few bytes could become many.

    torch never compresses, but reads what is. Format: pkware.com/appnote, 4.3.12 to 4.3.16; the directory is looked for
    where torch's own reader does. Leaves the file at its beginning.
    """
    file.seek(0, os.SEEK_END)
    length = file.tell()  # what `seek` returns is, of torch's view of a part of a file, where the whole file stands

    def record(form: struct.Struct, at: int, signature: bytes = b"") -> tuple[Any, ...]:
        if not 0 <= at <= length - form.size:
            raise ValueError("it is no file of torch.save")
        file.seek(at)
        fields = form.unpack(file.read(form.size))
        if signature not in (b"", fields[0]):
            raise ValueError("it is no file of torch.save")
        return fields

    *_, n_bytes, start, _ = record(_END, length - _END.size, b"PK\5\6")
    locator = record(_LOCATOR_64, length - _END.size - _LOCATOR_64.size)
    if locator[0] == b"PK\6\7":
        *_, n_bytes, start = record(_END_64, locator[2], b"PK\6\6")
    at = start
    while at < start + n_bytes:
        entry = record(_ENTRY, at, b"PK\1\2")
        if entry[4]:
            raise ValueError("it is compressed, as Keel and torch never write it")
        at += _ENTRY.size + sum(entry[10:13])
    file.seek(0)
