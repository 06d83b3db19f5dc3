"""Rules for torch.compile's mode."""

from collections.abc import Iterator

from configs.checks.rule import Problem, Rule
from configs.layout import smallest_world_size
from configs.schema import Config


def _cuda_graphs(config: Config, world_size: int | None) -> Iterator[Problem]:
    """A graph is recorded for fixed addresses, but FSDP gathers parameters into new memory each time."""
    n_ranks = world_size or smallest_world_size(config.mesh)
    records = config.compile.mode in ("reduce-overhead", "max-autotune")
    if records and (n_ranks > 1 or config.fsdp.reshard_after_forward == "always"):
        where = f"on {n_ranks} ranks" if n_ranks > 1 else 'with fsdp.reshard_after_forward "always"'
        yield (
            "compile.mode",
            f"CUDA graphs need parameters that stay where they are in memory, but {where} they are freed and gathered "
            'again; set compile.mode = "max-autotune-no-cudagraphs" or "default"',
        )


def _autotuning(config: Config, _: int | None) -> Iterator[Problem]:
    training = config.training
    if config.compile.mode.startswith("max-autotune") and (training.deterministic or training.reduction == "exact"):
        cause = "training.deterministic" if training.deterministic else 'training.reduction "exact"'
        yield (
            "compile.mode",
            f"autotuning takes the kernels that were fastest when they were timed, each with another order of sums, "
            f'but {cause} fixes the order; set compile.mode = "default" or "reduce-overhead"',
        )


RULES: tuple[Rule, ...] = (_cuda_graphs, _autotuning)
