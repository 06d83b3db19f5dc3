"""The message about a step that changed nothing: which rank's numbers were bad, and on which samples."""

from collections.abc import Sequence

from parallelisms.ranks import gather
from trainer.data.loader import MicroBatch
from trainer.guards.trace_nonfinite import trace_nonfinite
from trainer.guards.verdict import StepResult, describe
from trainer.progress import Progress
from trainer.report.console import Console
from trainer.step import Learner


def report_skip(
    result: StepResult, progress: Progress, learner: Learner, micro_batches: list[MicroBatch], console: Console
) -> bool:
    """Tell why the step after `progress` changed nothing; all ranks must call it.

    Args:
        result: of the step.
        micro_batches: this rank's share of it.

    Returns:
        Whether it was computed again, to find the first bad number.
    """
    step = progress.run.step + 1
    samples = _samples(micro_batches)
    limit = f" (a spike is above {progress.loss_limit})" if result.is_spike else ""
    console.note(
        f"step {step} skipped: {describe(result.gather())}{limit}; its samples are {samples[0]} to {samples[-1]}"
    )
    is_traced = progress.last_was_finite and not result.is_spike
    if is_traced:
        console.note(f"step {step}: {trace_nonfinite(learner, micro_batches)}")
    return is_traced


def _samples(micro_batches: Sequence[MicroBatch]) -> list[int]:
    """Numbers of the samples of all ranks, in order."""
    by_rank = gather([sample for batch in micro_batches for sample in batch.samples])
    return sorted({sample for samples in by_rank for sample in samples})
