"""What can be concluded from two configs that were trained with the same seeds and scored on the same sequences.

The losses are two matrices, (seeds, sequences). Sequences are no independent repetitions of a training, nor do seeds
repeat a text: with a few seeds and many sequences, an interval over all numbers as one sample would be far too narrow
(the "language-as-fixed-effect fallacy": Clark 1973). So both are taken as random: the mean difference has one interval
over the seeds' means, and one over the sequences' means, both Student's, and the interval for new seeds and new text
combines their half-widths as a hypotenuse (Howe 1974, "Approximate confidence limits on the mean of X + Y"). It is
conservative, because what a seed does to a single sequence counts in both. One seed says nothing about another
training; then the interval is about these two models alone.

*Paired* means that the differences are taken seed by seed and sequence by sequence before anything is averaged: what
makes a sequence hard or a seed lucky for both configs cancels. *Unpaired* is the same interval as if each config had
seeds and sequences of its own.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass
from functools import cache

import numpy as np

CONFIDENCE = 0.98
"""Two equal configs are called different in one comparison of 50."""
POWER = 0.8
"""The probability that the tokens that `Needed` names decide, if the difference is what it seems to be."""
_MOST_SEEDS = 10_000
_MOST_FREEDOM = 200


@dataclass(frozen=True)
class Needed:
    """The training that decides on a difference as large as the measured one, with a probability of 80%."""

    seeds: int
    """Number of seeds of each config."""
    sequences: int
    tokens: int
    """Trained on with these seeds by both configs together, including those of the runs that exist."""


@dataclass(frozen=True)
class Comparison:
    """Two configs' losses; a difference is the second's minus the first's."""

    difference: float
    paired: float | None
    """Half-width of the interval around the difference, for new seeds and new text; with one seed, for new text and
    these two models. None if there is one sequence."""
    unpaired: float | None
    of_seeds: float | None
    """The part of `paired` that more seeds would reduce; None with one seed."""
    of_text: float | None
    """The part that more sequences would reduce."""
    confidence: float
    noise_floor: tuple[float | None, float | None]
    """Each config's standard deviation over seeds of a training's loss on these sequences."""
    paired_noise: float | None
    """Standard deviation over seeds of the difference."""
    is_equal: bool
    """The losses are the same to the last bit."""
    needed: Needed | None
    """None with one seed, without a difference, or if it would take more than 10,000 seeds."""

    @property
    def is_decided(self) -> bool:
        """Whether a difference of the configs, not just of two models, is called."""
        return self.of_seeds is not None and self.paired is not None and abs(self.difference) > self.paired


def compare(first: np.ndarray, second: np.ndarray, tokens_of_a_pair: int, confidence: float = CONFIDENCE) -> Comparison:
    """Compare losses of two configs, float64 (seeds, sequences), rows and columns of both in the same order.

    Args:
        tokens_of_a_pair: trained on by a run of each.
    """
    differences = second - first
    difference = float(differences.mean())
    of_seeds, of_text = (_half_width([differences.mean(axis)], confidence) for axis in (1, 0))
    unpaired = [_half_width([first.mean(axis), second.mean(axis)], confidence) for axis in (1, 0)]
    is_equal = not differences.any()
    needed = None
    if of_seeds is not None and of_text is not None and not is_equal:
        needed = _needed(differences, tokens_of_a_pair, confidence)
    return Comparison(
        difference=difference,
        paired=_together(of_seeds, of_text),
        unpaired=_together(*unpaired),
        of_seeds=of_seeds,
        of_text=of_text,
        confidence=confidence,
        noise_floor=(_deviation(first.mean(1)), _deviation(second.mean(1))),
        paired_noise=_deviation(differences.mean(1)),
        is_equal=is_equal,
        needed=needed,
    )


def _half_width(samples: list[np.ndarray], confidence: float) -> float | None:
    """Half-width of Student's interval for a mean, or Welch's for the difference of two; None for single numbers."""
    if len(samples[0]) < 2:
        return None
    squares = [float(sample.var(ddof=1)) / len(sample) for sample in samples]
    if not sum(squares):
        return 0.0
    freedom = sum(squares) ** 2 / sum(s**2 / (len(x) - 1) for s, x in zip(squares, samples, strict=True))
    return student(confidence, math.floor(freedom * (1 + 1e-12))) * math.sqrt(sum(squares))


def _together(of_seeds: float | None, of_text: float | None) -> float | None:
    return None if of_text is None else math.hypot(of_seeds or 0.0, of_text)


def _deviation(sample: np.ndarray) -> float | None:
    return float(sample.std(ddof=1)) if len(sample) > 1 else None


def _needed(differences: np.ndarray, tokens_of_a_pair: int, confidence: float) -> Needed | None:
    """How many seeds and sequences make the interval narrower than the measured difference."""
    difference = abs(float(differences.mean()))
    of_seeds, of_text = (_deviation(differences.mean(axis)) or 0.0 for axis in (1, 0))
    now = differences.shape[1]

    def is_wide(seeds: int, sequences: int) -> bool:
        errors = of_seeds / math.sqrt(seeds), of_text / math.sqrt(sequences)
        quantiles = student(confidence, seeds - 1), student(confidence, sequences - 1)
        half = math.hypot(*(quantile * error for quantile, error in zip(quantiles, errors, strict=True)))
        return half + student(2 * POWER - 1, seeds - 1) * math.hypot(*errors) > difference

    def is_text_wide(sequences: int) -> bool:  # more than half of what is left to both, as squares
        quantiles = student(confidence, sequences - 1) + student(2 * POWER - 1, sequences - 1)
        return quantiles * of_text / math.sqrt(sequences) > difference / math.sqrt(2)

    texts = range(now, 10_000 * now)
    seeds = range(2, _MOST_SEEDS + 1)
    sequences = bisect_left(texts, True, key=lambda n: not is_text_wide(n))
    if sequences == len(texts):
        return None
    enough = bisect_left(seeds, True, key=lambda n: not is_wide(n, texts[sequences]))
    if enough == len(seeds):
        return None
    return Needed(seeds[enough], texts[sequences], seeds[enough] * tokens_of_a_pair)


@cache
def student(confidence: float, freedom: int) -> float:
    """Half-width of the interval around 0 that holds `confidence` of Student's t with `freedom` degrees of freedom.

    Above 200 degrees of freedom it is the one for 200, which is at most 1% to 2% wider.
    """
    freedom = min(freedom, _MOST_FREEDOM)
    low = 0.0
    high = math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < confidence else (low, middle)
    return math.sqrt(freedom) * math.tan(high)


def _within(angle: float, freedom: int) -> float:
    """P(|T| <= sqrt(freedom) tan(angle)), as a finite series (Abramowitz and Stegun 1964, 26.7.3 and 26.7.4)."""
    sine = math.sin(angle)
    cosine = math.cos(angle)
    is_odd = freedom % 2
    term = cosine if is_odd else 1.0
    total = term if freedom > 1 else 0.0
    for n in range(2 + is_odd, freedom - 1, 2):
        term *= cosine**2 * (n - 1) / n
        total += term
    return 2 / math.pi * (angle + sine * total) if is_odd else sine * total
