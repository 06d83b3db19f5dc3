"""A store that counts requests."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch.distributed as dist


class Recorded:
    """Counts the requests of each rank; torch's own are one request each, however many keys they name."""

    def __init__(self, store: dist.Store) -> None:
        self.store = store
        self.requests: Counter[int] = Counter()
        self.asking = -1
        """The rank that makes the requests."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def request(*arguments: Any) -> Any:
            self.requests[self.asking] += 1
            return getattr(self.store, name)(*arguments)

        return request
