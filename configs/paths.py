"""Checks that the files and folders that a job reads exist, before anything is built.

`--validate` only warns of missing ones, because the machine that runs the job may have them.
"""

from collections.abc import Iterator
from glob import has_magic, iglob
from pathlib import Path

from configs.load import LoadedConfig
from configs.reading.keys import key_path
from configs.schema import Config, Source

Missing = tuple[str, str]
"""A key, and what is wrong with its path."""

_NOT_FILES = ("hub:", "python_stdlib")


def missing_paths(job: LoadedConfig) -> list[str]:
    """Return a line for each missing path, with where it was set; paths that the job creates itself are left out."""
    found = [*_tokenizer(job.config), *_data(job.config), *_checkpoint(job.config)]
    return [f"{job.layers.where(key_path(key))}: {key} {problem}" for key, problem in found]


def _tokenizer(config: Config) -> Iterator[Missing]:
    path, train_on = config.tokenizer.path, config.tokenizer.train_on
    if not path or Path(path).is_file():
        return
    if Path(path).is_dir():
        yield "tokenizer.path", f'is "{path}": a folder; name the file in it, such as tokenizer.model or tokenizer.json'
    elif train_on:
        yield from _texts("tokenizer.train_on", train_on)
    else:
        yield "tokenizer.path", f'is "{path}": no such file; scripts/train_tokenizer.py creates one'


def _data(config: Config) -> Iterator[Missing]:
    prepare, to_be_made = config.data.prepare, None
    if prepare and not any(Path(prepare.output).glob("*")):
        to_be_made = Path(prepare.output)
        yield from _texts("data.prepare.input", prepare.input)
    validation = config.validation.sources if config.validation.interval else []
    for table, sources in (("data", config.data.sources), ("validation", validation)):
        for index, source in enumerate(sources):
            if source.path and to_be_made not in Path(source.path).parents:
                yield from _source(f"{table}.sources.{index}.path", source, source.path)


def _source(key: str, source: Source, path: str) -> Iterator[Missing]:
    if source.kind == "text":
        yield from _texts(key, [path])
    elif source.kind == "tokens" and not Path(path).is_dir():
        yield key, f'is "{path}": no such folder of token files; scripts/prepare_data.py creates one'


def _texts(key: str, inputs: list[str]) -> Iterator[Missing]:
    for text in inputs:
        if not text.startswith(_NOT_FILES) and not Path(text).exists() and not _matches(text):
            yield key, f'names "{text}": no such file or folder'


def _matches(pattern: str) -> bool:
    """Whether a glob pattern matches anything."""
    return has_magic(pattern) and next(iglob(pattern, recursive=True), None) is not None


def _checkpoint(config: Config) -> Iterator[Missing]:
    load, init_from = config.checkpoint.load, config.checkpoint.init_from
    # A run with checkpoints no longer needs the one that it began from.
    has_own = any((config.job.folder / "checkpoints").glob("step-*"))
    if isinstance(load, str) and load not in ("latest", "none") and not has_own and not Path(load).is_dir():
        yield "checkpoint.load", f'is "{load}": no such folder (use "latest", "none", a step or a path)'
    if init_from is not None and (load == "none" or not has_own) and not Path(init_from).is_dir():
        yield "checkpoint.init_from", f'is "{init_from}": no such checkpoint folder'
