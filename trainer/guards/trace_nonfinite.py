"""Why a step was not finite: the first weight or module where it shows, on which rank, and for which sample.

All ranks compute the step again, since its collectives need all of them; the results are discarded.
"""

import socket
from dataclasses import astuple

from parallelisms.guards.nonfinite import Finding, NonfiniteTracer, finding_of, weights_not_finite
from parallelisms.ranks import gather
from trainer.data.loader import MicroBatch
from trainer.guards.verdict import name_ranks
from trainer.step import Learner

_Found = tuple[Finding | None, list[int], str]
"""A rank's first finding, the samples in question, and its host."""


def trace_nonfinite(learner: Learner, micro_batches: list[MicroBatch]) -> str:
    """Describe the first non-finite value in one sentence, the same on all ranks, which must all call it.

    Args:
        micro_batches: this rank's share of the step that was skipped.
    """
    learner.forget_gradients()  # of the next step, if its passes are queued already
    found = _gather(weights_not_finite(learner.parameters), micro_batches)
    if not any(finding for finding, *_ in found):
        tracer = NonfiniteTracer(learner.stages, learner.config.compile.enable)
        with tracer.watching():
            loss, norm = learner.gradients(micro_batches)
        tracer.look_at_gradients(learner.parameters)
        learner.forget_gradients()
        found = _gather(tracer.first, micro_batches)
        if not any(finding for finding, *_ in found):
            return _nothing_found(bool(loss.isfinite() and norm.isfinite()))
    return _sentence(found)


def _gather(finding: Finding | None, micro_batches: list[MicroBatch]) -> list[_Found]:
    told = gather((astuple(finding) if finding else None, _samples(finding, micro_batches), socket.gethostname()))
    return [(finding_of(it) if it else None, samples, host) for it, samples, host in told]


def _samples(finding: Finding | None, micro_batches: list[MicroBatch]) -> list[int]:
    if finding is None or finding.micro_batch is None:
        return []
    samples = micro_batches[finding.micro_batch].samples
    return [samples[row] for row in finding.rows if row < len(samples)] or samples


def _sentence(found: list[_Found]) -> str:
    first = min(finding for finding, *_ in found if finding)
    ranks = [rank for rank, (it, *_) in enumerate(found) if it and (it.when, it.event) == (first.when, first.event)]
    samples = sorted({sample for rank in ranks for sample in found[rank][1]})
    text = f"the first value that is not finite is in {first.what}, on {name_ranks(ranks, [f[2] for f in found])}"
    if samples:
        text += f", for {'sample' if len(samples) == 1 else 'samples'} {', '.join(map(str, samples))}"
    return text + (f"; {first.before}, before it, is finite" if first.before else "")


def _nothing_found(is_finite: bool) -> str:
    if is_finite:
        return "computed again, the step is finite: a device or its memory is at fault, not the model or the data"
    return "every value and gradient is finite, but their sum is not: it overflows"
