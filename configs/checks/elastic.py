"""Rules for copies of the state in memory, from which an elastic run goes on."""

from collections.abc import Iterator

from configs.checks.rule import Problem, Rule
from configs.schema import Config


def _copies(config: Config, _: int | None) -> Iterator[Problem]:
    table = config.checkpoint
    if table.memory_copies and not table.memory_interval:
        yield (
            "checkpoint.memory_interval",
            f"memory_copies = {table.memory_copies} needs the number of steps between copies; set memory_interval, "
            "such as to a tenth of checkpoint.interval",
        )
    if table.memory_copies and table.mode == "sync":
        yield (
            "checkpoint.memory_copies",
            'copies are made in the background, from memory that mode = "sync" does not take; set checkpoint.mode = '
            '"async", or leave memory_copies out',
        )


RULES: tuple[Rule, ...] = (_copies,)
