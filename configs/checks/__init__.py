"""Rules between keys, one file per subject; each rule is a function that yields the key to blame and a message.

Messages show sizes with their arithmetic. An option that does nothing is a warning (the schema declares what each key
needs, `idle.py` checks it).
"""

from collections.abc import Collection
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from configs.checks import data, job, mesh, model, techniques, training
from configs.checks.rule import Problem, Rule
from configs.reading.keys import tables_in
from configs.schema import Config, table_of_model

RULES: tuple[Rule, ...] = (
    *job.RULES,
    *model.RULES,
    *data.RULES,
    *training.RULES,
    *mesh.RULES,
    *techniques.RULES,
)


def check(config: Config, world_size: int | None) -> list[Problem]:
    """Return everything that is wrong between the keys.

    Args:
        config: the job.
        world_size: None if not known yet; then the fewest ranks that the mesh allows are checked.
    """
    return [problem for rule in RULES for problem in rule(config, world_size)]


def check_tables(values: dict[str, Any], wrong: Collection[str | int]) -> list[Problem]:
    """Return what is wrong between the keys of a job's right tables; a rule that reads a wrong one is skipped.

    Args:
        values: the job, as nested tables.
        wrong: the tables with keys that are unknown, missing, or set to a wrong value.
    """
    names = Config.model_fields.keys() - {"stages", *wrong}
    choices = {name: tables_in(Config.model_fields[name].annotation) for name in names}
    tables = {name: found[0] for name, found in choices.items()}
    if "model" in tables:
        tables["model"] = table_of_model(values.get("model"))
    right: Any = SimpleNamespace(**{name: table.model_validate(values.get(name, {})) for name, table in tables.items()})
    problems: list[Problem] = []
    for rule in RULES:
        with suppress(AttributeError):
            problems.extend(rule(right, None))
    return problems
