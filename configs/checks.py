"""What must hold between keys, each check a function that yields the key to blame and the message.

Sizes are shown with their arithmetic. An option that would do nothing is an error, since whoever set it expects
something of it; but an option may stay set when the mesh or the devices at hand leave it idle, so that one file runs
on any number of ranks.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import PurePath

from configs.layout import (
    decay_steps,
    expert_dim,
    head_dim,
    n_kv_heads,
)
from configs.layout_checks import LAYOUT_RULES, Problem, Rule
from configs.reading.keys import schema_keys
from configs.schema import Config, Source


def check(config: Config, world_size: int | None, complete: bool = True) -> list[Problem]:
    """All that is wrong between the keys.

    Args:
        world_size: None if it is not known yet; then the fewest ranks that the mesh allows are checked.
        complete: False if `config` lacks the keys with errors of their own; what needs one of them is not checked.
    """
    problems: list[Problem] = []
    for rule in _RULES:
        try:
            problems.extend(rule(config, world_size))
        except AttributeError:
            if complete:
                raise
    return problems


def _head_width(config: Config, _: int | None) -> Iterator[Problem]:
    model = config.model
    if model.head_dim is None and model.dim % model.n_heads:
        yield (
            "model.dim",
            f"dim {model.dim} is not divisible by n_heads {model.n_heads} ({model.dim} / {model.n_heads} = "
            f"{model.dim / model.n_heads:.2f}); change one of them, or set head_dim",
        )
    elif head_dim(model) % 2:
        width = "" if model.head_dim else f" = dim {model.dim} / n_heads {model.n_heads}"
        key = "model.head_dim" if model.head_dim else "model.dim"
        yield (
            key,
            f"head_dim {head_dim(model)}{width} is odd; rotary positions turn pairs of features, so it must be even",
        )


def _kv_heads(config: Config, _: int | None) -> Iterator[Problem]:
    model = config.model
    if model.n_heads % n_kv_heads(model):
        yield (
            "model.n_kv_heads",
            f"n_heads {model.n_heads} is not divisible by n_kv_heads {model.n_kv_heads} ({model.n_heads} / "
            f"{model.n_kv_heads} = {model.n_heads / n_kv_heads(model):.2f}): every key head serves as many query heads",
        )


def _experts(config: Config, _: int | None) -> Iterator[Problem]:
    model = config.model
    if model.n_experts is None:
        for name in ("experts_per_token", "n_shared_experts", "expert_dim", "n_dense_layers", "router"):
            if getattr(model, name) != type(model).model_fields[name].default:
                yield f"model.{name}", f"{name} does nothing without experts: set model.n_experts, or leave it out"
        return
    if model.experts_per_token > model.n_experts:
        yield (
            "model.experts_per_token",
            f"experts_per_token {model.experts_per_token} is above n_experts {model.n_experts}: each is chosen once",
        )
    if model.n_dense_layers >= model.n_layers:
        yield (
            "model.n_dense_layers",
            f"n_dense_layers {model.n_dense_layers} of n_layers {model.n_layers} leaves no layer for the experts",
        )
    if model.n_dense_layers == 0 and expert_dim(model) != model.ffn_dim:
        yield (
            "model.expert_dim",
            f"with n_dense_layers = 0 no layer has the dense feed-forward of ffn_dim {model.ffn_dim}: set ffn_dim = "
            f"{model.expert_dim} and leave expert_dim out, or set n_dense_layers",
        )


def _router(config: Config, _: int | None) -> Iterator[Problem]:
    model, router = config.model, config.model.router
    if model.n_experts is None:
        return
    if model.experts_per_token == 1 and router.renormalize:
        yield (
            "model.router.renormalize",
            "with experts_per_token = 1 renormalize makes every weight 1, from which the router learns nothing: set "
            "renormalize = false",
        )
    for name, rule in {"auxiliary_loss_weight": "auxiliary_loss", "bias_update_rate": "bias"}.items():
        if getattr(router, name) != type(router).model_fields[name].default and router.load_balance != rule:
            yield (
                f"model.router.{name}",
                f'{name} does nothing with load_balance "{router.load_balance}", only with "{rule}"; leave it out',
            )


def _rope_scaling(config: Config, _: int | None) -> Iterator[Problem]:
    scaling = config.model.rope_scaling
    if scaling and scaling.low_freq_factor >= scaling.high_freq_factor:
        yield (
            "model.rope_scaling.high_freq_factor",
            f"high_freq_factor {scaling.high_freq_factor} must be above low_freq_factor {scaling.low_freq_factor}",
        )


def _dtypes(config: Config, _: int | None) -> Iterator[Problem]:
    """A float64 run is there to prove something exact; one narrower stage would bring the round-off back unseen."""
    dtypes = {key: getattr(config.training, key) for key in ("dtype", "compute_dtype", "reduce_dtype")}
    wide = [key for key, dtype in dtypes.items() if dtype == "float64"]
    if 0 < len(wide) < len(dtypes):
        narrow = " and ".join(f'{key} is "{dtype}"' for key, dtype in dtypes.items() if key not in wide)
        yield (
            f"training.{wide[0]}",
            f"float64 is for proofs, so {', '.join(dtypes)} are all float64 or none, but {narrow}",
        )


def _numerics(config: Config, _: int | None) -> Iterator[Problem]:
    training = config.training
    if training.tf32 and training.compute_dtype != "float32":
        yield "training.tf32", f'tf32 does nothing with compute_dtype "{training.compute_dtype}", only with "float32"'
    if config.job.device == "cpu":
        for name, instead in {
            "tf32": "has no such products",
            "deterministic": "gives the same bits every time",
        }.items():
            if getattr(training, name):
                yield f"training.{name}", f'{name} does nothing with job.device = "cpu", which {instead}; leave it out'


def _tokenizer(config: Config, _: int | None) -> Iterator[Problem]:
    path, train_on = config.tokenizer.path, config.tokenizer.train_on
    if train_on and path is None:
        yield "tokenizer.train_on", "train_on needs path: where the trained tokenizer is to be kept"
    if train_on and path is not None and path.endswith(".json"):
        yield "tokenizer.train_on", f'train_on makes a SentencePiece model: path "{path}" should end in .model'
    readers = [f'source "{source.name}"' for source in config.data.sources if source.kind != "synthetic"]
    if config.data.prepare:
        readers.append("[data.prepare]")
    if readers and path is None and not train_on:
        yield "tokenizer.path", f"a tokenizer is needed for {', '.join(readers)}: set tokenizer.path"


def _sources(config: Config, _: int | None) -> Iterator[Problem]:
    for table, sources in (("data", config.data.sources), ("validation", config.validation.sources)):
        names = Counter(source.name for source in sources)
        for index, source in enumerate(sources):
            key = f"{table}.sources.{index}"
            yield from _source(key, source)
            if names[source.name] > 1 and source.name in [other.name for other in sources[:index]]:
                yield f"{key}.name", f'a source named "{source.name}" stands above already; names must differ'


def _source(key: str, source: Source) -> Iterator[Problem]:
    if source.kind == "synthetic" and source.path is not None:
        yield f"{key}.path", f'source "{source.name}": synthetic tokens are read from nowhere; leave path out'
    if source.kind != "synthetic" and not source.path:
        what = "the folder of its token files" if source.kind == "tokens" else "a file, a folder, or hub:NAME"
        yield f"{key}.path", f'source "{source.name}" of kind "{source.kind}" needs path: {what}'
    for name, kind in {"text_key": "text", "virtual_shards": "text", "document_length": "synthetic"}.items():
        if source.kind != kind and getattr(source, name) != schema_keys()[f"data.sources.N.{name}"].default:
            yield (
                f"{key}.{name}",
                f'source "{source.name}": {name} does nothing with kind "{source.kind}", only with "{kind}"',
            )


def _prepare(config: Config, _: int | None) -> Iterator[Problem]:
    prepare = config.data.prepare
    if prepare is None:
        return
    if not prepare.input:
        yield "data.prepare.input", "input names no text; give files, folders, hub:NAME or python_stdlib"
    if prepare.validation_fraction == 1:
        yield "data.prepare.validation_fraction", "validation_fraction 1 leaves nothing to train on"
    held_out = PurePath(prepare.output) / "validation"
    for index, source in enumerate(config.validation.sources):
        if prepare.validation_fraction == 0 and source.path and PurePath(source.path) == held_out:
            yield (
                f"validation.sources.{index}.path",
                f"nothing will be in {held_out}: data.prepare.validation_fraction is 0; set it, 0.02 for example",
            )


def _validation(config: Config, _: int | None) -> Iterator[Problem]:
    if config.validation.interval and not config.validation.sources:
        yield (
            "validation.interval",
            f"interval {config.validation.interval} needs [[validation.sources]]; 0: no validation",
        )


def _lr_schedule(config: Config, _: int | None) -> Iterator[Problem]:
    schedule = config.lr_schedule
    warmup, total, stable_decay = schedule.warmup_steps, schedule.total_steps, schedule.name == "warmup_stable_decay"
    if warmup > total:
        yield "lr_schedule.warmup_steps", f"warmup_steps {warmup} is above total_steps {total}"
    elif stable_decay and warmup + decay_steps(schedule) > total:
        decay = decay_steps(schedule)
        yield (
            "lr_schedule.decay_steps",
            f"warmup_steps {warmup} + decay_steps {decay} = {warmup + decay} is above total_steps {total}",
        )
    if schedule.decay_steps is not None and not stable_decay:
        yield (
            "lr_schedule.decay_steps",
            f'decay_steps does nothing with name "{schedule.name}", only with "warmup_stable_decay"; leave it out',
        )


def _optimizer_groups(config: Config, _: int | None) -> Iterator[Problem]:
    patterns = [group.pattern for group in config.optimizer.groups]
    for index, pattern in enumerate(patterns):
        if pattern in patterns[:index]:
            yield f"optimizer.groups.{index}.pattern", f'the pattern "{pattern}" stands above already; the first counts'


def _profile(config: Config, _: int | None) -> Iterator[Problem]:
    profile, steps = config.profile, config.training.steps
    last = profile.start_step + profile.steps - 1
    if profile.memory_snapshot and not profile.start_step:
        yield "profile.memory_snapshot", "memory_snapshot needs start_step above 0: it covers the steps of the trace"
    if profile.memory_snapshot and config.job.device == "cpu":
        yield "profile.memory_snapshot", 'memory_snapshot records CUDA memory: it does nothing with job.device = "cpu"'
    if profile.start_step and last > steps:
        yield "profile.start_step", f"the trace would end at step {last}, after training.steps {steps}"


def _job(config: Config, _: int | None) -> Iterator[Problem]:
    name = config.job.name
    if config.job.output_dir is None and (name in ("", ".", "..") or "/" in name or "\0" in name):
        yield (
            "job.name",
            f'the run folder is runs/<name>, so name "{name}" must be a plain folder name; or set output_dir',
        )


def _checkpoint(config: Config, _: int | None) -> Iterator[Problem]:
    table, load, validated = config.checkpoint, config.checkpoint.load, config.validation.interval
    if isinstance(load, int) and load < 0:
        yield "checkpoint.load", f"there is no step {load}"
    if table.init_from is not None and load not in ("latest", "none"):
        yield "checkpoint.init_from", f"init_from is for a run that starts anew, but load is {load}; leave one out"
    if table.go_back and load in ("latest", "none"):
        yield "checkpoint.go_back", f"go_back does nothing with load {load}, only with a step or a folder; leave it out"
    for name in ("keep_every", "keep_best"):
        if getattr(table, name) and not table.keep_last:
            yield f"checkpoint.{name}", f"{name} does nothing with keep_last = 0, which keeps all; set keep_last"
    if table.keep_best and (not validated or not table.interval or table.interval % validated):
        yield (
            "checkpoint.keep_best",
            f"keep_best needs a validation at every checkpoint, but validation.interval {validated} does not divide "
            f"checkpoint.interval {table.interval}",
        )
    if table.export_every and (not table.interval or table.export_every % table.interval):
        yield (
            "checkpoint.export_every",
            f"an export is made of a checkpoint, but export_every {table.export_every} is no multiple of interval "
            f"{table.interval}",
        )
    if table.optimizer_dtype == config.training.dtype:
        yield "checkpoint.optimizer_dtype", 'optimizer_dtype does nothing here: training.dtype is "bfloat16", too'


def _spikes(config: Config, _: int | None) -> Iterator[Problem]:
    spikes = config.fault.spikes
    of_rewind = ("rewind_interval", "max_rewinds")
    idle = {"none": ("threshold", "window", *of_rewind), "skip": of_rewind, "rewind": ()}
    for name in idle[spikes.action]:
        if getattr(spikes, name) != type(spikes).model_fields[name].default:
            yield f"fault.spikes.{name}", f'{name} does nothing with action "{spikes.action}"; leave it out'


_RULES: tuple[Rule, ...] = (
    _job,
    _checkpoint,
    _head_width,
    _kv_heads,
    _experts,
    _router,
    _rope_scaling,
    _tokenizer,
    _sources,
    _prepare,
    _dtypes,
    _numerics,
    _optimizer_groups,
    _lr_schedule,
    *LAYOUT_RULES,
    _validation,
    _profile,
    _spikes,
)
