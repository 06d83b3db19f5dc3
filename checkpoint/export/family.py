"""Models of Hugging Face that Keel trains as they are: their folders, written and read by transformers itself.

The names in a folder are not always those of the modules: a family may keep each expert separate on disk and all of
them stacked in memory. transformers knows how, so that a folder is what its `save_pretrained` writes, bit for bit. The
whole model is in memory meanwhile.
"""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from configs.errors import UserError
from configs.schema import HfModel


def write_folder(
    model: HfModel,
    tensors: Mapping[str, Tensor],
    folder: Path,
    dtype: torch.dtype,
    max_shard_bytes: int,
    special: Mapping[str, int],
) -> None:
    """Write config.json and the weights of a model, as `save_pretrained` does.

    Args:
        model: the job's table.
        tensors: its parameters in `dtype`, and the buffers that are saved with them, by name, in CPU memory.
        folder: an existing folder.
        max_shard_bytes: the largest size of a file.
        special: ids of special tokens, by field, which replace those of the config.

    Raises:
        UserError: transformers cannot be imported.
    """
    family = _family_class(model)
    config = _config(model, special)
    config.dtype = dtype
    with torch.device("meta"):
        built = family.from_config(config, dtype=dtype)
    parameters = {name for name, _ in built.named_parameters()}
    missing = (parameters | _state(built).keys()) ^ tensors.keys()
    assert not missing, missing
    for name, tensor in tensors.items():
        owner, _, attribute = name.rpartition(".")
        value = torch.nn.Parameter(tensor, requires_grad=False) if name in parameters else tensor
        setattr(built.get_submodule(owner), attribute, value)
    built.tie_weights()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        built.save_pretrained(folder, max_shard_size=max_shard_bytes)


def read_folder(model: HfModel, source: Path, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Read the parameters and saved buffers of a Hugging Face folder, by the names of the family's modules.

    Args:
        model: its config.json, as the table of a job.
        source: a folder with safetensors; code in it never runs.
        dtype: dtype of the weights; None: as in the folder, and float32 for float16.

    Raises:
        UserError: weights are missing, have another shape or belong to no module.
    """
    family = _family_class(model)
    arguments: dict[str, Any] = {"use_safetensors": True, "local_files_only": True, "trust_remote_code": False}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            built, found = family.from_pretrained(
                source, config=_config(model, {}), dtype=dtype or "auto", output_loading_info=True, **arguments
            )
    except Exception as error:  # whatever transformers makes of a damaged folder
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise UserError(f"{source}: transformers cannot read this model: {reason}") from None
    for what in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        if names := sorted(map(str, found.get(what) or ())):
            raise UserError(f"{source}: {what.replace('_keys', '')} weights: {', '.join(names[:8])} ({len(names)})")
    tensors = {name: parameter.detach() for name, parameter in built.named_parameters()}
    is_half = dtype is None and any(tensor.dtype == torch.float16 for tensor in tensors.values())
    whole = {name: tensor.float() for name, tensor in tensors.items()} if is_half else tensors
    return whole | _state(built)


def _state(built: torch.nn.Module) -> dict[str, Tensor]:
    """The buffers that are saved with the weights, which keep their own dtype."""
    saved = built.state_dict().keys()
    return {name: buffer for name, buffer in built.named_buffers() if name in saved}


def seq_len_of(model: HfModel, trained: int = 0) -> int:
    """Tokens of the longest sequence that a model is made for; `trained`: those of the job, if it is a job's."""
    return max(trained, model.declared_length or 0) or 2048


def _config(model: HfModel, special: Mapping[str, int]) -> Any:
    import transformers

    fields = {**model.fields, **special}
    return transformers.CONFIG_MAPPING[fields.pop("model_type")].from_dict(fields)


def _family_class(model: HfModel) -> Any:
    try:
        import transformers
    except ImportError:
        raise UserError(
            f"this model is {model.model_type} of transformers, which is not installed: "
            "pip install 'transformers>=5.17'"
        ) from None
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM
