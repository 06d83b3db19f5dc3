"""Models as plain single-device PyTorch, each with its plan: what a parallelism needs to know of it, by module name."""

from torch import nn

from configs.schema import Model
from models.llama import Llama

_ARCHITECTURES = {"llama": Llama}


def build_model(config: Model) -> nn.Module:
    """Build the model that `[model]` describes; under `torch.device("meta")` it takes no memory."""
    return _ARCHITECTURES[config.architecture](config)
