"""Preparation on many hosts: `keel prepare --shard I/N` does one of N shares of the work, and `--finish` the rest.

The result has the bytes that one process writes (see `prepare`, whose shards are one token file for each split). Shares
need nothing but a folder that all hosts see, `.OUTPUT.shards` beside OUTPUT, in any order and at any time:

    plan.jsonl               settings, N, and the inputs, divided into pieces: what the first share has found
    shares/00003.json        share 3 is finished: the files that it has examined, and a hash of each piece's content
    output/, reports/        token files and their reports, where a share has all pieces of one
    raw/00007-00001.tokens   otherwise part 1 of the pieces of token file 7: all its documents, in order, not packed
    raw/00007-00001.json     and its report, .documents: their splits and sizes, .hashes: of their texts, sorted

With N up to the number of token files, share i has files i, i + N, i + 2N, ...; otherwise several shares divide the
pieces of a file among them. Duplicates are dropped at the end, since only then all texts are known: copies are tokenized in vain.
Their hashes are compared range by range, so that a range's documents fit in memory; of equal ones the first in the
order of the inputs stays.

A part is written in a folder of its launch, moved when it is complete, and counts once its report is there. What
decides is names, sizes and content, never a time or a process id: a share that is done again keeps the parts whose
pieces have the content that their reports tell. `finish` compares the content that was tokenized with the content that
was examined, and the plan with the inputs.
"""

import json
import os
import struct
import uuid
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, astuple, dataclass, field, replace
from functools import cached_property
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from configs.errors import UserError
from configs.files import replacing, synced
from configs.untrusted import parse_json, read_file
from trainer.data.text.bad_files import PATIENCE, BadFiles
from trainer.data.text.documents import Piece, file_pieces, pieces
from trainer.data.text.hub import pin
from trainer.data.text.inputs import HUB, files_of
from trainer.data.text.listing import MAX_LIST_BYTES, InputFile, content_hash, examined, named, plain_files
from trainer.data.text.prepare import discard, divide, errors_of, lock, seal
from trainer.data.text.prepared_folder import (
    TRAIN,
    VALIDATION,
    Settings,
    check_same,
    is_finished,
    read_json,
    read_record,
    write_json,
)
from trainer.data.text.shard import (
    Outputs,
    Shard,
    encode,
    is_validation,
    keep,
    make_folders,
    read_bytes,
    texts_of,
    write_shard,
)
from trainer.data.text.token_writer import TokenFileWriter
from trainer.data.text.workers import Progress, on_all
from trainer.data.token_file import SUFFIX, TokenFile

MAX_SHARES = 1 << 16
RANGE_DOCUMENTS = 1 << 20
"""Documents whose hashes are compared at a time, in one process: about 100 MB."""

_DOCUMENT = struct.Struct("<Q?")
"""A document of a raw shard: bytes of text, and whether it is for validation."""
_HASH_BYTES = 24
"""Bytes of a document in a file of hashes, which is three columns of uint64: hash, rest of the hash, number."""
_DOCUMENTS = ".documents"
_HASHES = ".hashes"
_COPIES = ".copies"


@dataclass(frozen=True)
class Call:
    """One call of `keel prepare` that is not alone; the arguments are those of `prepare`."""

    settings: Settings
    output: Path
    tokenizer_path: Path
    processes: int = 1
    max_bad_files: int = 0
    progress: Progress = lambda done, total, message: None
    launch: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def working(self) -> Path:
        """The folder that all calls share."""
        return self.output.absolute().with_name(f".{self.output.name}.shards")

    def check(self, plan: "Plan") -> None:
        """Raise UserError if the plan was made with other settings."""
        check_same(self.working, asdict(plan.settings), self.settings, self.advice)

    @property
    def advice(self) -> str:
        """How to begin again."""
        return f"To begin again with all shards, delete {self.working}"


# ------------------------------------------------------------------------------------------- the plan


@dataclass(frozen=True)
class RawShard(Shard):
    """A part of a token file's pieces, whose documents are put into the token file at the end."""

    @property
    def name(self) -> str:
        """Name of its files, in the order of the inputs."""
        return f"{self.index:05d}-{self.part:05d}"

    @property
    def folder(self) -> Path:
        """Where its files are once they are complete."""
        return self.working / "raw"

    @property
    def report_path(self) -> Path:
        """The file that records that it is complete."""
        return self.folder / f"{self.name}.json"


@dataclass(frozen=True)
class Listed:
    """A file, a saved dataset, or a dataset of the hub, with its pieces."""

    input: str
    path: str
    """The file or folder; of the hub, the dataset with its commit."""
    pieces: list[Piece]


@dataclass(frozen=True)
class Plan:
    """What all shares agree on."""

    settings: Settings
    shares: int
    listed: list[Listed]
    hash: str
    """Of the file that holds the plan."""

    @cached_property
    def portions(self) -> list[list[Piece]]:
        """The pieces of each token file, in order."""
        return divide([piece for each in self.listed for piece in each.pieces])

    def parts(self, portion: int) -> int:
        """The number of shares that divide a token file's pieces among them."""
        return max(1, len(range(portion, self.shares, len(self.portions))))

    def is_whole(self, portion: int) -> bool:
        """Whether a share writes the token file, and nothing is left to do for it."""
        return self.parts(portion) == 1 and not self.settings.drop_duplicates

    def share_of(self, shard: Shard) -> int:
        """The share that has a unit of work."""
        return (shard.index + shard.part * len(self.portions)) % self.shares

    def pieces_of(self, portion: int) -> list[list[Piece]]:
        """The parts of a token file's pieces, which have about the same number of bytes, and may be empty."""
        n_parts = self.parts(portion)
        parts: list[list[Piece]] = [[] for _ in range(n_parts)]
        total = max(1, sum(piece.n_bytes for piece in self.portions[portion]))
        start = 0
        for piece in self.portions[portion]:
            parts[min(n_parts - 1, start * n_parts // total)].append(piece)
            start += piece.n_bytes
        return parts

    def whole(self, call: Call, portion: int) -> Shard:
        """A token file as the work of one process."""
        common = (call.working, call.launch, call.tokenizer_path, self.settings, call.max_bad_files)
        return Shard(portion, self.portions[portion], *common)

    def shards(self, call: Call, portion: int) -> list[Shard]:
        """The units of work for a token file."""
        whole = self.whole(call, portion)
        if self.is_whole(portion):
            return [whole]
        common = (whole.working, whole.launch, whole.tokenizer_path, whole.settings, whole.max_bad_files)
        parts = enumerate(self.pieces_of(portion))
        return [RawShard(portion, own, *common, part=part) for part, own in parts if own]

    def of_share(self, call: Call, share: int) -> list[Shard]:
        """A share's units of work."""
        n_portions = len(self.portions)
        portions = range(share % n_portions, n_portions, self.shares) if n_portions else ()
        found = [shard for portion in portions for shard in self.shards(call, portion)]
        return [shard for shard in found if self.share_of(shard) == share]


def list_inputs(settings: Settings, bad: BadFiles) -> list[Listed]:
    """All inputs as they are now, in order; what is skipped is added to `bad`.

    Raises:
        UserError: one does not exist or cannot be listed.
    """
    found = []
    for name in settings.inputs:
        if name.startswith(HUB):
            found.append(Listed(name, pin(name), pieces(name)))
        else:
            found += [Listed(name, str(file), file_pieces(file)) for file in files_of(name, bad)]
    return found


def _make_plan(call: Call, shares: int) -> None:
    """List the inputs for all shares. Of two shares that begin at once, the later may replace the plan by an equal one;
    should it differ, what was made by the other does not count."""
    call.progress(0, None, f"listing the files of {', '.join(call.settings.inputs)}")
    listed = list_inputs(call.settings, BadFiles())
    call.working.mkdir(parents=True, exist_ok=True)
    with replacing(call.working / "plan.jsonl", call.launch) as file:
        file.write(json.dumps({"shards": shares, "settings": asdict(call.settings)}).encode() + b"\n")
        for each in listed:
            file.write(json.dumps([each.input, each.path, [astuple(piece) for piece in each.pieces]]).encode() + b"\n")


def _read_plan(call: Call) -> Plan:
    """The plan in the working folder.

    Raises:
        UserError: it is damaged, or of other settings.
    """
    path = call.working / "plan.jsonl"
    raw = read_file(path, MAX_LIST_BYTES)
    try:
        head, *rows = [parse_json(line) for line in raw.splitlines()]
        listed = [Listed(name, place, [Piece(*piece) for piece in own]) for name, place, own in rows]
        plan = Plan(Settings(**head["settings"]), head["shards"], listed, xxhash.xxh3_128_hexdigest(raw))
    except (ValueError, TypeError, KeyError):
        raise UserError(f"{path}: not in the form that this Keel writes. {call.advice}") from None
    call.check(plan)
    return plan


# ------------------------------------------------------------------------------------------- content


def contents(parts: Sequence[Piece], known: dict[str, str] | None = None) -> tuple[str, ...]:
    """A hash of each piece's content: of its own bytes in a .jsonl file, otherwise of the file that it is in.

    Args:
        known: hashes of whole files by their path.
    """
    whole = dict(known or {})
    return tuple(_content(piece, whole) for piece in parts)


def _content(piece: Piece, whole: dict[str, str]) -> str:
    if piece.kind == "hub":
        return piece.path  # with the commit
    path = Path(piece.path)
    if piece.kind == "jsonl":
        return content_hash(path, piece.start, piece.stop) if path.is_file() else ""  # a pipe must not be waited for
    if piece.path not in whole:
        hashes = [content_hash(file) for file in plain_files(path)]
        whole[piece.path] = hashes[0] if len(hashes) == 1 else xxhash.xxh3_128_hexdigest("".join(hashes).encode())
    return whole[piece.path]


def _require_as_planned(call: Call, listed: Sequence[Listed], now: Sequence[Listed]) -> None:
    """Compare the inputs, by names and sizes, with the plan.

    Raises:
        UserError: some were added, removed or changed.
    """
    before, after = ({each.path: each.pieces for each in some} for some in (listed, now))
    differences = {
        "added": sorted(after.keys() - before.keys()),
        "removed": sorted(before.keys() - after.keys()),
        "changed": sorted(path for path in before.keys() & after.keys() if before[path] != after[path]),
    }
    if any(differences.values()):
        lines = [f"  {what}: {named(paths)}" for what, paths in differences.items() if paths]
        what = "the inputs are no longer those of which the first shard has made a list:"
        raise UserError("\n".join([what, *lines, f"Restore them. {call.advice}"]))


# ------------------------------------------------------------------------------------------- a share


def make_share(call: Call, share: int, shares: int) -> tuple[int, int] | None:
    """Do one of several shares of a preparation.

    Returns:
        How many parts were made, and how many were there; None if OUTPUT is finished.

    Raises:
        UserError: as `prepare`; or the plan has other settings, another number of shares, or other inputs.
    """
    with errors_of(call.output):
        if is_finished(call.output, call.settings):
            return None
        if not (call.working / "plan.jsonl").exists():
            _make_plan(call, shares)
        plan = _read_plan(call)
        if plan.shares != shares:
            raise UserError(
                f"{call.working}: the work is divided into {plan.shares} shards, not {shares}. {call.advice}"
            )
        found = _examine(call, plan, share)
        for left in call.working.glob(f"unfinished.{share:05d}.*"):  # of earlier launches of this share
            discard(left)
        own = replace(call, launch=f"{share:05d}.{call.launch}")
        done = _make_all(own, plan, plan.of_share(own, share))
        _write_record(own, plan, share, found)
        return done


def _make_all(call: Call, plan: Plan, shards: list[Shard]) -> tuple[int, int]:
    """Write what is not there; returns how many shards were written, and how many were there."""
    make_folders(call.working, plan.settings, call.launch)
    for place in ("raw", "shares", f"unfinished.{call.launch}/raw"):
        (call.working / place).mkdir(exist_ok=True)
    written = [shard for shard in shards if shard.report_path.exists()]
    with closing(
        on_all(_is_made, written, call.processes, call.progress, message="looking at what is done")
    ) as results:
        there = {shard.name for shard, is_made in results if is_made}
    left = [shard for shard in shards if shard.name not in there]
    done = sum(shard.n_bytes for shard in shards if shard.name in there)
    with closing(on_all(_make, left, call.processes, call.progress, done)) as results:
        for _ in results:
            pass
    discard(call.working / f"unfinished.{call.launch}")
    return len(left), len(there)


@dataclass(frozen=True)
class _Examined:
    """What a share has found in one of the inputs that it has examined."""

    files: list[InputFile]
    contents: list[str]
    """A hash of each piece's content."""


def _examine(call: Call, plan: Plan, share: int) -> list[_Examined]:
    """Read the share's inputs once, as `listing.examine`.

    Raises:
        UserError: more of them than allowed are unreadable, or they are not as planned.
    """
    listed = plan.listed[share :: plan.shares]
    files = [(each.input, Path(each.path)) for each in listed if not each.input.startswith(HUB)]
    touched = {piece.path for shard in plan.of_share(call, share) for piece in shard.pieces}
    planned = [each for each in plan.listed if each.path in touched] + listed
    planned = [each for each in planned if not each.input.startswith(HUB)]
    _require_as_planned(call, planned, [replace(each, pieces=file_pieces(Path(each.path))) for each in planned])
    looked_at = BadFiles(call.max_bad_files)
    total = sum(piece.n_bytes for each in listed for piece in each.pieces)

    def report(n_bytes: int) -> None:
        call.progress(n_bytes, total, "checking the inputs")

    found = iter(examined(files, call.settings.text_key, looked_at, call.processes, report))
    entries: list[list[InputFile]] = [[] if each.input.startswith(HUB) else next(found) for each in listed]
    looked_at.check()
    return [
        _Examined(own, list(contents(each.pieces, {entry.path: entry.hash for entry in own})))
        for each, own in zip(listed, entries, strict=True)
    ]


def _record_path(call: Call, share: int) -> Path:
    return call.working / "shares" / f"{share:05d}.jsonl"


def _write_record(call: Call, plan: Plan, share: int, found: Sequence[_Examined]) -> None:
    """Record that a share is finished."""
    with replacing(_record_path(call, share), call.launch) as file:
        file.write(json.dumps(plan.hash).encode() + b"\n")
        for each in found:
            file.write(json.dumps([[astuple(entry) for entry in each.files], each.contents]).encode() + b"\n")


def _read_record(call: Call, plan: Plan, share: int) -> list[_Examined] | None:
    """The record of a share; None if it is of another plan."""
    path = _record_path(call, share)
    try:
        plan_hash, *rows = [parse_json(line) for line in read_file(path, MAX_LIST_BYTES).splitlines()]
        return (
            [_Examined([InputFile(*f) for f in files], own) for files, own in rows] if plan_hash == plan.hash else None
        )
    except (ValueError, TypeError):
        raise UserError(f"{path}: not in the form that this Keel writes; delete it, and run its shard again") from None


def _is_made(shard: Shard) -> bool:
    """Whether a shard was made of what its files now contain."""
    return replace(shard, content=contents(shard.pieces)).report() is not None


def _make(shard: Shard) -> None:
    """Write a shard, in a worker, and record it.

    Raises:
        UserError: its files changed meanwhile.
    """
    shard = replace(shard, content=contents(shard.pieces))
    report = _write_raw(shard) if isinstance(shard, RawShard) else write_shard(shard)
    now = contents(shard.pieces)
    if changed := [p.path for p, a, b in zip(shard.pieces, shard.content, now, strict=True) if a != b]:
        raise UserError(f"{named(changed)}: changed while being read; run the same command again")
    report["content"] = shard.content
    if isinstance(shard, RawShard):
        for suffix in (SUFFIX, _DOCUMENTS, _HASHES):
            os.replace(shard.unfinished / "raw" / (shard.name + suffix), shard.folder / (shard.name + suffix))
        write_json(shard.report_path, report, shard.launch)
    else:
        keep(shard, report)


def _write_raw(shard: RawShard) -> dict[str, Any]:
    """Write all documents of a shard, in order, into the folder for unfinished work; returns its report."""
    settings = shard.settings
    bad = BadFiles(shard.max_bad_files, PATIENCE)
    place = shard.unfinished / "raw" / shard.name
    empty = 0
    documents = bytearray()
    digests = bytearray()
    has_mask = settings.mask_until is not None
    with TokenFileWriter(place.with_suffix(SUFFIX), settings.vocab_size, settings.tokenizer_hash, has_mask) as writer:
        for text in texts_of(shard, bad):
            if not text:
                empty += 1
                continue
            raw = text.encode()
            writer.append(encode(shard, text))
            is_held_out = is_validation(raw, settings.validation_fraction)
            documents += _DOCUMENT.pack(len(raw), is_held_out)
            if settings.drop_duplicates:
                digests += xxhash.xxh3_128_digest(raw)
    for suffix, data in ((_DOCUMENTS, documents), (_HASHES, _sorted_hashes(digests).tobytes())):
        with synced(place.with_suffix(suffix)) as file:
            file.write(data)
    return {
        "documents": len(documents) // _DOCUMENT.size,
        "empty_documents": empty,
        "bad_files": bad.messages,
        "skipped": bad.skipped,
        "inputs_hash": shard.inputs_hash,
    }


def _sorted_hashes(digests: bytes | bytearray) -> np.ndarray:
    """The documents' hashes, ascending, each with its document's number; (3, documents), uint64."""
    keys = np.frombuffer(digests, dtype="<u8").reshape(-1, 2)
    order = np.lexsort((keys[:, 1], keys[:, 0]))
    return np.stack([keys[order, 0], keys[order, 1], order.astype("<u8")])


# ------------------------------------------------------------------------------------------- the end


def finish(call: Call) -> dict[str, Any]:
    """Put the shares together; returns the record as `prepare` does.

    Raises:
        UserError: shares are missing, or were made of other content, or the inputs are no longer as planned; or as
            `prepare`.
    """
    with errors_of(call.output):
        if is_finished(call.output, call.settings):
            return read_record(call.output)
        if not (call.working / "plan.jsonl").exists():
            raise UserError(f"{call.working}: no shards are there; make them with --shard 0/N to --shard N-1/N first")
        with lock(call.working, call.progress):
            if not is_finished(call.output, call.settings):
                _put_together(call, _read_plan(call))
                os.rename(call.working / "output", call.output)
            discard(call.working)
        record = read_record(call.output)
    BadFiles(call.max_bad_files).extend(record["bad_files"])
    return record


def _put_together(call: Call, plan: Plan) -> None:
    """Do what no share can do alone, up to the final record."""
    found = _interleaved(_records(call, plan), len(plan.listed))
    bad = BadFiles(call.max_bad_files)
    call.progress(0, None, f"listing the files of {', '.join(plan.settings.inputs)}")
    hub = [each for each in plan.listed if each.input.startswith(HUB)]
    local = replace(plan.settings, inputs=[name for name in plan.settings.inputs if not name.startswith(HUB)])
    _require_as_planned(call, plan.listed, list_inputs(local, bad) + hub)
    shards, raws = _checked(call, plan, [hash for each in found for hash in each.contents])
    for shard in [*raws, *(shard for shard in shards if plan.is_whole(shard.index))]:
        bad.extend(read_json(shard.report_path)["bad_files"])
    make_folders(call.working, plan.settings, call.launch)
    if plan.settings.drop_duplicates:
        _mark_copies(call, raws)
    left = [
        _Assembly(shard, [raw for raw in raws if raw.index == shard.index]) for shard in shards if not shard.report()
    ]
    with closing(
        on_all(_assemble, left, call.processes, call.progress, message="putting token files together")
    ) as done:
        for _ in done:
            pass
    reports = [read_json(shard.report_path) for shard in shards]
    pinned = {each.input: each.path for each in hub}
    read_from = [pinned.get(name, name) for name in plan.settings.inputs]
    seal(call.working, plan.settings, reports, [file for each in found for file in each.files], read_from, bad)


def _records(call: Call, plan: Plan) -> list[list[_Examined]]:
    """What each share has examined.

    Raises:
        UserError: some are missing.
    """
    there = {path.name for path in (call.working / "shares").glob("*.jsonl")}
    records = {}
    for share in range(plan.shares):
        if _record_path(call, share).name in there and (record := _read_record(call, plan, share)) is not None:
            records[share] = record
    if missing := [share for share in range(plan.shares) if share not in records]:
        raise UserError(
            f"{call.working}: {len(missing)} of {plan.shares} shards are not finished: {_ranges(missing)}. Run each of "
            f"them as --shard I/{plan.shares} with the same options, then --finish again"
        )
    return list(records.values())


def _checked(call: Call, plan: Plan, hashes: Sequence[str]) -> tuple[list[Shard], list[RawShard]]:
    """The shard of each token file, and all raw shards, with the content that was examined.

    Args:
        hashes: of the content of all pieces, in order.

    Raises:
        UserError: a part was made of other content.
    """
    expected = iter(hashes)
    shards: list[Shard] = []
    raws: list[RawShard] = []
    changed: dict[str, set[int]] = {}
    examiner = {each.path: index % plan.shares for index, each in enumerate(plan.listed)}
    for portion in range(len(plan.portions)):
        own = [replace(s, content=tuple(islice(expected, len(s.pieces)))) for s in plan.shards(call, portion)]
        for shard in own:
            then = read_json(shard.report_path)["content"]
            for path in {p.path for p, a, b in zip(shard.pieces, shard.content, then, strict=True) if a != b}:
                changed.setdefault(path, set()).update((examiner[path], plan.share_of(shard)))
        raws += [shard for shard in own if isinstance(shard, RawShard)]
        content = tuple(hash for shard in own for hash in shard.content)
        shards.append(replace(plan.whole(call, portion), content=content))
    if changed:
        again = sorted(set().union(*changed.values()))
        raise UserError(
            f"{named(sorted(changed))}: changed while the shards were made. Run shards {_ranges(again)} of {plan.shares}"
            " again, then --finish"
        )
    return shards, raws


def _interleaved(of_shares: list[list[_Examined]], total: int) -> list[_Examined]:
    """What share i says of the inputs i, i + N, ..., in the order of the inputs."""
    return [of_shares[index % len(of_shares)][index // len(of_shares)] for index in range(total)]


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers in the form of `sbatch --array`: 3,17-20."""
    first = [n for i, n in enumerate(numbers) if i == 0 or numbers[i - 1] != n - 1]
    last = [n for i, n in enumerate(numbers) if i == len(numbers) - 1 or numbers[i + 1] != n + 1]
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(first, last, strict=True))


@dataclass(frozen=True)
class _Range:
    """The documents whose hashes begin with numbers in [low, high)."""

    low: int
    high: int
    raws: list[tuple[Path, int]]
    """The files, without suffix, of all raw shards in order, and their number of documents."""
    n_bytes: int


def _mark_copies(call: Call, raws: list[RawShard]) -> None:
    """Write for each raw shard one byte for each document: whether it is a copy of an earlier one."""
    counts = [read_json(raw.report_path)["documents"] for raw in raws]
    files = [(raw.folder / raw.name, count) for raw, count in zip(raws, counts, strict=True) if count]
    for place, count in files:
        place.with_suffix(_COPIES).write_bytes(bytes(count))
    n_ranges = -(-sum(counts) // RANGE_DOCUMENTS)
    bounds = [(i << 64) // n_ranges for i in range(n_ranges + 1)]
    size = sum(counts) * _HASH_BYTES // n_ranges
    ranges = [_Range(low, high, files, size) for low, high in pairwise(bounds)]
    with closing(on_all(_mark_range, ranges, call.processes, call.progress, message="looking for duplicates")) as done:
        for _ in done:
            pass


def _mark_range(own: _Range) -> None:
    found = [_hashes_in(place, own) for place, _ in own.raws]
    source = np.repeat(np.arange(len(found)), [each.shape[1] for each in found])
    hashes = np.concatenate(found, axis=1)
    order = np.lexsort((hashes[2], source, hashes[1], hashes[0]))  # of equal documents, the first comes first
    is_copy = (hashes[:2, order[1:]] == hashes[:2, order[:-1]]).all(axis=0)
    copies = np.sort(order[1:][is_copy])
    for index in np.unique(source[copies]):
        place, count = own.raws[index]
        marks = np.memmap(place.with_suffix(_COPIES), dtype=np.uint8, mode="r+", shape=(count,))
        marks[hashes[2, copies[source[copies] == index]]] = 1
        marks.flush()
    read_bytes.add(own.n_bytes)


def _hashes_in(place: Path, own: _Range) -> np.ndarray:
    """The part of a raw shard's sorted hashes that is in the range: (3, documents), uint64."""
    hashes = np.memmap(place.with_suffix(_HASHES), dtype="<u8", mode="r").reshape(3, -1)
    begin, end = (int(np.searchsorted(hashes[0], np.uint64(bound))) for bound in (own.low, min(own.high, 2**64 - 1)))
    return np.array(hashes[:, begin : hashes.shape[1] if own.high == 2**64 else end])


@dataclass(frozen=True)
class _Assembly:
    """A token file that is put together from raw shards."""

    shard: Shard
    raws: list[RawShard]

    @property
    def n_bytes(self) -> int:
        """Bytes of text, for the progress display."""
        return self.shard.n_bytes


def _assemble(own: _Assembly) -> None:
    """Write a shard's token files from those of its parts, in a worker, and record it."""
    shard = own.shard
    reports = [read_json(raw.report_path) for raw in own.raws]
    bad = BadFiles(shard.max_bad_files, PATIENCE)
    for report in reports:
        part = BadFiles()
        part.messages, part.skipped = report["bad_files"], report["skipped"]
        bad.merge(part)
    duplicates = 0
    with Outputs(shard) as outputs:
        for raw in own.raws:
            for tokens, n_bytes, is_held_out, is_copy in _documents(raw):
                if is_copy:
                    duplicates += 1
                else:
                    outputs.add(VALIDATION if is_held_out else TRAIN, tokens, n_bytes)
            read_bytes.add(raw.n_bytes)
    empty = sum(report["empty_documents"] for report in reports)
    keep(shard, outputs.report(bad, empty, duplicates))


def _documents(raw: RawShard) -> Iterator[tuple[np.ndarray, int, bool, bool]]:
    """The documents of a raw shard, in order: tokens, bytes of text, whether for validation, whether a copy."""
    place = raw.folder / raw.name
    facts = place.with_suffix(_DOCUMENTS).read_bytes()
    n_documents = len(facts) // _DOCUMENT.size
    drops = raw.settings.drop_duplicates and n_documents
    copies = place.with_suffix(_COPIES).read_bytes() if drops else bytes(n_documents)
    file = TokenFile(place.with_suffix(SUFFIX))
    bounds = np.append(file.document_starts(0, file.n_tokens), file.n_tokens).tolist()
    for number, (n_bytes, is_held_out) in enumerate(_DOCUMENT.iter_unpack(facts)):
        tokens = file.read(bounds[number], bounds[number + 1] - bounds[number])
        yield tokens, n_bytes, is_held_out, bool(copies[number])
