"""Layer by layer, and how noisy the gradient is: what a step of `metrics.details_interval` measures besides its loss.

The gradient noise scale (McCandlish et al. 2018, arXiv:1812.06162) is the batch size up to which larger batches pay
off. With the gradient G of an infinite batch and the covariance S of a single sequence's gradient, the gradient of a
batch of n sequences has the expected squared norm |G|^2 + tr(S) / n. Two batches of different sizes give both unknowns
(appendix A.1), and their ratio tr(S) / |G|^2 is the noise scale, in sequences.

The large batch is the step's own. The small one is its first eighth: sequences that the run, and not the mesh, fixes.
Its gradient takes passes of its own, in which all other targets are ignored, before the step: so the same numbers come
out on any mesh, and a step costs up to an eighth more (with a pipeline, whose schedule has a fixed number of
micro-batches, twice as much). A micro-batch's or a rank's own gradient would come for free, but is another batch on
each mesh.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from configs.schema import Config
from parallelisms.details import Activations, squared_grad_norms
from trainer.data.loader import IGNORED, MicroBatch
from trainer.planning.skeleton import skeleton
from trainer.step import Learner

SMALL_BATCH_SHARE = 8
"""The small batch is the global batch's first sequences: its size divided by this."""


@dataclass(frozen=True)
class StepDetails:
    """A step's measurements, the same on all ranks; the fields are keys of `StepMetrics`."""

    layer_grad_norms: dict[str, float | None]
    """2-norm of each layer's gradients before clipping; 0 if it is frozen."""
    layer_activation_rms: dict[str, float | None]
    """Root mean square of the residual stream after the embedding and after each block."""
    grad_noise_scale: float | None = None
    """tr(S) / |G|^2, in sequences, of this step alone; None if an estimate below is not positive."""
    grad_noise_trace: float | None = None
    """Estimate of tr(S). It and the next may be negative, since they are unbiased; for a noise scale of several steps,
    average each first."""
    grad_signal: float | None = None
    """Estimate of |G|^2."""


def noise_scale(small_square: float, large_square: float, small: int, large: int) -> tuple[float | None, float, float]:
    """The noise scale in sequences, and the estimates of tr(S) and |G|^2, from the squared norms of two gradients.

    Args:
        small_square, large_square: of the mean gradients of `small` and `large` sequences.
    """
    signal = (large * large_square - small * small_square) / (large - small)
    trace = (small_square - large_square) / (1 / small - 1 / large)
    return trace / signal if min(trace, signal) > 0 else None, trace, signal


def _finite(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None


class Details:
    """Measures the steps that are due; all ranks have one, and make the same calls."""

    def __init__(self, config: Config, learner: Learner) -> None:
        self._interval = config.metrics.details_interval
        self._learner = learner
        self._small: Tensor | None = None
        """Squared norm of the small batch's gradient in the present step; None if the step is not measured."""
        if not self._interval:
            return
        model = skeleton(config.model)
        plan = model.plan
        parts = (*plan.before_blocks, *plan.blocks, *plan.after_blocks)
        self._layers = tuple(part for part in parts if any(name.startswith(f"{part}.") for name in model.shapes))
        self._streams = (*plan.before_blocks, *plan.blocks)
        self._activations = Activations(learner.stages, self._streams, learner.mesh)
        # An auxiliary loss has a gradient of its own, which ignored targets do not remove; so have further tokens.
        self._has_other_loss = plan.has_losses_of_layers or bool(plan.further_blocks)

    @property
    def _batch(self) -> int:
        return self._learner.config.training.global_batch_size

    @property
    def _n_small(self) -> int:
        """Sequences of the small batch; 0: it is not measured."""
        return 0 if self._has_other_loss or self._batch < 2 else max(1, self._batch // SMALL_BATCH_SHARE)

    @contextmanager
    def watching(self, step: int, micro_batches: list[MicroBatch]) -> Iterator[None]:
        """Measure the passes of step number `step`, which run inside this context, if it is due."""
        self._small = None
        if not self.is_due(step):
            yield
            return
        self._small = self._square_of_small_batch(micro_batches)
        with self._activations.watching():
            yield

    def is_due(self, step: int) -> bool:
        """Whether step number `step` is measured."""
        return self._interval > 0 and step % self._interval == 0

    def numbers(self) -> Tensor | None:
        """The measurements of the step whose passes were watched last, and whose gradients are not clipped yet.

        Returns:
            On the device, float64: squared gradient norm by layer, mean square by stream, squared norm of the small
            batch's gradient. None if the step is not measured.
        """
        if self._small is None:
            return None
        with self._learner.guard.watch():
            squares = squared_grad_norms(self._learner.counted, self._layers, self._learner.mesh)
            return torch.cat((squares, self._activations.mean_squares(), self._small[None]))

    def read(self, numbers: Tensor) -> StepDetails:
        """What `numbers` has returned, in words; it is in the host's memory by now."""
        *squares_and_means, small = numbers.tolist()
        squares = squares_and_means[: len(self._layers)]
        means = squares_and_means[len(self._layers) :]
        noise: tuple[float | None, ...] = (None, None, None)
        if not math.isnan(small):
            noise = noise_scale(small, sum(squares), self._n_small, self._batch)
        return StepDetails(
            {layer: _finite(math.sqrt(square)) for layer, square in zip(self._layers, squares, strict=True)},
            {stream: _finite(math.sqrt(mean)) for stream, mean in zip(self._streams, means, strict=True)},
            *map(_finite, noise),
        )

    def _square_of_small_batch(self, micro_batches: list[MicroBatch]) -> Tensor:
        """Squared norm of the gradient of the global batch's first sequences, a scalar; NaN if it is not measured."""
        learner = self._learner
        if not self._n_small:
            return torch.full((), math.nan, dtype=torch.float64, device=learner.mesh.device)
        sizes = learner.mesh.sizes
        micro_batch = len(micro_batches[0].tokens)
        n_passes = -(-self._n_small // (sizes.dp * micro_batch))
        # Samples are counted over the whole run, and earlier stages of it may have had other batches.
        first = micro_batches[0].samples[0] - learner.mesh.dp_rank * micro_batch
        small = [self._only_small(batch, first) for batch in micro_batches]
        learner.gradients(small[:n_passes] if sizes.pp == 1 else small)
        square = squared_grad_norms(learner.counted, self._layers, learner.mesh).sum()
        learner.forget_gradients()
        return square

    def _only_small(self, batch: MicroBatch, first: int) -> MicroBatch:
        is_small = torch.tensor([sample - first < self._n_small for sample in batch.samples])
        return replace(batch, targets=batch.targets.masked_fill(~is_small[:, None], IGNORED))
