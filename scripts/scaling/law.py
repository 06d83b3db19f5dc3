"""A scaling law through the losses of a few runs, and the loss of a larger one with an interval.

The law is L(C) = E + A (C / C_target) ** -alpha, C the training FLOPs of a run (Henighan et al. 2020, section 4; its
form is that of Hoffmann et al. 2022 if tokens grow in proportion to the parameters, as on a ladder). For an alpha it is
linear in E and A. So all exponents of a fine grid are tried, each with the best E and A that are not negative: no start
values, and no minimum that is only local. The law at the target is E + A.

The interval is a parametric bootstrap. The mean loss of a rung has the variance that its seeds show, or that of the
residuals of the law, whichever is larger, since a law that does not fit well must not predict well. Each draw moves the
means by so much and fits again; a Student's t instead of a normal distribution allows for a variance that is itself
estimated. The noise of one run, the target's, is added. What no interval covers is that the law might bend between the
largest rung and the target.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_EXPONENTS = np.geomspace(0.01, 2, 100)
_DRAWS = 1000


@dataclass(frozen=True)
class Law:
    """A fitted law, and what it predicts."""

    irreducible: float
    """E: the loss without end of compute."""
    reducible: float
    """A: the part of the target's loss that more compute would reduce."""
    exponent: float
    """alpha."""
    residual: float
    """Root mean square of the rungs' residuals, in nats."""
    predicted: float
    """Loss of the target."""
    low: float
    high: float

    def at(self, compute: float) -> float:
        """The loss of a run with `compute` times the target's FLOPs."""
        return self.irreducible + self.reducible * compute**-self.exponent


def fit(compute: Sequence[float], losses: np.ndarray, confidence: float) -> Law:
    """Fit the law.

    Args:
        compute: FLOPs of each rung as a part of the target's, at least four different ones.
        losses: float64 (rungs, seeds).
        confidence: probability of the interval.
    """
    rungs, seeds = losses.shape
    x = np.array(compute)
    means = losses.mean(1)[:, None]
    found = _fit_all(x, means, _EXPONENTS)
    for apart in (1.06, 1.002, 1.0001):  # around the best exponent so far, ever finer
        exponent = found[2][0]
        found = _fit_all(x, means, np.geomspace(exponent / apart, exponent * apart, 61))
    e, a, exponent, squares = (float(each[0]) for each in found)
    freedom = rungs - 3
    variance = squares / freedom
    of_run = variance
    if seeds > 1:
        of_run = float(losses.var(1, ddof=1).mean())
        if of_run / seeds > variance:
            freedom = rungs * (seeds - 1)
            variance = of_run / seeds
    draws = np.random.default_rng(0)
    moved = means + draws.standard_t(freedom, (rungs, _DRAWS)) * np.sqrt(variance)
    low_e, low_a, _, _ = _fit_all(x, moved, _EXPONENTS)
    targets = low_e + low_a + draws.standard_t(freedom, _DRAWS) * np.sqrt(of_run)
    low, high = np.quantile(targets, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Law(e, a, exponent, float(np.sqrt(squares / rungs)), e + a, min(float(low), e + a), max(float(high), e + a))


def _fit_all(compute: np.ndarray, losses: np.ndarray, exponents: np.ndarray) -> tuple[np.ndarray, ...]:
    """Fit each column of losses (rungs, columns), with the best of these exponents.

    Returns: E, A, alpha and the sum of squared residuals, each (columns).
    """
    columns = losses.shape[1]
    best = np.full(columns, np.inf)
    found = np.zeros((3, columns))
    for exponent in exponents:
        x = compute**-exponent
        for e, a in _candidates(x, losses):
            squares = ((losses - e - a * x[:, None]) ** 2).sum(0)
            better = squares < best
            best = np.where(better, squares, best)
            found = np.where(better, np.stack([e, a, np.full(columns, exponent)]), found)
    return found[0], found[1], found[2], best


def _candidates(x: np.ndarray, losses: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """The least squares solutions for one exponent: of both terms where neither is negative, and of each alone."""
    mean = losses.mean(0)
    centered = x - x.mean()
    a = centered @ losses / (centered @ centered)
    e = mean - a * x.mean()
    is_valid = (a >= 0) & (e >= 0)
    nothing = np.zeros_like(mean)
    return [
        (np.where(is_valid, e, mean), np.where(is_valid, a, 0)),
        (nothing, np.maximum(x @ losses / (x @ x), 0)),
    ]
