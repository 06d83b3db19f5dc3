"""AdEMAMix (Pagliardini et al. 2024, arXiv 2409.03137, algorithm 1): AdamW with a second, slow average of gradients.

The fast average follows the loss, the slow one remembers tens of thousands of steps. Early in a run its old gradients
would point the wrong way, so its decay rate and its weight grow over `slow_warmup_steps`; the paper takes all steps.
"""

import math
from typing import Any

import torch
from torch import Tensor

from configs.schema import Optimizer
from parallelisms.ranks import local_part
from trainer.optimizers import rule
from trainer.optimizers.training import TrainingOptimizer, decay


class AdEMAMix(TrainingOptimizer):
    """AdEMAMix over this rank's part of every parameter.

    Shards change no bit, since products and sums are separate operations (see `lion.py`).
    """

    def __init__(self, groups: list[dict[str, Any]], config: Optimizer) -> None:
        """Create the optimizer without its state."""
        super().__init__(groups, {"lr": config.lr, "betas": (config.betas[0], config.betas[1]), "eps": config.eps})
        self._config = config

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters that have a gradient; `closure` is not supported."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        state["step"] += 1
        t = int(state["step"])
        weight = local_part(parameter.detach())
        assert parameter.grad is not None
        gradient = local_part(parameter.grad)
        fast, slow, square = (local_part(state[key]) for key in ("exp_avg", "exp_avg_slow", "exp_avg_sq"))
        beta1, beta2 = group["betas"]
        beta3, alpha = slow_rates(self._config, t)
        fast.mul_(beta1).add_(gradient * (1 - beta1))
        slow.mul_(beta3).add_(gradient * (1 - beta3))
        square.mul_(beta2).add_(gradient * gradient * (1 - beta2))
        update = (fast / (1 - beta1**t)).add_(slow * alpha)
        update.div_((square / (1 - beta2**t)).sqrt_().add_(group["eps"]))
        decay([weight], [update], group["lr"] * group["weight_decay"], self._config.cautious_weight_decay)
        weight.sub_(update * group["lr"])


def slow_rates(config: Optimizer, t: int) -> tuple[float, float]:
    """The slow average's decay rate and weight in step t, from 1 (section 3, "beta3 and alpha schedulers").

    The number of steps after which a gradient counts half grows linearly, from that of the fast average.
    """
    warmup = config.slow_warmup_steps
    if t >= warmup:
        return config.slow_beta, config.slow_weight
    done = t / warmup
    start = math.log(max(config.betas[0], 1e-8))
    end = math.log(config.slow_beta)
    return math.exp(start * end / ((1 - done) * end + done * start)), done * config.slow_weight


class Rule(rule.Rule):
    """Three averages of each parameter, and the number of its updates."""

    def state(self, parameter: Tensor) -> dict[str, Tensor]:
        averages = ("exp_avg", "exp_avg_slow", "exp_avg_sq")
        count = {"step": torch.zeros((), dtype=torch.float32, device="meta" if parameter.is_meta else "cpu")}
        return count | {key: torch.zeros_like(parameter, memory_format=torch.preserve_format) for key in averages}

    def without_state(self, groups: list[dict[str, Any]]) -> AdEMAMix:
        return AdEMAMix(groups, self.config)
