"""A teacher: a model whose probabilities of the next token are learned beside the text (`distillation.py`).

It is never trained. It is split over the job's mesh as the model is, and runs forward on the tokens of each micro-batch
before the model does; the loss then multiplies its last hidden states by its head, a chunk of tokens at a time. With a
pipeline, the teacher's forward passes of a step's micro-batches come before the model's.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from checkpoint.export.model_files import model_of
from checkpoint.find import find_checkpoint
from checkpoint.manifest import Damaged, read_manifest, seal_of
from checkpoint.reader import Description, Log, Reader
from configs.checks import check
from configs.errors import ConfigError, UserError
from configs.places import standing_for
from configs.schema import (
    ActivationCheckpoint,
    AnyModel,
    Attention,
    Average,
    Checkpoint,
    Config,
    Distillation,
    Expert,
    Float8,
    Fsdp,
    HfModel,
    Optimizer,
    table_of_model,
)
from configs.table import with_keys
from models.hf.family import without_training
from parallelisms.fsdp import finish_gathers, freeze, keep_head
from parallelisms.init import allocate
from parallelisms.mesh import Mesh
from parallelisms.passes import Call
from parallelisms.pipeline import Relay
from parallelisms.ranges import named_range
from parallelisms.ranks import Json
from parallelisms.streams import queue_gathers
from trainer.distillation import Divergence, States
from trainer.planning.skeleton import skeleton
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
        self.states = States(hidden.flatten(0, 1), weight, bias, softcap, group)
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
    """A job for the teacher's forward passes on the mesh of `config`, in its precision.

    Raises:
        KeelError: the teacher can't be read, or has another vocabulary.
    """
    teacher = str(config.distillation.teacher)
    known = _known(teacher)
    model = known.model
    if model.vocab_size != config.model.vocab_size:
        raise ConfigError(
            f'distillation.teacher is "{teacher}", with model.vocab_size {model.vocab_size}, and this job has '
            f"{config.model.vocab_size}; both must give probabilities of the same tokens, so choose a teacher with "
            "this vocabulary, or set model.vocab_size and the tokenizer to its own"
        )
    forward_only = {
        "model": model,
        "optimizer": Optimizer(lr=1.0),
        "average": Average(),
        "activation_checkpoint": ActivationCheckpoint(),
        "attention": Attention(),
        "fsdp": Fsdp(),
        "expert": Expert(),
        "float8": Float8(),
        "distillation": Distillation(),
        "checkpoint": Checkpoint(init_from=known.place, load="none"),
    }
    dtype = config.training.compute_dtype
    chosen = config.training.micro_batch_size
    micro_batch_size = 1 if chosen == "auto" else chosen  # as long as it is open, the least
    return with_keys(
        config.model_copy(update=forward_only),
        training={"dtype": dtype, "reduce_dtype": dtype, "reduction": "fast", "micro_batch_size": micro_batch_size},
        pipeline={"split": None},
        mesh={} if skeleton(model).plan.experts else {"ep": 1},
    )


def fits_teacher(config: Config) -> bool:
    """Whether the rules between keys let the teacher run forward on the job's mesh; true without one."""
    return config.distillation.teacher is None or not check(teacher_job(config), None)


@dataclass(frozen=True)
class _Known:
    """The checkpoint that a teacher's path names."""

    place: str
    """Its own path, or its place in object storage."""
    seal: str
    tokenizer_hash: str | None
    model: AnyModel


_KNOWN: dict[str, _Known] = {}
"""Those that this process has read, by path: a search of plans asks often, and of a run another may be newest later."""


def _known(teacher: str) -> _Known:
    """Raises UserError if there is no such checkpoint, or it can't be read."""
    if teacher not in _KNOWN:
        know_teacher(teacher, told_teacher(teacher))
    return _KNOWN[teacher]


def told_teacher(teacher: str) -> Json:
    """What a rank that sees the teacher's folder tells the others.

    Raises:
        UserError: there is no checkpoint, or it can't be read.
    """
    source = standing_for(teacher)
    with _named_in_errors():
        checkpoint = find_checkpoint(source)
        inside = checkpoint.relative_to(source).as_posix()
        place = teacher if inside == "." else f"{teacher.rstrip('/')}/{inside}"
        manifest = read_manifest(checkpoint)
        model = model_of(manifest, checkpoint).model_dump(mode="json")
        return [place, seal_of(checkpoint), manifest.tokenizer_hash, model]


@contextmanager
def _named_in_errors() -> Iterator[None]:
    """Say by which key a checkpoint is named that can't be read: those of the run itself are whole."""
    try:
        yield
    except Damaged as error:
        raise UserError(f"distillation.teacher: {error.which}; name another checkpoint") from None
    except UserError as error:
        raise UserError(f"distillation.teacher: {error}") from None


def know_teacher(teacher: str, told: Json) -> None:
    """Keep what `told_teacher` has returned."""
    place, seal, tokenizer_hash, model = cast(list[Any], told)
    table = table_of_model(model).model_validate(model)
    if isinstance(table, HfModel):  # it may have dropout: a teacher is not trained
        table = without_training(table)
    _KNOWN[teacher] = _Known(place, seal, tokenizer_hash, table)


def require_same_tokens(config: Config, tokenizer_hash: str | None) -> None:
    """Raise ConfigError if the teacher learned another tokenizer's tokens than the job's, whose hash is given."""
    teacher = config.distillation.teacher
    theirs = _known(teacher).tokenizer_hash if teacher else None
    if theirs and tokenizer_hash and theirs != tokenizer_hash and not config.job.allow_run_change:
        raise ConfigError(
            f'distillation.teacher is "{teacher}", which was trained with another tokenizer, so its probabilities are '
            "of other tokens; set tokenizer.path to its own or, if both files give the same tokens, "
            "--job.allow_run_change true"
        )


def teacher_seal(config: Config) -> str | None:
    """What identifies the teacher's checkpoint wherever it is; None: the job has no teacher."""
    teacher = config.distillation.teacher
    return None if teacher is None else _known(teacher).seal


def _load(job: Config, stages: Mapping[int, nn.Module], mesh: Mesh) -> None:
    nothing = job.job.folder / "teacher"  # so nothing is resumed
    run = Description(job.model_dump(mode="json"), mesh.sizes.axes)
    tensors = {name: tensor for stage in stages.values() for name, tensor in model_tensors(stage)}
    everyone = dist.group.WORLD
    assert everyone is not None
    with _named_in_errors():
        Reader(nothing, job.checkpoint, run, Log(), everyone).load(tensors)
