"""Conversion of a Hugging Face folder to a checkpoint: weights only, to continue training.

One tensor of the checkpoint is in memory at a time. The output gets its name only when it is complete, and an existing
folder is never touched.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor

from checkpoint import manifest as manifests
from checkpoint.export.hf_config import checkpoint_shapes, sources, tensor_shapes, unknown_fields
from checkpoint.export.hf_folder import (
    common_dtype,
    dtype_name,
    dtypes_of,
    is_left_out,
    open_folder,
    read_family,
    read_json,
    read_source,
    tensors_in,
)
from checkpoint.export.output import unfinished_folder, write_bytes
from checkpoint.find import HF_CONFIG_NAME as CONFIG_NAME
from checkpoint.manifest import Manifest
from checkpoint.storage import FolderStorage, commit
from checkpoint.tensor_stream import Counter, Progress, n_bytes, write_tensors
from configs.places import is_url
from configs.reading.toml_text import table_text
from configs.schema import AnyModel

MODEL_TOML = "model.toml"


def import_hf(
    source: Path,
    output: Path,
    tokenizer: Path | None,
    dtype: str | None = None,
    progress: Progress = lambda done, total: None,
    as_it_is: bool = False,
    place: str | None = None,
) -> None:
    """Write the model in a Hugging Face folder as a checkpoint: weights only, for `checkpoint.init_from`.

    The output also gets `model.toml`, a base for job files with the model's shape, and a copy of the tokenizer.

    Args:
        source: the Hugging Face folder.
        output: the folder to create.
        tokenizer: the tokenizer's file, in the form for Keel to use; None: no tokenizer.
        dtype: dtype of the weights; None: as in the source. float16, and mixed dtypes, become the narrowest dtype that
            represents all of them exactly.
        progress: called after each tensor.
        as_it_is: for architecture "hf", whatever the family; otherwise for Keel's own modules.
        place: where the output will be, for what is written into it; None: where it is.

    Raises:
        UserError: the source can't be read, or Keel can't train its model, or the output exists or can't be written.
    """
    place = place or str(output.resolve())
    if as_it_is:
        _import_family(source, output, tokenizer, dtype, progress, place)
        return
    model, tensors = open_folder(source)
    shapes = tensor_shapes(model)
    target = getattr(torch, dtype) if dtype else common_dtype(model, tensors)
    dtypes = dtypes_of(model, target)
    count = Counter(progress, sum(n_bytes(shape, dtypes[name]) for name, shape in shapes.items()))
    names = sources(model)
    to_write = checkpoint_shapes(model).items()
    stream = ((name, count(read_source(names[name], shape, tensors, dtypes[name]))) for name, shape in to_write)
    _write_import(source, output, place, tokenizer, model, target, stream)


def unread(source: Path) -> list[str]:
    """What an import into Keel's own modules leaves out: fields of config.json and tensors, as sentences."""
    path = source / CONFIG_NAME
    config = read_json(path)
    found = []
    if fields := unknown_fields(config, path):
        found.append(f"{path} has fields that Keel does not know; the import is without them: {', '.join(fields)}")
    if tensors := [name for name in tensors_in(source) if is_left_out(name, config)]:
        found.append(
            f"{source} has modules that predict further tokens, which Keel does not have in such a model; the import "
            f"is without their {len(tensors)} tensors, such as {tensors[0]}"
        )
    return found


def _import_family(
    source: Path, output: Path, tokenizer: Path | None, dtype: str | None, progress: Progress, place: str
) -> None:
    """Import a model to train as it is."""
    model, tensors = read_family(source, getattr(torch, dtype) if dtype else None)
    target = next(iter(tensors.values())).dtype
    count = Counter(progress, sum(n_bytes(tensor.shape, target) for tensor in tensors.values()))
    stream = ((f"model.{name}", count(tensor)) for name, tensor in tensors.items())
    _write_import(source, output, place, tokenizer, model, target, stream)


def _write_import(
    source: Path,
    output: Path,
    place: str,
    tokenizer: Path | None,
    model: AnyModel,
    target: torch.dtype,
    stream: Iterator[tuple[str, Tensor]],
) -> None:
    with unfinished_folder(output) as folder:
        storage = FolderStorage()
        files = write_tensors(storage, folder, stream)
        tables: dict[str, Any] = {"model": model.model_dump()}
        if tokenizer:
            files[tokenizer.name] = write_bytes(folder / tokenizer.name, tokenizer.read_bytes())
            tables["tokenizer"] = {"path": f"{place}/{tokenizer.name}"}
        toml = _toml_heading(source, place) + table_text(tables)
        files[MODEL_TOML] = write_bytes(folder / MODEL_TOML, toml.encode())
        config = tables | {"training": {"dtype": dtype_name(target)}}
        tokenizer_hash = files[tokenizer.name].xxh3 if tokenizer else None
        commit(storage, folder, output, _draft(config, tokenizer_hash), files, "{}")


def _toml_heading(source: Path, place: str) -> str:
    base = MODEL_TOML if is_url(place) else f"{place}/{MODEL_TOML}"  # a base is a file on a disk
    job = "a job file beside a copy of this file" if is_url(place) else "a job file"
    return (
        f"# The shape of the model that was imported from {source}. To continue training it, in {job}:\n"
        f'#   base = "{base}", and in [checkpoint] init_from = "{place}"\n\n'
    )


def _draft(config: dict[str, Any], tokenizer_hash: str | None) -> Manifest:
    return Manifest(
        step=0,
        tokens=0,
        config=config,
        config_hash=manifests.config_hash(config),
        mesh={},
        torch_version=torch.__version__,
        run_id=uuid4().hex,
        parent=None,
        run_changes=[],
        files={},
        tokenizer_hash=tokenizer_hash,
    )
