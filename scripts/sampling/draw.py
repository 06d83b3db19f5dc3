"""The next token of a sequence, drawn from a model's logits.

The logits are divided by the temperature; then `top_k` keeps the most likely tokens, and `top_p` keeps, of these, the
fewest that have this share of the probability (Holtzman et al. 2020, "nucleus sampling"). This is the order of Hugging
Face's `generate`.

The random numbers come from a generator for each sequence, keyed by the seed and by the sequence's place among the
prompts. So a sequence does not depend on the other sequences of its batch, nor on the mesh, but for the rounding of
the logits. The generators are numpy's: torch's random state is not touched.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

NOT_FINITE = -1
"""Stands for a token whose logits are not all finite."""


@dataclass(frozen=True)
class Distribution:
    """How a distribution over the next token is made of the logits."""

    temperature: float = 1.0
    """0: always the most likely token; 1: the model's own distribution; above: more even."""
    top_k: int | None = None
    """Number of the most likely tokens to choose from, at least 1; None: all tokens."""
    top_p: float = 1.0
    """Share of the most likely tokens' probability to choose from, above 0; 1: all tokens."""
    vocab_size: int | None = None
    """The tokenizer's; the model's further logits are padding, and never drawn. None: there are none."""


def generators(seed: int, n: int, *key: int) -> list[np.random.Generator]:
    """A generator for each of `n` sequences, by its place; further keys, such as the step, make other generators."""
    return [np.random.default_rng([seed, *key, place]) for place in range(n)]


def draw(logits: Tensor, distribution: Distribution, numbers: Sequence[float]) -> Tensor:
    """Draw a token from each row of logits.

    Args:
        logits: (rows, vocab).
        distribution: temperature 0 takes the first of the largest logits.
        numbers: for each row a number in [0, 1), uniformly distributed.

    Returns:
        (rows,) int64, in CPU memory; `NOT_FINITE` where the logits are not.
    """
    logits = logits[:, : distribution.vocab_size]
    if distribution.temperature == 0:
        chosen = logits.argmax(-1)
    else:
        cumulative = probabilities(logits, distribution).cumsum(-1)
        total = cumulative[:, -1:]
        # A number has 53 bits, so the product is below the total, also when rounded.
        wanted = torch.tensor(numbers, dtype=total.dtype, device=total.device)[:, None] * total
        chosen = torch.searchsorted(cumulative, wanted, right=True)[:, 0]
    return chosen.where(logits.isfinite().all(-1), NOT_FINITE).cpu()


def probabilities(logits: Tensor, distribution: Distribution) -> Tensor:
    """The probability of each token, float64, (rows, vocab), for a temperature above 0."""
    logits = logits.double()
    shares = ((logits - logits.amax(-1, keepdim=True)) / distribution.temperature).softmax(-1)
    if distribution.top_k is None and distribution.top_p == 1:
        return shares
    order = shares.argsort(dim=-1, descending=True, stable=True)
    ranked = shares.gather(-1, order)
    if distribution.top_k is not None:
        ranked[:, distribution.top_k :] = 0
        ranked = ranked / ranked.sum(-1, keepdim=True)
    more_likely = ranked.cumsum(-1) - ranked
    ranked = ranked.where(more_likely < distribution.top_p, 0)
    return torch.zeros_like(shares).scatter(-1, order, ranked / ranked.sum(-1, keepdim=True))
