"""Keeping the load of a mixture's experts even, over the whole global batch, and saying how even it is.

The routers of a model know the tokens of one micro-batch on one rank. Here they learn what makes their auxiliary loss
that of the whole: where sequences are cut over ranks, and what a sequence's share of the global batch is. After each
step their counts are added up over the ranks, as exact integers, for the bias rule and for the metrics.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _resolve_process_group

from configs.schema import Config
from parallelisms.mesh import Mesh
from parallelisms.plan import plan_of


def apply_load_balance(model: nn.Module, mesh: Mesh, config: Config) -> None:
    """Tell each router of the plan its place in the global batch.

    FSDP averages gradients over the ranks that hold different tokens, while the mean over the global batch's sequences
    is wanted; tensor-parallel ranks all compute the same loss, and their gradients are added up.
    """
    sizes = mesh.sizes
    for name in plan_of(model).routers:
        router: Any = model.get_submodule(name)
        router.balance_scale = sizes.token_ranks / (config.training.global_batch_size * sizes.tp)
        if sizes.cp > 1:
            router.sum_over_sequence = partial(_sum_over, group=mesh.cp.get_group().group_name)


@torch.library.custom_op("keel::sum_over", mutates_args=())
def _sum_over(counts: Tensor, group: str) -> Tensor:
    """The sum over the ranks of a group; without a gradient."""
    total = counts.clone()
    dist.all_reduce(total, group=_resolve_process_group(group))  # type: ignore[arg-type]  # str before torch 2.13
    return total


@_sum_over.register_fake
def _(counts: Tensor, group: str) -> Tensor:
    return torch.empty_like(counts)


class LoadBalance:
    """The routers on this rank, those of all its pipeline stages."""

    def __init__(self, stages: Mapping[int, nn.Module], config: Config, mesh: Mesh) -> None:
        self._config, self._mesh = config.model, mesh
        self._routers: dict[str, Any] = {
            name: stage.get_submodule(name) for stage in stages.values() for name in plan_of(stage).routers
        }
        self._counts: Tensor | None = None
        """Of the last step, (routers, n_experts + 1): tokens of each expert, and the entropy; float64, so that one
        collective takes both: integers up to 2^53 are exact."""

    def state(self) -> dict[str, Tensor]:
        """The biases, by name; a checkpoint holds them."""
        return {f"{name}.bias": router.bias for name, router in self._routers.items() if router.bias is not None}

    @torch.no_grad()
    def finish_step(self, skipped: bool) -> None:
        """Take over the counts of a step, and move the biases unless it was skipped; all ranks must call it."""
        if not self._routers:
            return
        routers = self._routers.values()
        self._counts = torch.stack([torch.cat((r.tokens_per_expert.double(), r.entropy[None])) for r in routers])
        for router in routers:
            router.tokens_per_expert.zero_()
            router.entropy.zero_()
        if self._config.router.load_balance != "bias":
            return
        self._mesh.sum_over_tokens(self._counts)
        if not skipped:
            tokens = self._counts[:, :-1]
            steps = (tokens.mean(1, keepdim=True) - tokens).sign() * self._config.router.bias_update_rate
            for router, step in zip(routers, steps, strict=True):
                router.bias += step
