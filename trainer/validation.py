"""The loss on text that is not trained on."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from trainer.data.loader import MicroBatch
from trainer.step import Learner


@dataclass(frozen=True)
class ValidationResult:
    """The result of a validation, the same on all ranks; the fields are keys of `StepMetrics`."""

    validation_loss: float
    """Mean cross-entropy over the valid target tokens, in nats."""
    validation_bits_per_byte: float | None
    """Cross-entropy per byte of text, which is comparable across tokenizers; None without a tokenizer."""
    samples: list[dict[str, str]] | None = None
    """The texts that the model continued (see `StepMetrics`); None if there are none, or a signal came."""


def validate(
    learner: Learner,
    steps: Iterable[list[MicroBatch]],
    token_bytes: torch.Tensor | None,
    is_over: Callable[[], bool],
) -> ValidationResult | None:
    """Evaluate the model on this rank's share of the validation samples; all ranks must call it.

    Args:
        learner: its model is not changed.
        steps: the same number of micro-batches on every rank.
        token_bytes: (vocab,) bytes of text per token.
        is_over: called before each step; must return the same on all ranks.

    Returns:
        The result, or None if `is_over` ended the validation.
    """
    total = torch.zeros(3, dtype=torch.float64, device=learner.mesh.device)
    for micro_batches in steps:
        if is_over():
            return None
        total += learner.evaluate(micro_batches, token_bytes)
    loss_sum, tokens, n_bytes = learner.mesh.sum_over_tokens(total).tolist()
    return ValidationResult(
        validation_loss=loss_sum / tokens if tokens else math.nan,
        validation_bits_per_byte=loss_sum / math.log(2) / n_bytes if n_bytes else None,
    )
