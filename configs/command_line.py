"""The command line of train.py: `--config NAME_OR_PATH`, overrides, and three actions that need no torch.

command = parse_command_line(sys.argv[1:])
if answer(command):
    return
loaded = load_for_run(command)
"""

import os
import shutil
from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal, NoReturn

from configs.checks.idle import without_effect
from configs.display import help_text, summary
from configs.errors import ConfigError
from configs.layout import smallest_world_size
from configs.load import LoadedConfig, load
from configs.own_code import is_import_path
from configs.paths import missing_paths
from configs.process import cannot_print, silence_stdout
from configs.reading.keys import find, nearest
from configs.reading.overrides import is_override, parse_overrides, split_flags
from configs.reading.toml_text import value_text
from configs.run_stages import largest_first
from configs.schema import Config, is_described

Action = Literal["run", "validate", "print_config", "help"]

_ACTIONS = ("--help", "--print-config", "--validate")
_STARTS_RANKS = "keel train JOB --ranks N starts N ranks, and so does torchrun --nproc-per-node N train.py ..."
_RESUMES = "the same command resumes from the newest checkpoint; checkpoint.load names another"
_HINTS = {"gpus": _STARTS_RANKS, "num_gpus": _STARTS_RANKS, "devices": _STARTS_RANKS, "nproc": _STARTS_RANKS}
_HINTS |= {"n_gpus": _STARTS_RANKS, "world_size": _STARTS_RANKS, "resume": _RESUMES, "resume_from_checkpoint": _RESUMES}
"""The advice on another program's flag, by its name."""
_TORCHRUN_FLAGS = ("--nproc-per-node", "--nproc_per_node", "--nnodes", "--node-rank", "--rdzv-endpoint", "--standalone")


@dataclass(frozen=True)
class CommandLine:
    """A parsed command line."""

    config: str
    """Name or path of the job file; empty only for help."""
    overrides: tuple[str, ...]
    """Words for `load`."""
    action: Action


def parse_command_line(words: Sequence[str]) -> CommandLine:
    """Parse the words after `train.py`. `load` checks the overrides' keys later, together with the file's.

    Raises:
        ConfigError: lists everything that cannot be understood, one per line.
    """
    given, others = _parser().parse_known_args(words)
    if given.help:
        return CommandLine("", (), "help")
    overrides: list[str] = []
    mistakes: list[str] = []
    for flag, value in split_flags(others):
        if is_override(flag):
            overrides.append(flag if value is None else f"{flag}={value}")
        else:
            mistakes.append(_misunderstood(flag, value))
    try:
        parse_overrides(overrides)
    except ConfigError as error:
        mistakes.append(str(error))
    if given.validate and given.print_config:
        mistakes.append("--print-config and --validate: choose one")
    if len(given.config) > 1:
        mistakes.append(f"--config: given {len(given.config)} times: {', '.join(given.config)}")
    if not given.config:
        mistakes.append("no job is named; to try Keel: keel train debug.toml, or python train.py --config debug.toml")
    elif not given.config[0]:
        mistakes.append("--config: needs a value: --config NAME_OR_PATH")
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    action: Action = "validate" if given.validate else "print_config" if given.print_config else "run"
    return CommandLine(given.config[0], tuple(overrides), action)


class _Parser(ArgumentParser):
    """Raises a ConfigError instead of printing the usage."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def _parser() -> ArgumentParser:
    """Parse what is no key of the job; what it does not know it leaves in order."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", action="append", nargs="?", const="", default=[])
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--print-config", action="store_true")
    parser.add_argument("--validate", action="store_true")
    return parser


Chooser = Callable[[Config, int, list[Config]], str]
"""Says what `activation_checkpoint.memory_limit_gib` chooses for a job on so many ranks, and its other stages."""

NamesCheck = Callable[[LoadedConfig], None]
"""Raises a ConfigError if the job names a parameter or an op that does not exist."""


def answer(
    command: CommandLine,
    environment: Mapping[str, str] = os.environ,
    chooser: Chooser = lambda *_: "",
    check_names: NamesCheck = lambda _: None,
    stages: Callable[[LoadedConfig], str] = lambda _: "",
) -> bool:
    """Carry out `--help`, `--validate` or `--print-config`; under torchrun only rank 0 prints.

    Args:
        command: the parsed command line.
        environment: where torchrun says how many ranks there are.
        chooser: called by `--validate` for a job with a memory limit; it needs torch.
        check_names: called by `--validate` for a job that names parameters or ops; it needs torch.
        stages: called by `--validate`; describes the stages of the run.

    Returns:
        False if none of them was given, so that the job is to be run.

    Raises:
        ConfigError: the job is not valid.
        OutageError: the output can't be written.
    """
    if command.action == "run":
        return False
    if command.action == "help":
        text = help_text(min(shutil.get_terminal_size().columns, 100))
    else:
        world_size = _world_size(environment)
        loaded = load(command.config, command.overrides, world_size)
        if command.action == "validate":
            if any(_has_names(job.config) for job in loaded.jobs):
                check_names(loaded)
            text = _report(loaded, world_size, chooser, stages)
        else:
            text = loaded.to_toml(with_origins=True)
    if environment.get("RANK", "0") == "0":
        _print(text)
    return True


def load_for_run(command: CommandLine, environment: Mapping[str, str] = os.environ) -> LoadedConfig:
    """Load the job and check it for the number of ranks that torchrun started, or for one without torchrun.

    Raises:
        ConfigError: the job is not valid.
    """
    world_size = _world_size(environment) or 1
    lacking = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in environment]
    if (world_size > 1 or "RANK" in environment) and lacking:
        raise ConfigError(
            f"the environment describes one of several ranks, but lacks {', '.join(lacking)}; start ranks with "
            "`torchrun --nproc-per-node N train.py ...` or `keel train JOB --ranks N`"
        )
    return load(command.config, command.overrides, world_size)


def _print(text: str) -> None:
    """Print; a reader that closes the pipe, as in `train.py --help | head`, is no error.

    Raises:
        OutageError: the output can't be written.
    """
    try:
        print(text, end="", flush=True)
    except OSError as error:
        silence_stdout()
        if not isinstance(error, BrokenPipeError):
            raise cannot_print(error) from None


def _report(
    loaded: LoadedConfig, world_size: int | None, chooser: Chooser, stages: Callable[[LoadedConfig], str]
) -> str:
    """The text of `--validate`."""
    missing = "".join(f"warning: {line}; the machine that runs the job needs it\n" for line in missing_paths(loaded))
    idle = "".join(f"warning: {line}\n" for line in (*loaded.warnings, *without_effect(loaded.config)))
    by_size = [stage.config for stage in largest_first(loaded.stages, loaded.config.training.steps)]
    chosen = _chosen(by_size, world_size, chooser)
    return f"{summary(loaded, world_size)}\n{stages(loaded)}{missing}{idle}{chosen}"


def _has_names(config: Config) -> bool:
    """Whether the job names a family, parameters, ops or matrices, which only torch and the model know."""
    table = config.activation_checkpoint
    is_unknown = not is_described(config.model)
    names = (config.training.loss, config.optimizer.name, config.lr_schedule.name)
    is_unknown = is_unknown or any(map(is_import_path, names))
    return is_unknown or bool(config.optimizer.groups or table.save_ops or table.save_every_nth_matmul > 1)


def _chosen(stages: list[Config], world_size: int | None, chooser: Chooser) -> str:
    """A line that says what the job's memory limit chooses; empty without one. `stages`: the largest first."""
    config, *others = stages
    limit = config.activation_checkpoint.memory_limit_gib
    if not limit:
        return ""
    ranks = smallest_world_size(config) if config.mesh.dp_shard != -1 else world_size
    if limit != "device" and ranks:
        return f"{chooser(config, ranks, others)}\n"
    by = "GPU's memory" if limit == "device" else "number of ranks"
    how = "`keel plan --memory-gib 80`" if limit == "device" else "WORLD_SIZE=8 before this command"
    name = f"activation_checkpoint.memory_limit_gib = {value_text(limit)}"
    return f"{name} chooses what is recomputed by the {by} when the run starts; {how} tells the choice\n"


def _world_size(environment: Mapping[str, str]) -> int | None:
    text = environment.get("WORLD_SIZE")
    if text is not None and not (text.isdecimal() and int(text) > 0):
        raise ConfigError(f"the environment variable WORLD_SIZE must be a number of ranks, got {text!r}")
    return int(text) if text else None


def _misunderstood(flag: str, value: str | None) -> str:
    if not flag.startswith("-"):
        return f'unexpected argument "{flag}"; did you mean --config {flag}?'
    if flag in _TORCHRUN_FLAGS:
        return f"{flag}: a flag of torchrun; put it before train.py: torchrun {flag} {value or 'N'} train.py ..."
    if hint := _HINTS.get(flag[2:].replace("-", "_")):
        return f"{flag}: unknown flag; {hint}"
    key = find((flag[2:],))
    if key and key.is_table:
        return f"{flag}: is a {key.type}; set its keys one by one: {flag}.KEY VALUE"
    known = ["--config", *_ACTIONS]
    near = next(iter(get_close_matches(flag, known, 1, 0.75)), None) or nearest(flag.lstrip("-"))
    return f"{flag}: unknown flag; " + (f"did you mean --{near.lstrip('-')}?" if near else "--help lists all flags")
