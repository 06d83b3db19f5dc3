"""Checks that a job's inputs exist, and creates the tokenizer and token files from text when first needed."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import xxhash

from checkpoint.bucket_files import local_file
from checkpoint.bucket_storage import local_copy
from checkpoint.find import HF_CONFIG_NAME, find_checkpoint, kept_tokenizer
from checkpoint.folder import Choice, choose
from checkpoint.manifest import MANIFEST_NAME, read_manifest, steps_in
from configs.errors import KeelError, UserError
from configs.files import exists, is_file, replacing
from configs.layout import used_sources
from configs.load import LoadedConfig
from configs.machine import available_cores
from configs.paths import missing_paths
from configs.places import is_url, standing_for
from configs.schema import Config, HfModel, Prepare
from configs.table import with_keys
from parallelisms.ranks import Json, on_rank_zero
from trainer.data.place import place_of
from trainer.data.text.bad_files import PATIENCE, BadFiles
from trainer.data.text.documents import Keys, documents
from trainer.data.text.fill_in import NAMES as FIM_NAMES
from trainer.data.text.listing import examine, list_files
from trainer.data.text.prepare import Call, prepare, settings_of
from trainer.data.text.prepared_folder import RECORD, described
from trainer.data.text.workers import Progress
from trainer.data.tokenizer import load_tokenizer, losses_of, train_sentencepiece
from trainer.lifecycle import EXIT_PREEMPTED, StopRequest
from trainer.report.console import Console
from trainer.report.sinks.choose import choose_sinks
from trainer.teacher import know_teacher, told_teacher


class PreparationStopped(KeelError):
    """A signal arrived during data preparation; finished parts are kept."""

    exit_code = EXIT_PREEMPTED


def require_inputs(job: LoadedConfig) -> None:
    """Check that the job's inputs exist, before hours go into data and minutes into weights.

    Call it on one rank; trainer.guards.agreement checks that the other ranks see the same data.

    Raises:
        ConfigError: the checkpoint that checkpoint.load names does not exist.
        UserError: a tokenizer, data or checkpoint.init_from is missing, a checkpoint cannot be read, or [metrics] asks
            for a package or a class that is not there.
    """
    config = job.config
    choose_sinks(config.metrics, config.job.folder)
    load = config.checkpoint.load
    init_from = config.checkpoint.init_from
    if is_url(str(load)) and (config.checkpoint.go_back or not steps_in(config.job.folder / "checkpoints")):
        local_copy(str(load))
    choice = _choice(config)
    if missing := missing_paths(job):
        raise UserError("\n".join(missing))
    if is_url(init_from) and not choice.candidates:
        local_copy(str(init_from))
    for source in [source for each in job.jobs for _, source in used_sources(each.config)]:
        if source.kind == "tokens" and is_url(source.path):
            place_of(str(source.path))  # one rank finds out, before all ask
    if init_from and not choice.candidates and imported_to(config) is None:
        read_manifest(find_checkpoint(standing_for(init_from)))


def require_teacher(job: LoadedConfig) -> None:
    """Find the teacher, if the job has one, and let all ranks know its model; all must call it.

    Raises:
        UserError: it is missing, or can't be read.
    """
    teacher = job.config.distillation.teacher
    if teacher is None:
        return

    def found() -> Json:
        if is_url(teacher):
            local_copy(teacher)
        if missing := missing_paths(job):
            raise UserError("\n".join(missing))
        return told_teacher(teacher)

    know_teacher(teacher, on_rank_zero(None, found))  # other hosts may not see its folder


def _choice(config: Config) -> Choice:
    """The checkpoints that the run may resume from."""
    return choose(config.job.folder / "checkpoints", config.checkpoint.load, config.checkpoint.go_back)


def imported_to(config: Config) -> Path | None:
    """The checkpoint that a Hugging Face folder in checkpoint.init_from becomes, in the run folder.

    None if it names no such folder, or the model is Keel's own, whose folders `keel import` translates. The name has a
    hash of what is in the folder, so that another folder becomes another checkpoint.
    """
    source = Path(config.checkpoint.init_from or "")
    is_folder = config.checkpoint.init_from is not None and is_file(source / HF_CONFIG_NAME)
    if not isinstance(config.model, HfModel) or not is_folder or exists(source / MANIFEST_NAME):
        return None
    files = sorted(path for pattern in ("*.json", "*.safetensors") for path in source.glob(pattern))
    content = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    digest = xxhash.xxh3_64_hexdigest(repr((str(source.resolve()), content)).encode())
    return config.job.folder / f"imported-{digest}"


def import_weights(config: Config, console: Console) -> None:
    """Import the Hugging Face folder that checkpoint.init_from names, unless the run has a checkpoint to resume from.

    Call it on one rank.

    Raises:
        UserError: it can't be read, or the disk refuses.
    """
    output = imported_to(config)
    if output is None or exists(output) or _choice(config).candidates:
        return
    from checkpoint.export.hf_import import import_hf

    with console.progress(f"Importing {config.checkpoint.init_from}", in_bytes=True) as report:
        import_hf(Path(config.checkpoint.init_from or ""), output, None, progress=report, as_it_is=True)


def with_imported_weights(config: Config) -> Config:
    """The job, with `checkpoint.init_from` at the checkpoint that its Hugging Face folder became."""
    output = imported_to(config)
    if output is None:
        return config
    return with_keys(config, checkpoint={"init_from": str(output)})


_ANOTHER_RUN = (
    "To train on other text, begin another run: set another job.name and data.prepare.output, and with it path of the "
    "sources"
)


def prepare_data(config: Config, console: Console, stop: StopRequest) -> None:
    """Create the tokenizer and the token files of `[tokenizer]` and `[data.prepare]` if missing.

    A run that has checkpoints continues with the token files that it has, whatever has become of their text.

    Call it on one rank.

    Raises:
        PreparationStopped: a signal arrived.
        UserError: the text cannot be read, or the output cannot be written.
    """
    _train_tokenizer(config, console, stop)
    if config.data.prepare and config.tokenizer.path:
        _write_token_files(config, config.data.prepare, config.tokenizer.path, console, stop)
    _look_at_text(config, console, stop)


def _train_tokenizer(config: Config, console: Console, stop: StopRequest) -> None:
    tokenizer = config.tokenizer
    wanted = config.data.prepare
    if not tokenizer.path or not tokenizer.train_on or exists(tokenizer.path):
        return
    kept = kept_tokenizer(config.job.folder)
    if kept and kept.suffix == ".model" and _choice(config).candidates:
        Path(tokenizer.path).parent.mkdir(parents=True, exist_ok=True)
        with replacing(Path(tokenizer.path)) as file:
            file.write(kept.read_bytes())
        console.line(f"{tokenizer.path}: was missing, and is copied from {kept}, with which this run began")
        return
    bad = BadFiles(wanted.max_bad_files if wanted else None, PATIENCE)
    key, separator = (wanted.text_key, wanted.separator) if wanted else ("text", "")
    with console.progress(f"Training a tokenizer of {config.model.vocab_size:,} pieces"):
        texts = (text for name in tokenizer.train_on for text in documents(name, key, bad, separator))
        control_tokens = FIM_NAMES[0] if wanted and wanted.fim_rate else ()
        path = Path(tokenizer.path)
        train_sentencepiece(_until(stop, texts), path, config.model.vocab_size, bad.check, control_tokens)
    for line in bad.described():
        console.line(line)


def _write_token_files(config: Config, wanted: Prepare, tokenizer: str, console: Console, stop: StopRequest) -> None:
    output = Path(wanted.output)
    choices = wanted.model_dump(exclude={"input", "output", "max_bad_files"})
    choices["pack"] = config.training.seq_len if wanted.pack else None

    def call(progress: Progress = Call.progress) -> Call:
        settings = settings_of(wanted.input, output, local_file(tokenizer), **choices)
        return Call(settings, output, local_file(tokenizer), available_cores(), wanted.max_bad_files, progress)

    if is_file(output / RECORD):  # only checks that it was made from the same text with the same settings
        prepare(call(), console.line, **_if_changed(config, output, console))
        return
    _warn_of_losses(tokenizer, console)
    with console.progress("Tokenizing", in_bytes=True) as report:

        def follow(done: int, total: int | None, message: str) -> None:
            _check(stop)
            report(done, total, message)

        record = prepare(call(follow), console.line)
    for message in record["bad_files"]:
        console.warning(f"skipped, as data.prepare.max_bad_files allows: {message}")
    for line in described(record, output):
        console.line(line)


def _if_changed(config: Config, output: Path, console: Console) -> dict[str, Any]:
    """The arguments of `prepare` that say what to do about text or settings that have changed since `output` was made.

    A run that has begun must not be stopped by other text, nor be told to delete what it is trained on.
    """
    if not _choice(config).candidates:
        return {}

    def warn(changes: str) -> None:
        goes_on = "its text has changed since it was prepared; this run continues with what it has"
        console.warning(f"{output}: {goes_on}:\n{changes}\n{_ANOTHER_RUN}")

    return {"if_changed": warn, "advice": f"Change them back, since this run has begun with it. {_ANOTHER_RUN}"}


def _look_at_text(config: Config, console: Console, stop: StopRequest) -> None:
    """Say which files of sources of text are not read.

    Raises:
        UserError: some are unreadable; the error names them all.
    """
    texts = [source for _, source in used_sources(config) if source.kind == "text"]
    if texts and config.tokenizer.path:
        _warn_of_losses(config.tokenizer.path, console)
    for source in texts:
        if source.path:
            bad = BadFiles()
            examine(list_files([source.path], bad), Keys(source.text_key), bad, report=lambda n_bytes: _check(stop))
            bad.check()
            for line in bad.described():
                console.line(f"{source.path}: {line}")


def _warn_of_losses(tokenizer: str, console: Console) -> None:
    for loss in losses_of(load_tokenizer(tokenizer)):
        console.warning(f"{tokenizer}: {loss}")


def _until(stop: StopRequest, texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        _check(stop)
        yield text


def _check(stop: StopRequest) -> None:
    if stop:
        raise PreparationStopped(f"stopped by {stop.reason} while preparing data; the same command resumes from there")
