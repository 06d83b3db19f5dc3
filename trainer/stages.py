"""The stages of a model that a rank holds, on its place in the mesh, and their tensors in a checkpoint."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from configs.schema import Config
from models import build_model
from parallelisms.mesh import Mesh
from parallelisms.parallelize import parallelize


def build_stages(config: Config, mesh: Mesh) -> tuple[dict[int, nn.Module], list[str]]:
    """Return this rank's parallelized stages on the meta device, and the names of all parameters of the model."""
    with torch.device("meta"):
        model = build_model(config.model).to(getattr(torch, config.training.dtype))
    names = [name for name, _ in model.named_parameters()]
    return parallelize(model, mesh, config), names


def saved_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers that are part of a model's state, by name, such as the biases of a mixture's routers."""
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def model_tensors(stage: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """A stage's parameters and saved buffers, by their names in a checkpoint."""
    for name, tensor in (*stage.named_parameters(), *saved_buffers(stage)):
        yield f"model.{name}", tensor
