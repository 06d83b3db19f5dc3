"""Preparation on many hosts: `keel prepare --shard I/N` does one of N shares of the work, and `--finish` the rest.

The result has the bytes that one process writes (see `prepare`, whose shards are one token file for each split). Shares
need nothing but a folder that all hosts see, `.OUTPUT.shards` beside OUTPUT, in any order and at any time:

    plan.jsonl               settings, N, and the inputs, divided into pieces: what the first share has found
    shares/00003.jsonl       share 3 is finished: the files that it has examined, and a hash of each piece's content
    output/, reports/        token files and their reports, where a share has all pieces of one
    raw/00007-00001.tokens   otherwise part 1 of the pieces of token file 7: all its documents, in order, not packed
    raw/00007-00001.json     and its report, .documents: their splits and sizes, .hashes: of their texts, sorted

With N up to the number of token files, share i has files i, i + N, i + 2N, ...; otherwise several shares divide the
pieces of a file among them. Duplicates are dropped at the end, since only then all texts are known: copies are
tokenized in vain. Their hashes are compared range by range, so that a range's documents fit in memory; of equal ones
the first in the order of the inputs stays.

A part is written in a folder of its launch, moved when it is complete, and counts once its report is there. What
decides is names, sizes and content, never a time or a process id: a share that is done again keeps the parts whose
pieces have the content that their reports tell. `finish` compares the content that was tokenized with the content that
was examined, and the plan with the inputs.
"""

import json
import os
import struct
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from configs.errors import UserError
from configs.files import exists, replacing, synced, write_json
from configs.untrusted import parse_json, read_file
from trainer.data.text.bad_files import PATIENCE, BadFiles
from trainer.data.text.documents import file_pieces
from trainer.data.text.inputs import HUB
from trainer.data.text.listing import MAX_LIST_BYTES, InputFile, examined, named
from trainer.data.text.plan import PLAN, Plan, RawShard, contents, make_plan, read_plan, require_as_planned
from trainer.data.text.prepare import Call, discard, errors_of
from trainer.data.text.prepared_folder import is_finished
from trainer.data.text.shard import (
    Shard,
    documents_of,
    encode,
    is_validation,
    keep,
    make_folders,
    read_bytes,
    write_shard,
)
from trainer.data.text.token_writer import TokenFileWriter
from trainer.data.text.workers import do_all, on_all
from trainer.data.token_file import SUFFIX

MAX_SHARES = 1 << 16
DOCUMENTS = ".documents"
HASHES = ".hashes"
DOCUMENT = struct.Struct("<Q?")
"""A document of a raw shard: bytes of text, and whether it is for validation."""
HASH_BYTES = 24
"""Bytes of a document in a file of hashes, which is three columns of uint64: hash, rest of the hash, number."""


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
        if not exists(call.working / PLAN):
            make_plan(call, shares)
        plan = read_plan(call)
        if plan.shares != shares:
            raise UserError(
                f"{call.work}: the work is divided into {plan.shares} shards, --shard I/{plan.shares}, not {shares}."
                f" {call.advice}"
            )
        found = _examine(call, plan, share)
        for left in call.working.glob(f"unfinished.{share:05d}.*"):  # of earlier launches of this share
            discard(left)
        own = replace(call, launch=f"{share:05d}.{call.launch}")
        done = _make_all(own, plan, share)
        _write_share(own, plan, share, found)
        return done


def _make_all(call: Call, plan: Plan, share: int) -> tuple[int, int]:
    """Write what is not there of a share; returns how many parts were written, and how many were there."""
    shards = plan.of_share(call, share)
    make_folders(call.working, plan.settings, call.launch)
    for place in ("raw", "shares", f"unfinished.{call.launch}/raw"):
        (call.working / place).mkdir(exist_ok=True)
    written = [shard for shard in shards if exists(shard.report_path)]
    there = {shard.name for shard, made in on_all(_is_made, written, call.processes, call.progress) if made}
    left = [shard for shard in shards if shard.name not in there]
    if left:
        share_path(call, share).unlink(missing_ok=True)
    done = sum(shard.n_bytes for shard in shards if shard.name in there)
    unfinished = call.working / f"unfinished.{call.launch}"
    try:
        do_all(_make, left, call.processes, call.progress, done)
    except FileNotFoundError:
        if exists(unfinished):
            raise
        raise UserError(
            f"another call of shard {share}/{plan.shares} has begun after this one, and does its work; wait for it"
        ) from None
    discard(unfinished)
    return len(left), len(there)


@dataclass(frozen=True)
class Examined:
    """What a share has found in one of the inputs that it has examined."""

    files: list[InputFile]
    contents: list[str]
    """A hash of each piece's content."""


def _examine(call: Call, plan: Plan, share: int) -> list[Examined]:
    """Read the share's inputs once, as `listing.examine`.

    Raises:
        UserError: more of them than allowed are unreadable, or they are not as planned.
    """
    listed = plan.listed[share :: plan.shares]
    files = [(each.input, Path(each.path)) for each in listed if not each.input.startswith(HUB)]
    planned = [each for each in plan.inputs_of_share(call, share) if not each.input.startswith(HUB)]
    require_as_planned(call, planned, [replace(each, pieces=file_pieces(Path(each.path))) for each in planned])
    looked_at = BadFiles(call.max_bad_files)
    total = sum(piece.n_bytes for each in listed for piece in each.pieces)

    def report(n_bytes: int) -> None:
        call.progress(n_bytes, total, "checking the inputs")

    found = iter(examined(files, call.settings.keys, looked_at, call.processes, report))
    entries: list[list[InputFile]] = [[] if each.input.startswith(HUB) else next(found) for each in listed]
    looked_at.check()
    return [
        Examined(own, list(contents(each.pieces, {entry.path: entry.hash for entry in own})))
        for each, own in zip(listed, entries, strict=True)
    ]


def share_path(call: Call, share: int) -> Path:
    """The file that records that a share is finished."""
    return call.working / "shares" / f"{share:05d}.jsonl"


def _write_share(call: Call, plan: Plan, share: int, found: Sequence[Examined]) -> None:
    """Record that a share is finished."""
    with replacing(share_path(call, share), call.launch) as file:
        file.write(json.dumps(plan.hash).encode() + b"\n")
        for each in found:
            file.write(json.dumps([[astuple(entry) for entry in each.files], each.contents]).encode() + b"\n")


def read_share(call: Call, plan: Plan, share: int) -> list[Examined] | None:
    """The record of a share; None if it is of another plan."""
    path = share_path(call, share)
    try:
        plan_hash, *rows = [parse_json(line) for line in read_file(path, MAX_LIST_BYTES).splitlines()]
        if plan_hash != plan.hash:
            return None
        return [Examined([InputFile(*file) for file in files], hashes) for files, hashes in rows]
    except (ValueError, TypeError):
        raise UserError(f"{path}: not in the form that this Keel writes; delete it, and run its shard again") from None


def _is_made(shard: Shard) -> bool:
    """Whether a shard was made of what its files now contain."""
    read_bytes.add(shard.n_bytes)
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
    shard.report_path.unlink(missing_ok=True)  # of other content, which is about to be replaced
    if isinstance(shard, RawShard):
        for suffix in (SUFFIX, DOCUMENTS, HASHES):
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
    path = place.with_suffix(SUFFIX)
    with TokenFileWriter(path, settings.vocab_size, settings.tokenizer_hash, settings.has_mask) as writer:
        for document in documents_of(shard, bad):
            is_held_out = is_validation(document.content, settings.validation_fraction)
            tokens = encode(shard, document, is_held_out) if document.text else []
            if not len(tokens):
                empty += 1
                continue
            writer.append(tokens)
            documents += DOCUMENT.pack(document.n_bytes, is_held_out)
            if settings.drop_duplicates:
                digests += xxhash.xxh3_128_digest(document.content)
    for suffix, data in ((DOCUMENTS, documents), (HASHES, _sorted_hashes(digests).tobytes())):
        with synced(place.with_suffix(suffix)) as file:
            file.write(data)
    return {
        "documents": len(documents) // DOCUMENT.size,
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
