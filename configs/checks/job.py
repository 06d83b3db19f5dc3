"""Rules for the launch: its folder, checkpoints and traces."""

from collections.abc import Iterator

from configs.checks.rule import Problem, Rule
from configs.exportable import not_exportable
from configs.schema import Config
from configs.untrusted import printable

_MAX_NAME_BYTES = 200
"""File systems allow 255 per name; next_rows and others append to it."""


def _job(config: Config, _: int | None) -> Iterator[Problem]:
    name = config.job.name
    if len(name.encode()) > _MAX_NAME_BYTES or printable(name) != name or "\n" in name:
        yield "job.name", f"name must be one line of printable characters, at most {_MAX_NAME_BYTES} bytes"
    if config.job.output_dir == "":
        yield "job.output_dir", "output_dir is empty; leave it out for runs/<job.name>"
    if "\0" in (config.job.output_dir or ""):
        yield "job.output_dir", "output_dir has a NUL character, which no name of a folder can have"
    if config.job.output_dir is None and (name in ("", ".", "..") or "/" in name or "\0" in name):
        yield (
            "job.name",
            f'the run folder is runs/<name>, so name "{name}" must be a plain folder name; or set output_dir',
        )


def _checkpoint(config: Config, _: int | None) -> Iterator[Problem]:
    table = config.checkpoint
    load = config.checkpoint.load
    validated = config.validation.interval
    if isinstance(load, int) and load < 0:
        yield "checkpoint.load", f"there is no step {load}; give a step of 0 or more"
    if table.go_back and load in ("latest", "none"):
        yield (
            "checkpoint.go_back",
            f'go_back does nothing with load = "{load}"; leave it out, or set load to a step or a folder',
        )
    if table.keep_best and (not validated or not table.interval or table.interval % validated):
        yield (
            "checkpoint.keep_best",
            f"keep_best needs a validation at every checkpoint, but validation.interval {validated} does not divide "
            f"checkpoint.interval {table.interval}; change one of them",
        )
    if table.export_every and (not table.interval or table.export_every % table.interval):
        yield (
            "checkpoint.export_every",
            f"an export needs a checkpoint, but export_every {table.export_every} is not a multiple of interval "
            f"{table.interval}; change one of them",
        )


def _export(config: Config, _: int | None) -> Iterator[Problem]:
    if config.checkpoint.export_every and (reason := not_exportable(config.model)):
        yield (
            "checkpoint.export_every",
            f"no checkpoint of this model can be exported: {reason}; leave export_every out",
        )


def _evaluation(config: Config, _: int | None) -> Iterator[Problem]:
    table = config.evaluation
    interval = config.checkpoint.interval
    if table.interval and (not interval or table.interval % interval):
        yield (
            "evaluation.interval",
            f"an evaluation needs a checkpoint, but interval {table.interval} is not a multiple of checkpoint.interval "
            f"{interval}; change one of them",
        )
    if table.tasks and config.tokenizer.path is None:
        yield "evaluation.tasks", "tasks are texts, and the job has no tokenizer; set tokenizer.path"


def _profile(config: Config, _: int | None) -> Iterator[Problem]:
    profile = config.profile
    steps = config.training.steps
    last = profile.start_step + profile.steps - 1
    if profile.start_step and last > steps:
        yield "profile.start_step", f"the trace would end at step {last}, after training.steps {steps}; start earlier"


RULES: tuple[Rule, ...] = (_job, _checkpoint, _export, _evaluation, _profile)
