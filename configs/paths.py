"""Checks that the files and folders that a job reads exist, before anything is built.

`--validate` only warns of missing ones, because the machine that runs the job may have them.
"""

import shutil
from collections.abc import Iterator
from contextlib import suppress
from glob import has_magic, iglob
from pathlib import Path

from configs.after_save import search_path, words_of
from configs.files import exists, is_file, is_folder, whole
from configs.layout import used_sources
from configs.load import LoadedConfig
from configs.places import is_url
from configs.reading.keys import key_path
from configs.schema import Config, Source

Missing = tuple[str, str]
"""A key, and what is wrong with its path."""

_NOT_FILES = ("hub:", "python_stdlib")


def missing_paths(job: LoadedConfig) -> list[str]:
    """Return a line for each missing path, with where it was set; paths that the job creates itself are left out."""
    found = [(job, missing) for missing in _tokenizer(job.config)]
    found += [(each, missing) for each in job.jobs for missing in _data(each.config)]
    found += [(job, missing) for missing in (*_checkpoint(job.config), *_commands(job.config))]
    return list(dict.fromkeys(_line(each, missing) for each, missing in found))


def _line(job: LoadedConfig, missing: Missing) -> str:
    key, problem = missing
    return f"{job.layers.where(key_path(key))}: {key} {problem}"


def _looked_at(key: str, path: str, problems: Iterator[Missing]) -> Iterator[Missing]:
    """The problems of a path; if it can't be followed, as through a folder that may not be entered, why."""
    try:
        yield from problems
    except OSError as error:
        yield key, f'is "{path}", which can\'t be looked at: {error.strerror}'


def _tokenizer(config: Config) -> Iterator[Missing]:
    path = config.tokenizer.path
    train_on = config.tokenizer.train_on
    if path and not is_url(path):
        yield from _looked_at("tokenizer.path", path, _tokenizer_file(path, train_on, config.job.folder))


def _tokenizer_file(path: str, train_on: list[str], run: Path) -> Iterator[Missing]:
    if is_file(path):
        return
    if is_folder(path):
        yield "tokenizer.path", f'is "{path}": a folder; name the file in it, such as tokenizer.model or tokenizer.json'
        return
    copies = [copy for copy in (run / "tokenizer.model", run / "tokenizer.json") if is_file(copy)]
    if train_on and copies and _has_any(run / "checkpoints", "step-*"):
        return  # it is copied back
    if train_on:
        yield from _texts("tokenizer.train_on", train_on)
    else:
        remedy = f"the run has a copy, {copies[0]}" if copies else "keel tokenizer makes one"
        yield "tokenizer.path", f'is "{path}": no such file: {whole(path)}; {remedy}'


def _data(config: Config) -> Iterator[Missing]:
    prepare = config.data.prepare
    to_be_made = None
    if prepare and not _has_any(Path(prepare.output), "*"):
        to_be_made = Path(whole(prepare.output))
        yield from _texts("data.prepare.input", prepare.input)
    for key, source in used_sources(config):
        if source.path and to_be_made not in Path(whole(source.path)).parents:
            yield from _looked_at(f"{key}.path", source.path, _source(f"{key}.path", source, source.path))


def _source(key: str, source: Source, path: str) -> Iterator[Missing]:
    if source.kind == "text":
        yield from _texts(key, [path])
    elif source.kind == "tokens" and not is_url(path) and not is_folder(path):
        what = f"no such folder of token files: {whole(path)}"
        yield key, f'is "{path}": {what}; keel prepare makes one'


def _texts(key: str, inputs: list[str]) -> Iterator[Missing]:
    for text in inputs:
        if not text.startswith(_NOT_FILES):
            yield from _looked_at(key, text, _text(key, text))


def _text(key: str, text: str) -> Iterator[Missing]:
    if not exists(text) and not (has_magic(text) and any(iglob(text, recursive=True))):
        yield key, f'names "{text}": no such file or folder: {whole(text)}'


def _has_any(folder: Path, pattern: str) -> bool:
    """Whether a folder has anything of such a name; not if it can't be looked at, which its first use reports."""
    with suppress(OSError, UnicodeError):  # the latter for a name that the encoding of the system lacks
        return any(folder.glob(pattern))
    return False


def _checkpoint(config: Config) -> Iterator[Missing]:
    load = config.checkpoint.load
    init_from = config.checkpoint.init_from
    # A run with checkpoints no longer needs the one that it began from.
    has_own = _has_any(config.job.folder / "checkpoints", "step-*")
    if isinstance(load, str) and load not in ("latest", "none") and not has_own:
        what = 'no such folder (use "latest", "none", a step or a path)'
        yield from _looked_at("checkpoint.load", load, _folder("checkpoint.load", load, what))
    if init_from is not None and (load == "none" or not has_own):
        yield from _model("checkpoint.init_from", init_from)
    if (teacher := config.distillation.teacher) is not None:
        yield from _model("distillation.teacher", teacher)


def _model(key: str, path: str) -> Iterator[Missing]:
    return _looked_at(key, path, _folder(key, path, "no such folder of a checkpoint or run"))


def _commands(config: Config) -> Iterator[Missing]:
    for index, table in enumerate(config.checkpoint.after_save):
        program = words_of(table.command)[0]
        if shutil.which(program, path=search_path()) is None:
            yield f"checkpoint.after_save.{index}.command", f"starts {program}: no such program"


def _folder(key: str, path: str, otherwise: str) -> Iterator[Missing]:
    if not is_url(path) and not is_folder(path):
        yield key, f'is "{path}": {otherwise}: {whole(path)}'
