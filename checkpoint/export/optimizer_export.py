"""The optimizer's state of a checkpoint, as plain torch takes it: for who goes on without Keel, or wants to look at it.

A file for each of torch's optimizers (`adamw.pt`; with Muon, also `muon.pt`) is what its `load_state_dict` takes: every
parameter has its number, its group and its entries. Whatever mesh has saved them, the tensors pass through one by one,
on the CPU: gathered, written, forgotten. What an export holds is the largest of them, and is known before it begins.

The experts of a mixture may be more than one machine can hold or wants to. They, or what a pattern names, can stay as
they lie: a file for each owner (the rank that wrote its part of them), which takes no gathering at all. In the
optimizer's own file such a parameter then has its entry, of its whole shape and type, but on the meta device, where a
tensor has no values: the count and the shapes are right (github.com/facebookresearch/fairscale/pull/560), and loading
it before the parts have been put in fails instead of starting from zeros. `index.json` says where every part of every
tensor is.
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
"""As an optimizer's `state_dict` returns it."""

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
    """Whether it is left as it lies."""

    @property
    def name(self) -> str:
        """In the checkpoint."""
        return f"{PREFIX}{self.parameter}.{self.key}"


@dataclass(frozen=True)
class _Source:
    """The checkpoint that is exported."""

    folder: Path
    metadata: Metadata
    count: Counter

    def whole(self, entry: _Entry) -> Later:
        """The tensor, gathered when its turn comes."""
        known = entry_of(self.metadata, entry.name)
        make = partial(read_tensor, self.folder, self.metadata, entry.name)
        return Later(tuple(known.size), known.properties.dtype, lambda: self.count(make()))

    def on_meta(self, entry: _Entry) -> Tensor:
        """Its shape and type, without values."""
        known = entry_of(self.metadata, entry.name)
        return torch.empty(tuple(known.size), dtype=known.properties.dtype, device="meta")

    def part(self, entry: _Entry, chunk: ChunkStorageMetadata) -> Later:
        """One owner's part of it."""
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
    """Write the optimizer's state of a checkpoint to a new folder; one process will do, whatever mesh has saved it.

    Args:
        optimizers: by the name of its file, what each optimizer's `state_dict` would be, of meta tensors; the groups
            have `param_names`.
        staying: names of the parameters that are left as they lie.
        gather: what the user calls that: "all" (none are), "dense" (a mixture's experts), or by pattern.
        max_bytes: of tensors that may be held at a time.
        verify: hash: first compare the content of the files that are read with their hashes.

    Raises: UserError if the checkpoint is damaged or of another optimizer, if it takes more than `max_bytes`, or if the
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
    """Every tensor of an optimizer's state, in its order. Counts of steps are gathered in any case."""
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
    """Raise UserError unless the checkpoint holds these tensors and no others."""
    found = {name: described(entry_of(metadata, name).size) for name in _saved(metadata)}
    if not found:
        raise UserError(f"checkpoint {checkpoint} holds weights only, and no state of an optimizer")
    require_same(
        f"checkpoint {checkpoint} does not hold the optimizer that its {MANIFEST_NAME} describes",
        found,
        {entry.name: described(entry.shape) for entry in entries},
    )


def _check_budget(metadata: Metadata, entries: Sequence[_Entry], max_bytes: int) -> None:
    """Raise UserError if one tensor takes more than `max_bytes` to export."""
    needs = {entry.name: _held(metadata, entry) for entry in entries}
    largest = max(needs, key=lambda name: needs[name])
    if needs[largest] > max_bytes:
        whole = not all(entry.stays for entry in entries if entry.name == largest)
        hint = '; --gather dense leaves the experts as they lie, "PATTERN=stay" what you name' if whole else ""
        raise UserError(
            f"{largest} takes {needs[largest]:,} bytes of memory to export, and {max_bytes:,} are allowed or free "
            f"(--max-bytes){hint}"
        )


def _held(metadata: Metadata, entry: _Entry) -> int:
    """Bytes that are held at a time to export a tensor: itself, and a part on its way into it, or just a part."""
    known = entry_of(metadata, entry.name)
    part = max(n_bytes(tuple(chunk.sizes), known.properties.dtype) for chunk in known.chunks)
    if entry.stays or len(known.chunks) == 1:
        return part
    return part + _n_bytes(metadata, entry)


def _write(
    source: _Source, folder: Path, optimizer: str, state_dict: StateDict, entries: Sequence[_Entry], parts: str
) -> dict[str, Any]:
    """Write the files of one optimizer, with the word `parts` in the names of owners'; returns what the index says."""
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
    """Write a file for each owner of parts; returns where those of each entry are."""
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
    """What each owner has written, in the order of the ranks. (Keel's ranks write one part of a tensor each.)"""
    owners: dict[tuple[int, str, int], dict[_Entry, ChunkStorageMetadata]] = {}
    seen: Count[tuple[str, str]] = Count()
    for entry in entries:
        for chunk in entry_of(metadata, entry.name).chunks:
            file = metadata.storage_data[MetadataIndex(entry.name, chunk.offsets)].relative_path
            owners.setdefault((len(file), file, seen[file, entry.name]), {})[entry] = chunk  # __2_0 before __10_0
            seen[file, entry.name] += 1
    return [owners[key] for key in sorted(owners)]


def _place(file: str, offsets: Sequence[int], shape: Sequence[int]) -> dict[str, Any]:
    return {"file": file, "offsets": list(offsets), "shape": list(shape)}


def _by_number(values: Mapping[_Entry, Any]) -> dict[int, dict[str, Any]]:
    """As a state dict has it."""
    state: dict[int, dict[str, Any]] = {}
    for entry, value in values.items():
        state.setdefault(entry.number, {})[entry.key] = value
    return state


def _saved(metadata: Metadata) -> list[str]:
    return [name for name in metadata.state_dict_metadata if name.startswith(PREFIX)]


def _n_bytes(metadata: Metadata, entry: _Entry) -> int:
    known = entry_of(metadata, entry.name)
    return n_bytes(tuple(known.size), known.properties.dtype)
