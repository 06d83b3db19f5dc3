"""Votes on what all ranks must know at the same step without waiting for it: the result arrives a step later."""

import torch
import torch.distributed as dist


class Vote:
    """One question to all ranks, answered while they continue to train."""

    def __init__(self, yes: bool) -> None:
        self._votes = torch.tensor(int(yes))
        self._work = dist.all_reduce(self._votes, op=dist.ReduceOp.MIN, async_op=True)

    def is_unanimous(self) -> bool:
        """Whether all ranks voted yes; waits for the last vote."""
        assert self._work is not None
        self._work.wait()
        return bool(self._votes)
