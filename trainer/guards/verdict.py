"""One verdict on a step for all ranks, and what each of them saw.

Loss and gradient norm are sums over ranks, so all ranks should hold the same two numbers. A fault of one machine, such
as a flipped bit in one of several replicas of a gradient, makes one rank's numbers differ. If each rank decided by its
own, some would update the model and some would not. So before the update, all ranks take the worst value that any of
them holds, in one small reduction on the device. The optimizer reads the verdict there, so that the host need not wait
for it: on a GPU it reads the numbers when it has queued the next step's work.
"""

import math
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from configs.errors import UserError, listed
from parallelisms.mesh import Mesh
from parallelisms.ranks import gather
from trainer.data.loader import MicroBatch

# Copies of a gradient are bitwise equal, but ranks may sum their norms in different orders: where an NCCL ring begins
# depends on the topology. Rounding of float32 over many ranks stays well below this.
_ROUNDING = 1e-5


@dataclass(frozen=True)
class Seen:
    """A step's numbers on one rank."""

    rank: int
    host: str
    loss: float
    grad_norm: float


@dataclass(frozen=True)
class StepResult:
    """A step's result; the same on all ranks, except for the fields that begin with `own_`."""

    loss: float
    """Mean over the global batch's valid target tokens, in nats; NaN or inf if it is on any rank."""
    grad_norm: float
    """Global norm before clipping; NaN or inf if it is on any rank."""
    skipped: bool
    """The loss or norm was not finite on some rank, or the loss was a spike, or the ranks held different numbers; so no
    parameter changed on any rank."""
    is_spike: bool
    """The loss was finite, but above the limit."""
    differs: bool
    """The ranks held different finite numbers."""
    is_missing_rows: bool
    """A buffer of experts was too small on some rank: nothing changed, and the step must be computed again."""
    is_stopping: bool
    """Some rank had been told to stop when it judged the step."""
    own_loss: float = field(compare=False)
    own_grad_norm: float = field(compare=False)
    gradient_sums: Tensor | None = field(default=None, compare=False)
    """Returned by `GradientFingerprint.sums`, in the host's memory; None without a fingerprint."""
    details: Tensor | None = field(default=None, compare=False)
    """Returned by `Details.numbers`, in the host's memory; None if the step is not measured."""

    def gather(self) -> list[Seen]:
        """Collect what each rank holds; all ranks must call it."""
        own = (dist.get_rank(), socket.gethostname(), self.own_loss, self.own_grad_norm)
        return [Seen(*seen) for seen in gather(own)]


@dataclass(frozen=True)
class QueuedStep:
    """A step that the device computes, or has computed, and whose result the host can read later."""

    micro_batches: list[MicroBatch]
    """This rank's share of the global batch."""
    skip: Tensor
    """1.0 if no parameter may change, otherwise 0.0; a float32 scalar on the device, as fused optimizers want it."""
    norm: Tensor
    """The norm by which all ranks clip, a scalar on the device; bitwise equal on all, so that replicas stay equal."""
    _numbers: Tensor
    """The step's numbers in the host's memory, valid once `_arrived` has happened."""
    _sizes: list[int]
    """How many of them are the verdict's, the gradients' sums, and the step's details."""
    _arrived: torch.cuda.Event | None

    def read(self) -> StepResult:
        """Wait until the device has finished the step. Any thread may call it, on any rank."""
        if self._arrived is not None and not self._arrived.query():
            self._arrived.synchronize()
        agreed, *further = self._numbers.split(self._sizes)
        *numbers, own_loss, own_norm, skip = agreed.tolist()
        kinds = numbers[0:2]
        largest = numbers[2:4]
        stop = numbers[6]
        is_missing_rows = max(numbers[7:], default=0.0) > 0
        loss, norm = ((x, math.inf, math.nan)[int(kind)] for kind, x in zip(kinds, largest, strict=True))
        differs = not any(kinds) and not is_missing_rows and _differ(largest, [-x for x in numbers[4:6]])
        is_spike = bool(skip) and not any(kinds) and not differs and not is_missing_rows
        found = (vector if len(vector) else None for vector in further)
        agreed_by_all = (bool(skip), is_spike, differs, is_missing_rows, bool(stop))
        return StepResult(loss, norm, *agreed_by_all, own_loss, own_norm, *found)

    def result(self) -> StepResult:
        """Read the result; all ranks must call it.

        Raises:
            UserError: the ranks hold different finite numbers.
        """
        result = self.read()
        if result.differs:
            raise UserError(
                f"the ranks hold different results of one step: {describe(result.gather())}; nothing was updated. A "
                "device or its memory is faulty: run the same command again to resume from the last checkpoint, and "
                "without that host if it happens again"
            )
        return result


def judge(
    mesh: Mesh,
    micro_batches: list[MicroBatch],
    gradients: tuple[Tensor, Tensor],
    loss_limit: float,
    is_stopping: bool,
    missing_rows: Tensor | None,
    *further: Tensor | None,
) -> QueuedStep:
    """Judge a step by the worst value that any rank holds; all ranks must call it. Does not wait for the device.

    Args:
        mesh: all of its ranks take part.
        micro_batches: this rank's share of the step.
        gradients: this rank's loss and gradient norm, scalars on the device.
        loss_limit: a loss above it is a spike.
        is_stopping: whether this rank was told to stop, which all ranks learn with the result.
        missing_rows: rows for which a buffer of this rank's had no place, a float64 scalar; None: there are no buffers.
        further: float64 vectors that come with the result (`gradient_sums` and `details` of `StepResult`).
    """
    own = torch.stack([scalar.double() for scalar in gradients])
    # Not the values themselves: a maximum over NaNs would depend on their order.
    kinds = own.isnan() * 2.0 + own.isinf()
    finite = own.nan_to_num(0.0, 0.0, 0.0)
    missing = own[:0] if missing_rows is None else missing_rows[None]
    # The worst of what any rank holds, whether any of them was told to stop, and the most rows that are missing.
    agreed = mesh.max_over_all(torch.cat((kinds, finite, -finite, own.new_full((1,), is_stopping), missing)))
    kinds = agreed[0:2]
    largest = agreed[2:4]
    smallest = -agreed[4:6]
    differs = largest - smallest > _ROUNDING * largest.abs()
    is_wrong = torch.cat((kinds > 0, differs, largest[:1] > loss_limit, agreed[7:] > 0))
    skip = is_wrong.any().float()
    vectors = [own[:0] if vector is None else vector for vector in further]
    numbers = torch.cat((agreed, own, skip.double()[None], *vectors)).to("cpu", non_blocking=True)  # into pinned memory
    sizes = [len(vector) for vector in vectors]
    arrived = None
    if own.is_cuda:
        arrived = torch.cuda.Event(blocking=True)
        arrived.record()
    return QueuedStep(micro_batches, skip, agreed[3], numbers, [len(numbers) - sum(sizes), *sizes], arrived)


def _differ(largest: Sequence[float], smallest: Sequence[float]) -> bool:
    return any(a - b > _ROUNDING * abs(a) for a, b in zip(largest, smallest, strict=True))


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
    named = [f"{rank} ({hosts[rank]})" for rank in ranks]
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {listed(named, ', ', _NAMED)}"


_NAMED = 8
