"""Checks what a job names of the user's own, with torch, before anything is built: the model, its rule, loss, schedule.

Everything runs on the meta device or on a handful of numbers, so that `--validate` can ask it, too.
"""

import math
from collections.abc import Callable, Iterator

import torch
from torch import nn

from configs.errors import ConfigError
from configs.layout import schedule_lengths
from configs.own_code import code_of, is_import_path, reason_of
from configs.plan import Plan, plan_of
from configs.schema import Config, LrSchedule, OwnModel
from models import build_model
from models.own_class import try_forward
from parallelisms.pipeline import own_stages
from trainer.loss import own_values
from trainer.lr_schedule import learning_rate
from trainer.optimizers.rule import Rule
from trainer.planning.skeleton import skeleton

Fault = tuple[str, str]
"""Dotted key to blame, message."""
_FORWARD_TOKENS = 8


def faults_of_own_code(config: Config) -> Iterator[Fault]:
    """Yield what is wrong with the user's own code, or asked of it and impossible."""
    if is_import_path(config.optimizer.name):
        yield from _rule(config.optimizer.name, config.fsdp.partition)
    if is_import_path(config.lr_schedule.name):
        yield from fault_of("lr_schedule.name", lambda: _check_schedule(config.lr_schedule))
    if is_import_path(config.training.loss):
        yield from fault_of("training.loss", lambda: _check_loss(config.training.loss, config.model.vocab_size))
    if isinstance(config.model, OwnModel):
        yield from _model(config)


def fault_of(key: str, check: Callable[[], object]) -> Iterator[Fault]:
    """What a check of this key finds wrong."""
    try:
        check()
    except ConfigError as error:
        yield key, str(error)


# --------------------------------------------------------------------------- the model


def _model(config: Config) -> Iterator[Fault]:
    plan = skeleton(config.model).plan
    asked = list(_asked_for(config, plan))
    yield from asked
    if not asked:
        yield from fault_of("model.architecture", lambda: _check_forward(config))


def _asked_for(config: Config, plan: Plan) -> Iterator[Fault]:
    """What the job asks for that the plan does not offer."""
    name = config.model.architecture
    tp = config.mesh.tp
    model = skeleton(config.model)
    for parameter, shape in model.shapes.items() if tp > 1 else ():
        dim = model.tp_dimension(parameter)
        if dim is not None and shape[dim] % tp:
            yield "mesh.tp", f"tp {tp} does not divide {shape[dim]}, a size of {parameter}; change one of them"
    if config.mesh.pp > 1:
        yield from (("mesh.pp", f"pp {config.mesh.pp} {reason}") for reason in _why_not_cut(config, plan))
    needs_attention = {
        "mesh.cp": config.mesh.cp > 1,
        "data.document_mask": config.data.document_mask,
        "attention.backend": config.attention.backend != "auto",
    }
    for key, is_asked in needs_attention.items():
        if is_asked and not plan.attention:
            yield (
                key,
                f'{key} replaces the function that mixes tokens, and the plan of "{name}" names no module that has it '
                "(attention); leave the key out, or give the model's attention an attribute attend",
            )


def _why_not_cut(config: Config, plan: Plan) -> Iterator[str]:
    if not plan.can_be_cut:
        yield (
            f'cuts the model into stages, which the plan of "{config.model.architecture}" does not allow (can_be_cut), '
            "as where embedding and head share one matrix; set pp = 1, and dp_shard or tp for the ranks"
        )
    parts = (*plan.blocks, *plan.before_blocks, *plan.after_blocks)
    for name in skeleton(config.model).shapes:
        if not name.startswith(tuple(f"{part}." for part in parts)):
            yield (
                f"cuts the model into stages, but {name} is in no part of the plan (before, blocks, after), so each "
                "stage would have its own; name its module in the plan, or set pp = 1"
            )
            return


def _check_forward(config: Config) -> None:
    with torch.device("meta"):
        model = build_model(config.model)
    stages: dict[int, nn.Module] = {}
    for rank in range(config.mesh.pp):
        stages |= own_stages(model, config, rank)
    try_forward([stages[number] for number in sorted(stages)], min(config.training.seq_len, _FORWARD_TOKENS))
    names = {name for stage in stages.values() for name in plan_of(stage).blocks}
    if missing := [name for name in plan_of(model).blocks if name not in names]:
        raise ConfigError(f"the plans of the pipeline's stages lack {missing[0]}")


# --------------------------------------------------------------------------- optimizer, schedule, loss


def _rule(name: str, partition: str) -> Iterator[Fault]:
    found = code_of(name)
    if not isinstance(found, type) or not issubclass(found, Rule):
        yield (
            "optimizer.name",
            f'"{name}" is no class derived from trainer.optimizers.rule.Rule, which says what it needs',
        )
    elif missing := sorted(getattr(found, "__abstractmethods__", ())):
        yield "optimizer.name", f'"{name}" lacks the methods {", ".join(missing)} of trainer.optimizers.rule.Rule'
    elif found.hidden_matrices_only and partition == "rows":
        yield (
            "optimizer.name",
            f'"{name}" needs whole matrices, but partition "rows" cuts them; set fsdp.partition = "owner" and '
            "mesh.dp_shard = 1, with dp_replicate for the ranks",
        )


def _check_schedule(schedule: LrSchedule) -> None:
    lengths = schedule_lengths(schedule)
    for step in (0, lengths.warmup, (lengths.warmup + lengths.total) // 2, lengths.total):
        try:
            rate = learning_rate(schedule, 1.0, step)
        except Exception as error:
            raise ConfigError(f'"{schedule.name}" raises {reason_of(error)}') from None
        if not isinstance(rate, float) or not math.isfinite(rate) or rate < 0:
            raise ConfigError(
                f'"{schedule.name}" makes the learning rate of step {step} {rate!r} times its peak; it must map the '
                "progress, from 0 to 1, to a number that is at least 0"
            )


def _check_loss(name: str, vocab_size: int) -> None:
    logits = torch.linspace(-1, 1, 2 * vocab_size).view(2, vocab_size).requires_grad_()
    try:
        values = own_values(code_of(name), logits, torch.tensor([0, vocab_size - 1]), name)
        values.sum().backward()
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f'"{name}" raises {reason_of(error)}') from None
