"""Loads a checked `Config` from a job file and the command line.

    loaded = load("llama_7b.toml", ["--training.steps", "100"], world_size=8)

All mistakes are reported at once, one per line: `file:line: message`.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from configs.checks import check
from configs.checks.idle import Idle, idle_keys
from configs.checks.rule import Problem
from configs.elastic import Choice, check_elastic
from configs.errors import ConfigError
from configs.reading.explain import MAX_EXPLAINED, Mistake, bad_paths, explain
from configs.reading.keys import KeyPath, dotted, key_path, table_in
from configs.reading.merge import Layers, read_layers, shown
from configs.reading.overrides import parse_overrides
from configs.reading.toml_text import table_text
from configs.schema import Config, Table

JOB_FILES = Path(__file__).parent
"""Folder in which a bare name is looked up if the current folder has no such file."""


@dataclass(frozen=True)
class LoadedConfig:
    """A checked config that knows where each of its values was set."""

    config: Config
    layers: Layers
    choice: Choice | None = None
    """The mesh that an elastic job forms; None if the job is not elastic, or the number of ranks not known.
    `config` has this mesh, but `to_toml` writes the job's own, so that the file is elastic again."""

    @property
    def file(self) -> str:
        """The job file, as messages show it."""
        return self.layers.file

    @cached_property
    def origins(self) -> dict[str, str]:
        """Where each key was set, by dotted name: "file:line", "--key" or "default".

        If a default applies because the value that was set does nothing, the entry says so: "default; ...".
        """
        left_out = {path: f"default; {origin.where}" for path, origin in self.layers.left_out.items()}
        set_in = {path: origin.where for path, origin in self.layers.origins.items()}
        words = left_out | set_in
        return {dotted(path): words.get(path, "default") for path in leaves(self.config.model_dump())}

    def error(self, key: str, message: str) -> ConfigError:
        """Make an error about a key (`"data.sources.0.path"`) that starts with where the key was set."""
        return ConfigError(f"{self.layers.where(key_path(key))}: {message}")

    def to_toml(self, with_origins: bool = False) -> str:
        """Write the whole config, including defaults, as a job file that loads to an equal config.

        With origins, each line says where its value was set, and keys without a value are listed as comments.
        """
        values = self.config.model_dump()
        if self.choice:
            values["mesh"] = self.choice.table_of_the_job.model_dump()
        for idle in idle_keys(self.config):  # a default that another key overrules; setting it would be an error
            table: Any = values
            for part in idle.path[:-1]:
                table = table[part]
            table[idle.path[-1]] = None
        return table_text(values, (lambda path: self.origins[dotted(path)]) if with_origins else None)


def load(name_or_path: str, overrides: Sequence[str] = (), world_size: int | None = None) -> LoadedConfig:
    """Read, merge and check a job.

    Args:
        name_or_path: a file, or the name of one in configs/, with or without ".toml".
        overrides: command-line words, `--table.key VALUE` or `--table.key=VALUE`.
        world_size: number of ranks; None if unknown, which checks the job for the fewest ranks possible.

    Raises:
        ConfigError: lists every mistake, one per line.
    """
    layers = read_layers(find_job_file(name_or_path))
    mistakes = list(_override_all(layers, overrides))
    layers.unset()
    config, error = _validate(layers)
    while _leave_out_idle(config, layers):
        config, error = _validate(layers)
    if error:
        mistakes += explain(error, layers)
        if (more := error.error_count() - MAX_EXPLAINED) > 0:
            raise ConfigError("\n".join([*map(str, mistakes), f"and {more} more"])) from None
    config, choice, problems = check_elastic(config, world_size, check)
    mistakes += (_mistake(problem, layers) for problem in problems)
    mistakes += _idle_mistakes(config, layers)
    if mistakes:
        raise ConfigError("\n".join(map(str, sorted(mistakes, key=_place))))
    return LoadedConfig(config, layers, choice)


def find_job_file(name_or_path: str) -> Path:
    """Find the file that `--config` names.

    Raises:
        ConfigError: there is none; the message lists the job files in configs/.
    """
    path = Path(name_or_path)
    candidates = [path]
    if path.name == name_or_path:
        candidates += [JOB_FILES / name_or_path, JOB_FILES / f"{name_or_path}.toml"]
    try:
        for candidate in candidates:
            if candidate.is_file():
                return candidate
        is_something = path.exists()
    except OSError as error:  # a folder that may not be entered, a name that is too long
        raise ConfigError(f"--config {name_or_path}: cannot be read: {error.strerror}") from None
    if is_something:
        what = "a folder; name the job file in it" if path.is_dir() else "not a regular file, which a job must be"
        raise ConfigError(f"--config {name_or_path} is {what}")
    names = sorted(file.stem for file in JOB_FILES.glob("*.toml"))
    near = get_close_matches(path.stem, names, 1)
    advice = f"did you mean {near[0]}.toml?" if near else f"{shown(JOB_FILES)} has {', '.join(names)}"
    place = "in the current folder or in configs/" if len(candidates) > 1 else "at that path"
    raise ConfigError(f"--config {name_or_path}: no job file {place}; {advice}")


def leaves(value: Any, path: KeyPath = ()) -> Iterator[KeyPath]:
    """Yield the paths of the keys in nested tables and lists of tables; plain and empty lists are single values."""
    is_tables = isinstance(value, list) and bool(value) and isinstance(value[0], dict)
    if isinstance(value, dict) or is_tables:
        for part, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(item, (*path, part))
    else:
        yield path


def _override_all(layers: Layers, words: Sequence[str]) -> Iterator[Mistake]:
    for override in parse_overrides(words):
        try:
            layers.override(override.flag, override.path, override.value)
        except ConfigError as error:
            yield Mistake(override.path, override.flag, str(error))


def _validate(layers: Layers) -> tuple[Config, ValidationError | None]:
    """Return the config, or its valid part and the error."""
    try:
        return Config.model_validate(layers.values), None
    except ValidationError as error:
        return _construct(Config, layers.values, set(bad_paths(error))), error


def _leave_out_idle(config: Config, layers: Layers) -> bool:
    """Remove keys that do nothing because a higher layer overruled them; returns whether there were any."""
    mistakes = {mistake.path for mistake in _idle_mistakes(config, layers)}
    overruled = {idle.path: idle for idle in idle_keys(config) if idle.is_set and idle.path not in mistakes}
    for path, idle in overruled.items():
        layers.leave_out(path, idle.fault, layers.layer(idle.other))
    return bool(overruled)


def _idle_mistakes(config: Config, layers: Layers) -> Iterator[Mistake]:
    """Yield the keys that did nothing where they were set: the other key's value is not from a higher layer."""
    found: dict[KeyPath, Idle] = {}
    for idle in idle_keys(config):
        if idle.is_set and layers.layer(idle.other) <= layers.layer(idle.path):
            found.setdefault(idle.path, idle)
    for path, idle in found.items():
        where = layers.where(idle.other) if idle.other in layers.origins else "the default"
        yield Mistake(path, layers.where(path), idle.message(where))


def _mistake(problem: Problem, layers: Layers) -> Mistake:
    key, message = problem
    return Mistake(key_path(key), layers.where(key_path(key)), message)


def _place(mistake: Mistake) -> tuple[bool, str, int]:
    """Sort key of messages: by file and line, those about the command line last."""
    file, _, line = mistake.where.rpartition(":")
    return mistake.where.startswith("--"), file or mistake.where, int(line) if line.isdigit() else 0


def _construct(table: type[Table], values: dict[str, Any], bad: Iterable[KeyPath], at: KeyPath = ()) -> Any:
    """Construct a table without validation and without the bad keys; reading one of those raises MissingKey."""
    given: dict[str, Any] = {}
    lacking = {str(path[-1]) for path in bad if path[:-1] == at}
    for name, field in table.model_fields.items():
        inner = table_in(field.annotation)
        value = values.get(name)
        if inner and isinstance(value, dict):
            given[name] = _construct(inner, value, bad, (*at, name))
        elif inner and isinstance(value, list):
            tables = [(index, item) for index, item in enumerate(value) if isinstance(item, dict)]
            given[name] = [_construct(inner, item, bad, (*at, name, index)) for index, item in tables]
            if len(tables) < len(value):  # the remaining items would have wrong indices
                lacking.add(name)
        elif name in values:
            given[name] = value
    made = table.model_construct(**given)
    for name in lacking:
        made.__dict__.pop(name, None)
    return made
