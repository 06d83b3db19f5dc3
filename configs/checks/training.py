"""Rules for precision, optimizer and learning-rate schedule."""

from collections.abc import Iterator

from configs.architectures.llama_keys import has_attention
from configs.checks.rule import Problem, Rule
from configs.layout import schedule_lengths
from configs.own_code import is_import_path
from configs.schema import Config, is_described

_MOST_TOKENS = 2**40
"""Limit for a step or a validation: thousands of times what the largest runs take, so more is a slip of the hand."""


def _tokens(config: Config, _: int | None) -> Iterator[Problem]:
    seq_len = config.training.seq_len
    validation = config.validation
    if seq_len > _MOST_TOKENS:
        yield "training.seq_len", f"a sequence of {seq_len:,} tokens fits no machine; at most {_MOST_TOKENS:,}"
        return
    sequences = {"training.global_batch_size": config.training.global_batch_size}
    if validation.interval:
        sequences["validation.sequences"] = validation.sequences
    for key, count in sequences.items():
        if count * seq_len > _MOST_TOKENS:
            yield (
                key,
                f"{count:,} sequences of seq_len {seq_len:,} are {count * seq_len:.3g} tokens at once, more than any "
                f"machine computes; at most {_MOST_TOKENS // seq_len:,} sequences",
            )


def _dtypes(config: Config, _: int | None) -> Iterator[Problem]:
    """A float64 run serves to prove exactness; one narrower stage would silently bring the round-off back."""
    dtypes = {key: getattr(config.training, key) for key in ("dtype", "compute_dtype", "reduce_dtype")}
    wide = [key for key, dtype in dtypes.items() if dtype == "float64"]
    if 0 < len(wide) < len(dtypes):
        narrow = " and ".join(f'{key} is "{dtype}"' for key, dtype in dtypes.items() if key not in wide)
        yield (
            f"training.{wide[0]}",
            f"{', '.join(dtypes)} must all be float64 or none, but {narrow}",
        )


def _optimizer_groups(config: Config, _: int | None) -> Iterator[Problem]:
    patterns = [group.pattern for group in config.optimizer.groups]
    for index, pattern in enumerate(patterns):
        if pattern in patterns[:index]:
            yield f"optimizer.groups.{index}.pattern", f'duplicate pattern "{pattern}"; only the first applies'


def _split_heads(config: Config, _: int | None) -> Iterator[Problem]:
    model = config.model
    if not config.optimizer.split_heads:
        return
    if not is_described(model):
        what = f'Keel does not know where the heads of architecture "{model.architecture}" are'
    elif model.attention == "latent":
        what = "latent attention has no q_proj, k_proj and v_proj whose rows are heads"
    elif "delta" in model.layers:
        what = "layers of kind delta (model.layers) have no q_proj, k_proj and v_proj whose rows are heads"
    else:
        return
    yield "optimizer.split_heads", f"{what}; leave it out"


def _qk_clip(config: Config, _: int | None) -> Iterator[Problem]:
    model = config.model
    if config.optimizer.qk_clip is None:
        return
    if not is_described(model):
        what = f'Keel does not know which weights of architecture "{model.architecture}" queries and keys come from'
    elif not has_attention(model):
        what = "no layer has attention (model.layers), whose queries and keys it scales"
    elif model.qk_norm != "none":
        what = f'model.qk_norm = "{model.qk_norm}" norms queries and keys, whatever the scale of their weights'
    else:
        return
    yield "optimizer.qk_clip", f"{what}; leave it out"


def _lr_schedule(config: Config, _: int | None) -> Iterator[Problem]:
    schedule = config.lr_schedule
    if (schedule.total_steps is None) == (schedule.total_tokens is None):
        which = "neither" if schedule.total_steps is None else "both"
        yield (
            "lr_schedule.total_steps",
            f"a schedule ends at total_steps or at total_tokens, and this one has {which}; set one of them",
        )
        return
    unit = "tokens" if schedule.total_steps is None else "steps"
    lengths = schedule_lengths(schedule)
    rise = f"warmup_{unit} {lengths.warmup}"
    above = f"is above total_{unit} {lengths.total}; change one of them"
    if lengths.warmup > lengths.total:
        yield f"lr_schedule.warmup_{unit}", f"{rise} {above}"
    elif lengths.decay is not None and lengths.warmup + lengths.decay > lengths.total:
        fall = f"decay_{unit} {lengths.decay} = {lengths.warmup + lengths.decay}"
        yield f"lr_schedule.decay_{unit}", f"{rise} + {fall} {above}"


def _average(config: Config, _: int | None) -> Iterator[Problem]:
    average = config.average
    if average.last == 1:
        yield "average.last", "the mean of one update is the weights themselves; set at least 2"
    is_exponential = average.interval and not average.last
    if is_exponential and average.dtype == "float32" and config.training.dtype == "bfloat16":
        yield (
            "average.interval",
            f"with decay {average.decay}, each update of an average in the weights' type, bfloat16, would be rounded "
            'away; set average.dtype = "bfloat16", which rounds stochastically, or training.dtype = "float32"',
        )


def _exact(config: Config, _: int | None) -> Iterator[Problem]:
    norm_type = config.training.norm_type
    if config.training.reduction == "exact" and norm_type % 1 > 0:  # not so for inf
        yield "training.norm_type", f'with reduction "exact" it must be a whole number or inf, got {norm_type}'


def _distillation(config: Config, _: int | None) -> Iterator[Problem]:
    if config.distillation.teacher is not None and is_import_path(config.training.loss):
        yield (
            "distillation.teacher",
            f'the divergence takes a share of the cross-entropy, in whose place this job has "{config.training.loss}"; '
            "leave distillation.teacher out, or training.loss",
        )


RULES: tuple[Rule, ...] = (
    *(_tokens, _dtypes, _optimizer_groups, _split_heads, _qk_clip, _lr_schedule, _average, _distillation, _exact),
)
