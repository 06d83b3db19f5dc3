"""A teacher: a model whose probabilities of the next token are learned beside the text (`distillation.py`).

It is never trained. It is split over the job's mesh as the model is, and runs forward on the tokens of each micro-batch
before the model does; the loss then multiplies its last hidden states by its head, a chunk of tokens at a time. With a
pipeline, the teacher's forward passes of a step's micro-batches come before the model's.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from checkpoint.bucket_storage import standing_for
from checkpoint.export.model_files import model_of
from checkpoint.find import find_checkpoint
from checkpoint.manager import CheckpointManager
from checkpoint.manifest import read_manifest, seal_of
from checkpoint.reader import Description, Log
from configs.checks import check
from configs.errors import ConfigError
from configs.schema import ActivationCheckpoint, Checkpoint, Config, Distillation, Expert, Float8, Fsdp, is_described
from configs.table import with_keys
from parallelisms.fsdp import finish_gathers, freeze, keep_head
from parallelisms.init import allocate
from parallelisms.mesh import Mesh
from parallelisms.passes import Call
from parallelisms.pipeline import Relay
from parallelisms.ranges import named_range
from parallelisms.streams import queue_gathers
from trainer.distillation import Divergence, States
from trainer.stages import build_stages, model_tensors


class Teacher:
    """A model on this rank's place in the mesh, for forward passes alone."""

    def __init__(self, config: Config, mesh: Mesh) -> None:
        """Build it and read its weights; all ranks must do so.

        Args:
            config: the job that learns from it.
            mesh: where this rank is.

        Raises:
            KeelError: it can't be read, or does not fit the job.
        """
        self._settings = config.distillation
        self._mesh = mesh
        job = teacher_job(config)
        stages, _ = build_stages(job, mesh)
        for stage in stages.values():
            allocate(stage, mesh.device)
            parameters = dict(stage.named_parameters())
            freeze([stage], parameters, parameters)
            keep_head(stage)
        queue_gathers(stages.values(), job.comm, mesh.device)
        _load(job, stages, mesh)
        self._stages = list(stages.values())
        self._forward = Relay(stages, job, mesh)
        self._sums = torch.zeros(2, dtype=torch.float64, device=mesh.device)
        """The divergence summed over valid tokens, and their number, of the passes since the last step."""
        self._last = torch.zeros_like(self._sums)
        """The last step's."""

    def prepare(self, call: Call) -> Call:
        """Run forward on a micro-batch's tokens; returns the call with a loss that takes account of the result."""
        seen = _LastStates()
        arguments = {name: value for name, value in call.arguments.items() if name != "further"} | {"loss": seen}
        with torch.no_grad(), named_range("teacher"):
            list(self._forward(Call(call.tokens, arguments)))
            for stage in self._stages:
                finish_gathers(stage)
        if seen.states is None:  # not on a pipeline's last stage
            return call
        lesson = Divergence(seen.states, self._settings, self._record)
        return Call(call.tokens, call.arguments | {"loss": _Taught(call.arguments["loss"], lesson)})

    def _record(self, sums: Tensor) -> None:
        self._sums += sums

    def finish_step(self) -> None:
        """Take over a step's sums."""
        self._last.copy_(self._sums)

    def forget(self) -> None:
        """Forget the sums of the passes since the last step."""
        self._sums.zero_()

    def measure(self) -> float:
        """The last step's mean divergence over the valid tokens, in nats, without T^2; all ranks must call it."""
        divergence, tokens = self._mesh.sum_over_pp(self._mesh.sum_over_tokens(self._last.clone())).tolist()
        return divergence / max(1.0, tokens)


class _LastStates:
    """Stands in for the loss: keeps what it is called with."""

    def __init__(self) -> None:
        self.states: States | None = None

    def __call__(
        self,
        hidden: Tensor,
        weight: Tensor,
        group: dist.ProcessGroup | None = None,
        bias: Tensor | None = None,
        softcap: float = 0.0,
    ) -> Tensor:
        """Arguments as of `CrossEntropy`; returns zero, (), in the place of a loss."""
        self.states = States(hidden.flatten(0, 1), weight, bias, softcap)
        return hidden.new_zeros(())


class _Taught:
    """A micro-batch's loss with a teacher's lesson, which has nothing to say of other targets than the next tokens."""

    def __init__(self, loss: Callable[..., Tensor], lesson: "Divergence") -> None:
        self._loss = loss
        self._lesson = lesson

    def __call__(self, hidden: Tensor, weight: Tensor, **others: Any) -> Tensor:
        """Arguments and result as of `CrossEntropy`, whose targets are known."""
        lesson = None if "targets" in others else self._lesson
        return self._loss(hidden, weight, lesson=lesson, **others)


def teacher_job(config: Config) -> Config:
    """A job for the teacher's forward passes on the mesh of `config`, in its precision; reads the teacher's manifest.

    Raises:
        KeelError: the teacher can't be read, or does not fit the job.
    """
    checkpoint = teacher_checkpoint(config)
    model = model_of(read_manifest(checkpoint), checkpoint)
    if model.vocab_size != config.model.vocab_size:
        raise ConfigError(
            f"distillation.teacher: {checkpoint} has model.vocab_size {model.vocab_size}, and this job "
            f"{config.model.vocab_size}; both must give probabilities of the same tokens, so choose a teacher with the "
            "same vocabulary, or set model.vocab_size to its own"
        )
    forward_only = {
        "model": model,
        "activation_checkpoint": ActivationCheckpoint(),
        "fsdp": Fsdp(),
        "expert": Expert(),
        "float8": Float8(),
        "distillation": Distillation(),
        "checkpoint": Checkpoint(init_from=str(checkpoint), load="none"),
    }
    dtype = config.training.compute_dtype
    job = with_keys(
        config.model_copy(update=forward_only),
        training={"dtype": dtype, "reduce_dtype": dtype, "reduction": "fast"},
        optimizer={"qk_clip": 0.0},
        pipeline={"split": None},
        mesh={"ep": 1} if is_described(model) and not model.n_experts else {},
    )
    for key, message in check(job, None):
        raise ConfigError(f"distillation.teacher: {checkpoint} does not fit {key} of this job: {message}")
    return job


def teacher_checkpoint(config: Config) -> Path:
    """The checkpoint that `distillation.teacher` names.

    Raises:
        UserError: there is none.
    """
    return find_checkpoint(standing_for(str(config.distillation.teacher)))


def teacher_seal(config: Config) -> str | None:
    """What identifies the teacher's checkpoint wherever it is; None: the job has no teacher."""
    return None if config.distillation.teacher is None else seal_of(teacher_checkpoint(config))


def _load(job: Config, stages: Mapping[int, nn.Module], mesh: Mesh) -> None:
    nothing = job.job.folder / "teacher"  # so nothing is resumed
    run = Description(job.model_dump(mode="json"), mesh.sizes.axes)
    tensors = {name: tensor for stage in stages.values() for name, tensor in model_tensors(stage)}
    CheckpointManager(nothing, job.checkpoint, run, Log()).resume(tensors)
