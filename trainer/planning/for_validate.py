"""What `--validate` asks that only torch can answer, which is imported when a job needs it."""

from collections.abc import Sequence

from configs.load import LoadedConfig
from configs.schema import Config


def say_choice(config: Config, ranks: int, others: Sequence[Config]) -> str:
    """The choice of `activation_checkpoint.memory_limit_gib` for a job on so many ranks, and for its other stages."""
    from trainer.planning.by_memory import planned_choice

    return str(planned_choice(config, ranks, None, others))


def say_stages(job: LoadedConfig) -> str:
    """The table of the run's stages, with a line break at its end; empty for a job without stages."""
    from trainer.planning.stage_table import stage_table

    return "".join(f"{line}\n" for line in stage_table(job))


def check_names(job: LoadedConfig) -> None:
    """Raise a ConfigError if the job names a parameter or an op that does not exist."""
    from trainer.planning.unknown_names import require_known_names

    for each in job.jobs:
        require_known_names(each)
