"""A trained model with its tokenizer: from a run, a checkpoint or a Hugging Face folder, in one process."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from checkpoint.compare import described, require_same
from checkpoint.export.model_files import ModelFiles, checkpoint_files, hf_files
from checkpoint.find import find_model, tokenizer_of
from checkpoint.lock import ReadLock
from checkpoint.manifest import MANIFEST_NAME, read_manifest
from configs.errors import UserError
from configs.files import exists, is_file, whole
from models import build_model
from parallelisms.ties import ties_kept
from parallelisms.torch_internals import settle_segments
from scripts.export.hf_tokenizer import find_tokenizer
from trainer.data.tokenizer import Tokenizer, load_tokenizer

DTYPES = ("float32", "bfloat16", "float64")


@dataclass(frozen=True)
class Trained:
    """A model with all that sampling from it needs."""

    model: nn.Module
    tokenizer: Tokenizer
    seq_len: int
    folder: Path
    """The checkpoint or Hugging Face folder that it was read from."""
    device: torch.device
    dtype: torch.dtype


def load_trained(source: Path, step: int | None, device: str, dtype: str | None, tokenizer: Path | None) -> Trained:
    """Load a model, whatever mesh has trained it; the optimizer is not read.

    Args:
        source: a run folder, a checkpoint or a Hugging Face folder.
        step: which of a run's checkpoints; None: the newest.
        device: "auto" (CUDA if available), "cpu" or "cuda".
        dtype: of weights and computation, of DTYPES; None: a run's training.compute_dtype, or else the tensors' own.
        tokenizer: replaces the job's tokenizer.

    Raises:
        UserError: there is no such checkpoint, or it or its tokenizer can't be read.
    """
    folder = find_model(source, step)
    with ReadLock(folder):  # a run that trains would remove it meanwhile
        return _load(folder, device, dtype, tokenizer)


def _load(folder: Path, device: str, dtype: str | None, tokenizer: Path | None) -> Trained:
    is_checkpoint = exists(folder / MANIFEST_NAME)
    tokenizer_file = tokenizer or _tokenizer_in(folder)
    files = checkpoint_files(folder) if is_checkpoint else hf_files(folder)
    loaded = load_tokenizer(tokenizer_file, files.model.vocab_size)
    if is_checkpoint:
        manifest = read_manifest(folder)
        if tokenizer is None and manifest.tokenizer_hash not in (None, loaded.hash):
            raise UserError(
                f"{tokenizer_file} is not the tokenizer that {folder} was trained with (its hash differs); name that "
                "one with --tokenizer FILE"
            )
        dtype = dtype or manifest.value("training", "compute_dtype", str)
    target = getattr(torch, dtype) if dtype in DTYPES else files.dtype
    place = _device(device)
    return Trained(_read_model(files, folder, place, target), loaded, files.seq_len, folder, place, target)


def _tokenizer_in(folder: Path) -> Path:
    """The tokenizer of the checkpoint or Hugging Face folder that `find_model` has found.

    Raises:
        UserError: there is none.
    """
    if not exists(folder / MANIFEST_NAME):
        if found := find_tokenizer(folder):
            return found
        raise UserError(f"{folder} has no tokenizer, which sampling needs; name one with --tokenizer FILE")
    path = tokenizer_of(folder)
    if path is None:
        raise UserError(
            f"the job of {folder} has no tokenizer.path, so its tokens stand for no text; if there is a tokenizer "
            "for them, name it with --tokenizer FILE"
        )
    if not is_file(path):
        raise UserError(
            f"the tokenizer of {folder} is neither in its run folder nor at {whole(path)}, where its job has it; name "
            "it with --tokenizer FILE"
        )
    return path


def _device(wanted: str) -> torch.device:
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UserError("--device is cuda, but torch sees no CUDA device here; use auto or cpu")
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    # A batch of prompts of different lengths needs a mask, with which cuDNN's attention is not right (torch 2.11).
    torch.backends.cuda.enable_cudnn_sdp(False)
    settle_segments(warnings.warn)
    return torch.device("cuda")


def _read_model(files: ModelFiles, folder: Path, device: torch.device, dtype: torch.dtype) -> nn.Module:
    with torch.device("meta"):
        model = build_model(files.model).to(dtype)
    saved = model.state_dict().keys()
    tensors = dict(model.named_parameters()) | {n: buffer for n, buffer in model.named_buffers() if n in saved}
    shapes = {f"model.{name}": described(tensor.shape) for name, tensor in tensors.items()}
    require_same(f"{folder} does not hold the model that it describes", files.tensors, shapes)
    try:
        with ties_kept(model):
            model.to_empty(device=device)
        for module in model.modules():
            if hasattr(module, "init_buffers"):
                cast(Callable[[], None], module.init_buffers)()
        for name in tensors:
            owner, _, attribute = name.rpartition(".")
            target: Any = getattr(model.get_submodule(owner), attribute)
            target.data.copy_(files.read(f"model.{name}"))
    except torch.OutOfMemoryError:
        raise UserError(f"{folder} does not fit into the GPU's memory; try --dtype bfloat16, or --device cpu") from None
    return model
