"""What all ranks must know at the same step, and none should wait for: votes whose result counts a step later."""

import time

import torch
import torch.distributed as dist


class Vote:
    """One question to all ranks, on its way while they train on."""

    def __init__(self, yes: bool) -> None:
        self._votes = torch.tensor(int(yes))
        self._work = dist.all_reduce(self._votes, op=dist.ReduceOp.MIN, async_op=True)

    def is_unanimous(self) -> bool:
        """Whether all ranks voted yes; waits for the last of them."""
        assert self._work is not None
        self._work.wait()
        return bool(self._votes)


class SaveClock:
    """Whether so many minutes have passed since the last save, in the opinion of all ranks."""

    def __init__(self, minutes: float) -> None:
        self._seconds = 60 * minutes
        self._vote: Vote | None = None
        self.is_due = False
        self.start()

    def start(self) -> None:
        """Begin anew."""
        self._since = time.monotonic()
        self.is_due = False
        self.close()

    def poll(self) -> None:
        """Hear what the ranks said at the last poll, and ask them again; 0 minutes: don't ask."""
        if not self._seconds or self.is_due:
            return
        self.is_due = self._vote is not None and self._vote.is_unanimous()
        self._vote = None if self.is_due else Vote(time.monotonic() - self._since >= self._seconds)

    def close(self) -> None:
        """Hear what was asked last, so that no rank leaves while another still speaks to it."""
        if self._vote is not None:
            self._vote.is_unanimous()
            self._vote = None
