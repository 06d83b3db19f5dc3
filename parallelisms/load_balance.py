"""Keeping the load of a mixture's experts even over the global batch, and measuring how even it is.

A model's routers see only one micro-batch on one rank. This file tells them what they need to compute the auxiliary
loss of the whole global batch: over which ranks sequences are split, and the weight of one sequence. After each step
the routers' counts are summed over the ranks, as exact integers, for the bias rule, for an auxiliary loss over the
global batch, and for the metrics.

In models whose routers are their own, such as Hugging Face's, modules of experts count the tokens that they are given.
These are measured in the same way; the entropy of the routers' scores is not known there.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from configs.architectures import LOAD, block_names
from configs.plan import Counter, Router, counters_of, plan_of, routers_of
from configs.schema import Config, is_described
from parallelisms.mesh import Mesh
from parallelisms.torch_internals import group_named


def apply_load_balance(model: nn.Module, mesh: Mesh, config: Config) -> None:
    """Set each router's factor on the auxiliary loss and, with context parallelism, its sum over a sequence's ranks.

    Gradients are summed over the ranks. Every rank therefore gives a sequence the same weight in the mean over the
    global batch. Tensor-parallel ranks all compute the same loss: where their gradients of a router are summed, each
    contributes 1/tp of it.
    """
    sizes = mesh.sizes
    n_summed = 1 if plan_of(model).keeps_sequences_whole else sizes.tp
    for router in routers_of(model).values():
        router.balance_scale = 1.0 / (config.training.global_batch_size * n_summed)
        if sizes.cp > 1:
            router.sum_over_sequence = partial(_sum_over, group=mesh.cp.get_group().group_name)


@torch.library.custom_op("keel::sum_over", mutates_args=())
def _sum_over(counts: Tensor, group: str) -> Tensor:
    """Sum `counts` over the ranks of a group; not differentiable."""
    total = counts.clone()
    dist.all_reduce(total, group=group_named(group))
    return total


@_sum_over.register_fake
def _(counts: Tensor, group: str) -> Tensor:
    return torch.empty_like(counts)


@dataclass(frozen=True)
class Balance:
    """How evenly the experts of the model shared a step's global batch."""

    tokens_per_expert: dict[int, list[int]]
    """Tokens sent to each expert, by layer number."""
    load_imbalance: float
    """The busiest expert's tokens over the mean of its layer's experts, for the most uneven layer; 1 is even."""
    router_entropy: float | None
    """Entropy of the normalized scores, in nats, averaged over tokens and layers; at most log(n_experts). None for
    models whose routers are their own."""
    router_entropies: dict[int, float] | None
    """The entropy of each layer, averaged over tokens, by layer number."""
    repeated_steps: int | None
    """Steps of this launch that were computed again, since a buffer of experts was too small; None without buffers."""


class LoadBalance:
    """The routers on this rank, or what counts in their place, over all of its pipeline stages."""

    def __init__(self, stages: Mapping[int, nn.Module], config: Config, mesh: Mesh) -> None:
        self._config = config.model
        self._mesh = mesh
        self._routers: dict[str, Router] = {}
        self._counters: dict[str, Counter] = {}
        self._n_experts = max(plan_of(stage).n_counted for stage in stages.values())
        self._layers: list[int] = []
        """The layer number of each counter."""
        for stage in stages.values():
            plan = plan_of(stage)
            self._routers |= routers_of(stage)
            for name, counter in counters_of(stage).items():
                self._counters[name] = counter
                blocks = enumerate((*plan.blocks, *plan.further_blocks))
                block = next(i for i, block in blocks if name.startswith(f"{block}."))
                self._layers.append(plan.first_block + block)
        per_token = [router.experts_per_token for router in self._routers.values()]
        self._per_token = torch.tensor(per_token, dtype=torch.float64, device=mesh.device)
        self._unknown = torch.zeros(len(self._counters), dtype=torch.float64, device=mesh.device)
        """What is measured of routers that are a model's own."""
        self._counts = torch.zeros(0)
        """(counters, n_experts + 2), last step: tokens of each expert, the entropy, and the tokens that it is of. In
        float64, which represents integers up to 2^53 exactly, so that one collective sums all."""
        self._is_summed = False
        self.repeated_steps = 0 if config.expert.exchange == "buffers" else None
        """`Balance.repeated_steps`."""

    @torch.no_grad()
    def finish_step(self, skip: Tensor) -> None:
        """Take over a step's counts, and what balances the next by them unless `skip`, a scalar, is 1.; all ranks must
        call it."""
        if not self._counters:
            return
        tokens = torch.stack([counter.tokens_per_expert.double() for counter in self._counters.values()])
        entropies = [router.entropy for router in self._routers.values()]
        measured = (torch.stack(entropies), tokens.sum(1) / self._per_token) if entropies else (self._unknown,) * 2
        self._counts = torch.cat((tokens, torch.stack(measured, dim=1)), dim=1)
        self._is_summed = False
        if any(router.bias is not None for router in self._routers.values()):
            self._move_biases(1 - skip.double())
        if any(router.frequency is not None for router in self._routers.values()):
            self._keep_frequencies(skip)

    @torch.no_grad()
    def forget(self) -> None:
        """Forget the counts of the passes since the last step."""
        for counter in self._counters.values():
            counter.tokens_per_expert.zero_()
        for router in self._routers.values():
            router.entropy.zero_()

    def _move_biases(self, keep: Tensor) -> None:
        tokens = self._summed()[:, :-2]
        directions = (tokens.mean(1, keepdim=True) - tokens).sign()
        for router, direction in zip(self._routers.values(), directions, strict=True):
            if router.bias is not None:
                router.bias += direction * (router.settings.bias_update_rate * keep)

    def _keep_frequencies(self, skip: Tensor) -> None:
        tokens = self._summed()[:, :-2]
        frequencies = tokens / tokens.mean(1, keepdim=True)
        for router, frequency in zip(self._routers.values(), frequencies, strict=True):
            if router.frequency is not None:
                router.frequency.copy_(torch.where(skip.bool(), router.frequency, frequency))

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint has of the balance, by name, beside the routers' biases, which are the model's."""
        routers = self._routers.items()
        return {f"{LOAD}{name}": router.frequency for name, router in routers if router.frequency is not None}

    def _summed(self) -> Tensor:
        """The last step's counts, summed over the global batch."""
        if not self._is_summed:
            self._mesh.sum_over_tokens(self._counts)
            self._is_summed = True
        return self._counts

    def measure(self) -> Balance | None:
        """The last step's balance, equal on all ranks, which must all call it; None for a model without experts."""
        n_experts = self._n_experts
        if not n_experts:
            return None
        n_layers = len(block_names(self._config)) if is_described(self._config) else self._config.n_layers
        whole = torch.zeros(n_layers, n_experts + 2, dtype=torch.float64, device=self._mesh.device)
        if self._counters:
            whole[self._layers] = self._summed()
        rows = self._mesh.sum_over_pp(whole).tolist()
        tokens = {layer: [int(n) for n in row[:-2]] for layer, row in enumerate(rows) if any(row)}
        if not tokens:  # with all routers frozen, experts of other families count nothing
            return None
        routed = sum(row[-1] for row in rows)
        entropies = {layer: rows[layer][-2] / rows[layer][-1] for layer in tokens} if routed else None
        return Balance(
            tokens_per_expert=tokens,
            load_imbalance=max(max(row) * len(row) / sum(row) for row in tokens.values()),
            router_entropy=sum(row[-2] for row in rows) / routed if routed else None,
            router_entropies=entropies,
            repeated_steps=self.repeated_steps,
        )
