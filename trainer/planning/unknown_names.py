"""Names in a job that only the model or torch knows: patterns of parameters, and ops.

They are checked before anything is built, and by `--validate`, which needs torch for it.
"""

from collections.abc import Iterator

import torch

import trainer.step  # noqa: F401  # the ops of all techniques must be known
from configs.checks import check
from configs.errors import ConfigError, UserError, quotient
from configs.load import LoadedConfig
from configs.plan import plan_of
from configs.reading.keys import key_path
from configs.schema import Config, HfModel, OwnModel, is_described
from models import build_model
from models.hf.check import require_attention, require_positions
from parallelisms.activation_checkpoint import select
from trainer.optimizers.build import frozen_until
from trainer.planning.own_code import Fault, fault_of, faults_of_own_code
from trainer.planning.skeleton import Skeleton, skeleton
from trainer.teacher import teacher_job


def require_known_names(job: LoadedConfig) -> None:
    """Check the patterns of `optimizer.groups`, and the ops and matrices of `[activation_checkpoint]`.

    Raises:
        ConfigError: lists all mistakes, one per line, each with where its key was set.
    """
    mistakes = [f"{job.layers.where(key_path(key))}: {message}" for key, message in _mistakes(job.config)]
    if mistakes:
        raise ConfigError("\n".join(mistakes))


def _mistakes(config: Config) -> Iterator[Fault]:
    """Yield a key and what is wrong with it."""
    table = config.activation_checkpoint
    if not is_described(config.model):
        key = "model.architecture" if isinstance(config.model, OwnModel) else "model.hf_config"
        faults = list(fault_of(key, lambda: _require_supported(config)))
        yield from faults
        if faults:
            return
    if isinstance(config.model, HfModel):
        yield from fault_of("training.seq_len", lambda: require_positions(config))
    yield from faults_of_own_code(config)
    yield from _of_teacher(config)
    if config.optimizer.groups:
        names = list(skeleton(config.model).shapes)
        yield from fault_of("optimizer.groups", lambda: frozen_until(config.optimizer, names))
    if table.mode == "selective" and (table.save_ops or table.save_every_nth_matmul > 1):
        key = "save_ops" if table.save_ops else "save_every_nth_matmul"
        yield from fault_of(f"activation_checkpoint.{key}", lambda: _select(config))


def _of_teacher(config: Config) -> Iterator[Fault]:
    """Why the teacher, if it is there, can't run forward on the job's mesh and data."""
    teacher = config.distillation.teacher
    if teacher is None:
        return
    key = "distillation.teacher"
    try:
        job = teacher_job(config)
    except ConfigError as error:
        yield key, str(error)
        return
    except UserError:  # a launch says so; as data, it may be made before that
        return
    for other, message in (*check(job, None), *_mistakes(job)):
        yield key, f'distillation.teacher is "{teacher}", which does not fit {other}: {message}'


def _require_supported(config: Config) -> None:
    """Check that a model without a description can be built, and split as the mesh asks.

    Raises:
        ConfigError: it can't.
    """
    plan = skeleton(config.model).plan
    if config.mesh.tp > 1 and plan.cannot_split:
        raise ConfigError(
            f"mesh.tp is {config.mesh.tp}, but {plan.cannot_split}; set tp = 1, and dp_shard for the ranks"
        )
    if config.mesh.tp > 1:
        _require_features(config.mesh.tp, skeleton(config.model))
    if config.mesh.pp > 1 and plan.why_no_pipeline:
        raise ConfigError(
            f"mesh.pp is {config.mesh.pp}, but {plan.why_no_pipeline}; with pp = 1, dp_shard or tp take the ranks"
        )
    if config.mesh.ep > 1:
        _require_distributable(config.mesh.ep, skeleton(config.model))
    if isinstance(config.model, HfModel) and (config.mesh.cp > 1 or config.data.document_mask):
        require_attention(config)


def _require_distributable(ep: int, model: Skeleton) -> None:
    """Check that expert parallelism can distribute a model's experts, the same number to each rank.

    Raises:
        ConfigError: it can't.
    """
    why_not = model.plan.why_not_distributed or ("" if model.plan.experts else "the model has no experts in its plan")
    if why_not:
        raise ConfigError(f"mesh.ep is {ep}, but {why_not}; set ep = 1: dp_shard shards experts, too")
    for name, shape in model.shapes.items():
        if model.is_of_experts(name) and shape[0] % ep:
            raise ConfigError(
                f"mesh.ep {ep} does not divide the {shape[0]} experts of {name} ({quotient(shape[0], ep)}), but each "
                "rank must hold the same number of experts; change mesh.ep"
            )


def _require_features(tp: int, model: Skeleton) -> None:
    """Check that tensor parallelism can split a model's experts, into parts of one size.

    Raises:
        ConfigError: it can't.
    """
    for name, shape in model.shapes.items():
        dim = model.tp_dimension(name)
        if model.is_of_experts(name) and dim is not None and shape[dim] % tp:
            raise ConfigError(
                f"mesh.tp {tp} does not divide the {shape[dim]} features of {name} ({quotient(shape[dim], tp)}), by "
                "which it splits each expert; change mesh.tp"
            )


def _select(config: Config) -> None:
    with torch.device("meta"):
        model = build_model(config.model)
    plan = plan_of(model)
    for name in plan.blocks:
        select(model.get_submodule(name), config.activation_checkpoint, plan.save_ops)
