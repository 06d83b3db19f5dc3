"""Exports the optimizer state of a checkpoint for plain torch, to continue without Keel or to inspect it.

Each torch optimizer gets a file (`adamw.pt`; with Muon, also `muon.pt`) that its `load_state_dict` accepts, in which
every parameter has its number, its group and its entries. Whatever mesh saved them, the tensors are gathered, written
and freed one by one, on the CPU. So an export needs memory for the largest one, which is known before it begins.

The experts of a mixture may not fit on one machine. They, or the parameters that a pattern names, can stay sharded:
each owner (the rank that wrote a part) gets a file, and nothing is gathered. In the optimizer's file, such a parameter
has an entry of its whole shape and type on the meta device, where a tensor has no values. Number and shapes are
therefore right (github.com/facebookresearch/fairscale/pull/560), and loading the file before the parts are filled in
fails instead of starting from zeros. `index.json` says where each part of each tensor is.
"""

from collections import Counter as Count
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

from checkpoint.compare import described, require_same
from checkpoint.export.output import finish, unfinished_folder, write_json
from checkpoint.export.torch_file import Later, write_torch_file
from checkpoint.manifest import MANIFEST_NAME, read_manifest
from checkpoint.pin import Pin
from checkpoint.safe_read import read_metadata
from checkpoint.tensor_stream import Counter, Progress, entry_of, n_bytes, read_part, read_tensor
from checkpoint.verify import check_tensors
from configs.errors import UserError

StateDict = Mapping[str, Any]
"""What an optimizer's `state_dict` returns."""

PREFIX = "optimizer."
INDEX_NAME = "index.json"


@dataclass(frozen=True)
class _Entry:
    """One tensor of the state: `key` of an optimizer's parameter `number`."""

    number: int
    key: str
    parameter: str
    shape: tuple[int, ...]
    stays: bool
    """Whether it stays sharded."""

    @property
    def name(self) -> str:
        """The tensor's name in the checkpoint."""
        return f"{PREFIX}{self.parameter}.{self.key}"


@dataclass(frozen=True)
class _Source:
    """The checkpoint to export."""

    folder: Path
    metadata: Metadata
    count: Counter

    def whole(self, entry: _Entry) -> Later:
        """The whole tensor, gathered when it is written."""
        known = entry_of(self.metadata, entry.name)
        make = partial(read_tensor, self.folder, self.metadata, entry.name)
        return Later(tuple(known.size), known.properties.dtype, lambda: self.count(make()))

    def on_meta(self, entry: _Entry) -> Tensor:
        """The tensor's shape and type, without values."""
        known = entry_of(self.metadata, entry.name)
        return torch.empty(tuple(known.size), dtype=known.properties.dtype, device="meta")

    def part(self, entry: _Entry, chunk: ChunkStorageMetadata) -> Later:
        """One owner's part of the tensor."""
        make = partial(read_part, self.folder, self.metadata, entry.name, chunk)
        dtype = entry_of(self.metadata, entry.name).properties.dtype
        return Later(tuple(chunk.sizes), dtype, lambda: self.count(make()))


def export_optimizer(
    checkpoint: Path,
    output: Path,
    optimizers: Mapping[str, StateDict],
    staying: Collection[str],
    gather: str,
    max_bytes: int,
    verify: Literal["size", "hash"] = "hash",
    progress: Progress = lambda done, total: None,
) -> None:
    """Write the optimizer state of a checkpoint to a new folder, in one process, whatever mesh saved it.

    Args:
        checkpoint: folder of the checkpoint.
        output: folder to create.
        optimizers: by file name, the `state_dict` of each optimizer with meta tensors; its groups have `param_names`.
        staying: names of the parameters that stay sharded.
        gather: the user's choice of these: "all" (none stays), "dense" (the experts stay), or patterns.
        max_bytes: maximum bytes of tensors in memory at a time.
        verify: hash: first compare the content of the files that are read with their hashes.
        progress: called with the bytes done and in total.

    Raises:
        UserError: the checkpoint is damaged or of another optimizer, the export takes more than `max_bytes`, or the
            output exists or can't be written.
    """
    with Pin(checkpoint):
        manifest, metadata = read_manifest(checkpoint), read_metadata(checkpoint)
        left = set() if gather == "all" else set(staying)
        entries = {name: _entries(state_dict, left) for name, state_dict in optimizers.items()}
        every = [entry for of_one in entries.values() for entry in of_one]
        _check_state(checkpoint, metadata, every)
        _check_budget(metadata, every, max_bytes)
        with unfinished_folder(output) as folder:
            if verify == "hash":
                check_tensors(checkpoint, manifest, metadata, PREFIX)
            source = _Source(checkpoint, metadata, Counter(progress, sum(_n_bytes(metadata, e) for e in every)))
            index: dict[str, Any] = {"step": manifest.step, "tokens": manifest.tokens, "gather": gather}
            index["optimizers"] = {
                name: _write(
                    source, folder, name, state_dict, entries[name], "experts" if gather == "dense" else "parts"
                )
                for name, state_dict in optimizers.items()
            }
            write_json(folder / INDEX_NAME, index)
            finish(folder, output)


def _entries(state_dict: StateDict, left: Collection[str]) -> list[_Entry]:
    """List each tensor of an optimizer's state, in order. Step counts never stay sharded."""
    names = _parameters(state_dict)
    return [
        _Entry(number, key, names[number], tuple(tensor.shape), stays=names[number] in left and tensor.dim() > 0)
        for number, state in sorted(state_dict["state"].items())
        for key, tensor in state.items()
    ]


def _parameters(state_dict: StateDict) -> list[str]:
    """The names of an optimizer's parameters, by number."""
    return [name for group in state_dict["param_groups"] for name in group["param_names"]]


def _check_state(checkpoint: Path, metadata: Metadata, entries: Sequence[_Entry]) -> None:
    """Check that the checkpoint holds these tensors and no others.

    Raises:
        UserError: it does not.
    """
    found = {name: described(entry_of(metadata, name).size) for name in _saved(metadata)}
    if not found:
        raise UserError(f"checkpoint {checkpoint} holds only weights and no optimizer state")
    require_same(
        f"checkpoint {checkpoint} does not hold the optimizer that its {MANIFEST_NAME} describes",
        found,
        {entry.name: described(entry.shape) for entry in entries},
    )


def _check_budget(metadata: Metadata, entries: Sequence[_Entry], max_bytes: int) -> None:
    """Check that no tensor takes more than `max_bytes` to export.

    Raises:
        UserError: one does.
    """
    needs = {entry.name: _held(metadata, entry) for entry in entries}
    largest = max(needs, key=lambda name: needs[name])
    if needs[largest] > max_bytes:
        whole = not all(entry.stays for entry in entries if entry.name == largest)
        hint = '; to gather less, use --gather dense or "PATTERN=stay"' if whole else ""
        raise UserError(
            f"{largest} takes {needs[largest]:,} bytes of memory to export, and {max_bytes:,} are allowed or free "
            f"(--max-bytes){hint}"
        )


def _held(metadata: Metadata, entry: _Entry) -> int:
    """Bytes in memory at a time to export a tensor: the whole and the part being added to it, or only a part."""
    known = entry_of(metadata, entry.name)
    part = max(n_bytes(tuple(chunk.sizes), known.properties.dtype) for chunk in known.chunks)
    if entry.stays or len(known.chunks) == 1:
        return part
    return part + _n_bytes(metadata, entry)


def _write(
    source: _Source, folder: Path, optimizer: str, state_dict: StateDict, entries: Sequence[_Entry], parts: str
) -> dict[str, Any]:
    """Write the files of one optimizer, those of owners with `parts` in their names; returns its index entry."""
    file = f"{optimizer}.pt"
    values = {entry: source.on_meta(entry) if entry.stays else source.whole(entry) for entry in entries}
    write_torch_file(folder / file, {**state_dict, "state": _by_number(values)})
    places = _write_owners(source, folder, f"{optimizer}-{parts}", [entry for entry in entries if entry.stays])
    parameters: dict[str, Any] = {
        name: {"number": number, "state": {}} for number, name in enumerate(_parameters(state_dict))
    }
    for entry in entries:
        known = entry_of(source.metadata, entry.name)
        parameters[entry.parameter]["state"][entry.key] = {
            "dtype": str(known.properties.dtype).removeprefix("torch."),
            "shape": list(known.size),
            "parts": places.get(entry) or [_place(file, [0] * len(known.size), known.size)],
        }
    return {"file": file, "parameters": parameters}


def _write_owners(
    source: _Source, folder: Path, stem: str, entries: Sequence[_Entry]
) -> dict[_Entry, list[dict[str, Any]]]:
    """Write a file for each owner of parts; returns where the parts of each entry are."""
    owners = _owners(source.metadata, entries)
    places: dict[_Entry, list[dict[str, Any]]] = {entry: [] for entry in entries}
    for number, chunks in enumerate(owners, 1):
        file = f"{stem}-{number:05d}-of-{len(owners):05d}.pt"
        parts = {entry: source.part(entry, chunk) for entry, chunk in chunks.items()}
        offsets = {entry: list(chunk.offsets) for entry, chunk in chunks.items()}
        write_torch_file(folder / file, {"state": _by_number(parts), "offsets": _by_number(offsets)})
        for entry, chunk in chunks.items():
            places[entry].append(_place(file, chunk.offsets, chunk.sizes))
    return places


def _owners(metadata: Metadata, entries: Sequence[_Entry]) -> list[dict[_Entry, ChunkStorageMetadata]]:
    """What each owner wrote, in the order of the ranks. (In Keel, each rank writes one part of a tensor.)"""
    owners: dict[tuple[int, str, int], dict[_Entry, ChunkStorageMetadata]] = {}
    seen: Count[tuple[str, str]] = Count()
    for entry in entries:
        for chunk in entry_of(metadata, entry.name).chunks:
            file = metadata.storage_data[MetadataIndex(entry.name, chunk.offsets)].relative_path
            owners.setdefault((len(file), file, seen[file, entry.name]), {})[entry] = chunk  # sorts __2_0 before __10_0
            seen[file, entry.name] += 1
    return [owners[key] for key in sorted(owners)]


def _place(file: str, offsets: Sequence[int], shape: Sequence[int]) -> dict[str, Any]:
    return {"file": file, "offsets": list(offsets), "shape": list(shape)}


def _by_number(values: Mapping[_Entry, Any]) -> dict[int, dict[str, Any]]:
    """Arrange values as in a state dict."""
    state: dict[int, dict[str, Any]] = {}
    for entry, value in values.items():
        state.setdefault(entry.number, {})[entry.key] = value
    return state


def _saved(metadata: Metadata) -> list[str]:
    return [name for name in metadata.state_dict_metadata if name.startswith(PREFIX)]


def _n_bytes(metadata: Metadata, entry: _Entry) -> int:
    known = entry_of(metadata, entry.name)
    return n_bytes(tuple(known.size), known.properties.dtype)
