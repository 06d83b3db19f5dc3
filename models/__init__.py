"""Models in plain single-device PyTorch, each with a plan that tells parallelisms, by module name, how to split it."""

from collections.abc import Callable
from typing import Any

from torch import nn

from configs.schema import AnyModel
from models.hf import HfCausalLm
from models.llama import Llama

_ARCHITECTURES: dict[str, Callable[[Any], nn.Module]] = {"llama": Llama, "hf": HfCausalLm}


def build_model(config: AnyModel) -> nn.Module:
    """Build the model that `[model]` describes. Under `torch.device("meta")` it takes no memory."""
    return _ARCHITECTURES[config.architecture](config)
