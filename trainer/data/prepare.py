"""Preparation of token files from text, in parallel and resumable.

The inputs are divided into pieces, which are grouped into *shards* of nearly equal size. The shards follow from the
inputs alone, and a process works on one shard at a time and writes its token files, so the result is the same, bit for
bit, at any number of processes. Each document goes to OUTPUT/train or OUTPUT/validation by a hash of its content, so
the same text is never in both.

Before that, all files are read once (`listing.examine`): what can't be read is named before hours go into tokenizing,
and the sizes and hashes of the inputs are recorded, so that text that is added or changed later is noticed.

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
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
import xxhash

from configs.errors import OutageError, UserError
from configs.files import FULL, write_atomically
from configs.untrusted import MAX_JSON_BYTES, parse_json, read_file, shortened
from trainer.data.bad_files import PATIENCE, BadFiles
from trainer.data.hub import pin
from trainer.data.listing import InputFile, changes, examine, list_files, read_list, summary, write_list
from trainer.data.packing import PackingWriter, write_mark
from trainer.data.text import Piece, pieces, read
from trainer.data.token_file import SUFFIX
from trainer.data.token_writer import TokenFileWriter
from trainer.data.tokenizer import Tokenizer, encode_document, load_tokenizer

MIN_SHARD_BYTES = 1 << 20
MAX_SHARDS = 256
"""Shards grow with the corpus, so that a folder never has more files than a process may open."""
RECORD = "prepare.json"
TRAIN, VALIDATION = "train", "validation"

_PROGRESS_SECONDS = 1.0
_KILLED = (
    "a process that prepared text was killed (out of memory?). "
    "Run the same command again: finished shards are kept. Fewer processes need less memory"
)
_Result = TypeVar("_Result")
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
    separator: str = ""
    drop_duplicates: bool = False
    pack: int | None = None
    """The seq_len that the documents are packed for; None: a stream."""

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
    duplicates: tuple[int, ...] = ()
    """Documents that are copies of earlier ones, by their number in the shard."""

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
        """Hash of the shard's inputs: files, their portions, sizes and modification times, and what is left out."""
        times = [os.stat(piece.path).st_mtime_ns if os.path.exists(piece.path) else 0 for piece in self.pieces]
        facts = [[asdict(piece) for piece in self.pieces], times, self.duplicates]
        return xxhash.xxh3_128_hexdigest(json.dumps(facts).encode())

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
    separator: str = "",
    drop_duplicates: bool = False,
    pack: int | None = None,
    say: Callable[[str], None] = lambda message: None,
) -> dict[str, Any]:
    """Tokenize the documents of `inputs` into OUTPUT/train and, with a validation fraction, OUTPUT/validation.

    Does nothing if OUTPUT was already prepared from the same files with the same settings. An exception raised by
    `progress` ends the work; finished shards are kept.

    Args:
        separator: cuts .txt files into documents.
        drop_duplicates: use only the first of documents with the same text.
        pack: pack whole documents into windows of this seq_len (see `packing`).
        say: called with remarks on an OUTPUT that exists.

    Returns:
        The record kept as OUTPUT/prepare.json: settings, inputs (of the hub with the commit), documents, tokens and
        bytes of text of each split, the number of empty documents (they give no tokens), and the unreadable inputs that
        were skipped.

    Raises:
        UserError: an input or the tokenizer cannot be read, more than `max_bad_files` inputs are unreadable, OUTPUT was
            made with other settings or from other files, or cannot be written, or a split would have no tokens.
    """
    output, tokenizer_path = Path(output), Path(tokenizer_path)
    tokenizer = load_tokenizer(tokenizer_path)
    choices = (validation_fraction, separator, drop_duplicates, pack)
    settings = Settings(list(inputs), text_key, tokenizer.hash, tokenizer.vocab_size, *choices)
    working = output.absolute().with_name(f".{output.name}.partial")
    try:
        if _is_finished(output, settings):
            _check_inputs(output, settings, say)
        else:
            job = _Job(settings, working, tokenizer_path, processes, BadFiles(max_bad_files), progress)
            with _lock(working, progress):
                if not _is_finished(output, settings):  # another launch may have finished it while this one waited
                    job.run()
                    os.rename(working / "output", output)
                _discard(working)
        record = _read_record(output)
    except OSError as error:
        kind = OutageError if error.errno in FULL else UserError
        raise kind(f"{error.filename or output}: {error.strerror}, while preparing {output}") from None
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


def described(record: dict[str, Any], output: Path) -> list[str]:
    """What a record says, in lines for people."""
    lines = []
    if "inputs" in record:
        lines.append(f"read {record['inputs']['files']:,} files of {record['inputs']['bytes']:,} bytes")
    for reason, found in record.get("skipped", {}).items():
        first = ", ".join(found["first"][:3])
        lines.append(f"skipped: {found['count']:,} {reason}" + (f": {first}" if first else ""))
    if record["empty_documents"]:
        lines.append(f"skipped: {record['empty_documents']:,} empty documents")
    if "duplicates" in record:
        lines.append(f"dropped: {record['duplicates']:,} documents with the same text as an earlier one")
    for name in (TRAIN, VALIDATION):
        if name in record:
            split = Split(*(record[name][key] for key in _SPLIT))
            counts = f"{split.documents:,} documents, {split.tokens:,} tokens, {split.text_bytes:,} bytes of text"
            lines.append(f"{output / name}: {counts}")
        if packed := record.get("packed", {}).get(name):
            lines.append(
                f"{output / name}: {packed['windows']:,} windows for training.seq_len = {packed['seq_len']}, "
                f"{packed['waste']:.2%} of them padding; {packed['cut_documents']:,} documents are longer than a window"
            )
    return lines


# ------------------------------------------------------------------------------------------- one shard


def write_shard(shard: Shard) -> dict[str, Any]:
    """Write a shard's token files into the folder for unfinished work; returns its report."""
    tokenizer = _load_once(shard.tokenizer_path)
    settings = shard.settings
    bad = BadFiles(shard.max_bad_files, PATIENCE)
    splits = {name: Split() for name in settings.splits}
    copies = set(shard.duplicates)
    empty = duplicates = 0
    with ExitStack() as stack:
        writers = {name: _writer(shard, name) for name in splits}
        for writer in writers.values():
            stack.enter_context(writer)
        for number, text in enumerate(_texts(shard, bad)):
            if not text:
                empty += 1
                continue
            if number in copies:
                duplicates += 1
                continue
            raw = text.encode()
            name = VALIDATION if is_validation(raw, settings.validation_fraction) else TRAIN
            tokens = encode_document(tokenizer, text)
            writers[name].append(tokens)
            splits[name].add(1, len(tokens), len(raw))
    packed = {
        name: {"windows": writer.n_windows, "cut_documents": writer.n_cut}
        for name, writer in writers.items()
        if isinstance(writer, PackingWriter)
    }
    return {
        **{name: asdict(split) for name, split in splits.items()},
        "empty_documents": empty,
        "duplicates": duplicates,
        "packed": packed,
        "bad_files": bad.messages,
        "skipped": dict(bad.skipped),
        "examples": bad.examples,
        "inputs_hash": shard.inputs_hash,
    }


def hash_shard(shard: Shard) -> bytes:
    """xxh3_128 of each of a shard's documents, 16 bytes each."""
    bad = BadFiles(shard.max_bad_files, PATIENCE)
    return b"".join(xxhash.xxh3_128_digest(text.encode()) for text in _texts(shard, bad))


def _texts(shard: Shard, bad: BadFiles) -> Iterator[str]:
    for piece in shard.pieces:
        yield from read(piece, shard.settings.text_key, bad, shard.settings.separator)
        _read_bytes.add(piece.n_bytes)


class _ReadBytes:
    """Counts the bytes of the pieces that this process has read, for whoever shows the progress."""

    def __init__(self) -> None:
        self.add: Callable[[int], None] = lambda n_bytes: None

    def add_to(self, counter: "Synchronized[int]") -> None:
        """From now on, add to a counter that processes share."""

        def add(n_bytes: int) -> None:
            with counter.get_lock():
                counter.value += n_bytes

        self.add = add


_read_bytes = _ReadBytes()


@cache
def _load_once(path: Path) -> Tokenizer:
    return load_tokenizer(path)


def _writer(shard: Shard, split: str) -> TokenFileWriter | PackingWriter:
    path = shard.unfinished / split / (shard.name + SUFFIX)
    writer = TokenFileWriter(path, shard.settings.vocab_size, shard.settings.tokenizer_hash)
    return PackingWriter(writer, shard.settings.pack) if shard.settings.pack else writer


# ------------------------------------------------------------------------------------------- all shards


@dataclass
class _Job:
    """One preparation, from its inputs to the finished working folder."""

    settings: Settings
    working: Path
    tokenizer_path: Path
    processes: int
    bad: BadFiles
    progress: Progress

    def run(self) -> None:
        """Do the remaining work in the working folder, including the final record."""
        try:
            files, shards = self._shards()
            self._write(files, self._without_duplicates(shards))
        except BaseException:
            if not any((self.working / "reports").glob("*.json")):  # there is nothing in it to resume from
                _discard(self.working)
            raise

    def _shards(self) -> tuple[list[InputFile], list[Shard]]:
        """Look at all inputs, and divide them.

        Raises:
            UserError: more of them than allowed are unreadable.
        """
        inputs, text_key = self.settings.inputs, self.settings.text_key
        self.progress(0, None, f"listing the files of {', '.join(inputs)}")
        listed = list_files(inputs, self.bad)
        looked_at = BadFiles(self.bad.limit)
        files = examine(listed, text_key, looked_at, self.processes, self._examined)
        looked_at.check()
        portions = divide([piece for name in inputs for piece in pieces(name)])
        limit = self.bad.limit or 0
        return files, [
            Shard(i, portion, self.working, os.getpid(), self.tokenizer_path, self.settings, limit)
            for i, portion in enumerate(portions)
        ]

    def _examined(self, n_bytes: int) -> None:
        self.progress(0, None, f"checking the inputs, {n_bytes / 1e6:,.0f} MB read")

    def _without_duplicates(self, shards: list[Shard]) -> list[Shard]:
        """Tell each shard which of its documents are copies of earlier ones."""
        if not self.settings.drop_duplicates:
            return shards
        hashes = dict.fromkeys((shard.index for shard in shards), b"")
        with closing(self._on_all(hash_shard, shards, 0, "looking for duplicates")) as results:
            for shard, found in results:
                hashes[shard.index] = found
        return [
            replace(shard, duplicates=copies)
            for shard, copies in zip(shards, find_duplicates(list(hashes.values())), strict=True)
        ]

    def _write(self, files: list[InputFile], shards: list[Shard]) -> None:
        settings, working = self.settings, self.working
        _enter(working, settings)
        reports = {shard.index: report for shard in shards if (report := shard.report())}
        _remove_leftovers(working, {shard.name for shard in shards if shard.index in reports})
        for report in reports.values():
            self.bad.extend(report["bad_files"])
        done = sum(shard.n_bytes for shard in shards if shard.index in reports)
        remaining = [shard for shard in shards if shard.index not in reports]
        with closing(self._on_all(write_shard, remaining, done, "")) as results:
            for shard, report in results:
                self.bad.extend(report["bad_files"])
                _keep(shard, report)
                reports[shard.index] = report
        if changed := [file.path for file in files if not file.is_untouched()]:
            raise UserError(f"{', '.join(changed[:5])}: changed while being read; run the same command again")
        try:
            record = _record(settings, [reports[shard.index] for shard in shards], self.bad)
            record["read_from"] = [pin(name) for name in settings.inputs]
        except UserError:
            _discard(working)  # the same inputs would end in the same error
            raise
        record["inputs"] = summary(files)
        write_list(working / "output", files)
        if settings.pack:
            for split in settings.splits:
                write_mark(working / "output" / split, settings.pack)
        _write_json(working / "output" / RECORD, record)

    def _on_all(
        self, work: Callable[[Shard], _Result], shards: list[Shard], done: int, message: str
    ) -> Generator[tuple[Shard, _Result], None, None]:
        """Apply a function to shards in several processes; yields each result as it is finished, and shows progress."""
        total = done + sum(shard.n_bytes for shard in shards)
        self.progress(done, total, message)
        processes = min(self.processes, len(shards))
        if processes <= 1:
            yield from self._on_all_here(work, shards, done, total, message)
        else:
            counter = multiprocessing.get_context("spawn").Value("q", done)
            with _pool(processes, counter) as pool:
                futures = {pool.submit(work, shard): shard for shard in shards}
                left = set(futures)
                while left:
                    finished, left = wait(left, _PROGRESS_SECONDS, FIRST_COMPLETED)
                    for future in finished:
                        try:
                            yield futures[future], future.result()
                        except BrokenProcessPool:
                            raise UserError(_KILLED) from None
                    self.progress(counter.value, total, message)

    def _on_all_here(
        self, work: Callable[[Shard], _Result], shards: list[Shard], done: int, total: int, message: str
    ) -> Generator[tuple[Shard, _Result], None, None]:
        shown_at = time.monotonic()

        def add(n_bytes: int) -> None:
            nonlocal done, shown_at
            done += n_bytes
            if time.monotonic() - shown_at > _PROGRESS_SECONDS:
                shown_at = time.monotonic()
                self.progress(done, total, message)

        _read_bytes.add = add
        for shard in shards:
            yield shard, work(shard)
            self.progress(done, total, message)


def find_duplicates(hashes: Sequence[bytes]) -> list[tuple[int, ...]]:
    """Find the documents that are copies of earlier ones.

    Args:
        hashes: for each shard, 16 bytes per document.

    Returns:
        For each shard, the numbers of its copies, ascending.
    """
    keys = np.frombuffer(b"".join(hashes), dtype="<u8").reshape(-1, 2)
    order = np.lexsort((keys[:, 1], keys[:, 0]))  # stable: of equal documents, the first comes first
    is_copy = np.zeros(len(keys), dtype=bool)
    is_copy[order[1:]] = (keys[order[1:]] == keys[order[:-1]]).all(axis=1)
    ends = np.cumsum([len(each) // 16 for each in hashes])
    return [tuple(np.flatnonzero(part).tolist()) for part in np.split(is_copy, ends[:-1])]


def _keep(shard: Shard, report: dict[str, Any]) -> None:
    """Move a written shard's token files to their final folder, and record that the shard is finished."""
    for split in shard.settings.splits:
        name = Path(split, shard.name + SUFFIX)
        os.replace(shard.unfinished / name, shard.working / "output" / name)
    _write_json(shard.report_path, report)


@contextmanager
def _pool(processes: int, counter: "Synchronized[int]") -> Iterator[ProcessPoolExecutor]:
    """Worker processes that end with this one, and at once if it leaves this context with an exception."""
    before = set(multiprocessing.active_children())
    spawn = multiprocessing.get_context("spawn")  # forking after torch's threads have started may hang
    pool = ProcessPoolExecutor(processes, mp_context=spawn, initializer=_start_worker, initargs=(counter,))
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in set(multiprocessing.active_children()) - before:
            child.terminate()
        raise
    pool.shutdown()


def _start_worker(counter: "Synchronized[int]") -> None:
    """In a worker: count what it reads, leave Ctrl-C to the parent, and exit if the parent is killed."""
    _read_bytes.add_to(counter)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _record(settings: Settings, reports: list[dict[str, Any]], bad: BadFiles) -> dict[str, Any]:
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
    for report in reports:
        skipped = BadFiles()
        skipped.skipped.update(report["skipped"])
        skipped.examples = report["examples"]
        bad.merge(skipped)
    record = {
        "settings": asdict(settings),
        **{name: asdict(split) for name, split in splits.items()},
        "empty_documents": sum(report["empty_documents"] for report in reports),
        "bad_files": [message for report in reports for message in report["bad_files"]],
        "skipped": {
            reason: {"count": count, "first": bad.examples.get(reason, [])} for reason, count in bad.skipped.items()
        },
    }
    if settings.drop_duplicates:
        record["duplicates"] = sum(report["duplicates"] for report in reports)
    if settings.pack:
        record["packed"] = {name: _packed(settings.pack, split, name, reports) for name, split in splits.items()}
    return record


def _packed(seq_len: int, split: Split, name: str, reports: list[dict[str, Any]]) -> dict[str, Any]:
    """How a split was packed; `waste` is the fraction of its windows that is padding."""
    windows, cut = (sum(report["packed"][name][key] for report in reports) for key in ("windows", "cut_documents"))
    waste = 1 - split.tokens / (windows * (seq_len + 1))
    return {"seq_len": seq_len, "windows": windows, "cut_documents": cut, "waste": round(waste, 6)}


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


def _check_inputs(output: Path, settings: Settings, say: Callable[[str], None]) -> None:
    """Compare the inputs with those of a finished folder, as far as they still exist.

    Raises:
        UserError: text was added, removed or changed since.
    """
    before = read_list(output)
    if before is None:
        _adopt_inputs(output, settings, say)
        return
    changed, gone = changes(before, settings.inputs)
    if changed:
        raise UserError(
            f"{output}: was made from other files:\n" + "\n".join(changed) + "\n"
            "Choose another output folder, or delete this one to have it made again"
        )
    if gone:
        say(f"{output}: the text that it was made from is gone ({', '.join(gone)}), so it was not compared")


def _adopt_inputs(output: Path, settings: Settings, say: Callable[[str], None]) -> None:
    """Record the inputs of a folder that was prepared before Keel recorded them."""
    try:
        write_list(output, examine(list_files(settings.inputs, BadFiles()), settings.text_key, BadFiles()))
        further = "they are recorded as they are now, so that later changes are noticed"
    except (UserError, OSError) as error:
        further = f"they can't be recorded now ({error})"
    say(f"{output}: prepared by an earlier Keel, so whether its inputs have changed since is unknown; {further}")


def _enter(working: Path, settings: Settings) -> None:
    """Start or resume in a working folder.

    Raises:
        UserError: shards in it were finished with other settings.
    """
    state = working / "settings.json"
    if state.exists() and (n_finished := len(list(working.glob("reports/*.json")))):
        advice = f"It holds {n_finished} finished part(s) of an interrupted preparation; to begin again, delete it"
        _check_same(working, _read_json(state), settings, advice)
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


def _check_same(
    folder: Path,
    before: Any,
    settings: Settings,
    advice: str = "Choose another output folder, or delete this one to have it made again",
) -> None:
    now = asdict(settings)
    then = _DEFAULTS | (before if isinstance(before, dict) else {})
    values = {key: shortened(repr(then.get(key)), 400) for key in now}
    changed = [f"  {key}: {values[key]} then, {now[key]!r} now" for key in now if then.get(key) != now[key]]
    if changed:
        raise UserError(f"{folder}: was made with other settings:\n" + "\n".join(changed) + f"\n{advice}")


_DEFAULTS = {"separator": "", "drop_duplicates": False, "pack": None}
"""Settings that folders of an earlier Keel lack."""


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
    if not _fits(record, _FORM):
        raise UserError(f"{output / RECORD}: not in the form that Keel writes; delete its folder to have it made again")
    return record


_SPLIT = dict.fromkeys(asdict(Split()), int)
_PACKED = {"seq_len": int, "windows": int, "cut_documents": int, "waste": float}
_FORM = {
    "bad_files": [str],
    "empty_documents": int,
    TRAIN: _SPLIT,
    f"{VALIDATION}?": _SPLIT,
    "inputs?": {"files": int, "bytes": int, "xxh3_128": str},
    "skipped?": {"*": {"count": int, "first": [str]}},
    "duplicates?": int,
    "packed?": {"*": _PACKED},
}
"""What a record has: types, lists of them, and objects; "?" marks what may be missing, "*" stands for any key."""


def _fits(value: Any, form: Any) -> bool:
    if isinstance(form, list):
        return isinstance(value, list) and all(_fits(item, form[0]) for item in value)
    if not isinstance(form, dict):
        return type(value) is form
    if not isinstance(value, dict):
        return False
    if "*" in form:
        return all(_fits(item, form["*"]) for item in value.values())
    needed = {key for key in form if not key.endswith("?")}
    return needed <= value.keys() and all(
        _fits(value[name], part) for key, part in form.items() if (name := key.rstrip("?")) in value
    )


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
