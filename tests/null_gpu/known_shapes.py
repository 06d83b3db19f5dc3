"""Pipelines whose stages all know the shapes of what they exchange, as Keel tells them.

Since torch 2.15 the ranks vote before the first step whether all of them do. The host reads the result, which on a
device without values is no, and then the shapes would travel as objects, of zeros. Up to 2.14 there is no vote.
"""

import functools
from typing import Any

from torch.distributed.pipelining import schedules


@functools.cache
def know_shapes() -> None:
    """From now on, in this process, the vote says what it would on a GPU."""
    schedule: Any = schedules._PipelineSchedule
    vote = getattr(schedule, "_initialize_pipeline_distributed_state", None)
    if vote is None:
        return

    def counted(self: Any, stages: Any, has_backward: bool, *more: Any) -> None:
        vote(self, stages, has_backward, *more)
        modes: Any = schedules.InferenceMode  # type: ignore[attr-defined]
        assert not any(modes.needs_dynamic(stage._user_meta, has_backward) for stage in stages)
        for stage in stages:
            stage._inference_mode = modes.STATIC

    schedule._initialize_pipeline_distributed_state = counted
