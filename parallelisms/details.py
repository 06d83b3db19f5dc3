"""What a step looks like inside: squared norms of gradients and of activations, part by part, equal on any mesh.

A *part* is a module that the model's plan names: a block, the embedding, the head. Sums of squares add up over shards,
slices and stages, so each rank sums what it holds, and one reduction per mesh gives the whole model's sums. Gradients
are replicated where they are not sharded; activations never are: data-, context- and tensor-parallel ranks hold
different tokens of them, and a pipeline's ranks different parts.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from configs.plan import plan_of
from parallelisms.grad_norm import gradients, norms_of, sharding_groups
from parallelisms.mesh import Mesh
from parallelisms.ranks import local_part


@torch.no_grad()
def squared_grad_norms(parameters: Mapping[str, Tensor], parts: Sequence[str], mesh: Mesh) -> Tensor:
    """Squared 2-norm of the gradients of each of `parts`; float64, (parts,), the same on all ranks, which all call it.

    Args:
        parameters: this rank's, by name; the name of the part that holds a parameter begins its name.
        parts: of the whole model.
    """
    by_groups: dict[tuple[dist.ProcessGroup, ...], dict[int, list[Tensor]]] = defaultdict(lambda: defaultdict(list))
    for number, part in enumerate(parts):
        own = [parameter for name, parameter in parameters.items() if name.startswith(f"{part}.")]
        for gradient in gradients(own):
            by_groups[sharding_groups(gradient)][number].append(local_part(gradient))
    whole = torch.zeros(len(parts), dtype=torch.float64, device=mesh.device)
    for groups, shards in by_groups.items():
        squares = torch.zeros_like(whole)
        for number, found in shards.items():
            filled = [shard for shard in found if shard.numel()]
            if filled:
                squares[number] = norms_of(filled).double().square().sum().to(mesh.device)
        for group in groups:
            dist.all_reduce(squares, group=group)
        whole += squares
    return mesh.sum_over_pp(whole)


class Activations:
    """Sums of squares of the outputs of a model's modules, over all micro-batches of the passes that it watches."""

    def __init__(self, stages: Mapping[int, nn.Module], parts: Sequence[str], mesh: Mesh) -> None:
        """Watch the modules among `parts` that this rank's `stages` hold: before the blocks, or blocks."""
        self._mesh = mesh
        # By the plan: a stage may have modules that stand in for those of other stages, under their names.
        self._modules = {
            parts.index(name): stage.get_submodule(name)
            for stage in stages.values()
            for name in (*plan_of(stage).before_blocks, *plan_of(stage).blocks)
        }
        self._sums = torch.zeros(2, len(parts), dtype=torch.float64, device=mesh.device)
        """Sums of squares, and numbers of elements, by part."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the passes inside this context; the hooks are outside of what is compiled or computed twice."""
        self._sums.zero_()
        hooks = [module.register_forward_hook(partial(self._add, number)) for number, module in self._modules.items()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def mean_squares(self) -> Tensor:
        """Mean square of each part's elements, float64, (parts,); all ranks must call it, and get the same."""
        sums = self._sums.clone()
        if dist.get_world_size() > 1:
            dist.all_reduce(sums)
        return sums[0] / sums[1]

    @torch.no_grad()
    def _add(self, part: int, _module: nn.Module, _inputs: Any, output: Any) -> None:
        x = local_part(output[0] if isinstance(output, tuple) else output).detach()
        self._sums[0, part] += norms_of([x])[0].double() ** 2
        self._sums[1, part] += x.numel()
