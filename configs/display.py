"""The output of `--help` and `--validate`."""

import textwrap
from collections.abc import Iterator

from configs.architectures import family_of
from configs.checks import check
from configs.elastic import describe
from configs.layout import (
    accumulation_steps,
    active_parameter_count,
    mesh_sizes,
    parameter_count,
    rank_counts,
    smallest_world_size,
    tokens_per_step,
)
from configs.load import LoadedConfig
from configs.reading.keys import Key, schema_keys
from configs.reading.toml_text import value_text
from configs.run_stages import stage_of
from configs.schema import AnyModel, Config, is_described, is_run_key

_MOST_COUNTS = 10
"""Numbers of ranks that `--validate` lists."""
_USAGE = """\
Keel trains language models from one TOML file.

  keel train JOB [--ranks N] [--table.key VALUE ...]
  torchrun [--nproc-per-node N] train.py --config JOB [--table.key VALUE ...]
  python train.py --config JOB [--table.key VALUE ...]       (one process)

  --config JOB        the job file; a bare name is also looked up in configs/
  --ranks N           of keel train: start N ranks on this host
  --nodes M           with --ranks N: print the command that starts N ranks on
                      each of M hosts; 1:4 is one to four hosts
  --table.key VALUE   set a key for this launch; VALUE is TOML, and a bare
                      word is a string:
                        --training.steps 100 --job.name trial
                        --data.sources '[{name = "a", kind = "synthetic"}]'
                        --data.sources.0.weight 2.0
  --validate          check the job and exit; with WORLD_SIZE=8 before the
                      command, check it for 8 ranks
  --print-config      print the whole config, and where each value was set
  --help              print this help

A job file may begin with base = "other.toml" to inherit every key that it does
not set. Keys of run tables decide what is learned, so a resume refuses to change
them. Keys of machine tables decide how it is computed; they may change at every
start (as may training.steps and, unless reduction = "exact", micro_batch_size).
"""


def help_text(width: int) -> str:
    """Describe every key with its type and default, grouped by table, for a terminal `width` columns wide."""
    sections = [_USAGE.rstrip()]
    for table, keys in keys_by_table():
        kind = "run" if is_run_key(table.name) else "machine"
        lines = [f"{header(table)}  ({kind} table)", *_wrapped(table, width, "  ")]
        lines += [line for key in keys for line in _entry(key, width)]
        sections.append("\n".join(lines))
    return "\n\n".join(sections) + "\n"


def keys_by_table() -> Iterator[tuple[Key, list[Key]]]:
    """Each table, and the keys in it that are no tables."""
    for name, table in schema_keys().items():
        if table.is_table:
            inner = [key for other, key in schema_keys().items() if other.rpartition(".")[0].removesuffix(".N") == name]
            yield table, [key for key in inner if not key.is_table]


def header(table: Key) -> str:
    """The line with which a table begins in a job file."""
    name = f"[[{table.name}]]" if table.type == "list of tables" else f"[{table.name}]"
    return name.replace(".N", "")


def sentence(key: Key) -> str:
    """What a key or table means, and when it does nothing."""
    return " ".join([key.doc, *map(str, key.conditions)])


def _entry(key: Key, width: int) -> Iterator[str]:
    values = f"  --{key.name}  {key.type}; {_default(key)}"
    yield from textwrap.wrap(values, _WIDEST, subsequent_indent=" " * 10)
    yield from _wrapped(key, width, " " * 6)


_WIDEST = 120
"""Longest line of a key's values, which are in one line where they fit, so that a search finds them."""


def _wrapped(key: Key, width: int, indent: str) -> list[str]:
    return textwrap.wrap(sentence(key), width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


def _default(key: Key) -> str:
    if key.required:
        return "required"
    return "optional" if key.default is None else f"default {value_text(key.default)}"


def summary(loaded: LoadedConfig, world_size: int | None) -> str:
    """Summarize a valid job in one line: parameters, global batch, length, ranks."""
    config = loaded.config
    batch = config.training.global_batch_size
    tokens = tokens_per_step(config)
    steps = config.training.steps
    in_all = stage_of(loaded.stages, steps).tokens_before(steps + 1)
    return (
        f"{loaded.file} is valid ({_parameters(config.model)}, global batch {batch} sequences = "
        f"{tokens:,} tokens, {steps:,} steps = {_short(in_all)} tokens, {_ranks(loaded, world_size)})"
    )


def _parameters(model: AnyModel) -> str:
    """The number of parameters; of a mixture of experts also the number active for a token.

    Without a description of the weights, only the modules know it: then the shape.
    """
    if not is_described(model):
        return family_of(model).shape(model)
    active = "" if model.n_experts is None else f", {_short(active_parameter_count(model))} active"
    return f"{_short(parameter_count(model))} parameters{active}"


def _ranks(loaded: LoadedConfig, world_size: int | None) -> str:
    config = loaded.config
    if loaded.choice:
        return f"{describe(config, loaded.choice)}{_cut(config, loaded.choice.ranks)}"
    if config.elastic.meshes:
        counts = [smallest_world_size(config.model_copy(update={"mesh": mesh})) for mesh in config.elastic.meshes]
        return f"elastic: {len(counts)} meshes, from {min(counts)} ranks"
    if world_size is not None:
        ranks = f"{world_size} rank{'s' * (world_size != 1)}"
        mesh = f": {mesh_sizes(config, world_size)}" if world_size > 1 else ""
        return f"{ranks}{mesh}{_cut(config, world_size)}"
    counts = _rank_counts(loaded)
    if len(counts) > _MOST_COUNTS:
        return f"{', '.join(map(str, counts[:_MOST_COUNTS]))} or up to {counts[-1]} ranks ({len(counts)} counts)"
    *others, most = map(str, counts)
    return f"{', '.join(others)}{' or ' if others else ''}{most} rank{'s' * (most != '1')}"


def _cut(config: Config, ranks: int) -> str:
    """How a global batch is cut: ", 2 micro-batches per step"; "" while that is not chosen."""
    if config.training.micro_batch_size == "auto":
        return ""
    steps = accumulation_steps(config, mesh_sizes(config, ranks))
    return f", {steps} micro-batch{'es' * (steps != 1)} per step"


def _rank_counts(loaded: LoadedConfig) -> list[int]:
    """The numbers of ranks that form the mesh and divide the global batch, in all stages up to training.steps."""
    config = loaded.config
    if config.mesh.dp_shard != -1:
        return [smallest_world_size(config)]
    reached = [stage.config for stage in loaded.stages if stage.border.after < config.training.steps]
    return [ranks for ranks in rank_counts(config) if not any(check(each, ranks) for each in reached)]


def _short(count: int) -> str:
    """1235814400 -> "1.24B"; 999885952 -> "1B"."""
    rounded = float(f"{count:.3g}")
    for size, letter in ((10**12, "T"), (10**9, "B"), (10**6, "M")):
        if rounded >= size:
            return f"{count / size:.3g}{letter}"
    return f"{count:,}"
