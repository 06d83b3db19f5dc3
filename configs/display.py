"""What `--help` and `--validate` print."""

import textwrap
from collections.abc import Iterator

from configs.layout import accumulation_steps, active_parameter_count, mesh_sizes, parameter_count, smallest_world_size
from configs.load import LoadedConfig
from configs.reading.keys import Key, schema_keys
from configs.reading.toml_text import value_text
from configs.schema import Config, Model, is_run_key
from configs.stages import fewest_micro_batches

_USAGE = """\
Keel trains language models from one TOML file.

  torchrun [--nproc-per-node N] train.py --config JOB [--table.key VALUE ...]
  python train.py --config JOB [--table.key VALUE ...]       (one process)

  --config JOB        the job file; a bare name is looked up in configs/, too
  --table.key VALUE   set a key for this launch; VALUE is TOML, a bare word a
                      string:
                        --training.steps 100 --job.name trial
                        --data.sources '[{name = "a", kind = "synthetic"}]'
                        --data.sources.0.weight 2.0
  --validate          check the job and end; WORLD_SIZE=8 before the command
                      checks it for 8 ranks
  --print-config      print the whole config, with where each value was set
  --help              print this

A job file may begin with base = "other.toml": what it does not set is taken
from there. The keys of the run tables say what is learned; a resume refuses to
change them. Those of the machine tables say how it is computed, and are free to
change at any start (as are training.steps and training.micro_batch_size).
"""


def help_text(width: int) -> str:
    """Every key with its type, default and a sentence, grouped by table, for a terminal of that many columns."""
    sections = [_USAGE.rstrip()]
    tables = {name: key for name, key in schema_keys().items() if key.is_table}
    for name, table in tables.items():
        inner = [key for other, key in schema_keys().items() if other.rpartition(".")[0].removesuffix(".N") == name]
        lines = [
            _header(table),
            *_sentence(table, width, "  "),
            *(line for key in inner if not key.is_table for line in _entry(key, width)),
        ]
        sections.append("\n".join(lines))
    return "\n\n".join(sections) + "\n"


def _header(table: Key) -> str:
    name = f"[[{table.name}]]" if table.type == "list of tables" else f"[{table.name}]"
    kind = "run" if is_run_key(table.name) else "machine"
    return f"{name.replace('.N', '')}  ({kind} table)"


def _entry(key: Key, width: int) -> Iterator[str]:
    yield f"  --{key.name}  {key.type}; {_default(key)}"
    yield from _sentence(key, width, " " * 6)


def _sentence(key: Key, width: int, indent: str) -> list[str]:
    words = " ".join([key.doc, *map(str, key.conditions)])
    return textwrap.wrap(words, width, initial_indent=indent, subsequent_indent=indent)


def _default(key: Key) -> str:
    if key.required:
        return "required"
    return "optional" if key.default is None else f"default {value_text(key.default)}"


def summary(loaded: LoadedConfig, world_size: int | None) -> str:
    """One line on a valid job: parameters, global batch, length, ranks."""
    config = loaded.config
    batch = config.training.global_batch_size
    tokens = batch * config.training.seq_len
    steps = config.training.steps
    return (
        f"{loaded.file} is valid ({_parameters(config.model)}, global batch {batch} sequences = "
        f"{tokens:,} tokens, {steps:,} steps = {_short(steps * tokens)} tokens, {_ranks(config, world_size)})"
    )


def _parameters(model: Model) -> str:
    """All of them, and of a mixture of experts those that a token meets."""
    active = "" if model.n_experts is None else f", {_short(active_parameter_count(model))} active"
    return f"{_short(parameter_count(model))} parameters{active}"


def _ranks(config: Config, world_size: int | None) -> str:
    if world_size is not None:
        sizes = mesh_sizes(config, world_size)
        steps = accumulation_steps(config, sizes)
        ranks = f"{world_size} rank{'s' * (world_size != 1)}"
        return f"{ranks}: {sizes}, {steps} micro-batch{'es' * (steps != 1)} a step"
    smallest = smallest_world_size(config.mesh)
    if config.mesh.dp_shard != -1:
        return f"{smallest} ranks"
    most = smallest * (accumulation_steps(config, mesh_sizes(config, smallest)) // fewest_micro_batches(config))
    return f"{smallest} to {most} ranks"


def _short(count: int) -> str:
    """1235814400 -> "1.24B"."""
    for size, letter in ((10**12, "T"), (10**9, "B"), (10**6, "M")):
        if count >= size:
            return f"{count / size:.3g}{letter}"
    return f"{count:,}"
