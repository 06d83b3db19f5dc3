"""Rules for what is read: tokenizer, sources, preparation, validation."""

from collections import Counter
from collections.abc import Iterator
from pathlib import PurePath

from configs.checks.rule import Problem, Rule
from configs.places import is_url, url_fault
from configs.schema import Config, Source


def _tokenizer(config: Config, _: int | None) -> Iterator[Problem]:
    path = config.tokenizer.path or None  # "" is none, too
    train_on = config.tokenizer.train_on
    if is_url(path) and (fault := url_fault(str(path))):
        yield "tokenizer.path", fault
    for name in filter(is_url, (path, *train_on) if train_on else ()):
        yield (
            "tokenizer.train_on",
            f"{name} is in object storage; a tokenizer is trained from and into files of this host only",
        )
    if train_on and path is None:
        yield "tokenizer.train_on", "train_on needs path, the file for the trained tokenizer; set tokenizer.path"
    if train_on and path is not None and path.endswith(".json"):
        yield "tokenizer.train_on", f'train_on makes a SentencePiece model, so path "{path}" must end in .model'
    readers = [f'source "{source.name}"' for source in config.data.sources if source.kind in ("tokens", "text")]
    if config.data.prepare:
        readers.append("[data.prepare]")
    if readers and path is None and not train_on:
        yield "tokenizer.path", f"a tokenizer is needed for {', '.join(readers)}: set tokenizer.path"


def _sources(config: Config, _: int | None) -> Iterator[Problem]:
    for table, sources in (("data", config.data.sources), ("validation", config.validation.sources)):
        names = Counter(source.name for source in sources)
        for index, source in enumerate(sources):
            key = f"{table}.sources.{index}"
            yield from _source(key, source)
            if config.data.document_mask and source.document_length == 1:
                yield (
                    f"{key}.document_length",
                    "documents of 1 token have no token to predict with data.document_mask; set document_length to 2 "
                    "or more",
                )
            if names[source.name] > 1 and source.name in [other.name for other in sources[:index]]:
                yield f"{key}.name", f'duplicate source name "{source.name}"; names must differ'


def _source(key: str, source: Source) -> Iterator[Problem]:
    if is_url(source.path):
        if fault := url_fault(str(source.path)):
            yield f"{key}.path", fault
        elif source.kind != "tokens":
            yield (
                f"{key}.path",
                f'only sources of kind "tokens" are read from object storage, and this is "{source.kind}"; prepare its '
                "text by keel prepare, whose output may be there, or copy it to a folder",
            )
    if source.kind in ("tokens", "text") and not source.path:
        what = "the folder of its token files" if source.kind == "tokens" else "a file, a folder, or hub:NAME"
        yield f"{key}.path", f'source "{source.name}" of kind "{source.kind}" needs path: {what}'


def _prepare(config: Config, _: int | None) -> Iterator[Problem]:
    prepare = config.data.prepare
    if prepare is None:
        return
    if not prepare.input:
        yield "data.prepare.input", "input is empty; give files, folders, hub:NAME or python_stdlib"
    if prepare.prompt_key and prepare.mask_until:
        yield "data.prepare.prompt_key", "prompt_key and mask_until both say what gives loss; leave one out"
    if prepare.fim_rate and (prepare.prompt_key or prepare.mask_until):
        yield (
            "data.prepare.fim_rate",
            "fim_rate moves the middle of a whole document to its end, and prompt_key and mask_until divide documents; "
            "leave one out",
        )
    if prepare.prompt_key == prepare.text_key:
        yield (
            "data.prepare.prompt_key",
            f'prompt_key and text_key both name "{prepare.text_key}", so the prompt is the text itself',
        )
    for name in filter(is_url, (*prepare.input, prepare.output)):
        yield (
            "data.prepare",
            f"{name} is in object storage, and a job prepares text from and into folders of this host only; prepare it "
            "before by keel prepare, and leave [data.prepare] out",
        )
    held_out = PurePath(prepare.output) / "validation"
    for index, source in enumerate(config.validation.sources):
        if prepare.validation_fraction == 0 and source.path and PurePath(source.path) == held_out:
            yield (
                f"validation.sources.{index}.path",
                f"{held_out} will be empty, because data.prepare.validation_fraction is 0; set it, for example to 0.02",
            )


def _validation(config: Config, _: int | None) -> Iterator[Problem]:
    if config.validation.interval and not config.validation.sources:
        yield (
            "validation.interval",
            f"interval {config.validation.interval} needs [[validation.sources]]; add one, or set interval = 0",
        )


RULES: tuple[Rule, ...] = (_tokenizer, _sources, _prepare, _validation)
