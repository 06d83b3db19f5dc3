"""The tensors of one checkpoint, put into a storage and read from it by torch.distributed.checkpoint (DCP).

A state is a flat dict from names to tensors or DTensors. Every rank first turns its own into shards (`shards.py`): a
plain local tensor and its position in the whole. One description thus serves a replicated scalar, an FSDP x TP
parameter and a copy of either in CPU memory, and DCP, which sees only shards, converts from any saved sharding to any
requested one. What several ranks hold is written once; which of them writes it, each derives by itself (`plan.py`).

Of DCP this writes the format and uses the reader, step by step, on each rank alone. `dcp.save` and `dcp.load` would
gather the plans of all ranks on the first, as pickles, and send them back.

Data are hashed as they are written, which costs a thirtieth of the writing.
"""

import math
import os
import socket
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import STORAGE_TYPES, ChunkStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem

from checkpoint.bucket import BucketError
from checkpoint.compare import described
from checkpoint.frame import TensorFile
from checkpoint.index import MOST_PARTS, complete_metadata, index_of, index_text, places_text, put_index
from checkpoint.manifest import Damaged, FileEntry, damaged
from checkpoint.plan import Plans, file_of
from checkpoint.shards import Shard
from checkpoint.storage import FolderStorage, HashedFile
from checkpoint.tensor_stream import entry_of, require_stored
from configs.errors import OutageError, UserError, listed
from configs.files import is_folder
from parallelisms.ranks import Json, error_as_json, error_of, gather, on_rank_zero


class SaveFailed(UserError):
    """The checkpoint could not be written; earlier checkpoints are unchanged."""


class NotFinite(UserError):
    """The state has non-finite values, so no run can resume from it."""


def require_finite(shards: Mapping[str, Shard], name: str, newest: Path | None, group: dist.ProcessGroup) -> None:
    """Check on all ranks that all values on all ranks are finite: a run must be able to resume from them.

    Only the minimum and maximum are tested: a non-finite value becomes one of them. Unlike torch.isfinite, this makes
    no copy (28 GB/s in float32 and 18 in bfloat16 against 1.0 and 0.24, on one core).

    Args:
        shards: this rank's.
        name: the checkpoint's, for the message.
        newest: the checkpoint before it.
        group: all of its ranks must call this.

    Raises:
        NotFinite: a value is not. All ranks raise it.
    """
    if found := places([shard for shard in shards if not _is_finite(shards[shard].local)], group):
        go_on = f"the newest checkpoint is {newest}: the same command resumes from it"
        raise NotFinite(
            f"checkpoint {name} is not written: not all values are finite in {listed(found, ', ')}; "
            f"{go_on if newest else 'there is no checkpoint before it'}. If it recurs, lower optimizer.lr or "
            "training.max_norm; if it recurs on one host only, test that host's memory"
        )


def places(names: Sequence[str], group: dist.ProcessGroup) -> list[str]:
    """ "NAME of rank R on HOST" for the names of all ranks of `group`; the same on all, which must call it."""
    by_rank = gather((socket.gethostname(), names), group)
    return [f"{name} of rank {rank} on {host}" for rank, (host, names) in enumerate(by_rank) for name in names]


def _is_finite(tensor: Tensor) -> bool:
    if tensor.numel() == 0 or not tensor.is_floating_point():
        return True
    return all(math.isfinite(extreme) for extreme in torch.stack(torch.aminmax(tensor)).tolist())


def write(
    storage: FolderStorage, folder: Path, shards: Mapping[str, Shard], group: dist.ProcessGroup, plans: Plans
) -> dict[str, FileEntry]:
    """Put every rank's shards, and their index, into the unfinished checkpoint `folder`; all ranks must call it.

    Args:
        storage: where the checkpoint is.
        folder: the unfinished checkpoint.
        shards: this rank's.
        group: all ranks.
        plans: keeps the plan for the next save.

    Returns:
        All files put, by any rank, with their sizes and hashes.

    Raises:
        SaveFailed: a rank could not write. All ranks raise it.
    """
    plan = plans.plan(shards, group)
    rank = dist.get_rank(group)
    n_parts = plan.directory.n_parts
    is_whole = dist.get_world_size(group) == 1 and n_parts <= MOST_PARTS
    files = _Files(storage)
    places: dict[str, tuple[int, int]] = {}
    failure: Exception | None = None
    try:
        with files.put(folder / file_of(rank)) as file:
            tensors = TensorFile(file)
            # First byte and number of bytes of each tensor's part in this rank's file.
            places = {item.index.fqn: tensors.write(shards[item.index.fqn].local) for item in plan.items}
        if not is_whole:
            with files.put(folder / index_of(file_of(rank))) as file:
                file.write(places_text(places))
    except Exception as error:
        failure = error
    told: Json = [
        None if failure is None else error_as_json(failure),
        sum(_n_bytes(item) for item in plan.items),
        {name: [entry.size, entry.xxh3] for name, entry in files.files.items()},
        places if n_parts <= MOST_PARTS else None,
    ]
    # What each rank has put, or why it could not.
    by_rank = gather(told, group)
    n_bytes = sum(of_rank for _, of_rank, *_ in by_rank)
    failures = {rank: error_of(error) for rank, (error, *_) in enumerate(by_rank) if error is not None}
    reasons = "; ".join(f"rank {rank}: {error}" for rank, error in failures.items())
    if not all(isinstance(error, OSError) for error in failures.values()):
        raise RuntimeError(f"writing {folder} failed: {reasons}") from failure
    if failures:  # the free space is measured once, so that all ranks say the same
        raise SaveFailed(on_rank_zero(group, lambda: str(save_failed(storage, folder, reasons, n_bytes)))) from None

    def put() -> Json:
        metadata = complete_metadata(plan.directory, [each for *_, each in by_rank]) if n_parts <= MOST_PARTS else None
        index = index_text(metadata) if is_whole and metadata else plan.directory.text()
        try:
            entries = put_index(lambda name: files.put(folder / name), index, metadata)
        except OSError as error:
            raise save_failed(storage, folder, f"rank 0: {error}") from None
        return {name: [entry.size, entry.xxh3] for name, entry in entries.items()}

    # The first rank puts the index of all, and measures the free space if it can't.
    of_index = on_rank_zero(group, put)
    all_entries = [*(entries for _, _, entries, _ in by_rank), of_index]
    return {name: FileEntry(*entry) for entries in all_entries for name, entry in entries.items()}


def save_failed(storage: FolderStorage, folder: Path, reason: object, n_bytes: int | None = None) -> SaveFailed:
    """Create the error for a checkpoint of `n_bytes` that could not be written to `folder`."""
    if not is_folder(folder.parent):
        return SaveFailed(f"checkpoint {folder.stem} could not be written: the folder {folder.parent} is gone")
    free = storage.room(folder.parent)
    needed = "" if n_bytes is None else f"the checkpoint takes {n_bytes:,} bytes"
    room = "" if free is None else f"{free:,} bytes are free there"
    facts = f"; {', and '.join(filter(None, [needed, room]))}" if needed or room else ""
    return SaveFailed(f"checkpoint {folder.stem} could not be written: {reason}{facts} (see job.output_dir)")


def read(
    storage: FolderStorage, folder: Path, metadata: Metadata, shards: Mapping[str, Shard], group: dist.ProcessGroup
) -> None:
    """Fill `shards` in place from the checkpoint in `folder`, whatever sharding it was written with.

    A tensor that was saved in another dtype is converted.

    Args:
        storage: where it is.
        folder: the checkpoint.
        metadata: its index (`index.read_metadata`), which must have passed `differences`.
        shards: this rank's shards.
        group: all of its ranks must call this.

    Raises:
        Damaged: a rank can't read a file. All ranks raise it.
        OutageError: a rank can't reach the storage, which says nothing of the checkpoint. All ranks raise it.
    """
    failure: Exception | None = None
    try:
        _read_shards(storage, folder, needed(metadata, shards), shards)
    except Exception as error:
        failure = error
    # Why ranks could not read.
    told = gather([_first_line(failure), isinstance(failure, BucketError)] if failure else None, group)
    failures = [(f"rank {rank}: {each[0]}", each[1]) for rank, each in enumerate(told) if each is not None]
    if outages := [reason for reason, is_outage in failures if is_outage]:
        raise OutageError(f"checkpoint {folder} can't be read now: {'; '.join(outages)}") from failure
    if failures:
        raise damaged(folder, "; ".join(reason for reason, _ in failures)) from failure


def _read_shards(storage: FolderStorage, folder: Path, metadata: Metadata, shards: Mapping[str, Shard]) -> None:
    reader = _Reader(storage, folder)
    planner = _LoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(shards), metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    own = reader.prepare_local_plan(planner.create_local_plan())
    [own] = planner.create_global_plan([own])
    [own] = reader.prepare_global_plan([own])
    reader.read_data(planner.finish_plan(own), planner).wait()


def needed(metadata: Metadata, shards: Mapping[str, Shard]) -> Metadata:
    """The index without the parts that none of `shards` needs.

    DCP looks at every part of every tensor. Here the tensors of a group, which share a list of parts, are looked at
    once for each box.
    """
    known: dict[Any, list[ChunkStorageMetadata]] = {}
    entries: dict[str, STORAGE_TYPES] = {}
    for name, shard in shards.items():
        entry = entry_of(metadata, name)
        key = (id(entry.chunks), shard.offsets, shard.local.shape)
        if key not in known:
            known[key] = [chunk for chunk in entry.chunks if _overlap(chunk, shard)]
        entries[name] = replace(entry, chunks=known[key])
    return replace(metadata, state_dict_metadata=entries)


def _overlap(chunk: ChunkStorageMetadata, shard: Shard) -> bool:
    sides = zip(chunk.offsets, chunk.sizes, shard.offsets, shard.local.shape, strict=True)
    return all(a < b + of_b and b < a + of_a for a, of_a, b, of_b in sides)


def differences(
    metadata: Metadata,
    shards: Mapping[str, Shard],
    group: dist.ProcessGroup,
    may_convert: Callable[[str, torch.dtype], bool] = lambda name, saved: False,
) -> list[str]:
    """How the tensors of a checkpoint differ from those that all ranks together hold; one line per tensor, sorted.

    The result is the same on all ranks, and empty if names, shapes and dtypes agree. `may_convert` says, by name and
    saved dtype, which tensors may have another dtype here.
    """
    saved = metadata.state_dict_metadata
    mine = [_difference(name, shard, saved.get(name), may_convert) for name, shard in shards.items()]
    # What each rank has to say.
    lines = set(chain.from_iterable(gather([line for line in mine if line], group)))
    names = sorted(saved)
    held = torch.tensor([name in shards for name in names], dtype=torch.uint8)
    # A rank need not hold every tensor (pipeline stages): only a tensor that no rank holds is superfluous.
    dist.all_reduce(held, op=dist.ReduceOp.MAX, group=group)
    superfluous = [name for name, is_held in zip(names, held.tolist(), strict=True) if not is_held]
    return sorted(lines | {f"{name}: only in the checkpoint" for name in superfluous})


def _difference(name: str, shard: Shard, saved: Any, may_convert: Callable[[str, torch.dtype], bool]) -> str | None:
    here = (tuple(shard.shape), shard.local.dtype)
    if saved is None:
        return f"{name}: not in the checkpoint"
    there = (tuple(saved.size), saved.properties.dtype)
    if there[0] == here[0] and may_convert(name, there[1]):
        return None
    return None if here == there else f"{name}: {described(*there)} in the checkpoint, {described(*here)} here"


def _n_bytes(item: WriteItem) -> int:
    assert item.tensor_data is not None  # all items are tensors
    return prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


def _first_line(error: Exception) -> str:
    if isinstance(error, Damaged) and error.reason:
        return error.reason
    return (str(error) or type(error).__name__).splitlines()[0]


class _LoadPlanner(dcp.DefaultLoadPlanner):
    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """Use the shards as they are; DCP's default would look for nested dicts and meta tensors in them."""
        self.state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].local


class _Reader(dcp.FileSystemReader):
    def __init__(self, storage: FolderStorage, folder: Path) -> None:
        super().__init__(folder)
        self.fs = _Files(storage)

    def _slice_file(self, file: Any, place: Any) -> Any:
        """The part of a file with one tensor, after checking that nothing in it is compressed."""
        part = super()._slice_file(file, place)
        require_stored(part)
        return part


class _Files(FileSystem):
    """A storage's files: as DCP reads them, and put with errors that name the file."""

    def __init__(self, storage: FolderStorage) -> None:
        super().__init__()
        self.storage = storage
        self.files: dict[str, FileEntry] = {}
        """The files put."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Generator[Any, None, None]:
        with self.storage.open(Path(path)) as stream:
            yield stream

    @contextmanager
    def put(self, path: Path) -> Generator[HashedFile, None, None]:
        """Open a new file for writing."""
        try:
            with self.storage.put(path) as file:
                yield file
        except OSError as error:
            error.filename = str(error.filename or path)
            raise
        self.files[path.name] = file.entry()
