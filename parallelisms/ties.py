"""Keeping tied parameters, such as a shared embedding and head, tied: in one model, and on both ends of a pipeline.

Sharding a parameter or moving it off the meta device makes a new tensor for each module that holds it, which would
silently turn one tied matrix into two.

In a pipeline the first stage embeds and the last one has the head, so both hold the matrix under its one name. So it is
with an embedding that modules on the last stage read as well, to predict further tokens. Both ends
draw the same initial values, add up their gradients (a sum of two has the same bits in either order), and compute one
update from equal moments. A checkpoint has it once. What is summed over the whole model, such as the norm of the
gradients, counts it on the first stage.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from configs.plan import plan_of
from parallelisms.grad_norm import exchanged_on, gradients
from parallelisms.ranks import local_part, swap


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


class TiedEnds:
    """The matrices that a pipeline's first and last stage both hold, on a rank of the pipeline."""

    def __init__(self, stages: Mapping[int, nn.Module], n_stages: int, pipeline: dist.ProcessGroup) -> None:
        """
        Args:
            stages: this rank's, by number.
            n_stages: of the whole pipeline; the first and the last are on different ranks.
            pipeline: the ranks of the pipeline.
        """
        self._pipeline = pipeline
        self._parameters: dict[str, nn.Parameter] = {}
        self._other_end = 0
        self.copies: frozenset[str] = frozenset()
        """Names of the parameters here that are counted on the first stage."""
        for number in stages.keys() & {0, n_stages - 1}:
            stage = stages[number]
            tied = tuple(f"{name}." for name in plan_of(stage).tied)
            self._parameters = {name: p for name, p in stage.named_parameters() if name.startswith(tied)}
            self._other_end = pipeline.size() - 1 if number == 0 else 0
            self.copies = frozenset() if number == 0 else frozenset(self._parameters)

    @torch.no_grad()
    def add_gradients(self) -> None:
        """Replace the gradients on both ends by their sum; all ranks of the pipeline call it."""
        for gradient in gradients(self._parameters.values()):
            own = local_part(gradient)
            # Offloaded gradients are in CPU memory, which NCCL can't send.
            own += self._exchanged(own.to(exchanged_on(gradient))).to(own.device)

    def _exchanged(self, gradient: Tensor) -> Tensor:
        """The other end's gradient, which has the same shape."""
        sent = gradient.contiguous()  # until it is sent
        # With the other end, which holds the same shard of the same matrix.
        return swap(sent, self._other_end, self._other_end, self._pipeline)()
