"""Reads `fingerprints.jsonl` and checks its chain, line by line."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from configs.errors import UserError
from trainer.proof.chain import link, opened
from trainer.proof.record import FILE_NAME, LAUNCH, STEP, Launch, Step, read_launch, read_step
from trainer.report.metrics import read_lines


@dataclass(frozen=True)
class Line:
    """One line of the file."""

    number: int
    """From 1."""
    found: Launch | Step | None
    """None: it is neither."""
    hash: str
    """As the line says it."""
    problem: str = ""
    """What is wrong with it, or with the lines between it and the one before."""


def read(folder: Path) -> Iterator[Line]:
    """Yield the lines of a run's fingerprints, with what breaks the chain.

    Raises:
        UserError: the run has none.
    """
    path = folder / FILE_NAME
    if not path.is_file():
        raise UserError(
            f"{folder} has no {FILE_NAME}: the run's fingerprints are recorded with metrics.fingerprint = true"
        )
    heads, last_step = {""}, 0  # both hashes that the last line may be continued by: its own, and what it should be
    for number, raw in enumerate(read_lines(path), 1):
        text = raw.removesuffix("\n")
        if launch := read_launch(text):
            problem = "" if launch[0].continues in heads else _gap(last_step, launch[0].step)
            yield Line(number, *launch, problem=problem)
            if problem:
                heads = {launch[0].continues}
            last_step = launch[0].step
            continue
        sealed = opened(text, STEP)
        step = read_step(sealed[0]) if sealed else None
        if sealed is None or step is None:
            kind = "of a launch, but its hash does not match" if opened(text, LAUNCH) else "of a step"
            yield Line(number, None, "", f"it has been changed: it is no line {kind}")
            continue
        expected = {link(head, sealed[0]) for head in heads}
        problem = (
            ""
            if sealed[1] in expected
            else _gap(last_step, step.step - 1)
            or (f"step {step.step} has been changed: its hash does not follow from its content and the line before")
        )
        yield Line(number, step, sealed[1], problem)
        heads, last_step = {sealed[1], *expected}, step.step


def _gap(last: int, before: int) -> str:
    """What is missing between two steps; "" if nothing is."""
    if before <= last:
        return ""
    return f"step {before} is missing" if before == last + 1 else f"steps {last + 1} to {before} are missing"


@dataclass(frozen=True)
class Stretch:
    """Consecutive steps with their launches."""

    launches: dict[str, Launch]
    """By hash."""
    steps: dict[int, Step]
    hashes: dict[int, str]
    """How the chain stood after each of the steps, and before the first."""


def read_stretch(folder: Path, first: int, last: int) -> Stretch:
    """Read the fingerprints of the steps from `first` to `last`, as far as they are recorded; other lines are skipped.

    Raises:
        UserError: the run has none.
    """
    stretch = Stretch({}, {}, {})
    for line in read(folder):
        if isinstance(line.found, Launch):
            stretch.launches[line.hash] = line.found
            stretch.hashes.setdefault(line.found.step, line.found.continues)
        elif isinstance(line.found, Step) and first - 1 <= line.found.step <= last:
            stretch.hashes[line.found.step] = line.hash
            if line.found.step >= first:
                stretch.steps[line.found.step] = line.found
    return stretch
