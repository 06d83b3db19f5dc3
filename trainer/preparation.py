"""Checks that a job's inputs exist, and creates the tokenizer and token files from text when first needed."""

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
from trainer.data.bad_files import PATIENCE, BadFiles
from trainer.data.prepare import described, prepare
from trainer.data.text import documents
from trainer.data.tokenizer import train_sentencepiece
from trainer.lifecycle import EXIT_PREEMPTED, StopRequest
from trainer.report.console import Console


class PreparationStopped(KeelError):
    """A signal arrived during data preparation; finished parts are kept."""

    exit_code = EXIT_PREEMPTED


def require_inputs(job: LoadedConfig) -> None:
    """Check that the job's inputs exist, before hours go into data and minutes into weights.

    Call it on one rank; trainer.guards.agreement checks that the other ranks see the same data.

    Raises:
        ConfigError: the checkpoint that checkpoint.load names does not exist.
        UserError: a tokenizer, data or checkpoint.init_from is missing, or a checkpoint cannot be read.
    """
    config = job.config
    choice = choose(config.job.folder / "checkpoints", config.checkpoint.load, config.checkpoint.go_back)
    if missing := missing_paths(job):
        raise UserError("\n".join(missing))
    if config.checkpoint.init_from and not choice.candidates:
        read_manifest(Path(config.checkpoint.init_from))


def prepare_data(config: Config, console: Console, stop: StopRequest) -> None:
    """Create the tokenizer and the token files of `[tokenizer]` and `[data.prepare]` if missing.

    Call it on one rank.

    Raises:
        PreparationStopped: a signal arrived.
        UserError: the text cannot be read, or the output cannot be written.
    """
    tokenizer, wanted = config.tokenizer, config.data.prepare
    if tokenizer.path and tokenizer.train_on and not Path(tokenizer.path).exists():
        with console.progress(f"Training a tokenizer of {config.model.vocab_size:,} pieces"):
            bad = BadFiles(wanted.max_bad_files if wanted else None, PATIENCE)
            key, separator = (wanted.text_key, wanted.separator) if wanted else ("text", "")
            texts = (text for name in tokenizer.train_on for text in documents(name, key, bad, separator))
            train_sentencepiece(_until(stop, texts), Path(tokenizer.path), config.model.vocab_size, bad.check)
    if wanted and tokenizer.path:
        write = partial(
            prepare,
            wanted.input,
            Path(wanted.output),
            Path(tokenizer.path),
            processes=os.cpu_count() or 1,
            validation_fraction=wanted.validation_fraction,
            max_bad_files=wanted.max_bad_files,
            text_key=wanted.text_key,
            separator=wanted.separator,
            drop_duplicates=wanted.drop_duplicates,
            pack=config.training.seq_len if wanted.pack else None,
            say=console.line,
        )
        if Path(wanted.output).exists():
            write()  # only checks that the files were made from the same text with the same settings
            return
        with console.progress("Tokenizing", in_bytes=True) as report:

            def follow(done: int, total: int | None, message: str) -> None:
                _check(stop)
                report(done, total, message)

            record = write(progress=follow)
        for message in record["bad_files"]:
            console.warning(f"skipped, as data.prepare.max_bad_files allows: {message}")
        for line in described(record, Path(wanted.output)):
            console.line(line)


def _until(stop: StopRequest, texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        _check(stop)
        yield text


def _check(stop: StopRequest) -> None:
    if stop:
        raise PreparationStopped(f"stopped by {stop.reason} while preparing data; the same command resumes from there")
