"""Records the fingerprint of every step of a run in `fingerprints.jsonl`, next to `metrics.jsonl`.

Rank 0 writes the lines. They are in memory until the next line of metrics or the next save, and are cut back with
`metrics.jsonl` on a resume.
"""

import threading
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from configs.errors import UserError
from configs.files import AppendedFile, insist
from configs.load import LoadedConfig
from parallelisms.guards.fingerprint import GradientFingerprint
from parallelisms.ranks import on_rank_zero
from trainer.data.tokenizer import load_tokenizer
from trainer.guards.environment import code_by_folder, environment
from trainer.guards.outages import Outages
from trainer.guards.verdict import StepResult
from trainer.planning.skeleton import skeleton
from trainer.proof.record import FILE_NAME, TEACHER, TOKENIZER, Launch, Step
from trainer.report.metrics import cut_back
from trainer.saved_state import RunState
from trainer.teacher import teacher_seal


class Fingerprints:
    """The fingerprints of a launch's steps; without `metrics.fingerprint` it only cuts back earlier launches'."""

    def __init__(
        self,
        job: LoadedConfig,
        gradients: GradientFingerprint | None,
        mesh: dict[str, int],
        device: torch.device,
        outages: Outages,
    ) -> None:
        """
        Args:
            job: the run's.
            gradients: the learner's; None: nothing is recorded.
            mesh: sizes of its axes.
            device: where it computes.
            outages: told if a line can't be written.
        """
        self._job = job
        self._gradients = gradients
        self._outages = outages
        surroundings = environment(device, job.config.fsdp.cpu_offload)
        self._mesh = mesh
        self._environment = {"torch": torch.__version__, **surroundings}
        self._file = AppendedFile(job.config.job.folder / FILE_NAME)
        self._last_step = 0
        self._lock = threading.Lock()

    def open(self, run: RunState, position: dict[str, Any]) -> None:
        """Begin a launch, or begin again after a rewind; all ranks must call it.

        Args:
            run: the steps before.
            position: in the data, as `DataLoader.state_dict` returns it.

        Raises:
            UserError: the file can't be written.
        """
        line = ""
        if self._gradients:
            shapes = skeleton(self._job.config.model).shapes
            line = Launch(
                step=run.step,
                next_sample=position["next_sample"],
                mesh=self._mesh,
                ranks=dist.get_world_size(),
                environment=self._environment,
                parameters=[(name, prod(shapes[name])) for name in self._gradients.names],
                job=self._job.to_toml(),
                data={name: source["fingerprint"] for name, source in position["sources"].items()}
                | self._beside_data(),
                code=code_by_folder(),
            ).line()
        on_rank_zero(None, lambda: self._open(run.step, line))

    def _beside_data(self) -> dict[str, str]:
        path = self._job.config.tokenizer.path
        seal = teacher_seal(self._job.config)
        return ({TOKENIZER: load_tokenizer(path).hash} if path else {}) | ({TEACHER: seal} if seal else {})

    def _open(self, step: int, line: str) -> None:
        self.flush()
        self._last_step = step
        try:
            insist(lambda: cut_back(self._file.path, step))
            if line:
                insist(self._file.touch)
                self._file.write(f"{line}\n".encode())
                insist(self._file.flush)
        except OSError as error:
            raise UserError(f"{error.filename or self._file.path} can't be written: {error.strerror}") from None

    def record(self, run: RunState, result: StepResult) -> None:
        """Keep the line of the step after `run` for the next `flush`, unless it was kept before.

        Any thread may call it.
        """
        if self._gradients is None or result.gradient_sums is None or dist.get_rank() > 0:
            return
        with self._lock:
            if (step := run.step + 1) > self._last_step:
                gradients = self._gradients.read(result.gradient_sums)
                line = Step(step, result.loss, result.grad_norm, **vars(gradients)).line()
                self._file.write(f"{line}\n".encode())
                self._last_step = step

    def flush(self) -> None:
        """Write all kept lines; any thread may call it."""
        self._outages.flush(self._file)

    def close(self) -> None:
        """Write all kept lines, or report that they are missing."""
        self._outages.give_up(self._file)
