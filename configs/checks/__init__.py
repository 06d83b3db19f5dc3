"""What must hold between keys, each rule a function that yields the key to blame and the message; a file a subject.

Sizes are shown with their arithmetic. An option that would do nothing is an error, since whoever set it expects
something of it (the schema says which need what, `idle.py` reads it); but an option may stay set when the mesh or the
devices at hand leave it idle, so that one file runs on any number of ranks.
"""

from configs.checks import activation_checkpoint, data, fsdp, job, mesh, model, training
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
)


def check(config: Config, world_size: int | None) -> list[Problem]:
    """All that is wrong between the keys.

    A rule that reads a key which `config` lacks, since the job has a mistake there, is not checked.

    Args:
        config: complete, or made of the keys that are right.
        world_size: None if it is not known yet; then the fewest ranks that the mesh allows are checked.
    """
    problems: list[Problem] = []
    for rule in RULES:
        try:
            problems.extend(rule(config, world_size))
        except MissingKey:
            continue
    return problems
