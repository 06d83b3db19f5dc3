"""Models in plain single-device PyTorch, each with a plan that tells parallelisms, by module name, how to split it."""

from torch import nn

from configs.schema import Model
from models.llama import Llama

_ARCHITECTURES = {"llama": Llama}


def build_model(config: Model) -> nn.Module:
    """Build the model that `[model]` describes. Under `torch.device("meta")` it takes no memory."""
    return _ARCHITECTURES[config.architecture](config)
