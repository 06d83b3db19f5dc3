"""What is done about copies of a tensor that are not equal: the run ends, or the majority's content is taken."""

from collections.abc import Sequence
from typing import Literal

from configs.errors import UserError
from parallelisms.guards.replicas import Copy, described, differences, heal


def see_that_copies_are_equal(
    copies: Sequence[Copy], on_difference: Literal["end", "heal"], step: int, saved_step: int | None
) -> str:
    """Compare this rank's copies with the other ranks', and repair what can be; all ranks must call it.

    Args:
        copies: what a difference is repaired in, in place.
        on_difference: `fault.on_difference`.
        step: after which this is, for the message.
        saved_step: of the newest checkpoint.

    Returns:
        What was repaired, a line a tensor; "" if all copies were equal.

    Raises:
        UserError: copies differ, and are to stay so; the same on all ranks.
    """
    found, hosts = differences(copies)
    if not found:
        return ""
    lines = described(found, hosts)
    heals = on_difference == "heal" and all(difference.majority for difference in found)
    if heals:
        heal(copies, found)
        heals = not differences(copies)[0]
    if not heals:
        raise UserError(_message(lines, on_difference, step, saved_step))
    return lines


def _message(lines: str, on_difference: str, step: int, saved_step: int | None) -> str:
    there_is = "There is no checkpoint yet, so the same command starts over"
    if saved_step is not None:
        there_is = f"The same command goes on from the checkpoint of step {saved_step}, when all copies were equal"
    healing = ' (fault.on_difference = "heal" needs more than half of the copies to be equal)'
    return (
        f"tensors that must be equal on several ranks differ after step {step}{healing * (on_difference == 'heal')}:"
        f"{lines}\nA fault of a machine's memory or arithmetic does this, or code that only some ranks run. Nothing "
        f"was saved. {there_is}; if a host is named again, leave it out"
    )
