"""Muon (Jordan 2024, kellerjordan.github.io/posts/muon; Liu et al. 2025, arXiv 2502.16982).

It updates a matrix by the orthogonal matrix nearest to its momentum. This needs the whole matrix: where ranks hold
parts, they exchange them (`parallelisms/whole_matrices.py`), in bfloat16, in which a matrix is orthogonalized anyway.
The momentum is sharded like the parameter. An expert's matrices are matrices like others. AdamW updates the norms, and
also the embedding and the head, whose rows are looked up or compared one by one.

With the defaults it computes what `torch.optim.Muon` does, which continues its exported state. Polar Express (Amsel et
al. 2025, arXiv 2505.16932) takes other polynomials, of the same cost.

An orthogonal matrix with more rows than columns has rows of different lengths, so some neurons move further than
others. NorMuon (Li et al. 2025, arXiv 2510.05491, algorithm 1) divides each row by the root of an average of its
squares, and then scales the whole matrix. Both need more than a rank's part. So a matrix's owner measures its rows, and
all ranks get these numbers, which are few.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from configs.schema import Optimizer
from parallelisms.init import local_ranges
from parallelisms.part import Part
from parallelisms.ranks import local_part
from parallelisms.whole_matrices import WholeMatrices, slices
from trainer.kernels.keyed import Key, round_into
from trainer.optimizers import rule
from trainer.optimizers.training import TrainingOptimizer, decay

Polynomial = tuple[float, float, float]
"""The coefficients of x, x^3 and x^5."""

NEWTON_SCHULZ: Polynomial = (3.4445, -4.7750, 2.0315)
"""The same in each iteration."""
STEPS = 5
"""Iterations that orthogonalize the momentum, as many as its author takes."""
_MARGIN = 1.01
"""Polar Express diverges above 1, so it works on singular values that bfloat16 may round up by this factor."""
POLAR_EXPRESS: list[Polynomial] = [
    (a / _MARGIN, b / _MARGIN**3, c / _MARGIN**5)
    for a, b, c in (
        (8.28721201814563, -23.595886519098837, 17.300387312530933),
        (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
        (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
        (3.3184196573706015, -2.488488024314874, 0.51004894012372),
        (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    )
]
"""One for each iteration, in order (its algorithm 1)."""
_SMALLEST_NORM = 1e-7
_ROOT_MEAN_SQUARE = 0.2
"""The size of an update's elements before the learning rate, that of AdamW's, so that one learning rate fits both (Liu
et al., section 2.2)."""


class Muon(TrainingOptimizer):
    """Muon over this rank's part of every matrix, or stack of matrices.

    Shards change no bit: products and sums of elements are separate operations, which round all elements in the same
    way, and a matrix is orthogonalized whole, by one rank and apart from others.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        matrices: WholeMatrices,
        stacked: Mapping[str, int],
        keys: Mapping[str, Key],
        config: Optimizer,
    ) -> None:
        """Create the optimizer without its state.

        Args:
            groups: as for torch's, with names.
            matrices: computes with whole matrices.
            stacked: how many matrices a parameter of two dimensions has one below the other, by name; others are one.
            keys: how each parameter is rounded stochastically, by name; otherwise empty.
            config: the optimizer's settings.
        """
        is_polar = config.orthogonalization == "polar_express"
        of_torch = {
            "lr": config.lr,
            "momentum": config.momentum,
            "nesterov": config.nesterov,
            "ns_coefficients": POLAR_EXPRESS if is_polar else NEWTON_SCHULZ,
            "eps": _SMALLEST_NORM,
            "ns_steps": STEPS,
            "adjust_lr_fn": "match_rms_adamw",
        }
        super().__init__(groups, of_torch)
        self._is_cautious = config.cautious_weight_decay
        self._neuron_beta = config.neuron_beta
        self._eps = config.eps
        self._orthogonal = polar_express if is_polar else newton_schulz
        self._matrices = matrices
        named = {
            name: parameter
            for group in self.param_groups
            for name, parameter in zip(group.get("param_names", ()), group["params"], strict=True)
        }
        self._keys = {parameter: _key_of(parameter, keys[name]) for name, parameter in named.items() if keys}
        self._stacked = {
            # Of stacked experts, an owner has those that are on its rank.
            parameter: parameter.shape[0] if parameter.ndim == 3 else stacked.get(name, 1)
            for name, parameter in named.items()
        }

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the matrices that have a gradient; all ranks of a pipeline stage must call it.

        Args:
            closure: not supported.
        """
        trained = [[p for p in group["params"] if p.grad is not None] for group in self.param_groups]
        # One after the other, here and below: all at once, the temporaries would take as much memory as the gradients.
        directions = [
            self._direction(parameter, group["momentum"], group["nesterov"])
            for group, members in zip(self.param_groups, trained, strict=True)
            for parameter in members
        ]
        if not directions:
            return
        stacked = {parameter: self._stacked[parameter] for members in trained for parameter in members}
        beta = self._neuron_beta
        measure = None if beta is None else _add_up_squares
        orthogonal, squares = self._matrices.map(self._orthogonal, stacked, directions, measure)
        scales: dict[Tensor, Tensor] = {}
        if beta is not None:
            scales |= {p: self._row_scales(p, each, beta) for p, each in zip(stacked, squares, strict=True)}
        updates = iter(orthogonal)
        for group, members in zip(self.param_groups, trained, strict=True):
            for parameter, update in zip(members, islice(updates, len(members)), strict=True):
                self._move(parameter, update, scales.get(parameter), group)

    def _direction(self, parameter: Tensor, momentum: float, nesterov: bool) -> Tensor:
        """Add the gradient to the momentum; returns what is orthogonalized, in bfloat16."""
        average = local_part(self.state[parameter]["momentum_buffer"])
        assert parameter.grad is not None
        gradient = local_part(parameter.grad) * (1 - momentum)
        average.mul_(momentum).add_(gradient)
        return (gradient.add_(average * momentum) if nesterov else average).bfloat16()

    def _row_scales(self, parameter: Tensor, squares: Tensor, beta: float) -> Tensor:
        """Add to the averages of the rows' squares; returns the factor on each row that this rank has, (..., rows, 1).

        Args:
            parameter: holds matrices.
            squares: the sum of squares of each row of all of them, as they were orthogonalized.
            beta: the averages' decay rate.
        """
        rows, columns = self._sides(parameter)
        average = self.state[parameter]["row_moment"]
        squares = squares.to(average.device, average.dtype)
        average.lerp_(squares / columns, 1 - beta)
        inverse = 1 / (average.sqrt() + self._eps)
        norms = (squares * inverse.square()).view(-1, rows).sum(1, dtype=torch.float64).sqrt()
        # Each matrix is scaled as a whole to the root mean square that it has without normalized rows.
        scale = _ROOT_MEAN_SQUARE * math.sqrt(rows * columns) / norms.clamp(min=_SMALLEST_NORM)
        scales = (inverse.view(-1, rows) * scale[:, None].to(inverse.dtype)).view_as(inverse)
        return scales[slices(local_ranges(parameter)[:-1])][..., None]

    def _sides(self, parameter: Tensor) -> tuple[int, int]:
        """Rows and columns of each of a parameter's matrices."""
        rows, columns = parameter.shape[-2:]
        return rows // self._stacked[parameter] if parameter.ndim == 2 else rows, columns

    def _move(self, parameter: Tensor, update: Tensor, scales: Tensor | None, group: Mapping[str, Any]) -> None:
        weight = local_part(parameter.detach())
        key = self._keys.get(parameter)
        moved = weight.float() if key else weight
        update = update.to(moved.device, moved.dtype)
        decay([moved], [update], group["lr"] * group["weight_decay"], self._is_cautious)
        scale = _ROOT_MEAN_SQUARE * math.sqrt(max(self._sides(parameter))) if scales is None else scales
        moved.sub_(update * (scale * group["lr"]))
        if key:
            state = self.state[parameter]
            state["step"] += 1
            round_into(weight, moved, key, int(state["step"]))


def _key_of(parameter: Tensor, key: Key) -> Key:
    """The key of what is seen of a parameter: by an owner whole matrices, of stacked experts those on its rank."""
    n = parameter.shape[-2:].numel()
    if local_part(parameter).numel() < parameter.numel():
        return key
    first = key.part.first // n * n  # the part may be a tensor-parallel rank's
    return Key(key.word, Part(first, rows=1, run=parameter.numel(), outer=0, inner=0))


def _add_up_squares(matrix: Tensor, sums: Tensor) -> None:
    """Write the sum of squares of each row, (..., rows)."""
    torch.linalg.vector_norm(matrix, dim=-1, dtype=sums.dtype, out=sums)
    sums.square_()


def newton_schulz(matrix: Tensor) -> Tensor:
    """Nearly the nearest orthogonal matrix, with singular values of 0.7 to 1.2; (rows, columns), bfloat16."""
    return _iterated(matrix, [NEWTON_SCHULZ] * STEPS, margin=1.0)


def polar_express(matrix: Tensor) -> Tensor:
    """The same by Polar Express, with singular values closer to 1."""
    return _iterated(matrix, POLAR_EXPRESS, _MARGIN)


def _iterated(matrix: Tensor, polynomials: Sequence[Polynomial], margin: float) -> Tensor:
    """Apply odd polynomials to the singular values of a matrix, one after the other, from values of at most 1."""
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / (x.norm() * margin).clamp(min=_SMALLEST_NORM)
    for a, b, c in polynomials:
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


class Rule(rule.Rule):
    """One momentum of each matrix, and with NorMuon a number for each row, whole on every rank that has a part of it.

    Where weights are rounded stochastically, also the number of its updates.
    """

    hidden_matrices_only = True

    def state(self, parameter: Tensor) -> dict[str, Tensor]:
        state = {"momentum_buffer": torch.zeros_like(parameter)}
        if self.config.neuron_beta is not None:
            dtype = torch.promote_types(parameter.dtype, torch.float32)
            state["row_moment"] = torch.zeros(parameter.shape[:-1], dtype=dtype, device=parameter.device)
        if self.config.rounding == "stochastic":
            state["step"] = torch.zeros((), device="meta" if parameter.is_meta else "cpu")
        return state

    def without_state(self, groups: list[dict[str, Any]]) -> Muon:
        return Muon(groups, WholeMatrices(self.mesh), self.stacked, self.keys, self.config)
