"""Profiling: a trace of a few steps and a snapshot of memory allocations (`[profile]`).

Each rank writes to the run folder's `profile/` a Chrome trace (open it in https://ui.perfetto.dev) and, on CUDA and if
requested, a snapshot of the allocator (open it in https://pytorch.org/memory_viz). Profiling slows its steps down, so
their speed in the metrics is not the run's. The first steps compile and warm up; start a trace after them. The names of
a step's parts are listed in docs/performance.md.
"""

import logging
from collections.abc import Collection
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from configs.checks.job import TRACED_STEPS
from configs.errors import ConfigError
from configs.files import is_link, link_refused
from configs.schema import Config
from parallelisms.ranges import ForwardRanges

_SNAPSHOT_EVENTS = 200_000  # allocations and frees kept, with stacks: about 100 MiB of host memory, several steps


class StepProfiler:
    """Profiles TRACED_STEPS steps, from the beginning of step `start_step`, counted from 1."""

    def __init__(
        self,
        config: Config,
        run_folder: Path,
        rank: int,
        device_type: str,
        resumed_step: int = 0,
        stages: Collection[nn.Module] = (),
    ) -> None:
        """
        Args:
            config: with `profile.start_step = 0` nothing is ever profiled.
            run_folder: its `profile/` is created when the trace is written.
            rank: part of the file names.
            device_type: "cpu" or "cuda".
            resumed_step: steps completed before this launch.
            stages: the models whose blocks are named in the trace.

        Raises:
            ConfigError: the steps are after the end of the run, or a memory snapshot is impossible here.
        """
        self._config = config.profile
        self._rank = rank
        self._folder = run_folder / "profile"
        self._cuda = device_type == "cuda"
        self._stages = stages
        self._profiler: profile | None = None
        self._ranges: ForwardRanges | None = None
        _check(config, device_type)
        if rank == 0 and 0 < self._config.start_step <= resumed_step:
            logging.getLogger(__name__).warning(
                f"no trace is made: profile.start_step = {self._config.start_step}, but this run resumes from step "
                f"{resumed_step}"
            )

    def before_step(self, step: int) -> Path | None:
        """Start recording if `step` (counted from 1) is the first to be profiled, or write the trace of those before.

        What is done between two steps, such as a save, is in the trace of the first.

        Returns:
            The path of a trace that was written.
        """
        if step == self._config.start_step + TRACED_STEPS:
            return self.finish()
        if step == self._config.start_step:
            self._start()
        return None

    def _start(self) -> None:
        if self._config.memory_snapshot:
            torch.cuda.memory._record_memory_history(max_entries=_SNAPSHOT_EVENTS)
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * self._cuda
        self._profiler = profile(activities=activities, record_shapes=True)
        self._profiler.start()
        self._ranges = ForwardRanges(self._stages)

    def finish(self) -> Path | None:
        """Write what has been recorded, if anything; also called when a run ends before its last profiled step."""
        if self._profiler is None or self._ranges is None:
            return None
        self._ranges.remove()
        if self._cuda:
            torch.cuda.synchronize()
        self._profiler.stop()
        profiler = self._profiler
        self._profiler = None
        try:
            return self._write(profiler)
        except OSError as error:
            logging.getLogger(__name__).warning(f"no trace in {self._folder}, which can't be written: {error}")
            return None
        finally:
            if self._config.memory_snapshot:
                torch.cuda.memory._record_memory_history(enabled=None)

    def _write(self, profiler: profile) -> Path:
        if is_link(self._folder):
            raise link_refused(self._folder)
        self._folder.mkdir(exist_ok=True)
        trace = self._folder / f"step-{self._config.start_step:08d}-rank-{self._rank}.json.gz"
        trace.unlink(missing_ok=True)  # it may be a link
        profiler.export_chrome_trace(str(trace))
        if self._config.memory_snapshot:
            snapshot = trace.with_name(trace.name.replace(".json.gz", ".memory.pickle"))
            snapshot.unlink(missing_ok=True)
            torch.cuda.memory._dump_snapshot(str(snapshot))
        return trace


def _check(config: Config, device_type: str) -> None:
    """What the checks of the job cannot know: which device `job.device = "auto"` is."""
    if config.profile.memory_snapshot and device_type != "cuda":
        raise ConfigError(
            "profile.memory_snapshot = true needs a CUDA device, and this job runs on the CPU; set it to false"
        )
