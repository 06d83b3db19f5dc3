"""What a Hugging Face folder holds: the model that its config.json describes, and that model's tensors.

From a stranger's folder only safetensors and JSON are read, neither of which can contain code.
"""

import json
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from checkpoint.compare import described, require_same
from checkpoint.export import family
from checkpoint.export.hf_config import Source, copies, tensor_shapes, to_keel
from checkpoint.find import HF_CONFIG_NAME as CONFIG_NAME
from checkpoint.manifest import is_plain_name
from configs.architectures import HF_CLASSES, own_weights, stored_tensors
from configs.architectures.llama_keys import MultiToken
from configs.architectures.parts import Shape
from configs.errors import UserError
from configs.files import exists, is_file
from configs.reading import hf_config
from configs.schema import AnyModel, HfModel, Model
from configs.untrusted import MAX_JSON_BYTES, link_out_of, parse_json, read_file, require_64_bits, shortened

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}
"""The floating-point dtypes of models, by safetensors' names."""


@dataclass(frozen=True)
class SourceTensor:
    """A tensor in a safetensors file."""

    path: Path
    shape: Shape
    dtype: torch.dtype


def open_folder(source: Path) -> tuple[Model, dict[str, SourceTensor]]:
    """The model that a Hugging Face folder's config.json describes, and its tensors."""
    config = read_json(source / CONFIG_NAME)
    model = to_keel(config, source / CONFIG_NAME)
    tensors = {name: tensor for name, tensor in tensors_in(source).items() if not is_left_out(name, config)}
    check_count(source / CONFIG_NAME, model, len(tensors))
    if not any(name.startswith(f"model.layers.{model.n_layers}.") for name in tensors):
        # transformers leaves the modules that predict further tokens out, and keeps their number in config.json.
        model = model.model_copy(update={"multi_token": MultiToken()})
    _check_tied_head(model, tensors)
    _check_copies(model, tensors)
    require_same(
        f"{source} does not hold the model that its {CONFIG_NAME} describes",
        {name: described(tensor.shape) for name, tensor in tensors.items()},
        {name: described(shape) for name, shape in tensor_shapes(model).items()},
    )
    return model, tensors


def check_count(path: Path, model: AnyModel, n_tensors: int) -> None:
    """Raise UserError if a model has more layers and experts than tensors: listing its tensors might never end."""
    if model.n_layers * (model.n_experts or 1) > n_tensors:
        experts = f" with {model.n_experts} experts each" if model.n_experts else ""
        raise UserError(f"{path} describes {model.n_layers} layers{experts}, and there are only {n_tensors} tensors")


def tensors_in(source: Path) -> dict[str, SourceTensor]:
    """The tensors of all safetensors files, by name.

    Raises:
        UserError: there are none, or one can't be read.
    """
    names = _file_names(source)
    tensors: dict[str, SourceTensor] = {}
    for name in names:
        tensors |= _tensors_of(source / name)
    # Exports from 2023 contain this buffer, which follows from the config.
    return {name: tensor for name, tensor in tensors.items() if not name.endswith("rotary_emb.inv_freq")}


def is_left_out(name: str, config: Mapping[str, Any]) -> bool:
    prefix = HF_CLASSES[str(config["model_type"])].left_out
    return bool(prefix) and name.startswith(prefix)


def _file_names(source: Path) -> list[str]:
    index = source / INDEX_NAME
    if is_file(index):
        weight_map = read_json(index).get("weight_map")
        names = sorted({str(name) for name in weight_map.values()}) if isinstance(weight_map, dict) else []
        outside = [name for name in names if not is_plain_name(name)]
        if not names or outside:
            outer = f"{shortened(repr(outside[0]), 300)}, outside of the folder" if outside else "no files"
            raise UserError(f"{index}: names {outer}")
        return names
    if is_file(source / SINGLE_NAME):
        return [SINGLE_NAME]
    pickles = sorted(path.name for pattern in ("*.bin", "*.pth", "*.pt") for path in source.glob(pattern))
    if not pickles:
        raise UserError(f"{source} has no safetensors: neither {INDEX_NAME} nor {SINGLE_NAME}")
    raise UserError(
        f"{source} has its weights only in {pickles[0]}, a pickle, which can run code when it is read. Keel reads "
        'safetensors; if you trust the folder, convert it once: python -c "import transformers; '
        f"transformers.AutoModelForCausalLM.from_pretrained('{source}', dtype='auto').save_pretrained('NEW_FOLDER')\""
    )


def _tensors_of(path: Path) -> dict[str, SourceTensor]:
    tensors = {}
    with _opened(path) as file:
        for name in file.keys():  # noqa: SIM118 (it is not a dict)
            entry = file.get_slice(name)
            if entry.get_dtype() not in _DTYPES:
                raise UserError(f"{path}: {name} is of type {entry.get_dtype()}; Keel imports {', '.join(_DTYPES)}")
            tensors[name] = SourceTensor(path, tuple(entry.get_shape()), _DTYPES[entry.get_dtype()])
    return tensors


def _check_tied_head(model: Model, tensors: dict[str, SourceTensor]) -> None:
    """Drop the head of a tied model, if the folder has one; it must equal the embedding."""
    head = "lm_head.weight"
    embedding = "model.embed_tokens.weight"
    if not model.tie_embeddings or not {head, embedding} <= tensors.keys():
        return
    if not torch.equal(*(_read(name, tensors[name], tensors[name].dtype) for name in (head, embedding))):
        raise UserError(
            f"{tensors[head].path}: {head} is not {embedding}, although tie_word_embeddings is true in {CONFIG_NAME}; "
            "if the head is right, set that to false"
        )
    del tensors[head]


def _check_copies(model: Model, tensors: dict[str, SourceTensor]) -> None:
    """Drop the embedding and the head of modules that predict further tokens; they must equal the model's own."""
    for name, first in copies(model).items():
        if name not in tensors or first not in tensors:
            continue
        if not torch.equal(*(_read(each, tensors[each], tensors[each].dtype) for each in (name, first))):
            raise UserError(
                f"{tensors[name].path}: {name} is not {first}, which Keel's modules that predict further tokens share; "
                f"to import the model without them, set num_nextn_predict_layers to 0 in {CONFIG_NAME} and leave out "
                f"the tensors of layer {model.n_layers} and later ones"
            )
        del tensors[name]


def read_source(place: Source, shape: Shape, tensors: Mapping[str, SourceTensor], dtype: torch.dtype) -> Tensor:
    """Read what a checkpoint stores as one tensor of this shape: a tensor, rows of one, or all experts', stacked."""
    names = place.names
    if len(names) == 1:
        tensor = _read(names[0], tensors[names[0]], dtype)
        if place.parts:
            tensor = tensor.unflatten(0, (place.parts, -1))[:, place.rows].flatten(0, 1)
        return tensor.view(shape)
    stack = torch.empty(shape, dtype=dtype)
    for number, name in enumerate(names):
        stack[number] = _read(name, tensors[name], dtype)
    return stack


def _read(name: str, tensor: SourceTensor, dtype: torch.dtype) -> Tensor:
    """Read the tensor into its own memory, and close the mapped file."""
    with _opened(tensor.path) as file:
        return file.get_tensor(name).to(dtype, copy=True)


@contextmanager
def _opened(path: Path) -> Generator[Any, None, None]:
    require_inside(path)
    if exists(path) and not is_file(path):  # opening a pipe would wait for a writer
        raise UserError(f"{path} can't be read: it is not a regular file")
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, MemoryError, SafetensorError) as error:  # MemoryError: the process may not map that much
        raise UserError(f"{path} can't be read: {error}") from None


def common_dtype(model: Model, tensors: Mapping[str, SourceTensor]) -> torch.dtype:
    """The narrowest of Keel's dtypes that represents all weights exactly."""
    weights = (name for weight in own_weights(model) for name in weight.hf_names)
    dtype = reduce(torch.promote_types, (tensors[name].dtype for name in weights))
    return torch.float32 if dtype == torch.float16 else dtype


def dtypes_of(model: Model, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The dtype of each tensor, by its names in a checkpoint and in Hugging Face's format: that of the weights is
    `dtype`, and buffers are in float32."""
    return {
        name: torch.float32 if weight.is_buffer else dtype
        for weight in stored_tensors(model)
        for name in (f"model.{weight.name}", *weight.hf_names)
    }


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def read_family(source: Path, dtype: torch.dtype | None) -> tuple[HfModel, dict[str, Tensor]]:
    """The model of a folder as it is, and its tensors: transformers reads them."""
    table = {"architecture": "hf", "hf_config": json.dumps(read_json(source / CONFIG_NAME))}
    if faults := [message for _, message in hf_config.resolve(table)]:
        raise UserError(f"{source / CONFIG_NAME}: {faults[0]}")
    model = HfModel.model_validate(table)
    return model, family.read_folder(model, source, dtype)


def read_json(path: Path) -> dict[str, Any]:
    require_inside(path)
    try:
        content = parse_json(read_file(path, MAX_JSON_BYTES))
        require_64_bits(content)
    except FileNotFoundError:
        raise UserError(f"{path.parent} is not a Hugging Face model folder: it has no {path.name}") from None
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{path} can't be read: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} holds a {type(content).__name__} instead of an object")
    return content


def require_inside(path: Path) -> None:
    """Raise UserError if a file of a Hugging Face folder is a link that leads out of it."""
    if problem := link_out_of(path):
        raise UserError(problem)
