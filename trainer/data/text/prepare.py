"""Preparation of token files from text, in parallel and resumable.

The inputs are divided into pieces, which are grouped into *shards* of nearly equal size. The shards follow from the
inputs alone, and a process works on one shard at a time and writes its token files, so the result is the same, bit for
bit, at any number of processes. Each document goes to OUTPUT/train or OUTPUT/validation by a hash of its content, so
the same text is never in both.

Before that, all files are read once (`listing.examine`): what can't be read is named before hours go into tokenizing,
and the sizes and hashes of the inputs are recorded, so that text that is added or changed later is noticed.

All work is done in a hidden folder next to OUTPUT that is renamed when complete: OUTPUT is either finished or does
not exist. A finished shard leaves a report in the hidden folder. After a kill, the next call does the shards that have
none, and those whose input files have changed since. A lock separates concurrent launches: the first prepares, the
others wait and find the work done. Worker processes write to a folder of their launch, and only the holder of the lock
moves finished files: a worker that briefly outlives its killed launch does no harm.
"""

import fcntl
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np

from configs.errors import OutageError, UserError
from configs.files import FULL
from trainer.data.packing import write_mark
from trainer.data.text.bad_files import BadFiles
from trainer.data.text.documents import Piece, pieces
from trainer.data.text.hub import pin
from trainer.data.text.listing import InputFile, examine, list_files, summary, write_list
from trainer.data.text.prepared_folder import (
    ADVICE,
    RECORD,
    Settings,
    Split,
    check_inputs,
    check_same,
    is_finished,
    read_json,
    read_record,
    write_json,
)
from trainer.data.text.shard import Shard, hash_shard, keep, read_bytes, write_shard
from trainer.data.tokenizer import load_tokenizer

MIN_SHARD_BYTES = 1 << 20
MAX_SHARDS = 256
"""Shards grow with the corpus, so that a folder never has more files than a process may open."""

_PROGRESS_SECONDS = 1.0
_KILLED = (
    "a process that prepared text was killed (out of memory?). "
    "Run the same command again: finished shards are kept. Fewer processes need less memory"
)
_Result = TypeVar("_Result")
Progress = Callable[[int, int | None, str], None]
"""Called with the bytes of text done, the total bytes (None: not known yet), and a message."""


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
    mask_until: str | None = None,
    mask_after: str | None = None,
    say: Callable[[str], None] = lambda message: None,
    if_changed: Callable[[str], None] | None = None,
    advice: str = ADVICE,
) -> dict[str, Any]:
    """Tokenize the documents of `inputs` into OUTPUT/train and, with a validation fraction, OUTPUT/validation.

    Does nothing if OUTPUT was already prepared from the same files with the same settings. An exception raised by
    `progress` ends the work; finished shards are kept.

    Args:
        separator: cuts .txt files into documents.
        drop_duplicates: use only the first of documents with the same text.
        pack: pack whole documents into windows of this seq_len (see `packing`).
        mask_until, mask_after: markers of the loss mask (see `loss_mask`); None: all tokens give loss.
        say: called with remarks on an OUTPUT that exists.
        if_changed: called with how the files have changed since OUTPUT was made, instead of raising an error.
        advice: what to do about an OUTPUT that was made with other settings.

    Returns:
        The record kept as OUTPUT/prepare.json: settings, inputs (of the hub with the commit), documents, tokens and
        bytes of text of each split, the number of empty documents (they give no tokens), and the unreadable inputs that
        were skipped.

    Raises:
        UserError: an input or the tokenizer cannot be read, more than `max_bad_files` inputs are unreadable, OUTPUT
            lies in an input folder, was made with other settings or from other files, or cannot be written, or a split
            would have no tokens, or none that gives loss.
    """
    output = Path(output)
    tokenizer_path = Path(tokenizer_path)
    _require_apart(inputs, output)
    tokenizer = load_tokenizer(tokenizer_path)
    choices = (validation_fraction, separator, drop_duplicates, pack, mask_until, mask_after)
    settings = Settings(list(inputs), text_key, tokenizer.hash, tokenizer.vocab_size, *choices)
    working = output.absolute().with_name(f".{output.name}.partial")
    try:
        if is_finished(output, settings, advice):
            check_inputs(output, settings, say, if_changed)
        else:
            job = _Job(settings, working, tokenizer_path, processes, BadFiles(max_bad_files), progress)
            with _lock(working, progress):
                if not is_finished(output, settings):  # another launch may have finished it while this one waited
                    job.run()
                    os.rename(working / "output", output)
                _discard(working)
        record = read_record(output)
    except OSError as error:
        kind = OutageError if error.errno in FULL else UserError
        raise kind(f"{error.filename or output}: {error.strerror}, while preparing {output}") from None
    BadFiles(max_bad_files).extend(record["bad_files"])
    return record


def _require_apart(inputs: Sequence[str], output: Path) -> None:
    """Refuse an output in a folder of inputs: the next launch would take what is written there for new texts."""
    place = output.resolve()
    for name in inputs:
        if Path(name).is_dir() and Path(name).resolve() in (place, *place.parents):
            raise UserError(
                f"the output {output} is in the input folder {name}, where the next preparation would read what this "
                "one writes; choose an output outside of it"
            )


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
        inputs = self.settings.inputs
        text_key = self.settings.text_key
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
        settings = self.settings
        working = self.working
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
                keep(shard, report)
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
        write_json(working / "output" / RECORD, record)

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

        read_bytes.add = add
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
    """Let a worker count what it reads, leave Ctrl-C to the parent, and exit if the parent is killed."""
    read_bytes.add_to(counter)
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
        skipped.skipped = report["skipped"]
        bad.merge(skipped)
    record = {
        "settings": asdict(settings),
        **{name: asdict(split) for name, split in splits.items()},
        "empty_documents": sum(report["empty_documents"] for report in reports),
        "bad_files": [message for report in reports for message in report["bad_files"]],
        "skipped": bad.summary(),
    }
    if settings.drop_duplicates:
        record["duplicates"] = sum(report["duplicates"] for report in reports)
    if settings.mask_until:
        record["masked"] = {name: _masked(settings, split, name, reports) for name, split in splits.items()}
    if settings.pack:
        record["packed"] = {name: _packed(settings.pack, split, name, reports) for name, split in splits.items()}
    return record


def _masked(settings: Settings, split: Split, name: str, reports: list[dict[str, Any]]) -> dict[str, int]:
    """How much of a split gives loss.

    Raises:
        UserError: nothing does.
    """
    found = {key: sum(report["masked"][name][key] for report in reports) for key in reports[0]["masked"][name]}
    if not found["tokens_with_loss"]:
        raise UserError(
            f"no token of {name} would give loss: none of its {split.documents:,} document(s) has a text behind the "
            f"marker {settings.mask_until!r} (mask_until), which must be written exactly as in the text"
        )
    return found


def _packed(seq_len: int, split: Split, name: str, reports: list[dict[str, Any]]) -> dict[str, Any]:
    """How a split was packed; `waste` is the fraction of its windows that is padding."""
    windows, cut = (sum(report["packed"][name][key] for report in reports) for key in ("windows", "cut_documents"))
    waste = 1 - split.tokens / (windows * (seq_len + 1))
    return {"seq_len": seq_len, "windows": windows, "cut_documents": cut, "waste": round(waste, 6)}


# ------------------------------------------------------------------------------------------- the working folder


def _enter(working: Path, settings: Settings) -> None:
    """Start or resume in a working folder.

    Raises:
        UserError: shards in it were finished with other settings.
    """
    state = working / "settings.json"
    if state.exists() and (n_finished := len(list(working.glob("reports/*.json")))):
        advice = f"It holds {n_finished} finished part(s) of an interrupted preparation; to begin again, delete it"
        check_same(working, read_json(state), settings, advice)
    for left in working.glob("unfinished.*"):
        _discard(left)
    (working / "reports").mkdir(exist_ok=True)
    for folder in ("output", f"unfinished.{os.getpid()}"):
        for split in settings.splits:
            (working / folder / split).mkdir(parents=True, exist_ok=True)
    write_json(state, asdict(settings))


def _remove_leftovers(working: Path, finished: set[str]) -> None:
    """Remove what unfinished shards left behind: temporary files, and files of a different division of the inputs."""
    for path in [*working.glob("reports/*"), *working.glob("output/*/*"), *working.glob("output/.*.tmp")]:
        if path.stem not in finished:
            path.unlink()


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
