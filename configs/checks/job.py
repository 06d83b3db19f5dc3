"""Rules for the launch: its folder, checkpoints and traces."""

from collections.abc import Iterator

from configs.after_save import PLACEHOLDERS, unknown_placeholders, words_of
from configs.checks.rule import Problem, Rule
from configs.exportable import not_exportable
from configs.places import is_url, url_fault
from configs.schema import AnyModel, Config
from configs.untrusted import printable

_MAX_NAME_BYTES = 200
"""File systems allow 255 per name; next_rows and others append to it."""
TRACED_STEPS = 3
"""Steps in a profiler's trace: enough to see one after the other, few enough for a browser."""


def _job(config: Config, _: int | None) -> Iterator[Problem]:
    name = config.job.name
    if len(name.encode()) > _MAX_NAME_BYTES or printable(name) != name or "\n" in name:
        yield "job.name", f"name must be one line of printable characters, at most {_MAX_NAME_BYTES} bytes"
    if config.job.output_dir == "":
        yield "job.output_dir", "output_dir is empty; leave it out for runs/<job.name>"
    if "\0" in (config.job.output_dir or ""):
        yield "job.output_dir", "output_dir has a NUL character, which no name of a folder can have"
    if is_url(config.job.output_dir) and (fault := url_fault(config.job.place)):
        yield "job.output_dir", fault
    if config.job.output_dir is None and (name in ("", ".", "..") or "/" in name or "\0" in name):
        yield (
            "job.name",
            f'the run folder is runs/<name>, so name "{name}" must be a plain folder name; or set output_dir',
        )


def _checkpoint(config: Config, _: int | None) -> Iterator[Problem]:
    table = config.checkpoint
    load = config.checkpoint.load
    validated = config.validation.interval
    names = {
        "checkpoint.load": load,
        "checkpoint.init_from": table.init_from,
        "distillation.teacher": config.distillation.teacher,
    }
    for key, name in names.items():
        if is_url(str(name)) and (fault := url_fault(str(name))):
            yield key, fault
        if name == "":
            yield key, '"" names nothing (is a variable of the shell not set?); leave it out'
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


def _after_save(config: Config, _: int | None) -> Iterator[Problem]:
    interval = config.checkpoint.interval
    names: list[str] = []
    for index, table in enumerate(config.checkpoint.after_save):
        key = f"checkpoint.after_save.{index}"
        if not interval or table.every % interval:
            yield (
                f"{key}.every",
                f"the command needs a checkpoint, but every {table.every} is not a multiple of checkpoint.interval "
                f"{interval}; change one of them",
            )
        if table.name in names:
            yield f"{key}.name", f'two commands have the name "{table.name}"; each needs a folder of its own'
        names.append(table.name)
        yield from ((f"{key}.command", message) for message in _faults(table.command, config.model))


def _faults(command: str, model: AnyModel) -> Iterator[str]:
    try:
        words = words_of(command)
    except ValueError as error:
        yield f"the command can't be split into words: {error}"
        return
    if not words:
        yield "the command is empty"
    for name in unknown_placeholders(words):
        known = ", ".join(f"{{{each}}}" for each in PLACEHOLDERS)
        yield f"{{{name}}} stands for nothing; there are {known} (text with other braces goes into a script)"
    if words[:2] == ["keel", "export"] and "--optimizer" not in words and (reason := not_exportable(model)):
        yield f"no checkpoint of this model can be exported: {reason}"


def _profile(config: Config, _: int | None) -> Iterator[Problem]:
    start = config.profile.start_step
    steps = config.training.steps
    last = start + TRACED_STEPS - 1
    if start and last > steps:
        yield "profile.start_step", f"the trace would end at step {last}, after training.steps {steps}; start earlier"


RULES: tuple[Rule, ...] = (_job, _checkpoint, _after_save, _profile)
