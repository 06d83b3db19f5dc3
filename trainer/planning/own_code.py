"""Checks what a job names of the user's own, with torch, before anything is built: the model, its rule, loss, schedule.

Everything runs on the meta device or on a handful of numbers, so that `--validate` can ask it, too.
"""

import math
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from inspect import signature

import torch
from torch import nn
from torch.optim import Optimizer as TorchOptimizer

from configs.errors import ConfigError
from configs.layout import schedule_lengths
from configs.own_code import code_of, is_import_path, reason_of
from configs.plan import Plan, plan_of
from configs.schema import Config, LrSchedule, Optimizer, OwnModel
from models import build_model
from models.own_class import try_forward
from parallelisms.pipeline import own_stages
from parallelisms.sums import sums_of
from trainer.loss import own_values
from trainer.lr_schedule import learning_rate
from trainer.optimizers.elementwise import require_elementwise
from trainer.optimizers.from_torch import arguments, keys_of
from trainer.optimizers.rule import Rule, rule_of
from trainer.planning.skeleton import skeleton

Fault = tuple[str, str]
"""Dotted key to blame, message."""
_FORWARD_TOKENS = 8


def faults_of_own_code(config: Config) -> Iterator[Fault]:
    """Yield what is wrong with the user's own code, or asked of it and impossible."""
    if is_import_path(config.optimizer.name):
        yield from _rule(config)
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


def _rule(config: Config) -> Iterator[Fault]:
    name = config.optimizer.name
    found = code_of(name)
    if isinstance(found, type) and issubclass(found, TorchOptimizer):
        faults = list(_torch_optimizer(config, found))
        yield from faults
        if faults:
            return
    elif not isinstance(found, type) or not issubclass(found, Rule):
        yield (
            "optimizer.name",
            f'"{name}" is neither a class of torch optimizers nor one derived from trainer.optimizers.rule.Rule; it '
            "must be one of them",
        )
        return
    elif missing := sorted(getattr(found, "__abstractmethods__", ())):
        yield "optimizer.name", f'"{name}" lacks the methods {", ".join(missing)} of trainer.optimizers.rule.Rule'
        return
    elif config.optimizer.options:
        yield "optimizer.options", f'"{name}" is a Rule, which reads the other keys of [optimizer]; leave options out'
    rule = rule_of(name)(config.optimizer, sums_of(config.training))
    if not rule.hidden_matrices_only:
        yield from fault_of("optimizer.name", lambda: require_elementwise(rule, getattr(torch, config.training.dtype)))
    elif config.fsdp.partition == "rows":
        yield (
            "optimizer.name",
            f'"{name}" needs whole matrices, but partition "rows" cuts them; set fsdp.partition = "owner" and '
            "mesh.dp_shard = 1, with dp_replicate for the ranks",
        )


def _torch_optimizer(config: Config, kind: type[TorchOptimizer]) -> Iterator[Fault]:
    """What a job asks of a class of torch optimizers that it does not do."""
    optimizer = config.optimizer
    name = kind.__name__
    keys = keys_of(kind)
    if "lr" not in keys:
        yield "optimizer.name", f"{name} takes no lr, which the schedule sets for each step"
        return
    closure = signature(kind.step).parameters.get("closure")
    if closure and closure.default is closure.empty:
        yield "optimizer.name", f"{name} needs a closure, to compute gradients several times in a step; Keel has none"
        return
    decays = [optimizer.weight_decay, *(group.weight_decay for group in optimizer.groups)]
    if any(decays) and "weight_decay" not in keys:
        yield "optimizer.weight_decay", f"{name} takes no weight_decay; set it to 0, here and in optimizer.groups"
    if optimizer.weight_decay_by != "lr":
        yield (
            "optimizer.weight_decay_by",
            f"what {name} multiplies weight_decay by is for itself to say; leave weight_decay_by out",
        )
    if optimizer.momentum != Optimizer.model_fields["momentum"].default:
        yield "optimizer.momentum", f"momentum is an option of such a class; set optimizer.options.momentum of {name}"
    if config.training.reduction == "exact":
        yield (
            "training.reduction",
            f'"exact" promises the same bits on every mesh, but on a CPU {name} rounds the last elements of a part '
            "differently; take an optimizer of Keel's, or another reduction",
        )
    yield from _options(optimizer, kind)


def _options(optimizer: Optimizer, kind: type[TorchOptimizer]) -> Iterator[Fault]:
    keys = keys_of(kind)
    options = [option for option in arguments(kind) if option not in keys]
    for option in optimizer.options:
        key = f"optimizer.options.{option}"
        if option in keys:
            yield key, f"{option} is a key of [optimizer] itself; set optimizer.{option}"
        elif option not in options:
            near = get_close_matches(option, options, 1)
            advice = f"did you mean {near[0]}?" if near else f"it has {', '.join(options) or 'none'}"
            yield key, f"{kind.__name__} has no option {option}; {advice}"


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
