"""The index of a checkpoint's tensors (`.metadata`), and the tensors themselves, read without trusting them.

torch.distributed.checkpoint stores the index as a pickle and reads it with plain `pickle.load`: the author of the file
could run any command on the machine that loads it. Instead, the unpickler in this file knows only the few classes of
which such an index consists. Its result is then checked: tensors only (no pickled objects), whole tensors, in files of
this folder that are long enough for them. Torch reads the tensors themselves with `weights_only=True`.

Preventing code is not enough: a pickle of nine bytes can claim gigabytes (the length of its memo table is its own
choice), and one of a kilobyte can contain nested tuples whose hash takes years. Hence a custom unpickler.
"""

import gc
import os
import pickle
import struct
import sys
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
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
"""Limit on `.metadata`, which has about 200 bytes for each part of a tensor that a rank has written."""

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
"""The classes of an index; each object is created empty and then given its fields."""

_GLOBALS = frozenset(_ALLOWED)


class _Index:
    """Unpickles an index: only its opcodes, only its classes, and only names are hashed.

    The standard library's pickletools documents each opcode. (The standard library's unpickler in Python, which takes
    four times as long, would work with another table of opcodes; the one in C does not accept one.)
    """

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._stack: list[Any] = []
        self._marks: list[int] = []

    def load(self) -> Any:
        """Return the value; raises any exception that damaged bytes lead to."""
        content, stack, marks = self._content, self._stack, self._marks
        known: list[Any] = []
        at = 0
        while True:
            op = content[at]
            at += 1
            if op == 0x94:  # MEMOIZE
                known.append(stack[-1])
            elif op == 0x68:  # BINGET
                stack.append(known[content[at]])
                at += 1
            elif op == 0x6A:  # LONG_BINGET
                stack.append(known[_number(content[at : at + 4])])
                at += 4
            elif op == 0x4B:  # BININT1
                stack.append(content[at])
                at += 1
            elif n_bytes := _NUMBERS.get(op):
                stack.append(_number(content[at : at + n_bytes], signed=op == 0x4A))
                at += n_bytes
            elif op == 0x8A:  # LONG1
                n_bytes = content[at]
                stack.append(_number(content[at + 1 : at + 1 + n_bytes], signed=True))
                at += 1 + n_bytes
            elif n_bytes := _TEXTS.get(op):
                start = at + n_bytes
                at = start + _number(content[at:start])
                stack.append(content[start:at].decode("utf-8", "surrogatepass"))
            elif op == 0x28:  # MARK
                marks.append(len(stack))
            elif op in _VALUES:
                stack.append(_VALUES[op]())
            elif op in _TUPLES:
                stack[-_TUPLES[op] :] = [tuple(stack[-_TUPLES[op] :])]
            elif op in _HEADERS:  # the protocol version, or the length of what follows
                at += _HEADERS[op]
            elif op == 0x2E:  # STOP
                return stack.pop()
            else:
                _EFFECTS[op](self)

    def _pop_mark(self) -> list[Any]:
        """Pop everything pushed since the last mark."""
        start = self._marks.pop()
        items = self._stack[start:]
        del self._stack[start:]
        return items

    def _tuple(self) -> None:
        self._stack.append(tuple(self._pop_mark()))

    def _class(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        _require(type(name) is str and type(module) is str, "it refers to something without a name")
        if (module, name) == ("builtins", "getattr"):
            return self._stack.append(_member)
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        _require(
            is_dtype or (module, name) in _GLOBALS, f"it refers to {module}.{name}, which has no place in a checkpoint"
        )
        self._stack.append(getattr(sys.modules[module], name))

    def _call(self) -> None:
        """Create a shape, a layout or a memory format from a name, a number or a tuple of numbers."""
        arguments, function = self._stack.pop(), self._stack.pop()
        if function is _member:
            return self._stack.append(_member(*arguments))
        _require(any(function is known for known in _FUNCTIONS), "it calls a function that no index calls")
        [argument] = arguments
        is_plain = type(argument) in (str, int) or (type(argument) is tuple and all(type(n) is int for n in argument))
        _require(is_plain, "it passes something other than a name or numbers")
        self._stack.append(function(argument))

    def _object(self) -> None:
        arguments, cls = self._stack.pop(), self._stack.pop()
        _require(arguments == () and any(cls is known for known in _OBJECTS), "it creates an object that no index has")
        self._stack.append(object.__new__(cls))

    def _fields(self) -> None:
        fields, made = self._stack.pop(), self._stack[-1]
        _require(any(type(made) is known for known in _OBJECTS), "it gives fields to something that no index has")
        if type(made) is TensorProperties:
            made.__setstate__(fields)
        else:
            _require(type(fields) is dict, "it gives an object something other than fields")
            made.__dict__.update(fields)  # a dict's keys were checked when it was filled; others raise TypeError

    def _append(self) -> None:
        item = self._stack.pop()
        self._list().append(item)

    def _extend(self) -> None:
        items = self._pop_mark()
        self._list().extend(items)

    def _list(self) -> list[Any]:
        _require(type(self._stack[-1]) is list, "it adds an item to something other than a list")
        return self._stack[-1]

    def _set_item(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._set([key, value])

    def _set_items(self) -> None:
        self._set(self._pop_mark())

    def _set(self, items: list[Any]) -> None:
        into = self._stack[-1]
        _require(type(into) is dict, "it sets an item of something other than a dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) is not str:
                _check_key(key)
            into[key] = value


def _check_key(key: Any) -> None:
    """Raise UnpicklingError unless the key is the position of a tensor's part; hashing nested tuples may take years."""
    _require(type(key) is MetadataIndex, f"it holds something under a {type(key).__name__} instead of a name")
    name, offset = key.__dict__.get("fqn"), key.__dict__.get("offset")
    _require(type(name) is str and type(offset) is torch.Size, "it places a part of a tensor as no index does")


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise pickle.UnpicklingError(message)


def _member(of: Any, name: Any) -> Any:
    """What Python 3.11.0 to 3.11.3 writes for a memory format: `getattr` of the enumeration and a name."""
    is_one = of is _MEM_FORMAT_ENCODING and type(name) is str and name in _MEM_FORMAT_ENCODING.__members__
    _require(is_one, "it takes an attribute of something")
    return _MEM_FORMAT_ENCODING[name]


def _number(content: bytes, signed: bool = False) -> int:
    return int.from_bytes(content, "little", signed=signed)


_FUNCTIONS = (torch.Size, torch.serialization._get_layout, _MEM_FORMAT_ENCODING)
_NUMBERS = {0x4D: 2, 0x4A: 4}  # BININT2, BININT
_TEXTS = {0x8C: 1, 0x58: 4}  # SHORT_BINUNICODE, BINUNICODE: bytes of their length
_TUPLES = {0x85: 1, 0x86: 2, 0x87: 3}
_HEADERS = {0x80: 1, 0x95: 8}  # PROTO, FRAME
_VALUES: dict[int, Callable[[], Any]] = {
    0x29: tuple,
    0x7D: dict,
    0x5D: list,
    0x4E: lambda: None,
    0x88: lambda: True,
    0x89: lambda: False,
}
_EFFECTS: dict[int, Callable[[_Index], None]] = {
    0x52: _Index._call,  # REDUCE
    0x81: _Index._object,  # NEWOBJ
    0x62: _Index._fields,  # BUILD
    0x75: _Index._set_items,  # SETITEMS
    0x73: _Index._set_item,  # SETITEM
    0x65: _Index._extend,  # APPENDS
    0x61: _Index._append,  # APPEND
    0x74: _Index._tuple,  # TUPLE
    0x93: _Index._class,  # STACK_GLOBAL
}


def read_metadata(folder: Path, sizes: Mapping[str, int] | None = None) -> Metadata:
    """Read the index of the checkpoint in `folder` without running any code in it.

    Args:
        folder: the checkpoint.
        sizes: of its files, in bytes, if not all of them are in the folder.

    Raises:
        UserError: the index can't be read, or has anything but whole tensors in files of this folder.
    """
    path = folder / METADATA_NAME
    try:
        content = read_file(path, MAX_INDEX_BYTES)
        with _without_collection():
            metadata = _Index(content).load()
        _check(metadata, lambda name: (folder / name).lstat().st_size if sizes is None else sizes.get(name, 0))
    except OSError as error:
        raise damaged(folder, f"{path.name} can't be read: {error.strerror}") from None
    # A damaged pickle may fail in any way, so every kind of exception means the same here.
    except Exception as error:
        raise damaged(folder, f"{path.name} can't be read: {_reason(error)}") from error
    return metadata


def _reason(error: Exception) -> str:
    """The reason to show; a KeyError means an opcode that no index has, other errors explain themselves."""
    if isinstance(error, KeyError):
        return "it is not an index of tensors"
    return str(error) or type(error).__name__


@contextmanager
def _without_collection() -> Generator[None, None, None]:
    """Disable garbage collection: there is no garbage, and looking for it takes as long as everything else."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _check(metadata: Any, size_of: Callable[[str], int]) -> None:
    """Raise ValueError unless `metadata` describes whole tensors in files beside it."""
    if type(metadata) is not Metadata:
        raise ValueError(f"it holds a {type(metadata).__name__} instead of an index of tensors")
    if type(metadata.state_dict_metadata) is not dict or type(metadata.storage_data) is not dict:
        raise ValueError("it lists no tensors")
    if metadata.planner_data is not None:
        raise ValueError("it has planner data, which Keel does not write")
    metadata.storage_meta = StorageMeta()
    _check_places(metadata.storage_data, size_of)
    for name, entry in metadata.state_dict_metadata.items():
        if type(entry) is not TensorStorageMetadata:
            raise ValueError(f"{name} is not a tensor")
        if type(entry.size) is not torch.Size or not isinstance(entry.properties.dtype, torch.dtype):
            raise ValueError(f"{name} has no shape or no type")
        if sum(prod(chunk.sizes) for chunk in entry.chunks) != prod(entry.size):
            raise ValueError(f"parts of {name} are missing or duplicated")
        for chunk in entry.chunks:
            _check_part(name, entry, chunk, metadata.storage_data)


def _check_places(places: dict[Any, Any], size_of: Callable[[str], int]) -> None:
    """Raise ValueError unless each place is in a file beside the index, and the files are long enough for them."""
    used: Counter[str] = Counter()
    for place in places.values():
        if type(place) is not _StorageInfo or not is_plain_name(place.relative_path):
            name = getattr(place, "relative_path", None)
            raise ValueError(f"{name if type(name) is str else 'a place'} is not a file of the checkpoint's folder")
        if place.transform_descriptors is not None:
            raise ValueError(f"{place.relative_path} is encoded in a way that Keel does not write")
        if type(place.offset) is not int or type(place.length) is not int or place.offset < 0 or place.length <= 0:
            raise ValueError(f"a place in {place.relative_path} is invalid")
        used[place.relative_path] += place.length
    for name, length in used.items():
        if length > size_of(name):
            raise ValueError(f"{name} is shorter than its tensors")


def _check_part(name: str, entry: TensorStorageMetadata, chunk: Any, places: dict[Any, Any]) -> None:
    """Raise ValueError unless the part is inside its tensor and fits into its place."""
    if type(chunk) is not ChunkStorageMetadata or not len(chunk.offsets) == len(entry.size) == len(chunk.sizes):
        raise ValueError(f"a part of {name} is invalid")
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
