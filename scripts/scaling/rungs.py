"""The rungs of a ladder: a job at smaller sizes, made shorter by one of two rules.

- Width: everything inside a block shrinks with `dim` (scripts/widths/widen.py). Sequences, data and vocabulary stay.
- Tokens are in proportion to the FLOPs of a token, so that each rung has as many tokens per parameter as the job
  (Hoffmann et al. 2022).
- Whatever is told in steps or tokens of the run (warm-up, decay, freezing) stays the same part of it.

By the rule "mup", depth stays, and muP, whose base is the job's own or else its `dim`, carries the learning rate over.
The batch is in proportion to the square root of the tokens, as the critical batch size is (Zhang et al. 2024, "How does
critical batch size scale in pre-training?"), and the learning rate to the square root of the batch (Malladi et al.
2022, "On the SDEs and scaling rules for adaptive gradient algorithms").

By the rule "compute", depth shrinks with the width, in whole periods of the layers' pattern, without muP. Batch and
learning rate are in proportion to powers of the training's FLOPs, which DeepSeek LLM found by a grid (Bi et al. 2024,
arXiv:2401.02954, equation 1).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from configs.architectures.parts import head_dim
from configs.errors import ConfigError
from configs.layout import micro_batch_size
from configs.load import LoadedConfig, load
from configs.reading.overrides import words
from configs.schema import Config, Model, Training, is_described
from scripts.command import refuse_keys
from scripts.comparison.runs import own_words
from scripts.widths.widen import width_keys
from trainer.planning.flops import flops_per_token
from trainer.planning.unknown_names import require_known_names

VALIDATIONS = 20
"""A run is compared with the ladder at each twentieth of its length."""
_NARROWEST = 8
"""The smallest rung's width is the job's by this, and the widest's half of it, where heads allow it."""
_LEAST_STEPS = 2 * VALIDATIONS
_BATCH_BY_COMPUTE = 0.3271
_LR_BY_COMPUTE = -0.125

_ON_ONE_AXIS = {
    f"mesh.{axis}": size
    for axis, size in {"dp_replicate": 1, "dp_shard": -1, "cp": 1, "tp": 1, "pp": 1, "ep": 1}.items()
} | {"expert.exchange": "uneven", "fsdp.partition": "rows"}
"""A small model needs no other axis."""
_LEFT_OUT = {"checkpoint.interval": 0, "checkpoint.after_save": "[]", "average.interval": 0, "elastic.enable": "false"}
"""What a rung has no use for."""


@dataclass(frozen=True)
class Rung:
    """A smaller run."""

    dim: int
    n_layers: int
    words: tuple[str, ...]
    """The keys that the command line of `keel train` sets, without seed and folder."""
    job: LoadedConfig
    flops: float
    """FLOPs of its training."""

    def with_seed(self, seed: int, folder: object) -> tuple[str, ...]:
        """The keys for a run with this seed in `folder`."""
        return (*self.words, *own_words(seed, folder))


def load_target(job: str, overrides: Sequence[str]) -> LoadedConfig:
    """The job whose loss is predicted, as for one rank.

    Raises:
        ConfigError: it is not valid, or has what a ladder does not scale.
    """
    refuse_keys(overrides, [*_ON_ONE_AXIS, *_LEFT_OUT], "a ladder's runs choose this themselves; leave it out")
    loaded = load(job, (*overrides, *words(_ON_ONE_AXIS | _LEFT_OUT)), 1)
    if loaded.config.stages:
        raise ConfigError("a ladder has runs of one stage only, and the job has [[stages]]")
    if not loaded.config.validation.interval:
        raise ConfigError("a ladder predicts the validation loss: set validation.interval and validation.sources")
    return loaded


def training_flops(config: Config) -> float:
    """FLOPs of a job's training."""
    return flops_per_token(config.model, config.training.seq_len).causal * _tokens(config)


def _tokens(config: Config) -> int:
    training = config.training
    return training.steps * training.global_batch_size * training.seq_len


def choose_rungs(
    job: str, overrides: Sequence[str], target: Config, sizes: int, dims: Sequence[int] | None, ranks: int, rule: str
) -> list[Rung]:
    """The rungs of a ladder, from the narrowest on.

    Args:
        job, overrides: the job file, and the keys that the command line sets.
        target: their job.
        sizes: how many rungs.
        dims: their widths, if they are not to be chosen.
        ranks: over which each is trained.
        rule: "mup" or "compute", by which they are shorter and smaller.

    Raises:
        ConfigError: the job has not so many widths, or is not valid or too short at one of them.
    """
    model = target.model
    if not is_described(model):
        raise ConfigError(
            f'which widths grow in architecture "{model.architecture}" is not known; a ladder needs "llama"'
        )
    if rule == "mup":
        _require_mup(job, overrides, model)
    if dims is None:
        model, dims = choose_widths(model, sizes)
    elif not all(_is_possible(model, dim) for dim in dims):
        model = with_narrower_heads(model)
    if dims[-1] >= target.model.dim:
        raise ConfigError(f"--dims: {dims[-1]} is not below the job's model.dim {target.model.dim}")
    return [_rung_of(job, overrides, target, model, dim, ranks, rule) for dim in dims]


def _require_mup(job: str, overrides: Sequence[str], model: Model) -> None:
    try:
        load(job, (*overrides, *words(_ON_ONE_AXIS | _LEFT_OUT | width_keys(model, model.dim, with_mup=True))), 1)
    except ConfigError as error:
        raise ConfigError(f"{error}; or take the rule without muP: --rule compute") from None


def choose_widths(model: Model, sizes: int) -> tuple[Model, list[int]]:
    """Widths at nearly equal ratios, from an eighth to a half of the model's where its sizes allow it.

    Returns: the model, whose heads get narrower instead of fewer if fewer would not give enough widths; the widths.

    Raises:
        ConfigError: there are not so many.
    """
    for form in (model, with_narrower_heads(model)):
        possible = [dim for dim in range(2, model.dim) if _is_possible(form, dim)]
        if len(possible) >= sizes:
            return form, _spread(possible, model.dim, sizes)
    raise ConfigError(
        f"only {len(possible)} widths below model.dim {model.dim} keep all sizes whole"
        f" ({', '.join(map(str, possible)) or 'none'}), and --sizes is {sizes}"
    )


def with_narrower_heads(model: Model) -> Model:
    """The model whose heads get narrower, not fewer, at smaller widths."""
    return model.model_copy(update={"mup_base_head_dim": model.mup_base_head_dim or head_dim(model)})


def _is_possible(model: Model, dim: int) -> bool:
    try:
        keys = width_keys(model, dim, with_mup=True)
    except ConfigError:
        return False
    return int(str(keys["model.head_dim"])) % 2 == 0


def _spread(possible: Sequence[int], dim: int, sizes: int) -> list[int]:
    left = list(possible)
    for number in range(sizes):
        wanted = dim / _NARROWEST * (_NARROWEST / 2) ** (number / (sizes - 1))
        left.remove(min(left, key=lambda width: abs(math.log(width / wanted))))
    return [width for width in possible if width not in left]


def depth_keys(model: Model, dim: int) -> dict[str, object]:
    """The keys that make a model as much shallower as it is narrower, with their values.

    Layers are left out in whole periods of what they repeat: their kinds, windows, and rotary embeddings. A layer at
    least is not dense where the job has both kinds.
    """
    period = math.lcm(len(model.layers), model.window_pattern or 1, model.no_rope_every or 1)
    times = dim / model.dim
    dense = max(1, round(model.n_dense_layers * times)) if model.n_dense_layers else 0
    periods = max(math.ceil((dense + 1) / period), round(model.n_layers * times / period))
    n_layers = min(period * periods, model.n_layers)  # a job may have a part of a period
    return {"model.n_layers": n_layers, "model.n_dense_layers": dense}


def _rung_of(job: str, overrides: Sequence[str], target: Config, model: Model, dim: int, ranks: int, rule: str) -> Rung:
    """The job at one width.

    Args:
        job, overrides: the job file, and the keys that the command line sets.
        target: their job.
        model: the target's, as `choose_widths` returns it.
        dim: the width.
        ranks: over which it is trained.
        rule: "mup" or "compute".

    Raises:
        ConfigError: it is not valid there, or would be too short to be of use.
    """
    with_mup = rule == "mup"
    sizes = width_keys(model, dim, with_mup) | ({} if with_mup else depth_keys(model, dim))
    base = (*overrides, *words(_ON_ONE_AXIS | _LEFT_OUT | sizes))
    narrow = load(job, base, 1).config
    seq_len = target.training.seq_len
    cost = flops_per_token(narrow.model, seq_len).causal / flops_per_token(target.model, seq_len).causal
    wanted = _tokens(target) * cost
    compute = cost**2  # since tokens are in proportion to it
    batch = _batch_size(target.training, math.sqrt(cost) if with_mup else compute**_BATCH_BY_COMPUTE, ranks)
    steps = VALIDATIONS * round(wanted / (batch * seq_len) / VALIDATIONS)
    if steps < _LEAST_STEPS:
        raise ConfigError(
            f"at dim {dim} a run would have {wanted / (batch * seq_len):.0f} steps, which is too short: take wider "
            "rungs (--dims), or a longer job"
        )
    keys = dict(_shortened(target, steps, batch, ranks))
    of_batch = math.sqrt(batch / target.training.global_batch_size)
    keys["optimizer.lr"] = repr(target.optimizer.lr * (of_batch if with_mup else compute**_LR_BY_COMPUTE))
    whole = (*base, *words(keys))
    loaded = load(job, whole, ranks)
    try:
        require_known_names(loaded)
    except ConfigError as error:
        raise ConfigError(f"at dim {dim} and n_layers {narrow.model.n_layers}: {error}") from None
    return Rung(dim, narrow.model.n_layers, whole, loaded, training_flops(loaded.config))


def _batch_size(training: Training, times: float, ranks: int) -> int:
    """So much of a job's batch; of whole micro-batches of each rank, unless these are few."""
    wanted = training.global_batch_size * times
    unit = ranks * micro_batch_size(training)
    if wanted < 4 * unit:
        unit = ranks
    return unit * max(1, round(wanted / unit))


def _shortened(target: Config, steps: int, batch: int, ranks: int) -> Iterator[tuple[str, object]]:
    """The keys of a run of `steps` steps that has the same parts as the target's."""
    training = target.training
    yield "training.steps", steps
    yield "training.global_batch_size", batch
    if (most := training.micro_batch_size) != "auto":
        yield "training.micro_batch_size", max(n for n in range(1, most + 1) if batch // ranks % n == 0)
    yield "validation.interval", steps // VALIDATIONS
    in_steps = steps / training.steps
    in_tokens = in_steps * batch / training.global_batch_size
    for unit, times in (("steps", in_steps), ("tokens", in_tokens)):
        for key in (f"warmup_{unit}", f"total_{unit}", f"decay_{unit}"):
            if value := getattr(target.lr_schedule, key):
                yield f"lr_schedule.{key}", max(1, round(value * times))
    if target.optimizer.slow_warmup_steps:
        yield "optimizer.slow_warmup_steps", max(1, round(target.optimizer.slow_warmup_steps * in_steps))
    for number, group in enumerate(target.optimizer.groups):
        if group.freeze_until_step:
            yield f"optimizer.groups.{number}.freeze_until_step", max(1, round(group.freeze_until_step * in_steps))
