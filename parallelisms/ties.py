"""Parameters that two modules share, such as a tied embedding and head, kept shared while they are replaced.

Cutting a parameter or moving it off the meta device makes a new tensor for each module that holds it, which would
silently turn one tied matrix into two.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def ties_kept(model: nn.Module) -> Iterator[None]:
    """Whatever parameters are replaced inside, names that shared one before share the first name's afterwards."""
    first: dict[int, str] = {}
    ties = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            ties.append((name, first[id(parameter)]))
    yield
    for name, source in ties:
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, model.get_parameter(source))
