"""The index of a checkpoint's tensors (`.metadata`), read without trusting it.

torch.distributed.checkpoint keeps the index as a pickle and reads it with plain `pickle.load`: whoever wrote the file
could run any command on the machine that loads it. Here an unpickler knows the few classes that such an index consists
of, and nothing else; what comes out is then checked: tensors only (no pickled objects), whole tensors, and file names
that stay inside the folder. The tensors themselves are read by torch with `weights_only=True`.
"""

import pickle
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from checkpoint.manifest import damaged, is_plain_name

METADATA_NAME = ".metadata"

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


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _ALLOWED:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, which has no place in a checkpoint")


def read_metadata(folder: Path) -> Metadata:
    """The index of the checkpoint in `folder`; no code in it is run, whoever wrote it.

    Raises: UserError if the index can't be read, or holds anything but whole tensors in files of this folder.
    """
    path = folder / METADATA_NAME
    try:
        with path.open("rb") as file:
            metadata = _IndexUnpickler(file).load()
        _check(metadata)
    # A damaged pickle fails in whatever way its bytes lead to, so every kind of exception means the same here.
    except Exception as error:
        raise damaged(folder, f"{path.name} can't be read: {str(error) or type(error).__name__}") from error
    return metadata


def _check(metadata: Any) -> None:
    """Raise ValueError unless `metadata` describes whole tensors that lie in files beside it."""
    if not isinstance(metadata, Metadata):
        raise ValueError(f"it holds a {type(metadata).__name__} instead of an index of tensors")
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise ValueError(f"{name} is no tensor")
        if sum(prod(chunk.sizes) for chunk in entry.chunks) != prod(entry.size):
            raise ValueError(f"parts of {name} are missing or doubled")
        for chunk in entry.chunks:
            if MetadataIndex(name, chunk.offsets) not in metadata.storage_data:
                raise ValueError(f"the place of a part of {name} is missing")
    for place in metadata.storage_data.values():
        if not isinstance(place, _StorageInfo) or not is_plain_name(place.relative_path):
            raise ValueError(f"{getattr(place, 'relative_path', place)!r} is no file of the checkpoint's folder")
        if place.transform_descriptors is not None:
            raise ValueError(f"{place.relative_path} is encoded in a way that Keel does not write")
