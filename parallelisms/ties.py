"""Keeping tied parameters, such as a shared embedding and head, tied while parameters are replaced.

Sharding a parameter or moving it off the meta device makes a new tensor for each module that holds it, which would
silently turn one tied matrix into two.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def ties_kept(model: nn.Module) -> Iterator[None]:
    """Restore ties on exit: every name that shared a parameter on entry is tied to the first such name again."""
    first: dict[int, str] = {}
    ties = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            ties.append((name, first[id(parameter)]))
    yield
    for name, source in ties:
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, model.get_parameter(source))
