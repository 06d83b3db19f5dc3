"""FSDP where a single rank would compute with copies of its parameters: what these are compared with."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

_PLACES = ("parallelisms.compute_copies", "parallelisms.fsdp", "trainer.step", "trainer.planning.memory")


@contextmanager
def fsdp_at_degree_1() -> Iterator[None]:
    """Learners built, and memory estimated, in this context have no copies."""
    with ExitStack() as patches:
        for place in _PLACES:
            patches.enter_context(patch(f"{place}.computes_with_copies", return_value=False))
        yield
