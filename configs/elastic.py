"""The mesh of an elastic job: the largest that the ranks of this launch, whose number is not known before, can form."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from configs.checks import mesh as rules
from configs.checks.rule import Problem
from configs.errors import ConfigError
from configs.layout import mesh_sizes, product_of_axes, rank_counts, smallest_world_size
from configs.schema import Config, Mesh


@dataclass(frozen=True)
class Choice:
    """The mesh of one launch."""

    ranks: int
    """Ranks that form it; those after them wait idle."""
    world_size: int
    """Ranks of the launch."""
    table_of_the_job: Mesh
    """`[mesh]` as the job has it; `elastic.meshes` may have replaced it."""

    @property
    def idle(self) -> int:
        """Ranks that wait."""
        return self.world_size - self.ranks


Check = Callable[[Config, int | None], list[Problem]]


def check_elastic(config: Config, world_size: int | None, check: Check) -> tuple[Config, Choice | None, list[Problem]]:
    """Choose the mesh of an elastic job, and check the job with it; another job is only checked.

    Args:
        config: the job.
        world_size: ranks of the launch; None if unknown, then each mesh is checked for the fewest ranks that form it.
        check: the rules between keys (configs.checks).

    Returns:
        The config with the chosen mesh, the choice (None if there is none), and what is wrong.
    """
    if not config.elastic.enable:
        return config, None, check(config, world_size)
    candidates = [(key, config.model_copy(update={"mesh": mesh})) for key, mesh in _candidates(config)]
    problems = [(_renamed(path, key), why) for key, each in candidates for path, why in check(each, None)]
    if problems or world_size is None:
        return config, None, list(dict.fromkeys(problems))
    for _, each in candidates:
        if ranks := _most_ranks(each, world_size):
            return each, Choice(ranks, world_size, config.mesh), check(each, ranks)
    return config, None, [_none_fits(config, world_size)]


def _candidates(config: Config) -> Iterator[tuple[str, Mesh]]:
    """The meshes in order of preference, each with the key that has it."""
    if config.elastic.meshes:
        yield from ((f"elastic.meshes.{index}", mesh) for index, mesh in enumerate(config.elastic.meshes))
    else:
        yield "mesh", config.mesh


def _renamed(path: str, key: str) -> str:
    """The key to blame: a rule knows only `[mesh]`, which may stand for an item of elastic.meshes."""
    return f"{key}.{path.removeprefix('mesh.')}" if path.startswith("mesh.") else path


def _most_ranks(config: Config, world_size: int) -> int:
    """The most of `world_size` ranks that can form the mesh and divide the global batch; 0 if there are too few."""
    try:
        is_open = config.mesh.dp_shard == -1
        counts = rank_counts(config, world_size) if is_open else [smallest_world_size(config)]
    except ConfigError:
        return 0
    for ranks in reversed(counts):
        if ranks <= world_size and not any(problem for rule in rules.RULES for problem in rule(config, ranks)):
            return ranks
    return 0


def _none_fits(config: Config, world_size: int) -> Problem:
    meshes = [mesh for _, mesh in _candidates(config)]
    fewest = min(smallest_world_size(config.model_copy(update={"mesh": mesh})) for mesh in meshes)
    listed = ", ".join(product_of_axes(mesh) or "dp_shard 1" for mesh in meshes)
    what = "no mesh of elastic.meshes" if config.elastic.meshes else "[mesh] does not, even at its smallest,"
    verb = "fits" if config.elastic.meshes else "fit"
    key = "elastic.meshes" if config.elastic.meshes else "mesh.dp_shard"
    ranks = f"{world_size} rank{'s' * (world_size != 1)}"
    return key, f"{what} {verb} {ranks} ({listed}); start {fewest} ranks or more, or add a smaller mesh"


def describe(config: Config, choice: Choice) -> str:
    """One line: "4 of 6 ranks form the mesh dp_shard 4; the other 2 wait idle"."""
    idle = f"; the other {choice.idle} wait{'s' * (choice.idle == 1)} idle" if choice.idle else ""
    of = f"{choice.ranks} of {choice.world_size} ranks form" if choice.idle else f"{choice.ranks} ranks form"
    return f"{of} the mesh {mesh_sizes(config, choice.ranks)}{idle}" if choice.world_size > 1 else "1 rank"
