"""The end of a preparation on many hosts (see `shares`): what its shares have made becomes one folder."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from configs.errors import UserError
from configs.files import exists
from trainer.data.text.bad_files import PATIENCE, BadFiles
from trainer.data.text.inputs import HUB
from trainer.data.text.listing import named
from trainer.data.text.plan import PLAN, Plan, RawShard, list_inputs, read_plan, require_as_planned
from trainer.data.text.prepare import Call, discard, errors_of, lock, seal
from trainer.data.text.prepared_folder import TRAIN, VALIDATION, is_finished, read_json, read_record
from trainer.data.text.shard import Outputs, Shard, keep, make_folders, read_bytes
from trainer.data.text.shares import DOCUMENT, DOCUMENTS, HASH_BYTES, HASHES, Examined, read_share, share_path
from trainer.data.text.shares_in_bucket import bring_outlines, bring_parts, bring_records
from trainer.data.text.workers import do_all
from trainer.data.token_file import SUFFIX, TokenFile

RANGE_DOCUMENTS = 1 << 20
"""Documents whose hashes are compared at a time, in one process: about 100 MB."""

_COPIES = ".copies"


def finish(call: Call) -> dict[str, Any]:
    """Put the shares together; returns the record as `prepare` does.

    Raises:
        UserError: shares are missing, or were made of other content, or the inputs are no longer as planned; or as
            `prepare`.
    """
    with errors_of(call.output):
        if is_finished(call.output, call.settings):
            return read_record(call.output)
        if call.remote:
            bring_records(call)
        if not exists(call.working / PLAN):
            raise UserError(f"{call.work}: no shards are there; make them with --shard 0/N to --shard N-1/N first")
        with lock(call.working, call.progress):
            if not is_finished(call.output, call.settings):
                _put_together(call, read_plan(call))
                os.rename(call.working / "output", call.output)
            discard(call.working)
        record = read_record(call.output)
    BadFiles(call.max_bad_files).extend(record["bad_files"])
    return record


def _put_together(call: Call, plan: Plan) -> None:
    """Do what no share can do alone, up to the final record."""
    found = _interleaved(_records(call, plan), len(plan.listed))
    if call.remote:
        bring_outlines(call)
    bad = BadFiles(call.max_bad_files)
    call.progress(0, None, f"listing the files of {', '.join(plan.settings.inputs)}")
    hub = [each for each in plan.listed if each.input.startswith(HUB)]
    local = replace(plan.settings, inputs=[name for name in plan.settings.inputs if not name.startswith(HUB)])
    require_as_planned(call, plan.listed, list_inputs(local, bad) + hub)
    shards, raws = _checked(call, plan, [hash for each in found for hash in each.contents])
    if call.remote:
        bring_parts(call, plan)
    for shard in [*raws, *(shard for shard in shards if plan.is_whole(shard.index))]:
        bad.extend(read_json(shard.report_path)["bad_files"])
    make_folders(call.working, plan.settings, call.launch)
    if plan.settings.drop_duplicates:
        _mark_copies(call, raws)
    left = [
        _Assembly(shard, [raw for raw in raws if raw.index == shard.index]) for shard in shards if not shard.report()
    ]
    do_all(_assemble, left, call.processes, call.progress, message="putting token files together")
    reports = [read_json(shard.report_path) for shard in shards]
    pinned = {each.input: each.path for each in hub}
    read_from = [pinned.get(name, name) for name in plan.settings.inputs]
    seal(call.working, plan.settings, reports, [file for each in found for file in each.files], read_from, bad)


def _records(call: Call, plan: Plan) -> list[list[Examined]]:
    """What each share has examined.

    Raises:
        UserError: some are missing.
    """
    there = {path.name for path in (call.working / "shares").glob("*.jsonl")}
    records = {}
    for share in range(plan.shares):
        if share_path(call, share).name in there and (record := read_share(call, plan, share)) is not None:
            records[share] = record
    if missing := [share for share in range(plan.shares) if share not in records]:
        raise UserError(
            f"{call.work}: {len(missing)} of {plan.shares} shards are not finished: {_ranges(missing)}. Run each of "
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
            f"{named(sorted(changed))}: changed while the shards were made. Run shards {_ranges(again)} of "
            f"{plan.shares} again, then --finish"
        )
    return shards, raws


def _interleaved(of_shares: list[list[Examined]], total: int) -> list[Examined]:
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
    if not files:
        return
    n_ranges = -(-sum(counts) // RANGE_DOCUMENTS)
    bounds = [(i << 64) // n_ranges for i in range(n_ranges + 1)]
    size = sum(counts) * HASH_BYTES // n_ranges
    ranges = [_Range(low, high, files, size) for low, high in pairwise(bounds)]
    do_all(_mark_range, ranges, call.processes, call.progress, message="looking for duplicates")


def _mark_range(own: _Range) -> None:
    """Mark the copies of a range, in a worker."""
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
    hashes = np.memmap(place.with_suffix(HASHES), dtype="<u8", mode="r").reshape(3, -1)
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
        bad.merge(report["bad_files"], report["skipped"])
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
    facts = place.with_suffix(DOCUMENTS).read_bytes()
    n_documents = len(facts) // DOCUMENT.size
    drops = raw.settings.drop_duplicates and n_documents
    copies = place.with_suffix(_COPIES).read_bytes() if drops else bytes(n_documents)
    file = TokenFile(place.with_suffix(SUFFIX))
    bounds = np.append(file.document_starts(0, file.n_tokens), file.n_tokens).tolist()
    for number, (n_bytes, is_held_out) in enumerate(DOCUMENT.iter_unpack(facts)):
        tokens = file.read(bounds[number], bounds[number + 1] - bounds[number])
        yield tokens, n_bytes, is_held_out, bool(copies[number])
