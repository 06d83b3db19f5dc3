"""The configs of an experiment, and what differs between two of them."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from configs.errors import ConfigError
from configs.load import LoadedConfig, load
from configs.reading.keys import find, flat, key_path, nearest
from configs.reading.toml_text import text_or_not_set
from configs.schema import Config, is_run_key
from models import build_model

_EXPECTED = {"job.name", "job.output_dir", "training.seed"}
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
        own = ("--training.seed", str(seed), "--job.output_dir", str(folder))
        return Arm(self.label, self.file, (*self.words, *own))

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


def differences(first: Config, second: Config) -> list[str]:
    """One line for each key that differs, `"optimizer.lr: 0.003 -> 0.004"`; not the name, folder and seed of a run."""
    before, after = (flat(config.model_dump()) for config in (first, second))
    keys = [key for key in {**before, **after} if before.get(key) != after.get(key) and key not in _EXPECTED]
    marks = {key: "" if is_run_key(key) else " (machine key)" for key in keys}
    changes = {key: f"{text_or_not_set(before.get(key))} -> {text_or_not_set(after.get(key))}" for key in keys}
    return [f"{key}: {change}{marks[key]}" for key, change in changes.items()]


def require_same_scoring(first: Config, second: Config) -> None:
    """Raise ConfigError if losses on the validation sequences of two configs are not losses of the same tokens."""
    lines = [
        line
        for line in differences(first, second)
        if any(line.startswith((f"{key}.", f"{key}:")) for key in _SCORING)
        and not line.startswith(("validation.interval", "validation.sample", "tokenizer.train_on"))
    ]
    if lines:
        raise ConfigError(
            "the configs can't be scored on the same sequences, because these keys differ:\n  " + "\n  ".join(lines)
        )


@dataclass(frozen=True)
class Pairing:
    """The part that two runs share."""

    same_weights: int
    """Parameters that start with the same bits in both."""
    parameters: int
    """Number of parameters of both models together, each name counted once."""
    same_samples: bool
    """Whether sample i is the same tokens in both."""
    same_batches: bool
    """Whether so is each step's batch."""

    def __str__(self) -> str:
        weights = "the same bits"
        if self.same_weights < self.parameters:
            weights = f"the same bits in {self.same_weights} of {self.parameters} parameters"
        samples = "the same in every step" if self.same_batches else "the same, but cut into other batches"
        return f"initial weights: {weights}; samples: {samples if self.same_samples else 'not the same'}"


def pairing(first: Config, second: Config) -> Pairing:
    """The part that two runs of these configs share."""
    ours = _initial(first)
    theirs = _initial(second)
    same = sum(ours[name] == theirs[name] for name in ours.keys() & theirs.keys())
    samples = all(getattr(first, name) == getattr(second, name) for name in ("data", "tokenizer"))
    for table, key in (("training", "seed"), ("training", "seq_len"), ("model", "vocab_size")):
        samples &= getattr(getattr(first, table), key) == getattr(getattr(second, table), key)
    batches = samples and first.training.global_batch_size == second.training.global_batch_size
    return Pairing(same, len(ours | theirs), samples, batches)


def _initial(config: Config) -> dict[str, tuple[Any, ...]]:
    """What each parameter's initial values depend on besides its name (parallelisms/init.py)."""
    with torch.device("meta"):
        model: Any = build_model(config.model)
    common = (config.training.seed, config.training.dtype, config.checkpoint.init_from)
    return {name: (*common, tuple(p.shape), model.init_std(name)) for name, p in model.named_parameters()}
