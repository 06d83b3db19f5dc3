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
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import numpy as np

from checkpoint.bucket import errors_for_user
from configs.errors import OutageError, UserError
from configs.files import FULL, exists, is_folder, write_json
from trainer.data.packing import write_mark
from trainer.data.text.bad_files import BadFiles
from trainer.data.text.documents import Piece, pieces
from trainer.data.text.fill_in import fim_tokens
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
)
from trainer.data.text.shard import Shard, hash_shard, keep, make_folders, write_shard
from trainer.data.text.workers import Progress, on_all
from trainer.data.tokenizer import load_tokenizer

MIN_SHARD_BYTES = 1 << 20
MAX_SHARDS = 256
"""Shards grow with the corpus, so that a folder never has more files than a process may open."""


@dataclass(frozen=True)
class Remote:
    """What of a preparation on hosts that share no disk is in object storage."""

    output: str
    """OUTPUT; `Call.output` is its copy on this host."""
    inputs: tuple[str, ...]
    tokenizer: str
    """Its name, of a file or in object storage."""

    @property
    def work(self) -> str:
        """Where all calls for shares leave their work, as in `Call.working`."""
        parent, _, name = self.output.rstrip("/").rpartition("/")
        return f"{parent}/.{name}.shards"


@dataclass(frozen=True)
class Call:
    """What a call of `keel prepare`, or a run, asks for: all of the work, a share of it, or its end."""

    settings: Settings
    output: Path
    tokenizer_path: Path
    processes: int = 1
    max_bad_files: int = 0
    progress: Progress = lambda done, total, message: None
    """Told of the work; an exception that it raises ends the work, and what is finished is kept."""
    launch: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Names the folder for its unfinished work; no other call, on any host, has the same."""
    remote: Remote | None = None
    """Not None: shares are made by hosts that share no disk."""

    @property
    def working(self) -> Path:
        """The folder that all calls for shares use, of this host or of all."""
        return _beside(self.output, "shards")

    @property
    def work(self) -> str | Path:
        """Where all hosts see the work."""
        return self.remote.work if self.remote else self.working

    @property
    def advice(self) -> str:
        """How to begin again."""
        return f"To begin again with all shards, delete {self.work}"


def prepare(
    call: Call,
    say: Callable[[str], None] = lambda message: None,
    if_changed: Callable[[str], None] | None = None,
    advice: str = ADVICE,
) -> dict[str, Any]:
    """Tokenize the documents of the inputs into OUTPUT/train and, with a validation fraction, OUTPUT/validation.

    Does nothing if OUTPUT was already prepared from the same files with the same settings.

    Args:
        call: what to do.
        say: called with remarks on an OUTPUT that exists.
        if_changed: called with how the files have changed since OUTPUT was made, instead of raising an error.
        advice: what to do about an OUTPUT that was made with other settings.

    Returns:
        The record kept as OUTPUT/prepare.json: settings, inputs (of the hub with the commit), documents, tokens and
        bytes of text of each split, the number of empty documents (they give no tokens), and the unreadable inputs that
        were skipped.

    Raises:
        UserError: an input cannot be read, more than `max_bad_files` inputs are unreadable, OUTPUT was made with other
            settings or from other files, or cannot be written, or a split would have no tokens, or none that gives
            loss.
    """
    output = call.output
    working = _beside(output, "partial")
    with errors_of(output):
        if is_finished(output, call.settings, advice):
            check_inputs(output, call.settings, say, if_changed)
        else:
            with lock(working, call.progress):
                if not is_finished(output, call.settings):  # another launch may have finished it while this one waited
                    _make(call, working)
                    os.rename(working / "output", output)
                discard(working)
        record = read_record(output)
    BadFiles(call.max_bad_files).extend(record["bad_files"])
    return record


def is_begun(output: Path) -> bool:
    """Whether this host has work of an unfinished preparation of OUTPUT, or of its shares."""
    return any(exists(_beside(output, work)) for work in ("partial", "shards"))


def _beside(output: Path, work: str) -> Path:
    return output.absolute().with_name(f".{output.name}.{work}")


def settings_of(
    inputs: Sequence[str],
    output: Path,
    tokenizer_path: Path,
    text_key: str = "text",
    validation_fraction: float = 0.0,
    **choices: Any,
) -> Settings:
    """What decides the content of OUTPUT, besides the inputs' content; `choices` are further fields of `Settings`.

    Raises:
        UserError: the tokenizer cannot be read, or lacks tokens, or OUTPUT lies in an input folder.
    """
    _require_apart(inputs, output)
    tokenizer = load_tokenizer(tokenizer_path)
    if choices.get("fim_rate"):
        try:
            fim_tokens(tokenizer)
        except UserError as error:
            raise UserError(f"{tokenizer_path}: {error}, or leave out fim_rate") from None
    return Settings(list(inputs), text_key, tokenizer.hash, tokenizer.vocab_size, validation_fraction, **choices)


@contextmanager
def errors_of(output: Path) -> Iterator[None]:
    """Name the output, or the file beside it, that the disk refuses, or the place that object storage does."""
    try:
        with errors_for_user():
            yield
    except OSError as error:
        kind = OutageError if error.errno in FULL else UserError
        raise kind(f"{error.filename or output}: {error.strerror}, while preparing {output}") from None


def _require_apart(inputs: Sequence[str], output: Path) -> None:
    """Refuse an output in a folder of inputs: the next launch would take what is written there for new texts."""
    place = output.resolve()
    for name in inputs:
        if is_folder(name) and Path(name).resolve() in (place, *place.parents):
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


def _make(call: Call, working: Path) -> None:
    """Do the remaining work in the working folder, including the final record."""
    bad = BadFiles(call.max_bad_files)
    try:
        files, shards = _shards(call, working, bad)
        _write(call, working, files, _without_duplicates(call, shards), bad)
    except BaseException:
        if not any((working / "reports").glob("*.json")):  # there is nothing in it to resume from
            discard(working)
        raise


def _shards(call: Call, working: Path, bad: BadFiles) -> tuple[list[InputFile], list[Shard]]:
    """Look at all inputs, and divide them.

    Raises:
        UserError: more of them than allowed are unreadable.
    """
    settings = call.settings

    def report(n_bytes: int) -> None:
        call.progress(0, None, f"checking the inputs, {n_bytes / 1e6:,.0f} MB read")

    call.progress(0, None, f"listing the files of {', '.join(settings.inputs)}")
    listed = list_files(settings.inputs, bad)
    looked_at = BadFiles(call.max_bad_files)
    files = examine(listed, settings.keys, looked_at, call.processes, report)
    looked_at.check()
    portions = divide([piece for name in settings.inputs for piece in pieces(name)])
    common = (working, call.launch, call.tokenizer_path, settings, call.max_bad_files)
    return files, [Shard(i, portion, *common) for i, portion in enumerate(portions)]


def _without_duplicates(call: Call, shards: list[Shard]) -> list[Shard]:
    """Tell each shard which of its documents are copies of earlier ones."""
    if not call.settings.drop_duplicates or not shards:
        return shards
    hashes = dict.fromkeys((shard.index for shard in shards), b"")
    what = "looking for duplicates"
    with closing(on_all(hash_shard, shards, call.processes, call.progress, message=what)) as results:
        for shard, found in results:
            hashes[shard.index] = found
    return [
        replace(shard, duplicates=copies)
        for shard, copies in zip(shards, find_duplicates(list(hashes.values())), strict=True)
    ]


def _write(call: Call, working: Path, files: list[InputFile], shards: list[Shard], bad: BadFiles) -> None:
    settings = call.settings
    _enter(working, settings, call.launch)
    reports = {shard.index: report for shard in shards if (report := shard.report())}
    _remove_leftovers(working, {shard.name for shard in shards if shard.index in reports})
    for report in reports.values():
        bad.extend(report["bad_files"])
    done = sum(shard.n_bytes for shard in shards if shard.index in reports)
    remaining = [shard for shard in shards if shard.index not in reports]
    with closing(on_all(write_shard, remaining, call.processes, call.progress, done)) as results:
        for shard, report in results:
            bad.extend(report["bad_files"])
            keep(shard, report)
            reports[shard.index] = report
    # What can't be read has no hash: it is among what may be skipped.
    if changed := [file.path for file in files if file.hash and not file.is_untouched()]:
        raise UserError(f"{', '.join(changed[:5])}: changed while being read; run the same command again")
    read_from = [pin(name) for name in settings.inputs]
    seal(working, settings, [reports[shard.index] for shard in shards], files, read_from, bad)


def seal(
    working: Path,
    settings: Settings,
    reports: list[dict[str, Any]],
    files: Sequence[InputFile],
    read_from: list[str],
    bad: BadFiles,
) -> None:
    """Write what the finished folder has beside its token files; the record is last.

    Args:
        reports: of all shards, in order.
        read_from: the inputs, of the hub with the commit.
        bad: what was skipped when the inputs were listed.

    Raises:
        UserError: a split has no tokens; the working folder is then removed, since it would end in the same error.
    """
    try:
        record = _record(settings, reports, bad)
    except UserError:
        discard(working)
        raise
    record["read_from"] = read_from
    record["inputs"] = summary(files)
    write_list(working / "output", files)
    if settings.pack:
        for split in settings.splits:
            write_mark(working / "output" / split, settings.pack)
    write_json(working / "output" / RECORD, record)


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
        bad.merge((), report["skipped"])
    record = {
        "settings": asdict(settings),
        **{name: asdict(split) for name, split in splits.items()},
        "empty_documents": sum(report["empty_documents"] for report in reports),
        "bad_files": [message for report in reports for message in report["bad_files"]],
        "skipped": bad.summary(),
    }
    if settings.drop_duplicates:
        record["duplicates"] = sum(report["duplicates"] for report in reports)
    if settings.fim_rate:
        record["rearranged"] = sum(report["rearranged"] for report in reports)
    if settings.has_mask:
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
        reason = "has a token behind its prompt (prompt_key)"
        if settings.mask_until is not None:
            marker = f"the marker {settings.mask_until!r} (mask_until)"
            reason = f"has a text behind {marker}, which must be written exactly as in the text"
        raise UserError(f"no token of {name} would give loss: none of its {split.documents:,} document(s) {reason}")
    return found


def _packed(seq_len: int, split: Split, name: str, reports: list[dict[str, Any]]) -> dict[str, Any]:
    """How a split was packed; `waste` is the fraction of its windows that is padding."""
    windows, cut = (sum(report["packed"][name][key] for report in reports) for key in ("windows", "cut_documents"))
    waste = 1 - split.tokens / (windows * (seq_len + 1))
    return {"seq_len": seq_len, "windows": windows, "cut_documents": cut, "waste": round(waste, 6)}


# ------------------------------------------------------------------------------------------- the working folder


def _enter(working: Path, settings: Settings, launch: str) -> None:
    """Start or resume in a working folder.

    Raises:
        UserError: shards in it were finished with other settings.
    """
    state = working / "settings.json"
    if exists(state) and (n_finished := len(list(working.glob("reports/*.json")))):
        advice = f"It holds {n_finished} finished part(s) of an interrupted preparation; to begin again, delete it"
        check_same(working, read_json(state), settings, advice)
    for left in working.glob("unfinished.*"):
        discard(left)
    make_folders(working, settings, launch)
    write_json(state, asdict(settings))


def _remove_leftovers(working: Path, finished: set[str]) -> None:
    """Remove what unfinished shards left behind: temporary files, and files of a different division of the inputs."""
    for path in [*working.glob("reports/*"), *working.glob("output/*/*"), *working.glob("output/.*.tmp")]:
        if path.stem not in finished:
            path.unlink()


def lock(working: Path, progress: Progress) -> IO[bytes]:
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
        if exists(path) and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return file
        file.close()  # it locks a folder that was removed in the meantime


def discard(folder: Path) -> None:
    """Remove a folder that other processes may use; it is renamed first, so that they create no file in it."""
    if exists(folder):
        trash = folder.with_name(f"{folder.name}.{os.getpid()}")
        os.rename(folder, trash)
        shutil.rmtree(trash)


def discard_shards(output: Path) -> None:
    """Remove what a `--finish` that was killed while it removed its work has left beside a finished OUTPUT."""
    work = _beside(output, "shards")
    is_left = re.compile(rf"{re.escape(work.name)}(\.[0-9]+)?")  # the number: of `discard`
    for path in list(work.parent.iterdir()):
        if is_left.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)
