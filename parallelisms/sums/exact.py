"""Sums with bits that no data-parallel mesh and no pipeline changes.

Gradients are added up in a fixed tree (`tree.py`). The norm adds within a row, which FSDP never splits, in a fixed
binary tree. The sums of the rows it adds as integers, which is exact in any order.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from configs.schema import Config
from parallelisms.grad_norm import exchanged_on, grad_norm, gradients, sharding_groups
from parallelisms.mesh import Mesh
from parallelisms.ranks import local_part
from parallelisms.sums.fast import Sums
from parallelisms.sums.tree import TreeReduction

_LIMB = 2.0**30
"""The integers to which sums of rows are rounded: up to 2^32 rows fit into 64 bits, in each of two parts."""
_AT_ONCE = {"cpu": 1 << 19, "cuda": 1 << 24}
"""Elements whose powers are in memory at once: on a CPU so few that they stay in its cache."""


class ExactSums(Sums):
    """Sums whose order is fixed."""

    mesh_changes_bits = False
    allows_copies = False
    updates_whole_vectors = True

    def reduction(self, model: nn.Module, config: Config) -> TreeReduction:
        return TreeReduction(model)

    @torch.no_grad()
    def grad_norm(
        self, parameters: Iterable[Tensor], norm_type: float = 2.0, pipeline: dist.ProcessGroup | None = None
    ) -> Tensor:
        """Like `parallelisms.grad_norm`, with the same bits however FSDP shards the gradients, and for any stages.

        Args:
            parameters, pipeline: as there.
            norm_type: a whole number or inf.

        Returns:
            A scalar, float64; NaN or inf if any gradient is.
        """
        parameters = list(parameters)
        if math.isinf(norm_type):  # a maximum has no order
            return grad_norm(parameters, norm_type, pipeline).double()
        by_groups: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = defaultdict(list)
        device = exchanged_on(parameters[0])
        for gradient in gradients(parameters):
            by_groups[sharding_groups(gradient)].append(_row_sums(local_part(gradient), int(norm_type)).to(device))
        rows = {groups: torch.cat(sums) for groups, sums in by_groups.items()}

        def over_all_ranks(measure: Callable[[Tensor], Tensor], empty: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
            results = [empty]
            for groups, sums in rows.items():
                result = measure(sums)
                # Over the ranks that hold the other shards of these gradients.
                for group in groups:
                    dist.all_reduce(result, op=op, group=group)
                results.append(result)
            stacked = torch.stack(results)
            total = stacked.amax(0) if op == dist.ReduceOp.MAX else stacked.sum(0)
            if pipeline is not None and pipeline.size() > 1:
                # Over the ranks that hold the other stages.
                dist.all_reduce(total, op=op, group=pipeline)
            return total

        extremes = torch.zeros(2, dtype=torch.float64, device=device)
        largest, kind = over_all_ranks(_extremes, extremes, dist.ReduceOp.MAX)
        unit = largest.clamp(min=torch.finfo(torch.float64).tiny) / _LIMB
        total = over_all_ranks(lambda sums: _in_integers(sums, unit), extremes.long(), dist.ReduceOp.SUM).double()
        norm = ((total[0] + total[1] / _LIMB) * unit) ** (1.0 / norm_type)
        return torch.where(kind == 0, norm, torch.where(kind == 1, math.inf, math.nan))

    def loss_sum(self, losses: Tensor, compute_dtype: str, mesh: Mesh) -> Tensor:
        if compute_dtype != "float64":
            losses = losses.float().double()  # a pipeline has multiplied and divided them
        ranks = mesh.tokens
        of_all = losses.new_zeros(len(losses), ranks.size())
        of_all[:, ranks.get_local_rank()] = losses
        # Adding zeros is exact; the last sum is the same on any mesh.
        return mesh.sum_over_tokens(of_all).flatten().sum()


def _row_sums(gradient: Tensor, power: int) -> Tensor:
    """The sum of the powers of the absolute values along the last dimension, (rows,) float64; of a vector, no sum.

    Only element-wise operations, whose results do not depend on the place of an element in a tensor.
    """
    gradient = gradient.reshape(-1, gradient.shape[-1]) if gradient.ndim > 1 else gradient.reshape(-1, 1)
    if gradient.dtype in (torch.bfloat16, torch.float16):
        gradient = gradient.float()
    sums = [gradient.new_zeros(1, dtype=torch.float64)]  # a shard may be empty
    for rows in gradient.split(max(1, _AT_ONCE[gradient.device.type] // gradient.shape[1])):
        values = magnitudes = rows.abs() if power % 2 else rows  # an even power has no sign
        for _ in range(power - 1):
            values = values * magnitudes
        while values.shape[1] > 1:
            n_pairs = values.shape[1] // 2
            half = (values.shape[1] + 1) // 2
            values[:, :n_pairs].add_(values[:, half:])
            values = values[:, :half]
        sums.append(values[:, 0].double())
    return torch.cat(sums)


def _extremes(sums: Tensor) -> Tensor:
    """The largest finite value, and 2 if any is NaN, else 1 if any is inf, else 0; (2,)."""
    kinds = sums.isnan() * 2.0 + sums.isinf()
    return torch.stack((sums.nan_to_num(0.0, 0.0, 0.0).max(), kinds.max()))


def _in_integers(sums: Tensor, unit: Tensor) -> Tensor:
    """The sum of values, each in integers: how many units, and how many 2^-30 of a unit in the rest; (2,) int64."""
    units = sums.nan_to_num(0.0, 0.0, 0.0) / unit
    whole = units.floor()
    return torch.stack((whole.long().sum(), ((units - whole) * _LIMB).long().sum()))
