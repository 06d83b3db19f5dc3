"""Spikes of the loss: which step is one, judging only by the losses before it.

The rule is that of OLMo's step-skipping optimizers (Groeneveld et al. 2024): a loss is a spike if it exceeds the mean
of the last losses by more than a given number of their standard deviations. It is known before the step's update, which
is then skipped. A loss is the same on all ranks, and on other meshes up to round-off; so the decision is the same as
well, unless a loss is within round-off of the limit.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from configs.errors import UserError
from configs.schema import Spikes

MAX_REWINDS = 3
"""Number of times that a run returns to the same checkpoint: other samples do not help then."""


def loss_limit(config: Spikes, past_losses: Sequence[float]) -> float:
    """The loss above which the next step is a spike, in nats; inf if no loss is.

    Args:
        past_losses: losses of the previous steps, as kept by `remembered`.
    """
    n = len(past_losses)
    if config.action == "none" or n < config.window:
        return math.inf
    mean = math.fsum(past_losses) / n
    deviation = math.sqrt(math.fsum((loss - mean) ** 2 for loss in past_losses) / n)
    return mean + config.threshold * deviation


def rewind_target(
    config: Spikes, step: int, incidents: Sequence[Mapping[str, Any]], loss: float, earliest: int
) -> int | None:
    """The step of the checkpoint to return to if the next step's `loss` is a spike; None: do not return.

    Args:
        step: number of completed steps.
        incidents: the run's incidents so far, as its checkpoints keep them.
        earliest: the run returns to no step before this one.

    Raises:
        UserError: the run has returned there too often.
    """
    to_step = step // config.rewind_interval * config.rewind_interval
    if config.action != "rewind" or to_step == 0 or to_step < earliest:
        return None
    rewinds = sum(incident.get("to_step") == to_step for incident in incidents)
    if rewinds >= MAX_REWINDS:
        raise UserError(
            f"the loss of step {step + 1} is a spike, {loss}, and the run has returned to step {to_step} {rewinds} "
            "times already: other samples do not help; resume from an earlier checkpoint "
            "(--checkpoint.load STEP --checkpoint.go_back 1), or with a lower optimizer.lr"
        )
    return to_step


def remembered(config: Spikes, past_losses: Sequence[float], loss: float) -> list[float]:
    """The past losses after a step was applied: as many as the rule looks at, oldest first."""
    return [] if config.action == "none" else [*past_losses, loss][-config.window :]
