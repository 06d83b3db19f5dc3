"""Maximal update parametrization (muP): what is tuned at one width is right at others (`model.mup_base_dim`).

Yang et al. 2022 (Tensor Programs V, arXiv 2203.03466), table 8, as Keel applies it; r = dim of the base / dim:

    embedding, norms, biases   initial values and learning rate as at the base width
    head                       the same, and its input is multiplied by r
    hidden matrices            initial standard deviation x sqrt(r), Adam's learning rate x r
    attention                  scores are divided by head_dim, times what the base divides by, not by its square root

All widths inside a block (`ffn_dim`, heads x `head_dim`, the ranks of latent attention) grow with `dim`, so the
matrices between them are hidden ones. A router maps a width to a fixed number of experts, like a head; it has the equal
form of table 3, without a multiplier: standard deviation and rate x r.

Gradients are then proportional to r, but for a router's, and Adam's eps with them (the paper has none; Everett et al.
2024, arXiv 2407.05872, section 4.3, show what an eps that they sink below does).

Muon's update has a spectral norm of 0.2 sqrt(larger side) times the rate, where features change by the same amount at
any width if it grows like sqrt(rows / columns) (Yang, Simon and Bernstein 2023, arXiv 2310.17813, condition 1). The
rate makes up for the difference.
"""

from collections.abc import Iterator
from math import sqrt
from typing import Any

from configs.architectures.llama import ATTENTION, further_block
from configs.architectures.llama_keys import n_further
from configs.architectures.parts import Weight, head_dim


def width_ratio(model: Any) -> float:
    """The base's dim / dim; 1 without muP."""
    return model.mup_base_dim / model.dim if model.mup_base_dim else 1.0


def base_head_dim(model: Any) -> int:
    """Width of a head of the base, whose attention divides scores as usual; without muP, of a head."""
    return model.mup_base_head_dim or head_dim(model)


def query_factor(model: Any) -> float:
    """Factor on the queries, whose scores with the keys attention divides by the square root of head_dim.

    The base's scores are divided by sqrt(query_scale) instead, those of a head f times as wide by f sqrt(query_scale).
    """
    base = base_head_dim(model)
    return sqrt(head_dim(model) / (model.query_scale or base)) * (base / head_dim(model))


def init_scale(model: Any, weight: Weight) -> float:
    """Factor on the standard deviation of a weight's initial values."""
    if not _is_hidden(weight):
        return 1.0
    return width_ratio(model) if weight.has_fixed_rows else sqrt(width_ratio(model))


def lr_scale(model: Any, weight: Weight, rule: str, by_head: bool = False) -> float:
    """Factor on a weight's learning rate.

    Args:
        model: the keys of [model].
        weight: the weight, whole.
        rule: name of the optimizer that updates it.
        by_head: whether Muon takes the rows of each head for a matrix.
    """
    if not _is_hidden(weight):
        return 1.0
    ratio = width_ratio(model)
    if rule != "muon":
        return ratio
    rows, columns = weight.shape[-2:]
    of_rows = 1.0 if weight.has_fixed_rows else ratio
    if by_head:
        rows = head_dim(model)
        of_rows = base_head_dim(model) / head_dim(model)
    largest = max(rows * of_rows, columns * ratio) / max(rows, columns)
    return sqrt(ratio / of_rows * largest)


def eps_scale(model: Any, weight: Weight) -> float:
    """Factor on what Adam adds to the root of a weight's second moment."""
    return 1.0 if weight.has_fixed_rows else width_ratio(model)


def _is_hidden(weight: Weight) -> bool:
    return weight.is_matrix and weight.role not in ("embedding", "head")


def folds(model: Any) -> dict[str, float]:
    """The factors of an export, by the weight's name: weights times these compute without muP what they do with it.

    The head's multiplier goes into its matrix, or, if that is also the embedding's, into the norm before it. The factor
    on the queries goes into their norm, or else into what computes them. Norms with an offset would need another form;
    no class of transformers has them without an embedding that muP refuses.
    """
    return {name: factor for name, factor in _folds(model) if factor != 1.0}


def _folds(model: Any) -> Iterator[tuple[str, float]]:
    yield "norm.weight" if model.tie_embeddings else "lm_head.weight", width_ratio(model)
    factor = query_factor(model) / sqrt(head_dim(model) / (model.query_scale or head_dim(model)))
    blocks = [f"layers.{layer}" for layer in range(model.n_layers)]
    for block in (*blocks, *map(further_block, range(n_further(model)))):
        attention = f"{block}.{ATTENTION}"
        if model.attention == "latent":
            yield f"{attention}.{'q_b_proj' if model.latent.query_rank else 'q_proj'}.weight", factor
        elif model.qk_norm != "none":
            yield f"{attention}.q_norm.weight", factor
        else:
            yield f"{attention}.q_proj.weight", factor
            yield f"{attention}.q_proj.bias", factor
