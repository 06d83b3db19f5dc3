"""The response to replicas of a tensor that are not equal: the run ends, or the majority's content is restored."""

from collections.abc import Sequence
from typing import Literal

from configs.errors import UserError
from parallelisms.guards.replicas import Replica, described, differences, heal


def check_replicas(
    replicas: Sequence[Replica], on_difference: Literal["end", "heal"], step: int, saved_step: int | None
) -> str:
    """Compare this rank's replicas with the other ranks', and repair what is repairable; all ranks must call it.

    Args:
        replicas: repaired in place.
        on_difference: `fault.on_difference`.
        step: number of completed steps, for the message.
        saved_step: step of the newest checkpoint; None if there is none.

    Returns:
        What was repaired, one line per tensor; "" if all replicas were equal.

    Raises:
        UserError: replicas differ and were not repaired. All ranks raise it, with the same text.
    """
    found, hosts = differences(replicas)
    if not found:
        return ""
    lines = described(found, hosts)
    heals = on_difference == "heal" and all(difference.majority for difference in found)
    if heals:
        heal(replicas, found)
        heals = not differences(replicas)[0]
    if not heals:
        raise UserError(_message(lines, on_difference, step, saved_step))
    return lines


def _message(lines: str, on_difference: str, step: int, saved_step: int | None) -> str:
    there_is = "There is no checkpoint yet, so the same command starts over"
    if saved_step is not None:
        there_is = f"The same command resumes from the checkpoint of step {saved_step}, when all replicas were equal"
    healing = ' (fault.on_difference = "heal" needs more than half of the replicas to be equal)'
    return (
        f"tensors that must be equal on several ranks differ after step {step}{healing * (on_difference == 'heal')}:"
        f"{lines}\nA fault in a machine's memory or arithmetic causes this, or code that only some ranks run. Nothing "
        f"was saved. {there_is}; if the same host is named again, exclude it"
    )
