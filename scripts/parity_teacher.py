"""What a model learns from a teacher, in plain PyTorch, for the reference of the parity table."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from checkpoint.manifest import read_manifest
from configs.schema import Config, table_of_model
from models import build_model
from parallelisms.init import materialize
from trainer.data.loader import IGNORED


def plain_teacher(config: Config) -> nn.Module | None:
    """A job's teacher, if it has one, with the initial weights of the run that wrote it, drawn again."""
    if config.distillation.teacher is None:
        return None
    manifest = read_manifest(Path(config.distillation.teacher))
    with torch.device("meta"):
        model = build_model(table_of_model(manifest.config["model"]).model_validate(manifest.config["model"]))
    model.to(getattr(torch, config.training.dtype))
    materialize(model, torch.device("cpu"), manifest.config["training"]["seed"])
    return model.requires_grad_(False)


def taught_loss(config: Config, loss: Tensor, logits: Tensor, taught: Tensor, targets: Tensor) -> Tensor:
    """The loss of the text and of the teacher's probabilities together (Hinton et al. 2015, section 2).

    Args:
        config: the job.
        loss: of the text, a scalar.
        logits: (batch, seq, vocab).
        taught: the teacher's logits, of the same shape.
        targets: (batch, seq).
    """
    table = config.distillation
    is_valid = targets != IGNORED
    own, theirs = ((each[is_valid] / table.temperature).log_softmax(-1) for each in (logits, taught))
    divergence = F.kl_div(own, theirs, reduction="batchmean", log_target=True)
    return (1 - table.weight) * loss + table.weight * table.temperature**2 * divergence
