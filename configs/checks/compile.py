"""Rules for torch.compile's mode and options."""

from collections.abc import Iterator

from configs.checks.rule import Problem, Rule
from configs.layout import smallest_world_size
from configs.schema import Config

_GRAPHS = "triton.cudagraphs"
_AUTOTUNE = "max_autotune"


def _settings(config: Config) -> tuple[str, bool, bool]:
    """The key that sets them, whether the compiler records CUDA graphs, and whether it times kernels."""
    table = config.compile
    key = "compile.options" if table.options else "compile.mode"
    records = table.mode in ("reduce-overhead", "max-autotune") or bool(table.options.get(_GRAPHS))
    times = table.mode.startswith("max-autotune") or any(
        value for name, value in table.options.items() if name.replace("-", "_").startswith(_AUTOTUNE)
    )
    return key, records, times


def _mode_or_options(config: Config, _: int | None) -> Iterator[Problem]:
    if config.compile.options and config.compile.mode != "default":
        yield (
            "compile.options",
            f'torch.compile takes a mode or options, but mode is "{config.compile.mode}"; leave one of them out (as an '
            "option, a mode is max_autotune = true or triton.cudagraphs = true)",
        )


def _cuda_graphs(config: Config, world_size: int | None) -> Iterator[Problem]:
    """A graph is recorded for fixed addresses, but FSDP gathers parameters into new memory each time."""
    key, records, _ = _settings(config)
    n_ranks = world_size or smallest_world_size(config.mesh)
    if records and (n_ranks > 1 or config.fsdp.reshard_after_forward == "always"):
        where = f"on {n_ranks} ranks" if n_ranks > 1 else 'with fsdp.reshard_after_forward "always"'
        yield (
            key,
            f"CUDA graphs need parameters that stay where they are in memory, but {where} they are freed and gathered "
            'again; set compile.mode = "max-autotune-no-cudagraphs" or "default"',
        )


def _autotuning(config: Config, _: int | None) -> Iterator[Problem]:
    key, _records, times = _settings(config)
    training = config.training
    if times and (training.deterministic or training.reduction == "exact"):
        cause = "training.deterministic" if training.deterministic else 'training.reduction "exact"'
        yield (
            key,
            f"autotuning takes the kernels that were fastest when they were timed, each with another order of sums, "
            f'but {cause} fixes the order; set compile.mode = "default" or "reduce-overhead"',
        )


RULES: tuple[Rule, ...] = (_mode_or_options, _cuda_graphs, _autotuning)
