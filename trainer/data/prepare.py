"""Preparation of token files from text, in parallel and resumable.

The inputs are divided into pieces, which are grouped into *shards* of nearly equal size. The shards follow from the
inputs alone, and a process works on one shard at a time and writes its token files, so the result is the same, bit for
bit, at any number of processes. Each document goes to OUTPUT/train or OUTPUT/validation by a hash of its content, so
the same text is never in both.

All work is done in a hidden folder beside OUTPUT that is renamed when it is complete: OUTPUT is either finished or does
not exist. A finished shard leaves a report in the hidden folder. After a kill, the next call does the shards that have
none, and those whose input files have changed since. A lock separates concurrent launches: the first prepares, the
others wait and find the work done. Worker processes write to a folder of their launch, and only the holder of the lock
moves finished files: a worker that briefly outlives its killed launch does no harm.
"""

import fcntl
import json
import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import IO, Any

import xxhash

from configs.errors import UserError
from configs.files import write_atomically
from configs.untrusted import MAX_JSON_BYTES, parse_json, read_file, shortened
from trainer.data.text import BadFiles, Piece, pieces, pin, read
from trainer.data.token_file import SUFFIX, TokenFileWriter
from trainer.data.tokenizer import Tokenizer, encode_document, load_tokenizer

MIN_SHARD_BYTES = 1 << 20
MAX_SHARDS = 256
"""Shards grow with the corpus, so that a folder never has more files than a process may open."""
RECORD = "prepare.json"
TRAIN, VALIDATION = "train", "validation"

Progress = Callable[[int, int | None, str], None]
"""Called with the bytes of text done, the total bytes (None: not known yet), and a message."""


@dataclass(frozen=True)
class Settings:
    """Everything that decides the content of the prepared folder, besides the inputs' content."""

    inputs: list[str]
    text_key: str
    tokenizer_hash: str
    vocab_size: int
    validation_fraction: float

    @property
    def splits(self) -> list[str]:
        """The folders inside OUTPUT."""
        return [TRAIN, VALIDATION] if self.validation_fraction else [TRAIN]


@dataclass
class Split:
    """Counts of one of the folders inside OUTPUT."""

    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0

    def add(self, documents: int, tokens: int, text_bytes: int) -> None:
        """Add to the counts."""
        self.documents += documents
        self.tokens += tokens
        self.text_bytes += text_bytes


@dataclass(frozen=True)
class Shard:
    """One unit of work, for one process."""

    index: int
    pieces: list[Piece]
    working: Path
    """The hidden folder beside OUTPUT."""
    launch: int
    """Process id of the launch, which names its folder for unfinished work."""
    tokenizer_path: Path
    settings: Settings
    max_bad_files: int

    @property
    def name(self) -> str:
        """Name of its files, without the suffix."""
        return f"{self.index:05d}"

    @property
    def n_bytes(self) -> int:
        """Bytes of text, for the progress display."""
        return sum(piece.n_bytes for piece in self.pieces)

    @property
    def unfinished(self) -> Path:
        """The folder in which its token files are written."""
        return self.working / f"unfinished.{self.launch}"

    @property
    def report_path(self) -> Path:
        """The file that records the shard's counts once its token files are complete."""
        return self.working / "reports" / f"{self.name}.json"

    @cached_property
    def inputs_hash(self) -> str:
        """Hash of the shard's inputs: files, their portions, sizes and modification times."""
        times = [os.stat(piece.path).st_mtime_ns if os.path.exists(piece.path) else 0 for piece in self.pieces]
        return xxhash.xxh3_128_hexdigest(json.dumps([[asdict(piece) for piece in self.pieces], times]).encode())

    def report(self) -> dict[str, Any] | None:
        """The counts of the finished shard; None if it is unfinished, or its input has changed since."""
        if not self.report_path.exists():
            return None
        report = _read_json(self.report_path)
        return report if report.get("inputs_hash") == self.inputs_hash else None


def prepare(
    inputs: Sequence[str],
    output: Path,
    tokenizer_path: Path,
    processes: int = 1,
    validation_fraction: float = 0.0,
    max_bad_files: int = 0,
    progress: Progress = lambda done, total, message: None,
    text_key: str = "text",
) -> dict[str, Any]:
    """Tokenize the documents of `inputs` into OUTPUT/train and, with a validation fraction, OUTPUT/validation.

    Does nothing if OUTPUT was already prepared with the same settings. An exception raised by `progress` ends the work;
    finished shards are kept.

    Returns:
        The record kept as OUTPUT/prepare.json: settings, inputs (of the hub with the commit), documents, tokens and
        bytes of text of each split, the number of empty documents (they give no tokens), and the unreadable inputs that
        were skipped.

    Raises:
        UserError: an input or the tokenizer cannot be read, more than `max_bad_files` inputs are unreadable, OUTPUT was
            made with other settings or cannot be written, or a split would have no tokens.
    """
    output, tokenizer_path = Path(output), Path(tokenizer_path)
    tokenizer = load_tokenizer(tokenizer_path)
    settings = Settings(list(inputs), text_key, tokenizer.hash, tokenizer.vocab_size, validation_fraction)
    working = output.absolute().with_name(f".{output.name}.partial")
    try:
        if not _is_finished(output, settings):
            progress(0, None, f"listing the files of {', '.join(inputs)}")
            portions = divide([piece for name in inputs for piece in pieces(name)])
            shards = [
                Shard(i, portion, working, os.getpid(), tokenizer_path, settings, max_bad_files)
                for i, portion in enumerate(portions)
            ]
            with _lock(working, progress):
                if not _is_finished(output, settings):  # another launch may have finished it while this one waited
                    _prepare_all(shards, settings, working, processes, BadFiles(max_bad_files), progress)
                    os.rename(working / "output", output)
                _discard(working)
        record = _read_record(output)
    except OSError as error:
        raise UserError(f"{error.filename or output}: {error.strerror}, while preparing {output}") from None
    BadFiles(max_bad_files).extend(record["bad_files"])
    return record


def divide(parts: Sequence[Piece]) -> list[list[Piece]]:
    """Group pieces, in order, into portions of about the same number of bytes."""
    target = max(MIN_SHARD_BYTES, sum(part.n_bytes for part in parts) // MAX_SHARDS)
    portions: list[list[Piece]] = []
    room = 0
    for part in parts:
        if room <= 0:
            portions.append([])
            room = target
        portions[-1].append(part)
        room -= part.n_bytes
    return portions


def is_validation(text: bytes, fraction: float) -> bool:
    """Whether a document belongs to the validation set, decided by its hash, which is uniform over 64 bits."""
    return xxhash.xxh3_64_intdigest(text) < fraction * 2**64


# ------------------------------------------------------------------------------------------- one shard


def write_shard(shard: Shard) -> dict[str, Any]:
    """Write a shard's token files into the folder for unfinished work; returns its report."""
    tokenizer = _load_once(shard.tokenizer_path)
    settings = shard.settings
    bad = BadFiles(shard.max_bad_files)
    splits = {name: Split() for name in settings.splits}
    empty = 0
    with ExitStack() as stack:
        writers = {name: stack.enter_context(_writer(shard, name)) for name in splits}
        for text in (text for piece in shard.pieces for text in read(piece, settings.text_key, bad)):
            if not text:
                empty += 1
                continue
            raw = text.encode()
            name = VALIDATION if is_validation(raw, settings.validation_fraction) else TRAIN
            tokens = encode_document(tokenizer, text)
            writers[name].append(tokens)
            splits[name].add(1, len(tokens), len(raw))
    counts = {name: asdict(split) for name, split in splits.items()}
    return {**counts, "empty_documents": empty, "bad_files": bad.messages, "inputs_hash": shard.inputs_hash}


@cache
def _load_once(path: Path) -> Tokenizer:
    return load_tokenizer(path)


def _writer(shard: Shard, split: str) -> TokenFileWriter:
    path = shard.unfinished / split / (shard.name + SUFFIX)
    return TokenFileWriter(path, shard.settings.vocab_size, shard.settings.tokenizer_hash)


# ------------------------------------------------------------------------------------------- all shards


def _prepare_all(
    shards: list[Shard], settings: Settings, working: Path, processes: int, bad: BadFiles, progress: Progress
) -> None:
    """Do the remaining work in the working folder, including the final record."""
    _enter(working, settings)
    reports = {shard.index: report for shard in shards if (report := shard.report())}
    _remove_leftovers(working, {shard.name for shard in shards if shard.index in reports})
    for report in reports.values():
        bad.extend(report["bad_files"])
    total = sum(shard.n_bytes for shard in shards)
    done = sum(shard.n_bytes for shard in shards if shard.index in reports)
    progress(done, total, f"tokenizing in {processes} process(es), {len(reports)} of {len(shards)} shards done before")
    with _written([shard for shard in shards if shard.index not in reports], processes) as results:
        for shard, report in results:
            _keep(shard, report)
            bad.extend(report["bad_files"])
            reports[shard.index] = report
            done += shard.n_bytes
            progress(done, total, "tokenizing")
    try:
        record = _record(settings, [reports[shard.index] for shard in shards])
        record["read_from"] = [pin(name) for name in settings.inputs]
    except UserError:
        _discard(working)  # the same inputs would end in the same error
        raise
    _write_json(working / "output" / RECORD, record)


def _keep(shard: Shard, report: dict[str, Any]) -> None:
    """Move a written shard's token files to their final folder, and record that the shard is finished."""
    for split in shard.settings.splits:
        name = Path(split, shard.name + SUFFIX)
        os.replace(shard.unfinished / name, shard.working / "output" / name)
    _write_json(shard.report_path, report)


@contextmanager
def _written(shards: list[Shard], processes: int) -> Iterator[Iterator[tuple[Shard, dict[str, Any]]]]:
    """Write the shards; yields each with its report as it is finished."""
    if processes == 1 or not shards:
        yield ((shard, write_shard(shard)) for shard in shards)
        return
    with _pool(min(processes, len(shards))) as pool:
        futures = {pool.submit(write_shard, shard): shard for shard in shards}
        try:
            yield ((futures[future], future.result()) for future in as_completed(futures))
        except BrokenProcessPool:
            raise UserError(
                "a process that prepared text was killed (out of memory?). "
                "Run the same command again: finished shards are kept. Fewer processes need less memory"
            ) from None


@contextmanager
def _pool(processes: int) -> Iterator[ProcessPoolExecutor]:
    """Worker processes that end with this one, and at once if it leaves this context with an exception."""
    before = set(multiprocessing.active_children())
    spawn = multiprocessing.get_context("spawn")  # forking after torch's threads have started may hang
    pool = ProcessPoolExecutor(processes, mp_context=spawn, initializer=_follow_parent)
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in set(multiprocessing.active_children()) - before:
            child.terminate()
        raise
    pool.shutdown()


def _follow_parent() -> None:
    """In a worker, leave Ctrl-C to the parent, and exit if the parent is killed (nothing else would end the worker)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _record(settings: Settings, reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Sum up the shards.

    Raises:
        UserError: a split has no tokens.
    """
    splits = {name: Split() for name in settings.splits}
    for report in reports:
        for name, split in splits.items():
            split.add(**report[name])
    documents = sum(split.documents for split in splits.values())
    if not documents:
        raise UserError(f"{', '.join(settings.inputs)}: no text, so there would be no token to train on")
    for name, split in splits.items():
        if not split.documents:
            raise UserError(
                f"validation_fraction {settings.validation_fraction} of {documents} document(s) leaves none for {name};"
                " give more documents (a text file is one, a .jsonl has one per line) or another fraction"
            )
    return {
        "settings": asdict(settings),
        **{name: asdict(split) for name, split in splits.items()},
        "empty_documents": sum(report["empty_documents"] for report in reports),
        "bad_files": [message for report in reports for message in report["bad_files"]],
    }


# ------------------------------------------------------------------------------------------- folders


def _is_finished(output: Path, settings: Settings) -> bool:
    """Whether OUTPUT was prepared with these settings.

    Raises:
        UserError: it contains anything else.
    """
    if (output / RECORD).is_file():
        _check_same(output, _read_json(output / RECORD).get("settings"), settings)
        return True
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"{output}: exists but is not a folder of prepared text; choose another output folder")
    return False


def _enter(working: Path, settings: Settings) -> None:
    """Start or resume in a working folder.

    Raises:
        UserError: it was started with other settings.
    """
    state = working / "settings.json"
    if state.exists():
        _check_same(working, _read_json(state), settings)
    for left in working.glob("unfinished.*"):
        _discard(left)
    (working / "reports").mkdir(exist_ok=True)
    for folder in ("output", f"unfinished.{os.getpid()}"):
        for split in settings.splits:
            (working / folder / split).mkdir(parents=True, exist_ok=True)
    _write_json(state, asdict(settings))


def _remove_leftovers(working: Path, finished: set[str]) -> None:
    """Remove what unfinished shards left behind: temporary files, and those of a different division of the inputs."""
    for path in [*working.glob("reports/*"), *working.glob("output/*/*"), *working.glob("output/.*.tmp")]:
        if path.stem not in finished:
            path.unlink()


def _check_same(folder: Path, before: Any, settings: Settings) -> None:
    now = asdict(settings)
    then = before if isinstance(before, dict) else {}
    values = {key: shortened(repr(then.get(key)), 400) for key in now}
    changed = [f"  {key}: {values[key]} then, {now[key]!r} now" for key in now if then.get(key) != now[key]]
    if changed:
        raise UserError(
            f"{folder}: was made with other settings:\n" + "\n".join(changed) + "\n"
            "Choose another output folder, or delete this one to have it made again"
        )


def _lock(working: Path, progress: Progress) -> IO[bytes]:
    """Lock the working folder (created if needed) for this process, until the returned file is closed."""
    path = working / "lock"
    while True:
        working.mkdir(parents=True, exist_ok=True)
        try:
            file = path.open("wb")
        except FileNotFoundError:  # the previous holder has just finished and removed the folder
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(0, None, f"waiting for another process that prepares {working}")
            fcntl.flock(file, fcntl.LOCK_EX)
        if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return file
        file.close()  # it locks a folder that was removed in the meantime


def _discard(folder: Path) -> None:
    """Remove a folder that other processes may use; it is renamed first, so that they create no file in it."""
    if folder.exists():
        trash = folder.with_name(f"{folder.name}.{os.getpid()}")
        os.rename(folder, trash)
        shutil.rmtree(trash)


def _read_record(output: Path) -> dict[str, Any]:
    """The record of a finished preparation.

    Raises:
        UserError: it is incomplete.
    """
    record = _read_json(output / RECORD)
    splits = [record.get(name, {}) for name in (TRAIN, VALIDATION)]
    counts = [
        record.get("empty_documents"),
        *(count for split in splits if _is_split(split) for count in split.values()),
    ]
    bad_files = record.get("bad_files")
    is_whole = isinstance(bad_files, list) and all(isinstance(message, str) for message in bad_files)
    if not is_whole or not all(map(_is_split, splits)) or not all(type(count) is int for count in counts):
        raise UserError(f"{output / RECORD}: not in the form that Keel writes; delete its folder to have it made again")
    return record


def _is_split(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() <= asdict(Split()).keys()


def _read_json(path: Path) -> dict[str, Any]:
    """Read an object that `_write_json` has written.

    Raises:
        UserError: the file is not one.
    """
    try:
        content = parse_json(read_file(path, MAX_JSON_BYTES))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise UserError(f"{path}: cannot be read ({error}); delete its folder to have it made again") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: cannot be read (not an object); delete its folder to have it made again")
    return content


def _write_json(path: Path, content: dict[str, Any]) -> None:
    write_atomically(path, [json.dumps(content, indent=2) + "\n"])
