"""Rules between keys, one file per subject; each rule is a function that yields the key to blame and a message.

Messages show sizes with their arithmetic. An option that would do nothing is an error, because the user who set it
expects an effect (the schema declares what each key needs, `idle.py` checks it). But an option may stay set where only
the mesh or the available devices leave it idle, so that one file runs on any number of ranks.
"""

from configs.checks import activation_checkpoint, attention, data, elastic, float8, fsdp, job, mesh, model, training
from configs.checks.rule import Problem, Rule
from configs.schema import Config, MissingKey

RULES: tuple[Rule, ...] = (
    *job.RULES,
    *model.RULES,
    *data.RULES,
    *training.RULES,
    *mesh.RULES,
    *fsdp.RULES,
    *activation_checkpoint.RULES,
    *attention.RULES,
    *float8.RULES,
    *elastic.RULES,
)


def check(config: Config, world_size: int | None) -> list[Problem]:
    """Return everything that is wrong between the keys.

    A rule is skipped if it reads a key that `config` lacks because its value in the job is invalid.

    Args:
        config: complete, or with the valid keys only.
        world_size: None if not known yet; then the fewest ranks that the mesh allows are checked.
    """
    problems: list[Problem] = []
    for rule in RULES:
        try:
            problems.extend(rule(config, world_size))
        except MissingKey:
            continue
    return problems
