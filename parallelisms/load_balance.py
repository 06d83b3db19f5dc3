"""Keeping the load of a mixture's experts even, over the whole global batch, and saying how even it is.

The routers of a model know the tokens of one micro-batch on one rank. Here they learn what makes their auxiliary loss
that of the whole: where sequences are cut over ranks, and what a sequence's share of the global batch is. After each
step their counts are added up over the ranks, as exact integers, for the bias rule and for the metrics.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _resolve_process_group

from configs.plan import plan_of
from configs.schema import Config
from parallelisms.mesh import Mesh


def apply_load_balance(model: nn.Module, mesh: Mesh, config: Config) -> None:
    """Tell each router of the plan its place in the global batch.

    Gradients are added up over the ranks: a sequence's part in the mean over the global batch is the same on all of
    them, and tensor-parallel ranks, which all compute the same loss, have their share of that.
    """
    sizes = mesh.sizes
    for name in plan_of(model).routers:
        router: Any = model.get_submodule(name)
        router.balance_scale = 1.0 / (config.training.global_batch_size * sizes.tp)
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


@dataclass(frozen=True)
class Balance:
    """How the experts of a whole model shared a step's global batch."""

    tokens_per_expert: dict[int, list[int]]
    """By number of the layer: tokens sent to each expert."""
    load_imbalance: float
    """The busiest expert's tokens over the mean of its layer's experts, of the layer where it is most; 1: even."""
    router_entropy: float
    """Mean over tokens and layers of the entropy of the scores' shares, in nats; at most log(n_experts)."""


class LoadBalance:
    """The routers on this rank, those of all its pipeline stages."""

    def __init__(self, stages: Mapping[int, nn.Module], config: Config, mesh: Mesh) -> None:
        self._config, self._mesh = config.model, mesh
        self._routers: dict[str, Any] = {}
        self._layers: list[int] = []
        """Number of each router's layer."""
        for stage in stages.values():
            plan = plan_of(stage)
            for name in plan.routers:
                self._routers[name] = stage.get_submodule(name)
                block = next(i for i, block in enumerate(plan.blocks) if name.startswith(f"{block}."))
                self._layers.append(plan.first_block + block)
        self._counts = torch.zeros(0)
        """Of the last step, (routers, n_experts + 1): tokens of each expert, and the entropy. In float64, which holds
        integers up to 2^53 exactly, so that one collective takes both."""
        self._is_summed = False

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
        self._is_summed = False
        for router in routers:
            router.tokens_per_expert.zero_()
            router.entropy.zero_()
        if self._config.router.load_balance == "bias" and not skipped:
            self._move_biases()

    def _move_biases(self) -> None:
        tokens = self._summed()[:, :-1]
        steps = (tokens.mean(1, keepdim=True) - tokens).sign() * self._config.router.bias_update_rate
        for router, step in zip(self._routers.values(), steps, strict=True):
            router.bias += step

    def _summed(self) -> Tensor:
        """The counts of the last step over the global batch."""
        if not self._is_summed:
            self._mesh.sum_over_tokens(self._counts)
            self._is_summed = True
        return self._counts

    def measure(self) -> Balance | None:
        """The last step's balance, the same on all ranks, which must all call it; None of a model without experts."""
        if self._config.n_experts is None:
            return None
        whole = torch.zeros(
            self._config.n_layers, self._config.n_experts + 1, dtype=torch.float64, device=self._mesh.device
        )
        if self._routers:
            whole[self._layers] = self._summed()
        rows = self._mesh.sum_over_pp(whole).tolist()
        tokens = {layer: [int(n) for n in row[:-1]] for layer, row in enumerate(rows) if any(row)}
        chosen = sum(map(sum, tokens.values()))
        return Balance(
            tokens_per_expert=tokens,
            load_imbalance=max(max(row) * len(row) / sum(row) for row in tokens.values()),
            router_entropy=sum(row[-1] for row in rows) * self._config.experts_per_token / chosen,
        )
