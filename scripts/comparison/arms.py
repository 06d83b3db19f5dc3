"""The configs of an experiment, and what differs between two of them."""

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from configs.errors import ConfigError
from configs.load import LoadedConfig, load
from configs.reading.keys import find, flat, key_path, nearest
from configs.reading.toml_text import text_or_not_set
from configs.run_stages import stage_of
from configs.schema import BY_CONTENT, Config, is_run_key
from models import build_model
from scripts.comparison.runs import own_words

_EXPECTED = {"job.name", "job.output_dir", "job.allow_run_change", "training.seed"}
"""Keys that differ between the runs of every experiment."""
_SCORING = ("validation", "tokenizer", "training.seq_len", "model.vocab_size", "data.document_mask")
"""Keys and tables on which the losses of the validation sequences depend, besides the model."""


@dataclass(frozen=True)
class Arm:
    """One of the configs that are compared."""

    label: str
    file: str
    """The job file."""
    words: tuple[str, ...]
    """Keys set on the command line, as `load` takes them."""

    def with_seed(self, seed: int, folder: Path) -> "Arm":
        """This config with a seed, trained in `folder`."""
        return Arm(self.label, self.file, (*self.words, *own_words(seed, folder)))

    def load(self, ranks: int) -> LoadedConfig:
        """Load and check the job for so many ranks."""
        return load(self.file, self.words, ranks)


def arms_of(files: Sequence[str], words: Sequence[str], sweep: str | None) -> list[Arm]:
    """The configs of a command line.

    Args:
        files: two job files, or one with a sweep.
        sweep: "table.key=value,value".

    Raises:
        ConfigError: there are not at least two configs.
    """
    if sweep is None:
        if len(files) != 2:
            raise ConfigError("give two job files, two run folders, or one job file and --sweep table.key=VALUE,VALUE")
        names = [Path(file).stem for file in files]
        labels = names if names[0] != names[1] else list(files)
        return [Arm(label, file, tuple(words)) for label, file in zip(labels, files, strict=True)]
    key, equals, values = sweep.partition("=")
    found = list(_values(values)) if equals else []
    if len(files) != 1 or len(found) < 2 or len(set(found)) < len(found):
        raise ConfigError("--sweep table.key=VALUE,VALUE needs one job file, and at least two values, all different")
    if find(key_path(key)) is None:
        near = nearest(key)
        raise ConfigError(f"--sweep {key}: no such key" + (f"; did you mean {near}?" if near else ""))
    return [Arm(f"{key}={value}", files[0], (*words, f"--{key}", value)) for value in found]


def _values(text: str) -> Iterator[str]:
    """Split at the commas outside of brackets and quotes."""
    depth = 0
    quote = ""
    value = ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        depth += (character in "[{") - (character in "]}") if not quote else 0
        if character == "," and not depth and not quote:
            yield value.strip()
            value = ""
        else:
            value += character
    yield value.strip()


def folder_name(label: str) -> str:
    """A label as the name of a folder."""
    return re.sub(r"[^\w.=+-]+", "_", label)


def differences(first: LoadedConfig, second: LoadedConfig, after: int = 0) -> list[str]:
    """One line for each key that differs, `"optimizer.lr: 0.003 -> 0.004"`; not the name, folder and seed of a run.

    Args:
        first, second: the jobs.
        after: steps that both runs have in common; what differs after them, or from a stage on, is said with the step.
    """
    lines: list[str] = []
    said: set[str] = set()
    borders = {stage.border.after for stage in (*first.stages, *second.stages) if stage.border.after > after}
    for border in sorted({after, *borders}):
        one, other = (stage_of(job.stages, border + 1) for job in (first, second))
        found = _changes(one.config, other.config)
        if one.border.schedule_after != other.border.schedule_after:
            begins = f"{one.border.schedule_after + 1:,} -> {other.border.schedule_after + 1:,}"
            found.append(f"lr_schedule begins at step: {begins}")
        place = f"from step {border + 1:,} on: " if border else ""
        lines += [f"{place}{change}" for change in found if change not in said]
        said.update(found)
    return lines


def _changes(first: Config, second: Config) -> list[str]:
    """The keys that differ between the jobs of two stages."""
    before, after = (flat(config.model_dump(exclude={"stages"})) for config in (first, second))
    keys = [key for key in {**before, **after} if before.get(key) != after.get(key) and key not in _EXPECTED]
    marks = {key: "" if is_run_key(key) or key in BY_CONTENT else " (machine key)" for key in keys}
    changes = {key: f"{text_or_not_set(before.get(key))} -> {text_or_not_set(after.get(key))}" for key in keys}
    return [f"{key}: {change}{marks[key]}" for key, change in changes.items()]


def require_same_scoring(first: Config, second: Config) -> None:
    """Raise ConfigError if losses on the validation sequences of two configs are not losses of the same tokens.

    Args:
        first, second: the jobs of the stages whose models are scored.
    """
    lines = [
        line
        for line in _changes(first, second)
        if any(line.startswith((f"{key}.", f"{key}:")) for key in _SCORING)
        and not line.startswith(("validation.interval", "validation.sample", "tokenizer.train_on"))
    ]
    if lines:
        raise ConfigError(
            "the configs can't be scored on the same sequences, because these keys differ:\n  " + "\n  ".join(lines)
        )


# --------------------------------------------------------------------------- what two runs share


@dataclass(frozen=True)
class Pairing:
    """The part that two runs share."""

    same_weights: int
    """Parameters that start with the same bits in both."""
    parameters: int
    """Number of parameters of both models together, each name counted once."""
    common_steps: int
    """Steps that both have in common, because one is a fork of the other."""
    other_batch_from: int | None
    """First step whose batch is not the same in both; None: every batch is."""
    other_samples_from: int | None
    """Number of the first sample, after the common steps, that is not the same tokens in both; None: every one is."""
    samples_before: int = 0
    """Samples between the common steps and the first step with another batch."""

    def __str__(self) -> str:
        if self.common_steps:
            return f"steps 1 to {self.common_steps:,}, as one is a fork; samples after them: {self._samples()}"
        weights = "the same bits"
        if self.same_weights < self.parameters:
            weights = f"the same bits in {self.same_weights} of {self.parameters} parameters"
        return f"initial weights: {weights}; samples: {self._samples()}"

    def _samples(self) -> str:
        if self.other_batch_from is None:
            return "the same in every step"
        if self.other_samples_from == 0:
            return "not the same"
        if self.other_samples_from == self.samples_before:
            return f"the same up to step {self.other_batch_from - 1:,}"
        same = "the same" if self.other_samples_from is None else f"the first {self.other_samples_from:,} are the same"
        place = f" from step {self.other_batch_from:,} on" if self.samples_before else ""
        return f"{same}, but cut into other batches{place}"


def pairing(first: LoadedConfig, second: LoadedConfig, common_steps: int = 0) -> Pairing:
    """The part that two runs share.

    Args:
        first, second: their jobs.
        common_steps: the steps that both have in common, because one is a fork of the other.
    """
    ours = _initial(first.config)
    theirs = _initial(second.config)
    same = sum(ours[name] == theirs[name] for name in ours.keys() & theirs.keys())
    both = [_stretches(job, common_steps) for job in (first, second)]
    begins = sorted({each.step for stretches in both for each in stretches})
    other_batch_from = next((step for step in begins if not _is_same_batch(*_at(both, step))), None)
    numbers = sorted({each.sample for stretches in both for each in stretches})
    other_samples_from = next((number for number in numbers if not _is_same_data(*_at(both, sample=number))), None)
    samples_before = 0
    if other_batch_from:
        before, _ = _at(both, other_batch_from)
        samples_before = before.sample + (other_batch_from - before.step) * before.batch
    return Pairing(same, len(ours | theirs), common_steps, other_batch_from, other_samples_from, samples_before)


@dataclass(frozen=True)
class _Stretch:
    """Steps that read the same data in batches of the same size."""

    step: int
    """Its first."""
    sample: int
    """Its first."""
    batch: int
    """Samples of a step."""
    data: tuple[Any, ...]
    """The keys on which the content of the samples depends."""


def _stretches(job: LoadedConfig, after: int) -> list[_Stretch]:
    """The stretches of a job after so many steps, from which samples are counted; the last one has no end."""
    found: list[_Stretch] = []
    for stage in job.stages:
        config = stage.config
        data = (config.data, config.tokenizer, config.training.seed, config.training.seq_len, config.model.vocab_size)
        step = max(stage.first_step, after + 1)
        sample = 0
        if step > after + 1:
            sample = found[-1].sample + (step - found[-1].step) * found[-1].batch
        found.append(_Stretch(step, sample, config.training.global_batch_size, data))
    return found


def _at(both: list[list[_Stretch]], step: int = sys.maxsize, sample: int = sys.maxsize) -> list[_Stretch]:
    return [[each for each in stretches if each.step <= step and each.sample <= sample][-1] for stretches in both]


def _is_same_data(one: _Stretch, other: _Stretch) -> bool:
    return one.data == other.data


def _is_same_batch(one: _Stretch, other: _Stretch) -> bool:
    return one.data == other.data and one.batch == other.batch


def _initial(config: Config) -> dict[str, tuple[Any, ...]]:
    """What each parameter's initial values depend on besides its name (parallelisms/init.py)."""
    with torch.device("meta"):
        model: Any = build_model(config.model)
    common = (config.training.seed, config.training.dtype, config.checkpoint.init_from)
    rule = _hashes_of_drawn(model, config.training.seed) if hasattr(model, "initial_values") else model.init_std
    return {name: (*common, tuple(p.shape), rule(name)) for name, p in model.named_parameters()}


def _hashes_of_drawn(model: Any, seed: int) -> Callable[[str], str]:
    """What stands for the rule of a family of transformers, which may follow any field of its config.json."""
    drawn = model.initial_values(seed)
    return lambda name: xxhash.xxh3_128_hexdigest(drawn(name).numpy())
