"""The losses of a trainer's steps, which a trainer itself does not keep."""

from trainer.guards.verdict import StepResult
from trainer.trainer import Trainer


def kept_losses(trainer: Trainer) -> list[float]:
    """A list to which each step of `trainer` will append its loss."""
    losses: list[float] = []
    count = trainer.progress.count

    def counted(result: StepResult) -> None:
        losses.append(result.loss)
        count(result)

    trainer.progress.count = counted  # type: ignore[method-assign]
    return losses
