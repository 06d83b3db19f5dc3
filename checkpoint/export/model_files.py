"""A model on disk, in a checkpoint or in a Hugging Face folder: one form to read its tensors from."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path

import torch
from pydantic import ValidationError
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata

from checkpoint import manifest as manifests
from checkpoint.compare import described
from checkpoint.export import family
from checkpoint.export.hf_config import checkpoint_shapes, longest_sequence, sources
from checkpoint.export.hf_folder import (
    check_count,
    common_dtype,
    dtypes_of,
    open_folder,
    read_family,
    read_json,
    read_source,
)
from checkpoint.find import HF_CONFIG_NAME as CONFIG_NAME
from checkpoint.index import read_metadata
from checkpoint.manifest import Manifest, damaged, read_manifest
from checkpoint.tensor_stream import entry_of, read_tensor
from configs.architectures import HF_CLASSES, stored_tensors
from configs.schema import AnyModel, OwnModel, is_described, table_of_model
from configs.untrusted import first_fault


@dataclass(frozen=True)
class ModelFiles:
    """A model on disk, in Keel's or in Hugging Face's format."""

    model: AnyModel
    seq_len: int
    """Tokens of the longest sequence that it is made for."""
    dtype: torch.dtype
    tensors: Mapping[str, str]
    """The shapes of its tensors, described, by their names in a checkpoint."""
    read: Callable[[str], Tensor]
    """Reads one of them, whole."""


def checkpoint_files(checkpoint: Path) -> ModelFiles:
    """Open the model in a checkpoint, whatever mesh has saved it.

    Raises:
        UserError: the checkpoint is damaged.
    """
    manifest = read_manifest(checkpoint)
    metadata = read_metadata(checkpoint)
    model = model_of(manifest, checkpoint)
    check_count(checkpoint / manifests.MANIFEST_NAME, model, n_tensors(metadata))
    metadata = with_biases(metadata, model)
    trained = manifest.value("training", "seq_len", int) or 0
    seq_len = _longest_sequence(model, trained)
    entries = model_entries(metadata)
    return ModelFiles(
        model,
        seq_len,
        reduce(torch.promote_types, (entry.properties.dtype for entry in entries.values())),
        {name: described(entry.size) for name, entry in entries.items()},
        lambda name: read_tensor(checkpoint, metadata, name),
    )


def hf_files(source: Path) -> ModelFiles:
    """Open the model in a Hugging Face folder: in Keel's own modules, or as it is where Keel has none for its family.

    Raises:
        UserError: it can't be read, or neither has modules for it.
    """
    if str(read_json(source / CONFIG_NAME).get("model_type")) not in HF_CLASSES:
        return _family_files(source)
    model, tensors = open_folder(source)
    shapes = checkpoint_shapes(model)
    names = sources(model)
    dtype = common_dtype(model, tensors)
    dtypes = dtypes_of(model, dtype)
    return ModelFiles(
        model,
        longest_sequence(model, 0),
        dtype,
        {name: described(shape) for name, shape in shapes.items()},
        lambda name: read_source(names[name], shapes[name], tensors, dtypes[name]),
    )


def _family_files(source: Path) -> ModelFiles:
    """Open a model without a description, which is then in memory, whole."""
    model, tensors = read_family(source, None)
    return ModelFiles(
        model,
        family.seq_len_of(model),
        reduce(torch.promote_types, (tensor.dtype for tensor in tensors.values())),
        {f"model.{name}": described(tensor.shape) for name, tensor in tensors.items()},
        lambda name: tensors[name.removeprefix("model.")],
    )


def model_of(manifest: Manifest, checkpoint: Path) -> AnyModel:
    try:
        table = manifest.in_effect.get("model")
        return table_of_model(table).model_validate(table)
    except ValidationError as error:
        raise damaged(checkpoint, f"{manifests.MANIFEST_NAME}: {first_fault(error, 'config', 'model')}") from None


def _longest_sequence(model: AnyModel, trained: int) -> int:
    """Tokens of the longest sequence that a model is made for, which was trained with so many."""
    if isinstance(model, OwnModel):
        return model.max_seq_len or trained
    return longest_sequence(model, trained) if is_described(model) else family.seq_len_of(model, trained)


def with_biases(metadata: Metadata, model: AnyModel) -> Metadata:
    """Add biases of routers that the first checkpoint of a fork may lack: tensors without parts, thus zeros."""
    if not is_described(model):
        return metadata
    properties = TensorProperties(torch.float32)
    lacking = {
        f"model.{weight.name}": TensorStorageMetadata(properties, torch.Size(weight.shape), [])
        for weight in stored_tensors(model)
        if weight.is_buffer
    }
    return replace(metadata, state_dict_metadata={**lacking, **metadata.state_dict_metadata})


def model_entries(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    """The tensors of the model in a checkpoint, by name."""
    names = [name for name in metadata.state_dict_metadata if name.startswith("model.")]
    return {name: entry_of(metadata, name) for name in names}


def n_tensors(metadata: Metadata) -> int:
    """The number of tensors that a checkpoint's tensors become in Hugging Face's format, where experts are separate."""
    entries = [entry_of(metadata, name) for name in metadata.state_dict_metadata]
    return sum(entry.size[0] if len(entry.size) == 3 else 1 for entry in entries)
