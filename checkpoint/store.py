"""The tensors of one checkpoint, put into a storage and read from it by torch.distributed.checkpoint (DCP).

A state is a flat dict from names to tensors or DTensors. Every rank first turns its own into `Shard`s: a plain local
tensor and its position in the whole. One description thus serves a replicated scalar, an FSDP x TP parameter and a copy
of either in CPU memory, and DCP, which sees only shards, converts from any saved sharding to any requested one. A shard
that several ranks hold is written once; DCP assigns it to the rank that has the least to write.

Data are hashed as they are written, which costs a thirtieth of the writing. In return, torch's own checksum is disabled
(the zip format's CRC-32, which torch.load never checks): it costs a third of the writing.
"""

import math
import os
import shutil
import socket
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, FileSystem
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future
from torch.serialization import get_crc32_options, set_crc32_options

from checkpoint.index import put_index
from checkpoint.manifest import FileEntry, damaged
from checkpoint.storage import Storage
from checkpoint.tensor_stream import require_stored
from configs.errors import UserError, listed
from parallelisms.ranks import Json, gather, on_rank_zero

State = Mapping[str, Tensor]
Result = TypeVar("Result")


class SaveFailed(UserError):
    """The checkpoint could not be written; earlier checkpoints are unchanged."""


class NotFinite(UserError):
    """The state has non-finite values, so no run can resume from it."""


@dataclass(frozen=True)
class Shard:
    """This rank's part of a tensor. DCP finds the methods by their names (protocol `_Checkpointable`)."""

    local: Tensor
    shape: torch.Size
    """Shape of the whole tensor."""
    offsets: torch.Size
    """Where `local` begins in the whole tensor, one number per dimension."""

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """The box for DCP to fill or write; empty if this rank's part is empty."""
        if self.local.numel() == 0:
            return []
        return [ChunkStorageMetadata(offsets=self.offsets, sizes=self.local.shape)]

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.local.dtype)
        return [
            WriteItem(
                index=MetadataIndex(name, self.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]


def shards_of(state: State) -> dict[str, Shard]:
    """This rank's parts of the tensors in `state`. They share its memory: loading into them loads `state`."""
    shards = {}
    for name, tensor in state.items():
        if not isinstance(tensor, DTensor):
            shards[name] = Shard(tensor.detach(), tensor.shape, torch.Size([0] * tensor.dim()))
        elif tensor.device_mesh.get_coordinate() is not None:
            [chunk] = tensor.__create_chunk_list__()
            shards[name] = Shard(tensor.to_local().detach(), tensor.shape, chunk.offsets)
    return shards


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
    storage: Storage, folder: Path, shards: Mapping[str, Shard], group: dist.ProcessGroup
) -> dict[str, FileEntry]:
    """Put every rank's shards, and their index, into the unfinished checkpoint `folder`; all ranks must call it.

    Returns:
        All files put, by any rank, with their sizes and hashes.

    Raises:
        SaveFailed: a rank could not write. All ranks raise it.
    """
    writer = _Writer(storage, folder)
    planner = _SavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        dcp.save(dict(shards), storage_writer=writer, planner=planner, process_group=group)
    # CheckpointException derives from BaseException, and has the errors of each rank.
    except CheckpointException as failure:
        if not all(isinstance(error, OSError) for error, _ in failure.failures.values()):
            raise RuntimeError(f"writing {folder} failed: {failure}") from failure
        reasons = "; ".join(f"rank {rank}: {error}" for rank, (error, _) in sorted(failure.failures.items()))
        # Only the first rank knows the plans of all.
        raise SaveFailed(on_rank_zero(group, lambda: str(save_failed(folder, reasons, planner.n_bytes)))) from None
    mine: dict[str, Json] = {name: [entry.size, entry.xxh3] for name, entry in writer.fs.files.items()}
    return {name: FileEntry(*entry) for files in gather(mine, group) for name, entry in files.items()}


def save_failed(folder: Path, reason: object, n_bytes: int | None = None) -> SaveFailed:
    """Create the error for a checkpoint of `n_bytes` that could not be written to `folder`."""
    if not folder.parent.is_dir():
        return SaveFailed(f"checkpoint {folder.stem} could not be written: the folder {folder.parent} is gone")
    try:
        free = f"{shutil.disk_usage(folder.parent).free:,} bytes are free there"
    except OSError:
        free = "free space there is unknown"
    needed = "" if n_bytes is None else f"the checkpoint takes {n_bytes:,} bytes, and "
    return SaveFailed(f"checkpoint {folder.stem} could not be written: {reason}; {needed}{free} (see job.output_dir)")


def read(
    storage: Storage, folder: Path, metadata: Metadata, shards: Mapping[str, Shard], group: dist.ProcessGroup
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
    """
    try:
        dcp.load(
            dict(shards),
            storage_reader=_Reader(storage, folder, metadata),
            planner=_LoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            process_group=group,
        )
    except CheckpointException as failure:
        reasons = [f"rank {rank}: {_first_line(error)}" for rank, (error, _) in sorted(failure.failures.items())]
        raise damaged(folder, "; ".join(reasons)) from failure


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
    # A rank need not hold every tensor (pipeline stages): only a tensor that no rank holds is superfluous.
    reports = gather([[line for line in mine if line], [*(saved.keys() - shards.keys())]], group)
    lines = set().union(*(lines for lines, _ in reports))
    superfluous = set.intersection(*(set(names) for _, names in reports))
    return sorted(lines | {f"{name}: only in the checkpoint" for name in superfluous})


def _difference(name: str, shard: Shard, saved: Any, may_convert: Callable[[str, torch.dtype], bool]) -> str | None:
    here = (tuple(shard.shape), shard.local.dtype)
    if saved is None:
        return f"{name}: not in the checkpoint"
    there = (tuple(saved.size), saved.properties.dtype)
    if there[0] == here[0] and may_convert(name, there[1]):
        return None
    return None if here == there else f"{name}: {_described(*there)} in the checkpoint, {_described(*here)} here"


def _described(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def _n_bytes(item: WriteItem) -> int:
    assert item.tensor_data is not None  # all items are tensors
    return prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


class _SavePlanner(dcp.DefaultSavePlanner):
    n_bytes: int | None = None
    """What all ranks together will write; set on the first rank, once all have planned."""
    _copy: Tensor | None = None
    """The copy that is being written."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        self.n_bytes = sum(_n_bytes(item) for plan in plans for item in plan.items)
        return plans, metadata

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].local

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """The shard in CPU memory, copied there unless it is a whole storage there already.

        DCP would copy it as well, but keeps all that it has written until a file is complete: in a save that is not
        staged, the rank's whole state (`tensor_dict` in torch 2.11 and 2.13). So the last copy is emptied here.
        """
        if self._copy is not None:
            self._copy.untyped_storage().resize_(0)
            self._copy = None
        tensor = self.lookup_object(write_item.index)
        if tensor.is_cpu and tensor.untyped_storage().nbytes() == tensor.nbytes:
            return tensor
        self._copy = tensor.to("cpu", copy=True)
        return self._copy


class _LoadPlanner(dcp.DefaultLoadPlanner):
    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """Use the shards as they are; DCP's default would look for nested dicts and meta tensors in them."""
        self.state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].local


class _Writer(dcp.FileSystemWriter):
    def __init__(self, storage: Storage, folder: Path) -> None:
        # Nothing is copied ahead: the planner holds one copy at a time. The storage syncs.
        super().__init__(folder, per_thread_copy_ahead=0, sync_files=False)
        self.fs: _Files = _Files(storage)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        computes_crc32 = get_crc32_options()
        set_crc32_options(False)
        try:
            return super().write_data(plan, planner)
        finally:
            set_crc32_options(computes_crc32)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Put the index, without the folder's path and a random id: equal states make equal files, wherever they are.

        DCP would sync its own before Python's buffer is flushed.
        """
        metadata.storage_data = {each.index: each.storage_data for written in results for each in written}
        metadata.storage_meta = StorageMeta()
        metadata.version = CURRENT_DCP_VERSION
        put_index(lambda name: self.fs.create_stream(Path(self.path) / name, "wb"), metadata)


class _Reader(dcp.FileSystemReader):
    def __init__(self, storage: Storage, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self.fs = _Files(storage)
        self._metadata = metadata

    def _slice_file(self, file: Any, place: Any) -> Any:
        """The part of a file with one tensor, after checking that nothing in it is compressed."""
        part = super()._slice_file(file, place)
        require_stored(part)
        return part

    # Without `kwargs` in the signature, DCP does not look for other files if this one fails.
    def read_metadata(self) -> Metadata:  # type: ignore[override]
        return self._metadata


class _Files(FileSystem):
    """A storage's files as DCP asks for them, with errors that show their cause.

    Torch's writer reports a full disk as "unexpected pos 704 vs 598".
    """

    def __init__(self, storage: Storage) -> None:
        super().__init__()
        self._storage = storage
        self.files: dict[str, FileEntry] = {}
        """The files put."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Generator[Any, None, None]:
        if "r" in mode:
            with self._storage.open(Path(path)) as stream:
                yield stream
            return
        file = None
        try:
            with self._storage.put(Path(path)) as file:
                yield file
        except Exception as error:
            cause = file.error if file and file.error else error
            raise OSError(cause.errno, cause.strerror, str(path)) if isinstance(cause, OSError) else error from None
        self.files[Path(path).name] = file.entry()

    def mkdir(self, path: str | os.PathLike) -> None:
        """Do nothing: `Storage.begin` has prepared the place."""
