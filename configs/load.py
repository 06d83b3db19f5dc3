"""Loads a checked `Config` from a job file and the command line.

    loaded = load("llama_7b.toml", ["--training.steps", "100"], world_size=8)

All mistakes are reported at once, one per line: `file:line: message`.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from itertools import islice
from pathlib import Path

from pydantic import ValidationError

from configs.checks import check, check_tables
from configs.checks.idle import idle_keys
from configs.checks.rule import Problem
from configs.elastic import Choice, check_elastic
from configs.errors import ConfigError, UserError
from configs.files import exists, is_file, is_folder, whole
from configs.own_code import admit, is_import_path, look_in
from configs.reading import hf_config, own_options
from configs.reading.explain import MAX_EXPLAINED, Mistake, explain, wrong_paths
from configs.reading.keys import dotted, general, key_path, leaves
from configs.reading.merge import JOB_FILES, Layers, read_layers, shown
from configs.reading.overrides import parse_overrides
from configs.reading.removed import without_removed
from configs.reading.toml_text import table_text
from configs.run_stages import Border, RunStage, check_order, check_stages, unfolded
from configs.schema import Config


@dataclass(frozen=True)
class LoadedConfig:
    """A checked config that knows where each of its values was set."""

    config: Config
    layers: Layers
    warnings: tuple[str, ...] = ()
    """Keys that were set but do nothing, with the reason; in `config` they have their defaults."""
    choice: Choice | None = None
    """The mesh that an elastic job forms; None if the job is not elastic, or the number of ranks not known.
    `config` has this mesh, but `to_toml` writes the job's own, so that the file is elastic again."""
    later_stages: tuple[RunStage, ...] = ()
    """The stages of `[[stages]]`."""

    @property
    def stages(self) -> tuple[RunStage, ...]:
        """All stages of the run, the first of which is `config`."""
        return (RunStage(Border(), self.config, self.layers), *self.later_stages)

    @property
    def jobs(self) -> "list[LoadedConfig]":
        """The job of each stage, whose errors name where the stage sets a key."""
        return [self, *(LoadedConfig(stage.config, stage.layers) for stage in self.later_stages)]

    @property
    def file(self) -> str:
        """The job file, as messages show it."""
        return self.layers.file

    @cached_property
    def origins(self) -> dict[str, str]:
        """Where each key was set, by dotted name: "file:line", "--key" or "default"."""
        paths = (path for path, _ in leaves(self.config.model_dump()))
        return {dotted(path): self.layers.origins.get(path, "default") for path in paths}

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
        return table_text(values, (lambda path: self.origins[dotted(path)]) if with_origins else None)


def load(
    name_or_path: str,
    overrides: Sequence[str] = (),
    world_size: int | None = None,
    is_stored: bool = False,
    at_step: int | None = None,
) -> LoadedConfig:
    """Read, merge and check a job.

    Args:
        name_or_path: a file, or the name of one in configs/, with or without ".toml".
        overrides: command-line words, `--table.key VALUE` or `--table.key=VALUE`.
        world_size: number of ranks; None if unknown, which checks the job for the fewest ranks possible.
        is_stored: the file is what a run has stored, and no job that somebody has named: the code of a user's own that
            it names is not imported, unless the overrides name it.
        at_step: of a stored job, read the keys of the stage of this step, without the stages; the overrides apply to
            these. None: the whole job.

    Raises:
        ConfigError: lists every mistake, one per line.
    """
    layers = read_layers(find_job_file(name_or_path))
    if at_step is not None:
        load(name_or_path, is_stored=is_stored)  # a job must be valid to have stages
        layers = [keys for border, keys in unfolded(layers) if border.after < max(1, at_step)][-1]
    mistakes = list(_override_all(layers, overrides))
    layers.unset()
    layers.values = without_removed(layers.values)
    of_model = [*_own_code(layers, is_stored), *_read_model(layers)]
    mistakes += of_model
    config, warnings = _validated(layers, mistakes, of_model)
    config, choice, problems = check_elastic(config, world_size, check)
    _refuse([*mistakes, *_between((*problems, *check_stages(layers.values.get("stages", []))), layers)])
    stages = _later_stages(layers, config, choice, world_size, is_stored)
    _refuse(_between(check_order([RunStage(Border(), config), *stages]), layers))
    return LoadedConfig(config, layers, tuple(warnings), choice, tuple(stages))


def _validated(
    layers: Layers, mistakes: Sequence[Mistake], of_model: Sequence[Mistake] = ()
) -> tuple[Config, list[str]]:
    """The config of merged values, without the keys that do nothing, which are removed, and a warning for each.

    Args:
        layers: the values.
        mistakes: found before, and reported with what is found here.
        of_model: those that left [model] incomplete.

    Raises:
        ConfigError: a key is unknown, missing or wrong.
    """
    try:
        config = Config.model_validate(layers.values)
    except ValidationError as error:
        wrong_tables = {path[0] for path in wrong_paths(error)} | {"model" for _ in of_model}
        found = [*mistakes, *explain(error, layers), *_between(check_tables(layers.values, wrong_tables), layers)]
        _refuse(found, error.error_count() - MAX_EXPLAINED)
        raise
    _refuse(list(mistakes) if of_model else [])  # the rules would read what could not be read
    warnings: list[str] = []
    while idle := dict(idle_keys(config, layers.origins)):  # once more: what a key needs may itself do nothing
        for path, message in idle.items():
            warnings.append(f"{layers.where(path)}: {message}")
            layers.remove(path)
        config = Config.model_validate(layers.values)
    return config, warnings


def _later_stages(
    layers: Layers, config: Config, choice: Choice | None, world_size: int | None, is_stored: bool
) -> list[RunStage]:
    """The stages after the first, each checked as a job; a mistake is reported with where its stage has the key.

    Raises:
        ConfigError: lists the mistakes of the first stage that has some.
    """
    stages: list[RunStage] = []
    for border, job in islice(unfolded(layers), 1, None):
        of_stage, _ = _validated(job, _own_code(job, is_stored))
        of_stage = of_stage.model_copy(update={"mesh": config.mesh})
        is_reached = border.after < config.training.steps  # until then, a resume may change the mesh
        ranks = choice.ranks if choice else world_size
        _refuse(_between(check(of_stage, ranks if is_reached else None), job))
        stages.append(RunStage(border, of_stage, job))
    return stages


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
            if is_file(candidate):
                return candidate
        is_something = exists(path)
    except OSError as error:  # a folder that may not be entered, a name that is too long
        raise ConfigError(f"job {name_or_path}: cannot be read: {error.strerror}") from None
    if is_something:
        what = "a folder; name the job file in it" if is_folder(path) else "not a regular file, which a job must be"
        raise ConfigError(f"job {name_or_path} is {what}")
    names = sorted(file.stem for file in JOB_FILES.glob("*.toml"))
    near = get_close_matches(path.stem, names, 1)
    advice = f"did you mean {near[0]}.toml?" if near else f"{shown(JOB_FILES)} has {', '.join(names)}"
    place = "no job file at {} or in configs/" if len(candidates) > 1 else "no job file at {}"
    raise ConfigError(f"job {name_or_path}: {place.format(whole(path))}; {advice}")


def _override_all(layers: Layers, words: Sequence[str]) -> Iterator[Mistake]:
    for override in parse_overrides(words):
        try:
            layers.override(override.flag, override.path, override.value)
        except ConfigError as error:
            yield Mistake(override.path, override.flag, str(error))


def _between(problems: Iterable[Problem], layers: Layers) -> list[Mistake]:
    """Where what is wrong between keys was set."""
    return [Mistake(key_path(key), layers.where(key_path(key)), message) for key, message in problems]


def _own_code(layers: Layers, is_stored: bool) -> list[Mistake]:
    """Import the code of the user's own that the job names."""
    mistakes: list[Mistake] = []
    for path in [path for path in layers.origins if general(path) in _NAMES_CODE]:
        name = layers.value(path)
        where = layers.where(path)
        is_named = not is_stored or where.startswith("--")
        if not is_import_path(name) or not is_named:
            continue
        look_in({Path(file.rpartition(":")[0] or file).parent for file in (layers.file, where)})
        if path == ("metrics", "sink"):  # a launch imports it where it opens the sinks
            continue
        try:
            admit(name, dotted(path))
        except UserError as error:
            mistakes.append(Mistake(path, where, str(error)))
    return mistakes


_NAMES_CODE = {
    *("model.architecture", "training.loss", "optimizer.name", "lr_schedule.name", "metrics.sink"),
    *("data.sources.N.kind", "validation.sources.N.kind"),
}
"""The keys whose value may be an import path."""


def _read_model(layers: Layers) -> list[Mistake]:
    """Put what is outside of the job into its table [model]: a config.json that it names, the defaults of options."""
    model = layers.values.get("model")
    if not isinstance(model, dict):
        return []
    mistakes = _between([*hf_config.resolve(model), *own_options.resolve(model)], layers)
    if ("model", "hf") in layers.origins and "hf" not in model:
        layers.origins["model", "hf_config"] = layers.origins["model", "hf"]
    for path in [path for path in layers.origins if path[:2] in (("model", "hf"), ("model", "hf_overrides"))]:
        if path[1] not in model:
            del layers.origins[path]
    return mistakes


def _refuse(mistakes: list[Mistake], more: int = 0) -> None:
    """Raise a ConfigError that lists the mistakes, and the number of those that are not explained, if there are any."""
    if mistakes:
        further = [f"and {more} more"] * (more > 0)
        raise ConfigError("\n".join([*map(str, sorted(mistakes, key=_place)), *further])) from None


def _place(mistake: Mistake) -> tuple[bool, str, int]:
    """Sort key of messages: by file and line, those about the command line last."""
    file, _, line = mistake.where.rpartition(":")
    return mistake.where.startswith("--"), file or mistake.where, int(line) if line.isdigit() else 0
