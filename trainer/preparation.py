"""What a job reads: that it is there, and the tokenizer and token files that are made from text when first needed."""

import os
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

from checkpoint.folder import choose
from checkpoint.manifest import read_manifest
from configs.errors import KeelError, UserError
from configs.load import LoadedConfig
from configs.paths import missing_paths
from configs.schema import Config
from trainer.data.prepare import prepare
from trainer.data.text import BadFiles, documents
from trainer.data.tokenizer import train_sentencepiece
from trainer.lifecycle import EXIT_PREEMPTED, StopRequest
from trainer.report.console import Console


class PreparationStopped(KeelError):
    """A signal came while data was prepared; what is finished is kept."""

    exit_code = EXIT_PREEMPTED


def require_inputs(job: LoadedConfig) -> None:
    """See that what the job reads is there, before hours go into data and minutes into weights.

    To be called on one rank. Whether the others see the same data, trainer.guards.agreement finds out.

    Raises:
        ConfigError: there is no such checkpoint as checkpoint.load names.
        UserError: a tokenizer, data or checkpoint.init_from is missing, or a checkpoint cannot be read.
    """
    config = job.config
    choice = choose(config.job.folder / "checkpoints", config.checkpoint.load, config.checkpoint.go_back)
    if missing := missing_paths(job):
        raise UserError("\n".join(missing))
    if config.checkpoint.init_from and not choice.candidates:
        read_manifest(Path(config.checkpoint.init_from))


def prepare_data(config: Config, console: Console, stop: StopRequest) -> None:
    """Train the tokenizer and write the token files that `[tokenizer]` and `[data.prepare]` ask for, if missing.

    To be called on one rank.

    Raises:
        PreparationStopped: at a signal.
        UserError: the text, or the folder to write to, does not allow it.
    """
    tokenizer, wanted = config.tokenizer, config.data.prepare
    if tokenizer.path and tokenizer.train_on and not Path(tokenizer.path).exists():
        with console.progress(f"Training a tokenizer of {config.model.vocab_size:,} pieces"):
            bad = BadFiles(wanted.max_bad_files if wanted else None)
            texts = (text for source in tokenizer.train_on for text in documents(source, bad=bad))
            train_sentencepiece(_until(stop, texts), Path(tokenizer.path), config.model.vocab_size)
    if wanted and tokenizer.path:
        write = partial(
            prepare,
            wanted.input,
            Path(wanted.output),
            Path(tokenizer.path),
            processes=os.cpu_count() or 1,
            validation_fraction=wanted.validation_fraction,
            max_bad_files=wanted.max_bad_files,
        )
        if Path(wanted.output).exists():
            write()  # checks that they were made with the same settings
            return
        with console.progress(f"Writing token files to {wanted.output}", in_bytes=True) as report:

            def follow(done: int, total: int | None, message: str) -> None:
                _check(stop)
                report(done, total, message)

            record = write(progress=follow)
        for message in record["bad_files"]:
            console.warning(f"left out, as data.prepare.max_bad_files allows: {message}")


def _until(stop: StopRequest, texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        _check(stop)
        yield text


def _check(stop: StopRequest) -> None:
    if stop:
        raise PreparationStopped(f"stopped by {stop.reason} while preparing data; the same command goes on from there")
