"""The file from which somebody else computes steps of a run again, and why theirs differ.

It is one JSON object of at most MAX_BYTES: the resolved job, the environment and the hashes of code, tokenizer and
data, as the run recorded them in `fingerprints.jsonl`, and the fingerprints of some steps. The names and sizes of the
parameters follow from the job, and which rank held what says nothing about another machine; both are left out.
"""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, NonNegativeInt

from checkpoint.manifest import seal_of
from checkpoint.reproducibility import CODE, changes
from configs.errors import UserError
from configs.files import write_atomically
from configs.load import load
from configs.run_change import run_key_diff
from configs.untrusted import parse_json, read_file, shortened
from scripts.proof.compare import has_other_data
from scripts.proof.recorded import NO_LINE, launch_of, read_stretch, step_of
from scripts.proof.replay import JOB_NAME, Plan, Verdict, configs_of
from trainer.planning.skeleton import skeleton
from trainer.proof.record import Launch, Step

MAX_BYTES = 64 << 10
MOST_STEPS = 20
"""Steps that a file has by default, if they fit."""
_PLACES = (".path", "tokenizer.", "data.prepare", "checkpoint.", "validation.")
"""Parts of run keys that may differ between two machines which compute the same."""


class _Form(BaseModel, extra="forbid", strict=True):
    """The form of a file, whose launch and steps are those of `fingerprints.jsonl`."""

    keel_reproduce: Literal[1]
    begin: NonNegativeInt
    seal: str | None
    first_sample: NonNegativeInt | None
    launch: dict[str, Any]
    steps: Annotated[list[dict[str, Any]], Field(min_length=1)]


@dataclass(frozen=True)
class Reproduction:
    """The content of a file."""

    begin: int
    """Steps before; 0: it begins with the initial weights."""
    seal: str | None
    """Seal of the checkpoint of that step; None: it begins with the initial weights."""
    first_sample: int | None
    """The same as of `Plan`."""
    launch: Launch
    steps: list[Step]

    def text(self) -> str:
        """The file's text."""
        launch = {name: value for name, value in asdict(self.launch).items() if name != "parameters"}
        steps = [parse_json(step.line()) | {"ranks": ""} for step in self.steps]
        head = {"keel_reproduce": 1, "begin": self.begin, "seal": self.seal, "first_sample": self.first_sample}
        return json.dumps(head | {"launch": launch, "steps": steps}) + "\n"

    def plan(self, checkpoint: Path | None, folder: Path, words: Sequence[str] = ()) -> Plan:
        """What is to be computed, in a folder that gets the job file.

        Args:
            checkpoint: that of step `begin`; None: it begins with the initial weights.
            folder: gets the job file.
            words: keys of the job and their values, by which a user names a model of their own.

        Raises:
            KeelError: it is missing, or another one, or the job is not one of this Keel.
        """
        if (self.begin > 0) != (checkpoint is not None):
            needs = f"begins at the checkpoint of step {self.begin}; name it with" if self.begin else "needs no"
            raise UserError(f"the file {needs} --checkpoint")
        if checkpoint and seal_of(checkpoint) != self.seal:
            raise UserError(f"{checkpoint} is another checkpoint than that of step {self.begin} which the file names")
        (folder / JOB_NAME).write_text(self.launch.job)
        shapes = skeleton(load(str(folder / JOB_NAME), words, is_stored=True).config.model).shapes
        parameters = [(name, prod(shape)) for name, shape in shapes.items()]
        launch = replace(self.launch, parameters=parameters)
        if not all(step.is_of(launch) for step in self.steps):
            raise UserError(f"the file's job has {len(parameters)} parameters here, but its steps have other numbers")
        return Plan(folder, checkpoint, self.first_sample, launch, {step.step: step for step in self.steps})


def write(file: Path, planned: Plan, begin: int, numbers: Sequence[int] | None) -> list[int]:
    """Write the file; returns the steps in it.

    Args:
        file: is replaced.
        planned: the steps of the run from the file's first on.
        begin: steps before.
        numbers: steps to keep besides the first; None: the first ones, up to MOST_STEPS, that fit.

    Raises:
        UserError: it would be too large, or can't be written, or a step was not recorded.
    """
    if missing := [number for number in (begin + 1, *(numbers or ())) if number not in planned.steps]:
        raise UserError(f"{planned.run} has no fingerprint of step {missing[0]} after step {begin}")
    for number, launch in read_stretch(planned.run, begin + 1, planned.last).launches.items():
        if (launch.mesh, launch.environment) != (planned.launch.mesh, planned.launch.environment):
            raise UserError(f"{planned.run}: step {number} was computed on another mesh or machine than {planned.last}")
    steps = [planned.steps[number] for number in sorted({begin + 1, *(numbers or planned.steps)})]
    seal = seal_of(planned.checkpoint) if planned.checkpoint else None
    found = Reproduction(begin, seal, planned.first_sample, planned.launch, steps)
    if numbers is None:
        found = replace(found, steps=steps[:MOST_STEPS])
        while len(found.text()) > MAX_BYTES and len(found.steps) > 1:
            found = replace(found, steps=found.steps[:-1])
    text = found.text()
    if len(text) > MAX_BYTES:
        raise UserError(
            f"{file} would have {len(text):,} bytes, {len(text) // len(found.steps):,} for each of "
            f"{len(found.steps)} steps; the most is {MAX_BYTES:,}{': choose fewer --steps' if numbers else ''}"
        )
    try:
        write_atomically(file, [text], writer=str(os.getpid()))
    except OSError as error:
        raise UserError(f"{file}: cannot be written ({error.strerror})") from None
    return [step.step for step in found.steps]


def read(file: Path, numbers: Sequence[int] | None = None) -> Reproduction:
    """Read a file that somebody else may have written; of its steps the first, and those asked for.

    Raises:
        UserError: it can't be read, or is no such file, or has not all of these steps.
    """
    try:
        form = _Form.model_validate(parse_json(read_file(file, MAX_BYTES)))
        launch = launch_of({**form.launch, "parameters": []})
        launch.job.encode()  # JSON can spell half of a character, which no file can hold
        steps = [step_of(each) for each in form.steps]
        found = Reproduction(form.begin, form.seal, form.first_sample, launch, steps)
        if steps[0].step != found.begin + 1:
            raise ValueError(f"its first step is {steps[0].step} instead of {found.begin + 1}")
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror})") from None
    except NO_LINE as error:
        reason = shortened(" ".join(str(error).split()), 200)
        raise UserError(f"{file}: not a file that keel reproduce has written ({reason})") from None
    wanted = {found.begin + 1, *(numbers or (step.step for step in steps))}
    if missing := sorted(wanted - {step.step for step in steps}):
        raise UserError(f"{file} has no step {missing[0]}; it has {', '.join(str(step.step) for step in steps)}")
    return replace(found, steps=[step for step in steps if step.step in wanted])


def reasons(planned: Plan, folder: Path, verdict: Verdict) -> Iterator[str]:
    """Why steps that were computed in `folder` differ from those of the file, the most certain reason first.

    If they do not, only that data differ which these steps have not read.
    """
    stretch = read_stretch(folder, planned.first, planned.last)
    now = stretch.launches[planned.last]
    others = [name for name, was in planned.launch.data.items() if now.data.get(name, was) != was]
    which = f" ({', '.join(others)}: other content)" if others else ""
    pairs = [(step, stretch.steps[number]) for number, step in sorted(planned.steps.items())]
    read_other = [step.step for step, again in pairs if has_other_data(step, again)]
    if read_other:
        yield f"data: step {read_other[0]} is the first that read other tokens{which}"
    elif others:
        yield f"data: not in these steps, whose tokens are the same, but elsewhere{which}"
    if verdict.holds:
        return
    lines = run_key_diff(*configs_of(planned.launch, now, folder))
    changed = [line for line in lines if not any(place in line.partition(": ")[0] for place in _PLACES)]
    if changed:
        yield f"job: {'; '.join(changed)}"
    if CODE in verdict.changed:
        folders = ", ".join(sorted(changes(planned.launch.code, now.code))) if planned.launch.code else ""
        yield f"code: {CODE} {verdict.changed[CODE]}{f', in {folders}' if folders else ''}"
    if "torch" in verdict.changed:
        yield f"torch: torch {verdict.changed['torch']}"
    if not (read_other or changed or {CODE, "torch"} & verdict.changed.keys()):
        yield "values: data, job, code and torch are the same; the weights at the beginning or a computation are not"
