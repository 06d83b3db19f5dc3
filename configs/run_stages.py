"""The stages of a run: from which step on which keys apply (docs/configs.md).

A stage sets keys on top of what applied before it, and the result is an ordinary job, checked like any other. The
table [lr_schedule] is the exception: a stage that sets a key of it begins another schedule, in which nothing is left of
the one before, and whose steps count from the stage's first.
"""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import pairwise
from operator import getitem
from typing import Any

from configs.checks.rule import Problem
from configs.errors import ConfigError
from configs.layout import micro_batch_size, tokens_per_step
from configs.own_code import is_admitted, is_import_path, takes
from configs.reading.keys import KeyPath, dotted, find, leaves
from configs.reading.merge import Layers
from configs.reading.toml_text import text_or_not_set
from configs.run_change import run_key_diff
from configs.schema import Config, Source

TABLES = ("model", "data", "training", "optimizer", "lr_schedule", "validation")
CHANGEABLE = (
    *("training.seq_len", "training.global_batch_size", "training.micro_batch_size", "training.max_norm"),
    *("training.z_loss_weight", "data.sources", "data.document_mask", "lr_schedule", "optimizer.lr"),
    *("optimizer.weight_decay", "optimizer.groups", "model.rope_theta", "model.rope_scaling", "validation"),
)
"""The keys and tables that a stage may set; all others are of the whole run."""

MOST_STAGES = 256
"""Limit for the stages of a run, each of which is checked as a job; more is a slip of the hand."""


@dataclass(frozen=True)
class Border:
    """Where a stage begins."""

    after: int = 0
    """Steps of the run before it."""
    tokens: int = 0
    """Tokens of the run before it."""
    schedule_after: int = 0
    """Steps of the run before its learning-rate schedule begins."""
    schedule_tokens: int = 0
    """Tokens of the run before its learning-rate schedule begins."""
    table: int = field(default=-1, compare=False)
    """Index of its table in [[stages]]; -1: the first stage has none."""


@dataclass(frozen=True)
class RunStage:
    """A stage: the job from one step to the next stage."""

    border: Border
    config: Config
    """The keys that apply; it has no stages of its own."""
    layers: Layers = field(default_factory=lambda: Layers(""), compare=False, repr=False)
    """Where each key was set."""

    @property
    def first_step(self) -> int:
        """Number of its first step."""
        return self.border.after + 1

    def __str__(self) -> str:
        training = self.config.training
        sources = ", ".join(f"{source.name} {source.weight:g}" for source in self.config.data.sources)
        return (
            f"{training.global_batch_size:,} sequences of {training.seq_len:,} tokens per step; sources {sources}; "
            f"peak learning rate {self.config.optimizer.lr:g}"
        )

    def schedule_place(self, number: int) -> tuple[int, int]:
        """What is done of its learning-rate schedule before step `number` of the run, and what that step adds to it.

        Both are steps, or tokens if the schedule is measured in them.
        """
        if self.config.lr_schedule.total_steps is None:
            return self.tokens_before(number) - self.border.schedule_tokens, tokens_per_step(self.config)
        return number - 1 - self.border.schedule_after, 1

    def tokens_before(self, step: int) -> int:
        """Tokens of the run before a step that is not before this stage, if there were no later one."""
        return self.border.tokens + (step - self.first_step) * tokens_per_step(self.config)


def stage_of(stages: Sequence[RunStage], step: int) -> RunStage:
    """The stage that step number `step` belongs to."""
    return next(stage for stage in reversed(stages) if stage.first_step <= step)


def steps_of_stages(stages: Sequence[RunStage], steps: int) -> list[int]:
    """How many steps of a run of `steps` steps each stage has; 0 for those that begin after its last one."""
    ends = [stage.border.after for stage in stages[1:]] + [steps]
    return [max(0, min(end, steps) - stage.border.after) for stage, end in zip(stages, ends, strict=True)]


def largest_first(stages: Sequence[RunStage], steps: int) -> list[RunStage]:
    """The stages that a run of `steps` steps trains, or the first, those with the most tokens in a micro-batch first.

    Of stages whose micro-batch is chosen and that are equal in this, the one with the largest batch is first, which may
    be cut in most ways.
    """
    trained = [stage for stage, n in zip(stages, steps_of_stages(stages, steps), strict=True) if n]
    return sorted(trained or stages[:1], key=_tokens_at_once, reverse=True)


def _tokens_at_once(stage: RunStage) -> tuple[int, int]:
    training = stage.config.training
    is_open = training.micro_batch_size == "auto"
    return micro_batch_size(training) * training.seq_len, training.global_batch_size * is_open


def stage_of_position(stages: Sequence[RunStage], steps: int, begins: bool) -> RunStage:
    """The stage that a position in the data after `steps` steps is of.

    At a border this is the stage before, until the next one's mixture has begun with the next sample (`begins`).
    """
    return stage_of(stages, max(1, steps + begins))


def unfolded(job: Layers) -> Iterator[tuple[Border, Layers]]:
    """The border and the job of each stage, the first of which is the job without its stages.

    A job must be checked before the next is asked for: from its length and batch follow the tokens at the next border.
    """
    stages = job.values.get("stages", [])
    border = Border()
    current = _without_stages(job)
    yield border, current
    for index, stage in enumerate(stages):
        for number, tables in enumerate(_ramp(stage)):
            training = current.values["training"]
            place = {"at_step": border.after + stage["every_steps"]} if number else stage
            border = _next(border, place | tables, training["seq_len"] * training["global_batch_size"], index)
            current = _without_stages(current)
            if "lr_schedule" in tables:
                current.remove(("lr_schedule",))
            _add(current, tables, job, index)
            yield border, current


def _ramp(stage: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What a table of [[stages]] sets: once, or with `every_steps` for each of the values in its lists."""
    tables = {name: stage[name] for name in TABLES if stage.get(name)}
    if stage.get("every_steps") is None:
        yield tables
        return
    ramps = _ramps(tables)
    n_stages = min(map(len, ramps.values()))
    if n_stages > MOST_STAGES:
        raise ValueError(f"a ramp of {n_stages} stages")
    for number in range(n_stages):
        of_step: Any = deepcopy(tables)
        for path, values in ramps.items():
            reduce(getitem, path[:-1], of_step)[path[-1]] = values[number]
        if number:
            of_step.pop("lr_schedule", None)  # its schedule goes on
        yield of_step


def _ramps(tables: dict[str, Any]) -> dict[KeyPath, list[Any]]:
    """The lists in place of values, by key."""
    found = {path: value for path, value in leaves(tables) if isinstance(value, list)}
    return {path: value for path, value in found.items() if (key := find(path)) and not key.type.startswith("list")}


def _without_stages(layers: Layers) -> Layers:
    """A copy whose tables can be changed, without the table of stages."""
    values = {name: deepcopy(value) for name, value in layers.values.items() if name != "stages"}
    return replace(layers, values=values, origins={p: w for p, w in layers.origins.items() if p[0] != "stages"})


def _add(layers: Layers, tables: dict[str, Any], job: Layers, index: int) -> None:
    layers.add(deepcopy(tables), lambda path: job.where(("stages", index, *path)))
    layers.unset()


def _next(before: Border, stage: dict[str, Any], tokens_of_step: int, table: int) -> Border:
    """The border of the next stage, after stretches of steps of `tokens_of_step`."""
    after = stage.get("at_step")
    if after is None:
        after = before.after - (before.tokens - stage["at_tokens"]) // tokens_of_step  # rounded up to a whole step
    tokens = before.tokens + (after - before.after) * tokens_of_step
    if stage.get("lr_schedule"):
        return Border(after, tokens, schedule_after=after, schedule_tokens=tokens, table=table)
    return replace(before, after=after, tokens=tokens, table=table)


# --------------------------------------------------------------------------- checks


def check_stages(stages: Sequence[dict[str, Any]]) -> Iterator[Problem]:
    """What is wrong with the tables [[stages]] before they are unfolded; a key that no job has, a later check finds."""
    tables = [{name: stage.get(name) or {} for name in TABLES} for stage in stages]
    n_stages = sum(max([1, *map(len, _ramps(each).values())]) for each in tables)
    if n_stages > MOST_STAGES:
        yield "stages", f"{n_stages:,} stages are too many; at most {MOST_STAGES}"
    for index, stage in enumerate(stages):
        key = f"stages.{index}"
        places = [name for name in ("at_step", "at_tokens") if stage.get(name) is not None]
        if len(places) != 1:
            which = "both" if places else "neither"
            yield key, f"a stage begins at_step or at_tokens, and this one has {which}; set one of them"
        lengths = {len(values) for values in _ramps(tables[index]).values()}
        if stage.get("every_steps") is not None and (len(lengths) != 1 or 0 in lengths):
            yield f"{key}.every_steps", "every_steps needs a list in place of a value; if several, of the same length"
        changed = [path for name in TABLES for path, _ in leaves(stage.get(name) or {}, (name,))]
        if not changed:
            yield key, f"this stage changes nothing; it may set {', '.join(CHANGEABLE)}"
        for path in changed:
            if find(path) and not any(f"{dotted(path)}.".startswith(f"{name}.") for name in CHANGEABLE):
                yield (
                    f"{key}.{dotted(path)}",
                    f"{dotted(path)} is the same in the whole run; a stage may set {', '.join(CHANGEABLE)}",
                )


def check_order(stages: Sequence[RunStage]) -> Iterator[Problem]:
    """What is wrong between stages that are each right by themselves."""
    yield from _other_lengths(stages)
    yield from _other_data(stages)
    for one, other in pairwise(stages):
        index = other.border.table
        if other.border.after <= one.border.after:
            yield (
                f"stages.{index}",
                f"this stage begins after step {other.border.after:,}, and the one before it after step "
                f"{one.border.after:,}; the steps must ascend",
            )
        if one.config.attention.backend == "flex" and one.config.training.seq_len != other.config.training.seq_len:
            yield f"stages.{index}.training.seq_len", 'attention.backend = "flex" is made for sequences of one length'
        always = [_never_trained(stage.config) for stage in (one, other)]
        if always[0] != always[1]:
            yield (
                f"stages.{index}.optimizer.groups",
                f"freeze = true is for the whole run, as such parameters have no optimizer state, and it changes here "
                f"({_names(always[0])} -> {_names(always[1])}); set freeze_until_step = N, also in the stages before, "
                "for parameters that train from step N + 1 on",
            )


def _other_lengths(stages: Sequence[RunStage]) -> Iterator[Problem]:
    """The sources that an earlier stage has read in sequences of another length, and that cannot change it."""
    lengths: dict[str, int] = {}
    for stage in stages:
        seq_len = stage.config.training.seq_len
        for source in stage.config.data.sources:
            before = lengths.setdefault(source.name, seq_len)
            is_own = is_import_path(source.kind) and is_admitted(source.kind)
            if before != seq_len and is_own and not takes(source.kind, "earlier"):
                yield (
                    f"stages.{stage.border.table}",
                    f'the source "{source.name}" of kind "{source.kind}" is read in sequences of {before} before, and '
                    f"of {seq_len} here, and its class takes no argument `earlier`, by which it could go on (docs/"
                    "own_models.md); leave it out, or give it another name, under which it begins again",
                )


def _other_data(stages: Sequence[RunStage]) -> Iterator[Problem]:
    """The sources whose name stands for other data than in an earlier stage: how far they were read says nothing."""
    before: dict[str, Source] = {}
    for stage in stages:
        for index, source in enumerate(stage.config.data.sources):
            earlier = before.setdefault(source.name, source)
            for key in ("kind", "path", "text_key", "document_length"):
                was, now = (text_or_not_set(getattr(each, key)) for each in (earlier, source))
                if was != now:
                    yield (
                        f"stages.{stage.border.table}.data.sources.{index}.{key}",
                        f'{key} of the source "{source.name}" changes here: {was} -> {now}. It would go on where an '
                        "earlier stage has left it; give other data another name",
                    )


def _never_trained(config: Config) -> list[str]:
    return [group.pattern for group in config.optimizer.groups if group.freeze]


def _names(patterns: list[str]) -> str:
    return ", ".join(patterns) or "none"


# --------------------------------------------------------------------------- configs that were stored


def stored_stages(config: dict[str, Any]) -> list[tuple[Border, dict[str, Any]]]:
    """The border and the keys of each stage of a complete config, given as nested tables.

    A stranger's config that can't be unfolded counts as one stage.
    """
    try:
        return [(border, layers.values) for border, layers in unfolded(Layers("", config))]
    except (KeyError, TypeError, AttributeError, ValueError, IndexError, ZeroDivisionError):
        return [(Border(), config)]


def in_effect(config: dict[str, Any], steps: int) -> dict[str, Any]:
    """The keys of a complete config with which the last of `steps` steps was trained, without its stages."""
    return _stored_stage(config, steps)[1]


def border_of(config: dict[str, Any], steps: int) -> Border:
    """The border of the stage that the last of `steps` steps was trained in."""
    return _stored_stage(config, steps)[0]


def _stored_stage(config: dict[str, Any], steps: int) -> tuple[Border, dict[str, Any]]:
    return [each for each in stored_stages(config) if each[0].after < max(1, steps)][-1]


def trained_diff(old: dict[str, Any], new: dict[str, Any], steps: int) -> tuple[int, list[str]]:
    """Compare the run keys of two complete configs over the steps that were trained.

    Args:
        old, new: the configs as nested tables.
        steps: the number of steps that were trained with `old`; later stages of both may differ.

    Returns:
        The first step that would differ, and a line for each key that does there, as of `run_key_diff`; no lines if
        none does.
    """
    differing = ((after, lines) for after, lines in _differences(old, new, 0) if after < max(1, steps) and lines)
    after, lines = next(differing, (-1, []))
    return after + 1, lines


def later_diff(old: dict[str, Any], new: dict[str, Any], steps: int) -> list[str]:
    """Compare the run keys of two complete configs over the steps after `steps`; a line for each key that differs."""
    found = [
        [f"from step {after + 1:,} on: {line}" for line in lines] if after > steps else lines
        for after, lines in _differences(old, new, steps)
    ]
    return [line for lines in found for line in lines]


def require_counted(old: dict[str, Any], new: dict[str, Any], steps: int, tokens: int) -> None:
    """Check that a job which goes on after `steps` steps, `tokens` tokens, counts as many, if a key depends on it.

    Args:
        old, new: the complete configs before and after.

    Raises:
        ConfigError: it counts others, and the job before did not.
    """
    key, counted = _miscounted(new, steps, tokens)
    if key and not _miscounted(old, steps, tokens)[0]:
        raise ConfigError(
            f"{key} counts tokens, and with training.seq_len and training.global_batch_size as they are now, {steps:,} "
            f"steps have {counted:,} tokens; these had {tokens:,}. Leave the two as they were, and set them in a stage "
            f"that begins there: --stages '[{{at_step = {steps}, training.seq_len = ...}}]', or in the job file"
        )


def _miscounted(config: dict[str, Any], steps: int, tokens: int) -> tuple[str, int]:
    """A key that counts the tokens of `steps` steps, if these are not `tokens`, and how many they are.

    A stranger's config that does not say them has no such key.
    """
    stages = stored_stages(config)
    present = [stage for stage in stages if stage[0].after <= steps][-1]
    border, keys = present
    training = keys.get("training", {})
    per_step = training.get("seq_len", 0) * training.get("global_batch_size", 0)
    counted = border.tokens + (steps - border.after) * per_step
    if counted == tokens or not per_step:
        return "", counted
    for border, keys in stages[stages.index(present) :]:
        if keys.get("lr_schedule", {}).get("total_tokens") and border.schedule_after < steps:
            return "lr_schedule.total_tokens", counted
    for index, stage in enumerate(config.get("stages", [])):
        if (stage.get("at_tokens") or 0) > min(counted, tokens):
            return f"stages.{index}.at_tokens", counted
    return "", counted


def _differences(old: dict[str, Any], new: dict[str, Any], first: int) -> Iterator[tuple[int, list[str]]]:
    """The differences after `first` steps and at each later border of either config."""
    both = stored_stages(old), stored_stages(new)
    for after in sorted({first} | {border.after for found in both for border, _ in found if border.after > first}):
        then, now = ([each for each in found if each[0].after <= after][-1] for found in both)
        lines = run_key_diff(then[1], now[1])
        if not lines and then[0].schedule_after != now[0].schedule_after:
            lines = [f"lr_schedule counts from step {then[0].schedule_after} -> {now[0].schedule_after}"]
        yield after, lines
