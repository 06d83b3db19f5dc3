"""Tries jobs and meshes that are drawn at random (`parity_draw.py`), and shrinks those that go wrong.

Draws in float64 must agree with the plain reference (`parity_reference.py`) to 1e-10; those with exact sums must have
the bits of the smallest mesh that these promise to equal. The weights that are compared are the last step's, and their
average, if one is kept.

What the config refuses is no fault; what it accepts must train, and to the right values. A fault is shrunk: its keys
are left out one by one, as long as it remains.
"""

import re
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpoint.manifest import step_folder
from configs.errors import ConfigError
from configs.load import find_job_file, load
from configs.reading.overrides import words
from configs.reading.toml_text import value_text
from scripts.parity_draw import DECISIVE, FLOAT64, Draw, Keys, draw
from scripts.parity_rows import BOUNDS

if TYPE_CHECKING:
    from scripts.rank_pool import RankPool


@dataclass(frozen=True)
class Outcome:
    """A draw's outcome."""

    refused: str = ""
    """The config's reason for refusing it, without its numbers and names."""
    reason: str = ""
    """All of that reason."""
    fault: str = ""
    """The fault that was found; empty if there is none."""
    trace: str = ""
    """Where it came from, of a crash."""
    is_lost: bool = False
    """Whether a rank's process ended by a signal."""


# --------------------------------------------------------------------------- trying


def attempt(pool: "RankPool", config_name: str, drawn: Draw) -> Outcome:
    """Train a draw and its reference, and compare."""
    from scripts.rank_pool import RankLost
    from trainer.planning.unknown_names import require_known_names

    try:
        with tempfile.TemporaryDirectory() as folder:
            drawn = _with_teacher(pool, config_name, drawn, Path(folder))
            job = _job_file(config_name, drawn.stages, Path(folder))
            for keys in (drawn.keys, _after_move(drawn)):
                require_known_names(load(job, words(keys), world_size=drawn.ranks))
            return Outcome(fault=_fault(pool, job, drawn, Path(folder)))
    except ConfigError as error:
        return Outcome(refused=_kind(str(error).splitlines()[0]), reason=str(error))
    except RuntimeError as error:  # of a rank, with its traceback
        last = str(error).strip().splitlines()[-1]
        if last.startswith("configs.errors."):
            return Outcome(refused=_kind(last), reason=last.removeprefix("configs.errors."))
        return Outcome(fault=f"crash: {last}", trace=str(error), is_lost=isinstance(error, RankLost))


def _job_file(config_name: str, stages: Sequence[str], folder: Path) -> str:
    """The job file with stages of its own, which no command line sets."""
    if not stages:
        return config_name
    job = folder / "job.toml"
    base = value_text(str(find_job_file(config_name).absolute()))
    job.write_text(f"base = {base}\nstages = [{', '.join(stages)}]\n")
    return str(job)


def _with_teacher(pool: "RankPool", config_name: str, drawn: Draw, folder: Path) -> Draw:
    """The draw with the teacher, which is written in `folder`, in its keys."""
    if not drawn.teacher:
        return drawn
    from scripts.parity_compare import write_teacher

    pool.run(1, write_teacher, config_name, words(drawn.teacher | FLOAT64), str(folder))
    return replace(drawn, keys=drawn.keys | {"distillation.teacher": value_text(str(step_folder(folder, 1)))})


def _after_move(drawn: Draw) -> Keys:
    return drawn.run | drawn.moved if drawn.move_at else drawn.keys


def _fault(pool: "RankPool", config_name: str, drawn: Draw, folder: Path) -> str:
    """The difference from the reference; empty if there is none."""
    from scripts.parity_compare import Detour, bits, compare
    from scripts.parity_reference import reference

    detour = Detour(drawn.evaluate_at, drawn.move_at, words(_after_move(drawn)), str(folder / "checkpoints"))
    if drawn.is_exact:
        ranks, keys = _same_bits(drawn)
        expected = pool.run(ranks, bits, config_name, words(keys))[0]
        found = pool.run(drawn.ranks, bits, config_name, words(drawn.keys), detour)[0]
        return "" if found == expected else f"other bits than on {ranks} rank{'s' * (ranks > 1)}"
    path = str(folder / "reference.pt")
    pool.run(1, reference, config_name, words(drawn.run), path)
    difference = pool.run(drawn.ranks, compare, config_name, words(drawn.keys), path, detour)[0]
    if difference.passes("float64"):
        return ""
    names = ("loss", "norm", "gradient", "weights")
    figures = [f"{name} {value:.1e}" for name, value in zip(names, difference.values, strict=True)]
    return f"more than {BOUNDS['float64'][0]:.0e} from the reference: {', '.join(figures)}"


def _same_bits(drawn: Draw) -> tuple[int, Keys]:
    """The smallest mesh that has the same bits: its ranks, and the overrides."""
    keys = drawn.run | {key: value for key, value in drawn.keys.items() if key in DECISIVE}
    cp, tp, ep = (int(str(keys.get(f"mesh.{axis}", 1))) for axis in ("cp", "tp", "ep"))
    data_ranks = max(1, ep // cp)
    is_by_owner = keys.get("fsdp.partition") == "owner"
    keys |= {"mesh.dp_replicate": data_ranks, "mesh.dp_shard": 1} if is_by_owner else {"mesh.dp_shard": data_ranks}
    return cp * tp * data_ranks, keys


def _kind(reason: str) -> str:
    """A message without its numbers, so that those of one rule are equal."""
    return re.sub(r"\d+(\.\d+)?", "N", reason.removeprefix("configs.errors.").split(";")[0])[:110]


# --------------------------------------------------------------------------- shrinking


def shrunk(pool: "RankPool", config_name: str, drawn: Draw, seconds: float = 600.0) -> Draw:
    """Leave out one thing after another, as long as the draw still goes wrong.

    Stops after `seconds` with the smallest draw found, since ranks that hang take minutes to fail.
    """
    end = time.monotonic() + seconds
    before = None
    while drawn != before:
        before = drawn
        for part in _parts(drawn):
            if time.monotonic() > end:
                return drawn
            smaller = _less(drawn, *part)
            if smaller != drawn and attempt(pool, config_name, smaller).fault:
                drawn = smaller
    return drawn


def _parts(drawn: Draw) -> list[tuple[str, str]]:
    """The parts that can be left out: a field, and a key of it."""
    kept = {"training.reduction", *(() if drawn.is_exact else FLOAT64)}
    keys = [("keys", key) for key in drawn.keys if key not in kept]
    stages = [("stages", stage) for stage in drawn.stages]
    taught = [("teacher", key) for key in ("", *drawn.teacher)] if drawn.teacher else []
    return [("move_at", ""), ("evaluate_at", ""), *taught, *stages, *keys, *(("moved", key) for key in drawn.moved)]


def _less(drawn: Draw, where: str, key: str) -> Draw:
    if where == "move_at":
        return replace(drawn, move_at=0, moved={})
    if where == "evaluate_at":
        return replace(drawn, evaluate_at=())
    if (where, key) == ("teacher", ""):
        untaught = {name: value for name, value in drawn.keys.items() if not name.startswith("distillation.")}
        return replace(drawn, keys=untaught, teacher={})
    if where == "stages":
        return replace(drawn, stages=tuple(stage for stage in drawn.stages if stage != key))
    kept: Any = {name: value for name, value in getattr(drawn, where).items() if name != key}
    return replace(drawn, **{where: kept})


# --------------------------------------------------------------------------- many


_TIMES_LOST = 1
"""Times that a rank may be lost and its job is tried once more (see `RankLost`): one in some 10,000 jobs."""


def run_random(config_name: str, jobs: int, seed: int) -> int:
    """Try the draws of a seed, print what goes wrong and how to repeat it; returns 1 if anything did, otherwise 0."""
    from scripts.rank_pool import RankPool

    started = time.perf_counter()
    reasons = Counter[str]()
    wrong = 0
    times_lost = 0
    print(f"{jobs} jobs of seed {seed}")
    with closing(RankPool(size=8)) as pool:
        for number in range(jobs):
            drawn = draw(seed, number)
            outcome = attempt(pool, config_name, drawn)
            if outcome.is_lost and times_lost < _TIMES_LOST:
                times_lost += 1
                print(f"job {number}: {outcome.fault}\n    {drawn.command(config_name)}\n{outcome.trace}", flush=True)
                print("  tried once more:", flush=True)
                outcome = attempt(pool, config_name, drawn)
            if outcome.fault:
                wrong += 1
                print(f"job {number}: {outcome.fault}\n    {drawn.command(config_name)}\n{outcome.trace}", flush=True)
                print(f"  shrunk:\n    {shrunk(pool, config_name, drawn).command(config_name)}", flush=True)
            reasons.update([outcome.refused] if outcome.refused else [])
            if (number + 1) % 10 == 0 or number + 1 == jobs:
                seconds = (time.perf_counter() - started) / (number + 1)
                print(f"{number + 1} jobs: {reasons.total()} refused, {wrong} wrong, {seconds:.1f} s each", flush=True)
    for reason, count in reasons.most_common():
        print(f"{count:5d} refused: {reason}")
    return min(wrong, 1)


def require_steps(config_name: str, drawn: Draw) -> None:
    """Check that a job goes on until it moves and is evaluated; of one that the config refuses, `attempt` says so.

    Raises:
        ConfigError: it ends before.
    """
    try:
        with tempfile.TemporaryDirectory() as folder:
            job = _job_file(config_name, drawn.stages, Path(folder))
            steps = load(job, words(drawn.keys), world_size=drawn.ranks).config.training.steps
    except ConfigError:
        return
    if drawn.move_at > steps:
        raise ConfigError(f"--move-at {drawn.move_at}: the job ends after {steps} steps; name one of them")
    if late := [step for step in drawn.evaluate_at if step >= steps]:
        raise ConfigError(f"--evaluate-at {late[0]}: a step must follow, and the job has {steps}; name an earlier one")


def run_one(config_name: str, drawn: Draw) -> int:
    """Try one draw and print its outcome; returns 1 if it is wrong, otherwise 0."""
    from scripts.rank_pool import RankPool

    with closing(RankPool(size=drawn.ranks)) as pool:
        outcome = attempt(pool, config_name, drawn)
    print(outcome.fault or (f"refused: {outcome.reason}" if outcome.refused else "right"))
    return 1 if outcome.fault else 0
