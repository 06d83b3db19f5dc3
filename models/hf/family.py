"""Builds a family of `transformers`, and checks that it can be trained as it is."""

import json
import re
from typing import Any

import torch
from torch import nn

from configs.errors import ConfigError
from configs.schema import HfModel
from configs.untrusted import shortened

_RATES = re.compile("drop|jitter")
_ROUTER_LOSSES = ("output_router_logits",)


def built(config: HfModel) -> Any:
    """Build a family's own model of plain transformers, on the device of the context, with float32 parameters.

    Raises:
        ConfigError: transformers cannot build it, or Keel cannot train it as it is.
    """
    transformers = _transformers()
    fields = dict(config.fields)
    kind = fields.pop("model_type")
    try:
        described = transformers.CONFIG_MAPPING[kind].from_dict(fields)
        family = transformers.AutoModelForCausalLM.from_config(described, dtype=torch.float32)
        _require_trainable(family)
        return family
    except ConfigError:
        raise
    except Exception as error:  # whatever the family's code makes of a wrong config
        reason = shortened(" ".join(f"{type(error).__name__}: {error}".split()), 1000)
        raise ConfigError(f"transformers cannot build this {kind} (model.hf, model.hf_overrides): {reason}") from None


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            f'model.architecture is "hf", but transformers cannot be imported ({error}): pip install '
            "'transformers>=5.17'"
        ) from None
    return transformers


def _require_trainable(family: Any) -> None:
    """Check what a config decides.

    Raises:
        ConfigError: dropout, whose random numbers a mesh would change, or a loss of its own.
    """
    fields = family.config.to_dict()
    kind = family.config.model_type
    if any(map(_drops, family.modules())):
        rates = {name: value for name, value in fields.items() if _RATES.search(name) and isinstance(value, float)}
        raise ConfigError(
            f"this {kind} has dropout or jitter, whose random numbers would not be the same on every mesh; set it to "
            f"0.0 in model.hf_overrides ({', '.join(f'{name} = {rate}' for name, rate in rates.items() if rate > 0)})"
        )
    for name in _ROUTER_LOSSES:
        if fields.get(name):
            raise ConfigError(
                f"{name} asks for the auxiliary loss of the routers, which Keel does not add for this architecture; "
                f"set model.hf_overrides.{name} = false"
            )


def without_training(config: HfModel) -> HfModel:
    """The same model without what is only for training: dropout, jitter and the routers' own loss."""
    fields = dict(config.fields)
    kind = fields.pop("model_type")
    mapping = _transformers().CONFIG_MAPPING
    if kind not in mapping:
        return config  # which is said when it is built
    described = mapping[kind].from_dict(fields).to_dict()
    rates = {name: 0.0 for name, value in described.items() if _RATES.search(name) and isinstance(value, float)}
    losses = {name: False for name in _ROUTER_LOSSES if fields.get(name)}
    changed = {name: value for name, value in (rates | losses).items() if described.get(name)}
    if not changed:
        return config
    return config.model_copy(update={"hf_config": json.dumps({**config.fields, **changed}, sort_keys=True)})


def _drops(module: nn.Module) -> bool:
    """Whether a module draws random numbers: it is dropout, or has a rate for its attention or its router's noise."""
    rates = [value for name, value in vars(module).items() if _RATES.search(name) and isinstance(value, float)]
    return (isinstance(module, nn.Dropout) and module.p > 0) or any(rate > 0 for rate in rates)
