"""Checks that a run's records and checkpoints are what was written, by the hashes that chain them.

The fingerprints of steps are chained; each line of metrics has the hash of its content, of the line before and of the
chain; each checkpoint has the chain's hash after its last step, and the seal of the checkpoint before it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli

from checkpoint.manifest import (
    MANIFEST_NAME,
    Manifest,
    read_trainer_state,
    step_folder,
    steps_in,
)
from checkpoint.seals import seal_of
from checkpoint.verify import check
from configs.errors import UserError
from configs.untrusted import parse_json
from trainer.proof.chain import link
from trainer.proof.metrics_chain import before, opened_line
from trainer.proof.reading import read
from trainer.proof.record import FILE_NAME, Launch, Step
from trainer.report.metrics import METRICS_NAME, read_lines


@dataclass
class Records:
    """What the fingerprints of a run say, without their arrays."""

    numbers: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Loss and gradient norm of each step."""
    chain: dict[int, str] = field(default_factory=dict)
    """How the chain stood after each step, and before the first."""
    intervals: list[tuple[int, int]] = field(default_factory=list)
    """Of each launch, the steps before it and its metrics.interval."""
    problems: list[str] = field(default_factory=list)

    @property
    def last(self) -> int:
        """The last step with a fingerprint."""
        return max(self.numbers, default=0)

    def logged(self, after: int, last: int) -> list[int]:
        """The steps up to `last` that must have a line of metrics.

        The last step before a launch may have none: a save at a signal, in the middle of the next step, may be the end.
        """
        found, starts = [], {step for step, _ in self.intervals}
        for step in range(after + 1, last + 1):
            interval = next((each for begin, each in reversed(self.intervals) if begin < step), 0)
            if interval and step % interval == 0 and step in self.numbers and step not in starts:
                found.append(step)
        return found


def read_records(run: Path) -> Records:
    """Read a run's fingerprints and check their chain.

    Raises:
        UserError: the run has none.
    """
    records = Records()
    for line in read(run):
        if line.problem:
            records.problems.append(f"{run / FILE_NAME}, line {line.number}: {line.problem}")
        if isinstance(line.found, Step):
            records.numbers[line.found.step] = line.found.loss, line.found.grad_norm
            records.chain[line.found.step] = line.hash
        elif isinstance(line.found, Launch):
            interval = tomli.loads(line.found.job)["metrics"]["interval"]
            records.intervals.append((line.found.step, interval))
            records.chain.setdefault(line.found.step, line.found.continues)
    return records


def metrics_problems(run: Path, records: Records) -> Iterator[str]:
    """What is wrong with a run's metrics.jsonl."""
    path, heads, last = run / METRICS_NAME, {""}, 0
    for number, raw in enumerate(read_lines(path) if path.is_file() else (), 1):
        found, step, line = opened_line(raw), _value(raw, "step"), raw.removesuffix("\n")
        if not isinstance(step, int):
            yield f"{path}, line {number}: it is no record of a step"
            continue
        if found is None and _value(raw, "loss") is None:  # of an evaluation
            heads = {link(head, line) for head in heads}
            continue
        chain, missing = records.chain.get(step, ""), records.logged(last, step - 1)
        expected = {link(before(head, chain), found[0]) for head in heads} if found else set()
        if found and found[1] not in expected and missing:
            yield f"{path}, line {number}: before it, the lines of steps {', '.join(map(str, missing))} are missing"
        elif step in records.numbers and (found is None or found[1] not in expected):
            yield f"{path}, line {number}: the line of step {step} has been changed{_how(raw, records.numbers[step])}"
        heads = {found[1], *expected} if found else {link(head, line) for head in heads}
        last = step
    if missing := records.logged(last, records.last):
        yield f"{path}: at its end, the lines of steps {', '.join(map(str, missing))} are missing"


def _value(line: str, key: str) -> object:
    try:
        return parse_json(line)[key]
    except (ValueError, KeyError, TypeError):
        return None


def _how(line: str, numbers: tuple[float, float]) -> str:
    """Which of the numbers that the fingerprint also has are others."""
    said = [
        f"{key} {_value(line, key)} instead of {number!r}"
        for key, number in zip(("loss", "grad_norm"), numbers, strict=True)
        if _value(line, key) not in (number, None)
    ]
    return f": {', '.join(said)}" if said else ""


def checkpoint_problems(run: Path, records: Records) -> Iterator[str]:
    """What is wrong with a run's checkpoints; reads all their files."""
    root = run / "checkpoints"
    seals: dict[tuple[str, int], str] = {}
    for step in steps_in(root):
        folder = step_folder(root, step)
        try:
            manifest, state = check(folder), read_trainer_state(folder)
            seals[manifest.run_id, step] = seal_of(folder)
        except UserError as error:
            yield str(error)
            continue
        yield from (f"{folder}: {problem}" for problem in _chain_problems(manifest, state, records))
        parent = manifest.parent
        before = seals.get((parent.run_id, parent.step)) if parent else None
        if parent and before and manifest.parent_seal and before != manifest.parent_seal:
            yield (
                f"{step_folder(root, parent.step)} has been exchanged or changed: its manifest is not the one that "
                f"{folder.name} continued"
            )


def _chain_problems(manifest: Manifest, state: dict[str, Any], records: Records) -> Iterator[str]:
    expected = records.chain.get(manifest.step)
    if expected is not None and manifest.chain != expected:
        yield (
            f"{MANIFEST_NAME} says that the chain of fingerprints ends in {manifest.chain or 'nothing'} after step "
            f"{manifest.step}, and {FILE_NAME} that it ends in {expected or 'nothing'}: one of them is of another run, "
            "or has been changed"
        )
    if expected is None and manifest.chain and manifest.step > records.last:
        yield f"the fingerprints of steps {records.last + 1} to {manifest.step} are missing in {FILE_NAME}"
    run = state.get("run")
    if not isinstance(run, dict) or run.get("chain", "") != manifest.chain:
        yield "its manifest and its trainer.json do not have the same chain of fingerprints"
