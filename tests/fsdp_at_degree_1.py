"""FSDP where a single rank would compute with copies of its parameters: what these are compared with."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from unittest.mock import patch

_PLACES = ("parallelisms.compute_copies", "parallelisms.fsdp", "trainer.step", "trainer.planning.memory")


@contextmanager
def fsdp_at_degree_1() -> Iterator[None]:
    """Learners built, and memory estimated, in this context have no copies."""
    modules = [import_module(place) for place in _PLACES]  # all before the first patch, which others would import
    with ExitStack() as patches:
        for module in modules:
            patches.enter_context(patch.object(module, "computes_with_copies", return_value=False))
        yield
