"""Votes on what all ranks must know at the same step without waiting for it: the result arrives a step later."""

import time

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


class SaveClock:
    """Tells whether all ranks agree that `minutes` have passed since the last save."""

    def __init__(self, minutes: float) -> None:
        self._seconds = 60 * minutes
        self._vote: Vote | None = None
        self.is_due = False
        self.start()

    def start(self) -> None:
        """Restart the clock."""
        self._since = time.monotonic()
        self.is_due = False
        self.close()

    def poll(self) -> None:
        """Take the result of the last vote, and start the next; with 0 minutes there are no votes."""
        if not self._seconds or self.is_due:
            return
        self.is_due = self._vote is not None and self._vote.is_unanimous()
        self._vote = None if self.is_due else Vote(time.monotonic() - self._since >= self._seconds)

    def close(self) -> None:
        """Finish the pending vote, so that no rank leaves in the middle of a collective."""
        if self._vote is not None:
            self._vote.is_unanimous()
            self._vote = None
