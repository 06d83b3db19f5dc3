"""A run beside its plan: what `keel plan` estimates of this job on this mesh and GPU, and what was measured.

Both stand in the record of the run's last step and in its closing table. Memory is compared on a GPU, whose allocator
counts what the plan counts; a step's time on the GPUs of configs/rates/devices.toml. The estimate takes tens of
milliseconds (150 to 400 for 405B on 512 ranks), on rank 0 after the last step, so a start does not wait for it.
"""

import os
from collections.abc import Callable
from statistics import median

from configs.errors import UserError
from configs.schema import Config
from parallelisms.mesh import Mesh
from trainer.guards.environment import device_name
from trainer.planning.devices import device_called
from trainer.planning.memory import estimate_memory
from trainer.planning.step_time import StepTime, estimate_step
from trainer.report.metrics import Memory, Throughput
from trainer.report.units import brief, percent, size

WORDS = {"step_seconds": "a step", "data_seconds": "waiting for data", "memory_peak_bytes": "peak memory"}
"""What the quantities that are compared are called."""
Quantities = dict[str, dict[str, float]]
"""`planned` and `measured` by quantity, the largest difference first."""


class BesidePlan:
    """Collects what a launch measures, and compares it with the plan at the end of the run."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._config: Config | None = None
        self._speeds: list[Throughput] = []
        self.quantities: Quantities = {}
        """Empty until `compare`, and if nothing can be compared."""
        self.parts: dict[str, float] = {}
        """The planned seconds of a step by part."""

    def count(self, config: Config, speed: Throughput) -> None:
        """Note the speed of the steps up to a logged one, under the keys of its stage of the run."""
        if config is not self._config:
            self._config = config
            self._speeds = []
        if speed.step_seconds is not None:
            self._speeds.append(speed)

    def compare(self, memory: Memory, warn: Callable[[str], None]) -> None:
        """Compare on one rank; an estimate that fails is told to `warn`, since the last step is still to be saved.

        Args:
            memory: the largest of all ranks.
        """
        try:
            found = self._step() | self._memory(memory)
        except Exception as error:
            warn(f"the run is not compared with its plan: {type(error).__name__}: {error}")
        else:
            self.quantities = by_difference(found)

    def _step(self) -> Quantities:
        """The medians over the logged lines of this launch, without the first, which warms up."""
        planned = self._planned_step()
        if planned is None:
            return {}
        self.parts = dict(planned.parts)
        speeds = self._speeds[1:] or self._speeds
        measured = {key: median(getattr(speed, key) for speed in speeds) for key in ("step_seconds", "data_seconds")}
        expected = {"step_seconds": planned.seconds + planned.data.waiting, "data_seconds": planned.data.waiting}
        return {key: {"planned": expected[key], "measured": measured[key]} for key in expected}

    def _planned_step(self) -> StepTime | None:
        """None if the GPU has no rates, the job is not modelled, or each step has compiled."""
        device = device_called(device_name(self._mesh.device))
        if device is None or self._config is None or not self._speeds:
            return None
        gpus_per_host = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        try:
            return estimate_step(self._config, self._mesh.sizes.world_size, device, gpus_per_host)
        except UserError:
            return None

    def _memory(self, memory: Memory) -> Quantities:
        """Left out on a CPU, where only the whole process is measured, and where stages differ in their memory."""
        if self._mesh.device.type != "cuda" or self._config is None or self._config.stages:
            return {}
        planned = estimate_memory(self._config, self._mesh.sizes, "cuda", self._mesh).device
        return {"memory_peak_bytes": {"planned": planned, "measured": memory.memory_peak_bytes}}

    def text(self) -> str:
        """Lines for the closing table; empty if nothing was compared."""
        lines = [compared(key, self.quantities) for key in self.quantities]
        if lines:
            lines[0] += ", the largest difference"
        parts = sorted(self.parts.items(), key=lambda part: -part[1])
        if parts:
            lines.append("planned parts: " + ", ".join(f"{part} {brief(seconds)}" for part, seconds in parts))
        return "\n".join(lines)


def by_difference(quantities: Quantities) -> Quantities:
    """Put the largest difference first: relative to the plan, or of a quantity planned as 0 to the planned step."""

    def difference(key: str) -> float:
        pair = quantities[key]
        return abs(pair["measured"] - pair["planned"]) / (pair["planned"] or quantities["step_seconds"]["planned"])

    return {key: quantities[key] for key in sorted(quantities, key=difference, reverse=True)}


def compared(key: str, quantities: Quantities) -> str:
    """A quantity in words: "a step 1.31 s instead of 1.2 s (+9.2%)"."""
    planned, measured = (quantities[key][which] for which in ("planned", "measured"))
    words = size if key.endswith("_bytes") else brief
    ratio = f" ({'+' * (measured >= planned)}{percent(measured / planned - 1)})" if planned else ""
    return f"{WORDS.get(key, key)} {words(measured)} instead of {words(planned)}{ratio}"
