"""Shares of a preparation (see `shares`) on hosts that share no disk: their work is in object storage.

Each host works in a folder of its own, with the names that a folder of all hosts has. Beside OUTPUT in the bucket,
`.OUTPUT.shards/` has:

    plan.jsonl               what all shares agree on: of hosts that list the inputs at once, one can create it
    parts/HASH/...           the token files of a part, and what a raw one has beside them; HASH: of its inputs' content
    reports/, raw/*.json     the reports of parts, which name the hash
    shares/00003.jsonl       share 3 is finished

A share puts the files of a part before its report, and its record at the end. What a share that was taken for dead puts
late is equal, or has another hash. The files on its host are removed when they have been put.
"""

import os
import shutil
from collections.abc import Sequence, Set
from contextlib import suppress
from pathlib import Path

from checkpoint.bucket import Bucket
from checkpoint.bucket_files import (
    alone_with,
    bring,
    bring_file,
    bucket_for,
    copy_of,
    has_all,
    is_here,
    put_file,
    remove_others,
)
from configs.files import exists, replacing
from trainer.data.text.documents import is_divided_by_content
from trainer.data.text.plan import PLAN, Plan, RawShard, plan_content, read_plan
from trainer.data.text.prepare import Call, Remote, discard, errors_of
from trainer.data.text.prepared_folder import RECORD, is_finished, read_json
from trainer.data.text.shard import Shard
from trainer.data.text.shares import DOCUMENTS, HASHES, make_share, share_path
from trainer.data.token_file import SUFFIX

_PARTS = "parts"
_PARQUET_END = 8
"""Bytes at the end of a .parquet file: how many before them describe it, and "PAR1"."""


def make_share_remotely(call: Call, share: int, shares: int) -> tuple[int, int] | None:
    """Do one of several shares on a host of its own; returns what `make_share` does.

    Raises:
        UserError: as `make_share`; or object storage refuses.
    """
    remote = _remote(call)
    with errors_of(call.output):
        if has_all(remote.output, RECORD):
            bring_file(f"{remote.output}/{RECORD}")
            is_finished(call.output, call.settings)
            shutil.rmtree(call.output, ignore_errors=True)
            return None
        plan = agreed_plan(call, shares)
        bring_inputs(call, {Path(each.path).absolute() for each in plan.inputs_of_share(call, share)})
        parts = plan.of_share(call, share)
        before = _bring_reports(call, parts)
        done = make_share(call, share, shares)
        if done is None:  # this host has finished OUTPUT, and has not put all of it
            return None
        _put_parts(call, parts, before)
        bucket = Bucket(remote.work)
        bucket.put(_key(call, share_path(call, share)), share_path(call, share).read_bytes())
        for path in (path for part in parts for path in (*_files(part), part.report_path)):
            path.unlink(missing_ok=True)
        return done


def agreed_plan(call: Call, shares: int) -> Plan:
    """The plan that is in the bucket, or that this host has put there."""
    bucket = Bucket(_remote(call).work)
    try:
        content = bucket.get(PLAN)
    except FileNotFoundError:
        bring_outlines(call)
        with suppress(FileExistsError):  # another host was faster
            bucket.create(PLAN, plan_content(call, shares))
        content = bucket.get(PLAN)
    _follow(call, content)
    return read_plan(call)


def _follow(call: Call, plan: bytes) -> None:
    """Keep a plan on this host, and nothing of another."""
    path = call.working / PLAN
    with alone_with(call.working):
        if not exists(path) or path.read_bytes() != plan:
            discard(call.working)
            call.working.mkdir(parents=True)
            with replacing(path) as file:
                file.write(plan)


def bring_inputs(call: Call, only: Set[Path] | None = None) -> None:
    """Bring the inputs that are in object storage to this host: all, or some of their files and saved datasets."""
    for url in _remote(call).inputs:
        bring(url, call.progress, only)


def bring_outlines(call: Call) -> None:
    """Bring as much of the inputs as a list of their pieces needs.

    Other copies have the size of their objects, and no content until `bring_inputs` is asked for it.
    """
    for url in _remote(call).inputs:
        target = copy_of(url)
        bucket = Bucket(url)
        objects = bucket.objects()
        bring(url, call.progress, {target / key for key in objects if is_divided_by_content(key)})
        with alone_with(target):
            for key, stored in objects.items():
                if not is_divided_by_content(key) and not is_here(target / key, stored):
                    _outline(bucket, key, stored.size, target / key)
            remove_others(target, objects)


def _outline(bucket: Bucket, key: str, size: int, target: Path) -> None:
    """Make a file of an object's size; a .parquet file gets its end, where it describes its row groups."""
    end = b""
    if key.lower().endswith(".parquet") and size >= _PARQUET_END:
        end, _ = bucket.get_range(key, size - _PARQUET_END, size)
        n_bytes = int.from_bytes(end[:4], "little") + _PARQUET_END
        if end[4:] == b"PAR1" and n_bytes <= size:
            end, _ = bucket.get_range(key, size - n_bytes, size)
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target) as file:
        file.truncate(size - len(end))
        file.seek(size - len(end))
        file.write(end)


def bring_records(call: Call) -> None:
    """Bring the plan, and the records and reports of all shares; records that are here alone are removed."""
    remote = _remote(call)
    bucket = Bucket(remote.work)
    try:
        _follow(call, bucket.get(PLAN))
    except FileNotFoundError:
        discard(call.working)
        return
    there = bucket.list("shares/")
    for path in (call.working / "shares").glob("*.jsonl"):
        if _key(call, path) not in there:
            path.unlink()
    bring(remote.work, call.progress, {call.working / place for place in ("shares", "reports", "raw")})


def bring_parts(call: Call, plan: Plan) -> None:
    """Bring the files of all parts, whose reports are here, to where `finish` looks for them."""
    parts = [part for portion in range(len(plan.portions)) for part in plan.shards(call, portion)]
    places = {path: call.working / _place(part, path) for part in parts for path in _files(part)}
    bring(_remote(call).work, call.progress, set(places.values()))
    for path, place in places.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        os.replace(place, path)


def remove_work(remote: Remote) -> None:
    """Remove what the shares have left in the bucket."""
    bucket = Bucket(remote.work)
    bucket.delete(bucket.list())


def _bring_reports(call: Call, parts: Sequence[Shard]) -> dict[str, bytes]:
    """Bring the reports of the parts that are in the bucket, unless a part is here; returns their content by name."""
    bucket = Bucket(_remote(call).work)
    found = {}
    for part in parts:
        with suppress(FileNotFoundError):
            found[part.name] = bucket.get(_key(call, part.report_path))
        if exists(part.report_path) and all(exists(path) for path in _files(part)):
            continue
        part.report_path.unlink(missing_ok=True)  # its files were put, and removed here
        if part.name in found:
            part.report_path.parent.mkdir(exist_ok=True)
            with replacing(part.report_path, call.launch) as file:
                file.write(found[part.name])
    return found


def _put_parts(call: Call, parts: Sequence[Shard], before: dict[str, bytes]) -> None:
    """Put the parts whose reports differ from those that were in the bucket."""
    own = [part for part in parts if part.report_path.read_bytes() != before.get(part.name)]
    bucket = bucket_for([path for part in own for path in _files(part)], _remote(call).work)
    for number, part in enumerate(own):
        call.progress(0, None, f"putting part {number + 1} of {len(own)}")
        for path in _files(part):
            put_file(bucket, _place(part, path), path)
        bucket.put(_key(call, part.report_path), part.report_path.read_bytes())


def _remote(call: Call) -> Remote:
    assert call.remote is not None
    return call.remote


def _key(call: Call, path: Path) -> str:
    return path.relative_to(call.working).as_posix()


def _place(part: Shard, path: Path) -> str:
    """The key of one of a part's files, of the content that its report tells."""
    return f"{_PARTS}/{read_json(part.report_path)['inputs_hash']}/{path.relative_to(part.working).as_posix()}"


def _files(part: Shard) -> list[Path]:
    """The files of a part, without its report."""
    if isinstance(part, RawShard):
        return [part.folder / (part.name + suffix) for suffix in (SUFFIX, DOCUMENTS, HASHES)]
    return [part.working / "output" / split / (part.name + SUFFIX) for split in part.settings.splits]
