"""Models in plain single-device PyTorch, each with a plan that tells parallelisms, by module name, how to split it."""

from collections.abc import Callable
from typing import Any

from torch import nn

from configs.schema import AnyModel, OwnModel
from models.hf.model import HfCausalLm
from models.llama import Llama
from models.own_class import build_own

_ARCHITECTURES: dict[str, Callable[[Any], nn.Module]] = {"llama": Llama, "hf": HfCausalLm}


def build_model(config: AnyModel) -> nn.Module:
    """Build the model that `[model]` describes. Under `torch.device("meta")` it takes no memory."""
    return build_own(config) if isinstance(config, OwnModel) else _ARCHITECTURES[config.architecture](config)
