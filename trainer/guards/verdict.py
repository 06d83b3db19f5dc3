"""One verdict on a step for all ranks, and what each of them saw.

Loss and gradient norm are sums over ranks, so all ranks should hold the same two numbers. A fault of one machine, such
as a flipped bit in one of several copies of a gradient, makes one rank's numbers differ. If each rank decided by its
own, some would update the model and some would not. So before the update, all ranks take the worst value that any of
them holds, in one small reduction on the device, which the host reads together with loss and norm.
"""

import math
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from configs.errors import UserError
from parallelisms.mesh import Mesh
from parallelisms.ranks import gather

# Copies of a gradient are bitwise equal, but ranks may sum their norms in different orders: where an NCCL ring begins
# depends on the topology. Rounding of float32 over many ranks stays well below this.
_ROUNDING = 1e-5


@dataclass(frozen=True)
class Seen:
    """What one rank held of a step."""

    rank: int
    host: str
    loss: float
    grad_norm: float


@dataclass(frozen=True)
class StepResult:
    """What a step did; the same on all ranks, except for the fields that begin with `own_` and `decided_at`."""

    loss: float
    """Mean over the global batch's valid target tokens, in nats; NaN or inf if it is on any rank."""
    grad_norm: float
    """Global norm before clipping; NaN or inf if it is on any rank."""
    skipped: bool
    """The loss or norm was not finite on some rank, or the loss was a spike, so no parameter changed on any rank."""
    is_spike: bool
    """The loss was finite, but above the limit."""
    own_loss: float = field(compare=False)
    own_grad_norm: float = field(compare=False)
    decided_at: float = field(compare=False)
    """When the host knew the verdict (time.perf_counter); the time after it is the update."""

    def gather(self) -> list[Seen]:
        """Collect what each rank holds; all ranks must call it."""
        return gather(Seen(dist.get_rank(), socket.gethostname(), self.own_loss, self.own_grad_norm))


def agree(mesh: Mesh, loss: Tensor, grad_norm: Tensor) -> Tensor:
    """Reduce to the worst value that any rank holds, (6,) in float64 on the device; all ranks must call it.

    Returns:
        Three pairs of (loss, norm): 0, 1 or 2 if all values are finite, one is infinite, one is NaN; the largest finite
        value; the smallest, negated. (A maximum over NaNs themselves would depend on their order.)
    """
    own = _pair(loss, grad_norm)
    kinds = own.isnan() * 2.0 + own.isinf()
    finite = own.nan_to_num(0.0, 0.0, 0.0)
    return mesh.max_over_all(torch.cat((kinds, finite, -finite)))


def agreed_norm(agreed: Tensor) -> Tensor:
    """The norm by which all ranks clip, a scalar on the device; bitwise equal on all, so that copies stay copies."""
    return agreed[3]


def decide(agreed: Tensor, loss: Tensor, grad_norm: Tensor, loss_limit: float) -> StepResult:
    """Decide on a step, given the result of `agree` and this rank's own numbers; all ranks must call it.

    A loss above `loss_limit` is a spike.

    Raises:
        UserError: the ranks hold different finite numbers.
    """
    # The only point at which the CPU waits for the device: whether to update must be known before the update.
    numbers = torch.cat((agreed, _pair(loss, grad_norm))).tolist()
    kinds, largest, smallest, own = numbers[0:2], numbers[2:4], [-x for x in numbers[4:6]], numbers[6:8]
    values = [(x, math.inf, math.nan)[int(kind)] for kind, x in zip(kinds, largest, strict=True)]
    is_finite = not any(kinds)
    is_spike = is_finite and values[0] > loss_limit
    result = StepResult(values[0], values[1], is_spike or not is_finite, is_spike, own[0], own[1], time.perf_counter())
    if is_finite and any(a - b > _ROUNDING * abs(a) for a, b in zip(largest, smallest, strict=True)):
        raise UserError(
            f"the ranks hold different results of one step: {describe(result.gather())}; nothing was updated. A "
            "device or its memory is faulty: run the same command again to resume from the last checkpoint, and "
            "without that host if it happens again"
        )
    return result


def _pair(loss: Tensor, grad_norm: Tensor) -> Tensor:
    return torch.stack((loss.double(), grad_norm.double()))


def describe(seen: Sequence[Seen]) -> str:
    """ "loss 5.61, gradient norm nan on rank 1 (node-b) and 1.31 on the others"."""
    losses = {each.rank: f"{each.loss:.8g}" for each in seen}
    norms = {each.rank: f"{each.grad_norm:.8g}" for each in seen}
    return f"loss {_by_rank(losses, seen)}, gradient norm {_by_rank(norms, seen)}"


def _by_rank(values: dict[int, str], seen: Sequence[Seen]) -> str:
    """Each value with the ranks that have it; the most common comes last, "on the others"."""
    ranks: dict[str, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(value, []).append(rank)
    *rare, (common, others) = sorted(ranks.items(), key=lambda item: (len(item[1]), math.isfinite(float(item[0]))))
    if not rare:
        return common
    parts = [f"{value} on {name_ranks(having, [each.host for each in seen])}" for value, having in rare]
    where = "the others" if len(others) > 1 else name_ranks(others, [each.host for each in seen])
    return f"{', '.join(parts)} and {common} on {where}"


def name_ranks(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """ "rank 1 (node-b)", "ranks 1 (node-b), 5 (node-c)"; only the first of many. `hosts` lists every rank's host."""
    named = [f"{rank} ({hosts[rank]})" for rank in ranks[:_NAMED]]
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(named)}{more}"


_NAMED = 8
