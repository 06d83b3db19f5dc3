"""The loss on text that is not trained on, as a whole and by source."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from configs.schema import Config
from parallelisms.mesh import Mesh
from trainer.data.loader import DataLoader, MicroBatch, build_loader
from trainer.data.tokenizer import load_tokenizer
from trainer.step import Learner

_LARGEST_EXPONENT = 709.0


@dataclass(frozen=True)
class ValidationResult:
    """The result of a validation, the same on all ranks; the fields are keys of `StepMetrics`."""

    validation_loss: float
    """Mean cross-entropy over the valid target tokens, in nats: the sources' losses, weighted by their tokens."""
    validation_perplexity: float
    """exp of the loss."""
    validation_bits_per_byte: float | None
    """Cross-entropy per byte of text, which is comparable across tokenizers; None without a tokenizer."""
    validation_by_source: dict[str, dict[str, float | None]]
    """Each source's `loss`, `perplexity` and `bits_per_byte`, by its name."""
    validation_average_loss: float | None = None
    """The loss of the average of the weights; None if there is none, or a signal came."""


class Validation:
    """The validations of a run; every rank has them, and all make the same calls."""

    def __init__(self, config: Config, mesh: Mesh) -> None:
        """Open the validation data, if the job has any.

        Raises:
            KeelError: it can't be read, or is too little.
        """
        self._mesh = mesh
        self._loader: DataLoader | None = None
        self._token_bytes: torch.Tensor | None = None
        self._last: tuple[int, float] | None = None
        """Step and loss of the last validation."""
        self.begin_stage(config)

    def begin_stage(self, config: Config) -> None:
        """Open the validation data of another stage of the run; raises as the constructor."""
        self.close()
        self._loader = None
        if config.validation.interval:
            sizes = self._mesh.sizes
            self._loader = build_loader(config, self._mesh.dp_rank, sizes.dp, start_sample=0, validation=True)
            if config.tokenizer.path:
                token_bytes = load_tokenizer(config.tokenizer.path).token_bytes()
                # Further ids stand for no text; random tokens of a synthetic source may have them.
                n_further = config.model.vocab_size - len(token_bytes)
                self._token_bytes = torch.from_numpy(np.pad(token_bytes, (0, n_further)))

    def measure(self, learner: Learner, step: int, is_over: Callable[[], bool]) -> ValidationResult | None:
        """Validate after `step` steps; arguments and result as of `validate`."""
        assert self._loader is not None
        result = validate(learner, self._loader, self._token_bytes, is_over)
        if result and learner.average and learner.average.has_begun:
            with learner.averaged():
                of_average = validate(learner, self._loader, self._token_bytes, is_over)
            result = of_average and replace(result, validation_average_loss=of_average.validation_loss)
        # None: what was measured after this step before a spike sent the run back is of other weights.
        self._last = (step, result.validation_loss) if result else None
        return result

    def loss_after(self, step: int) -> float | None:
        """The loss that was measured after `step` steps; None if the last validation was at another step."""
        return self._last[1] if self._last and self._last[0] == step else None

    def close(self) -> None:
        """End the loader's background thread."""
        if self._loader:
            self._loader.close()


def validate(
    learner: Learner,
    steps: Iterable[list[MicroBatch]],
    token_bytes: torch.Tensor | None,
    is_over: Callable[[], bool],
) -> ValidationResult | None:
    """Evaluate the model on this rank's share of the validation samples; all ranks must call it.

    Args:
        learner: its model is not changed.
        steps: the same number of micro-batches on every rank, each with samples of one source.
        token_bytes: (vocab,) bytes of text per token.
        is_over: called before each step; must return the same on all ranks.

    Returns:
        The result, or None if `is_over` ended the validation.
    """
    sources = [source.name for source in learner.config.validation.sources]
    total = torch.zeros(len(sources), 3, dtype=torch.float64, device=learner.mesh.device)
    for micro_batches in steps:
        if is_over():
            return None
        sums = learner.evaluate(micro_batches, token_bytes)
        name = micro_batches[0].source
        if name is not None:  # otherwise this rank had padding only
            total[sources.index(name)] += sums
    total = learner.mesh.sum_over_tokens(total)
    whole = _means(*total.sum(0).tolist())
    return ValidationResult(
        **{f"validation_{name}": mean for name, mean in whole.items()},
        validation_by_source={name: _means(*sums) for name, sums in zip(sources, total.tolist(), strict=True)},
    )


def _means(loss_sum: float, tokens: float, n_bytes: float) -> dict[str, Any]:
    loss = loss_sum / tokens if tokens else math.nan
    return {
        "loss": loss,
        "perplexity": math.exp(loss) if loss < _LARGEST_EXPONENT else loss * math.inf,
        "bits_per_byte": loss_sum / math.log(2) / n_bytes if n_bytes else None,
    }
