"""Exports the optimizer state of a checkpoint for plain torch, to continue without Keel or to inspect it.

Each torch optimizer gets a file (`adamw.pt`; with Muon, also `muon.pt`) that its `load_state_dict` accepts, in which
every parameter has its number, its group and its entries, whatever mesh saved them.

The experts of a mixture may not fit on one machine. They, or the parameters that a pattern names, can stay sharded:
each owner (the rank that wrote a part) gets a file, and nothing is gathered. In the optimizer's file, such a parameter
has an entry of its whole shape and type on the meta device, where a tensor has no values. Number and shapes are
therefore right (github.com/facebookresearch/fairscale/pull/560), and loading the file before the parts are filled in
fails instead of starting from zeros. `index.json` says where each part of each tensor is.

A file is in memory while it is written, so an export takes the memory of what is gathered. This is known before it
begins.
"""

import difflib
import fnmatch
import json
import warnings
from collections import Counter as Count
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import ValidationError
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

from checkpoint.compare import described, require_same
from checkpoint.export.output import finish, unfinished_folder, write_json
from checkpoint.find import OPTIMIZER_INDEX_NAME
from checkpoint.index import read_metadata
from checkpoint.lock import ReadLock
from checkpoint.manifest import MANIFEST_NAME, Manifest, read_manifest
from checkpoint.tensor_stream import Counter, Progress, entry_of, n_bytes, read_part, read_tensor
from checkpoint.verify import check_tensors
from configs.architectures.mup import folds
from configs.errors import UserError
from configs.files import synced
from configs.machine import free_memory
from configs.own_code import is_import_path
from configs.plan import plan_of
from configs.reading.removed import without_removed
from configs.run_stages import RunStage, border_of
from configs.schema import Config, is_described
from models import build_model
from trainer.lr_schedule import learning_rate_of
from trainer.optimizers.build import plain_optimizers, set_lr
from trainer.step import hidden_matrices, width_scales

StateDict = Mapping[str, Any]
"""The result of an optimizer's `state_dict`."""

PREFIX = "optimizer."


@dataclass(frozen=True)
class Entry:
    """One tensor of the state: `key` of an optimizer's parameter `number`."""

    number: int
    key: str
    parameter: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    """The dtype in the checkpoint."""
    chunks: Sequence[ChunkStorageMetadata]
    stays: bool
    """Whether it stays sharded."""

    @property
    def name(self) -> str:
        """The tensor's name in the checkpoint."""
        return f"{PREFIX}{self.parameter}.{self.key}"


def export_optimizer(
    checkpoint: Path, output: Path, gather: Sequence[str], verify: Literal["size", "hash"], progress: Progress
) -> None:
    """Write the optimizer state of a checkpoint to a new folder, in one process, whatever mesh saved it.

    Args:
        checkpoint: folder of the checkpoint.
        output: folder to create.
        gather: "all"; "dense": the experts stay sharded; or one or more of "PATTERN=stay".
        verify: hash: first compare the content of the files that are read with their hashes.
        progress: called with the bytes done and in total.

    Raises:
        UserError: the checkpoint is damaged or holds no optimizer, the choice of what to gather is wrong, what it
            gathers takes more than the free memory, or the output exists or can't be written.
    """
    with ReadLock(checkpoint) as lock:
        manifest = read_manifest(checkpoint)
        metadata = read_metadata(checkpoint)
        optimizers, experts = _described_optimizers(checkpoint, manifest, metadata)
        staying = _staying(gather, optimizers, experts)
        _check_state(checkpoint, metadata, optimizers)
        entries = {name: _entries(metadata, state_dict, staying) for name, state_dict in optimizers.items()}
        _check_memory(entries)
        total = sum(n_bytes(entry.shape, entry.dtype) for of_one in entries.values() for entry in of_one)
        with unfinished_folder(output) as folder:
            if verify == "hash":
                check_tensors(checkpoint, manifest, metadata, PREFIX)
            source = _Source(checkpoint, metadata, Counter(progress, total))
            stem = "experts" if list(gather) == ["dense"] else "parts"
            index: dict[str, Any] = {"step": manifest.step, "tokens": manifest.tokens, "gather": ", ".join(gather)}
            index["optimizers"] = {
                name: source.write(folder, name, stem, state_dict, entries[name])
                for name, state_dict in optimizers.items()
            }
            write_json(folder / OPTIMIZER_INDEX_NAME, index)
            lock.require_there()
            finish(folder, output)


def _described_optimizers(
    checkpoint: Path, manifest: Manifest, metadata: Metadata
) -> tuple[dict[str, StateDict], list[str]]:
    """Describe the optimizers of the job that wrote the checkpoint.

    Returns:
        The `state_dict` of each optimizer by name, with meta tensors and the learning rate of the next step; and the
        names of the experts' parameters.

    Raises:
        UserError: the checkpoint holds only weights, or does not fit its own config.
    """
    try:
        config = Config.model_validate_json(json.dumps(without_removed(manifest.in_effect)))
    except ValidationError:
        raise UserError(f"{checkpoint} holds only a model's weights, no job to continue") from None
    if is_import_path(config.optimizer.name):
        raise UserError(
            f"{checkpoint} has the state of {config.optimizer.name}, and only that of Keel's own is exported"
        )
    stage = RunStage(border_of(manifest.config, manifest.step), config)
    if is_described(config.model) and folds(config.model):
        raise UserError(
            f"{checkpoint}: the optimizer's state can't be exported with muP (model.mup_base_dim): it is of weights "
            "without the multipliers that an exported model has in them"
        )
    n_tensors = len(metadata.state_dict_metadata)
    if config.model.n_layers > n_tensors:  # building that many might never end
        raise UserError(f"{checkpoint} describes {config.model.n_layers} layers, but holds only {n_tensors} tensors")
    with torch.device("meta"):
        model = build_model(config.model).to(getattr(torch, config.training.dtype))
        hidden = hidden_matrices(model, config)
        scales = width_scales(config, hidden)
        optimizers = plain_optimizers(config.optimizer, list(model.named_parameters()), hidden, scales)
    for optimizer in optimizers.values():
        set_lr(optimizer, learning_rate_of(stage, manifest.step + 1))
    of_experts = tuple(f"{module}." for module in plan_of(model).experts)
    experts = [name for name, _ in model.named_parameters() if name.startswith(of_experts)]
    return {name: optimizer.state_dict() for name, optimizer in optimizers.items()}, experts


def _staying(gather: Sequence[str], optimizers: Mapping[str, StateDict], experts: Sequence[str]) -> set[str]:
    """Return the names of the parameters that stay sharded.

    Raises:
        UserError: a pattern matches no parameter, or "all" or "dense" is combined with another word.
    """
    if list(gather) in (["all"], ["dense"]):
        return set(experts if gather[0] == "dense" else ())
    names = [name for state_dict in optimizers.values() for name in _parameters(state_dict)]
    stay: set[str] = set()
    for word in gather:
        pattern, _, what = word.rpartition("=")
        if what != "stay":
            raise UserError(f'--gather {word}: choose all, dense, or one or more of "PATTERN=stay"')
        matches = fnmatch.filter(names, pattern)
        if not matches:
            nearest = ", ".join(difflib.get_close_matches(pattern, names, n=3, cutoff=0))
            raise UserError(f'--gather "{word}" matches no parameter; the nearest names are {nearest}')
        stay |= set(matches)
    return stay


def _parameters(state_dict: StateDict) -> list[str]:
    """The names of an optimizer's parameters, by number."""
    return [name for group in state_dict["param_groups"] for name in group["param_names"]]


def _check_state(checkpoint: Path, metadata: Metadata, optimizers: Mapping[str, StateDict]) -> None:
    """Check that the checkpoint holds the tensors of these optimizers and no others.

    Raises:
        UserError: it does not.
    """
    saved = [name for name in metadata.state_dict_metadata if name.startswith(PREFIX)]
    if not saved:
        raise UserError(f"checkpoint {checkpoint} holds only weights and no optimizer state")
    expected = {}
    for state_dict in optimizers.values():
        names = _parameters(state_dict)
        for number, state in state_dict["state"].items():
            for key, tensor in state.items():
                expected[f"{PREFIX}{names[number]}.{key}"] = described(tensor.shape)
    require_same(
        f"checkpoint {checkpoint} does not hold the optimizer that its {MANIFEST_NAME} describes",
        {name: described(entry_of(metadata, name).size) for name in saved},
        expected,
    )


def _entries(metadata: Metadata, state_dict: StateDict, staying: set[str]) -> list[Entry]:
    """List each tensor of an optimizer's state, in order. Step counts never stay sharded."""
    names = _parameters(state_dict)
    entries = []
    for number, state in sorted(state_dict["state"].items()):
        for key in state:
            known = entry_of(metadata, f"{PREFIX}{names[number]}.{key}")
            stays = names[number] in staying and len(known.size) > 0
            entries.append(
                Entry(number, key, names[number], tuple(known.size), known.properties.dtype, known.chunks, stays)
            )
    return entries


def _check_memory(entries: Mapping[str, Sequence[Entry]]) -> None:
    """Check that what is gathered for each optimizer fits in the free memory.

    Raises:
        UserError: it does not.
    """
    free = free_memory()
    for name, of_one in entries.items():
        needed = sum(n_bytes(entry.shape, entry.dtype) for entry in of_one if not entry.stays)
        if needed > free:
            raise UserError(
                f"gathering the state of {name} takes {needed:,} bytes of memory, and {free:,} are free; to gather "
                'less, use --gather dense or --gather "PATTERN=stay"'
            )


@dataclass(frozen=True)
class _Source:
    """The checkpoint to export."""

    checkpoint: Path
    metadata: Metadata
    count: Counter

    def write(
        self, folder: Path, optimizer: str, stem: str, state_dict: StateDict, entries: Sequence[Entry]
    ) -> dict[str, Any]:
        """Write the files of one optimizer, the owners' with `stem` in their names; returns its index entry."""
        file = f"{optimizer}.pt"
        parameters: dict[str, Any] = {
            name: {"number": number, "state": {}} for number, name in enumerate(_parameters(state_dict))
        }
        for entry in entries:
            parameters[entry.parameter]["state"][entry.key] = {
                "dtype": str(entry.dtype).removeprefix("torch."),
                "shape": list(entry.shape),
                "parts": [] if entry.stays else [_place(file, [0] * len(entry.shape), entry.shape)],
            }
        _save(folder / file, {**state_dict, "state": self._gathered(entries)})
        owners = list(self._owners([entry for entry in entries if entry.stays]))
        for number, parts in enumerate(owners, 1):
            file = f"{optimizer}-{stem}-{number:05d}-of-{len(owners):05d}.pt"
            _save(folder / file, self._parts(parts))
            for entry, chunk in parts:
                place = _place(file, chunk.offsets, chunk.sizes)
                parameters[entry.parameter]["state"][entry.key]["parts"].append(place)
        return {"file": f"{optimizer}.pt", "parameters": parameters}

    def _gathered(self, entries: Sequence[Entry]) -> dict[int, dict[str, torch.Tensor]]:
        """The optimizer's state, in which what stays sharded is on the meta device."""
        state: dict[int, dict[str, torch.Tensor]] = {}
        for entry in entries:
            if entry.stays:
                tensor = torch.empty(entry.shape, dtype=entry.dtype, device="meta")
            else:
                tensor = self.count(read_tensor(self.checkpoint, self.metadata, entry.name))
            state.setdefault(entry.number, {})[entry.key] = tensor
        return state

    def _parts(self, parts: Sequence[tuple[Entry, ChunkStorageMetadata]]) -> dict[str, Any]:
        """The content of an owner's file."""
        state: dict[int, dict[str, torch.Tensor]] = {}
        offsets: dict[int, dict[str, list[int]]] = {}
        for entry, chunk in parts:
            tensor = self.count(read_part(self.checkpoint, self.metadata, entry.name, chunk))
            state.setdefault(entry.number, {})[entry.key] = tensor
            offsets.setdefault(entry.number, {})[entry.key] = list(chunk.offsets)
        return {"state": state, "offsets": offsets}

    def _owners(self, entries: Sequence[Entry]) -> Iterator[list[tuple[Entry, ChunkStorageMetadata]]]:
        """Yield what each owner wrote, in the order of the ranks. (In Keel, each rank writes one part of a tensor.)"""
        owners: dict[tuple[int, str, int], list[tuple[Entry, ChunkStorageMetadata]]] = {}
        seen: Count[tuple[str, str]] = Count()
        for entry in entries:
            for chunk in entry.chunks:
                file = self.metadata.storage_data[MetadataIndex(entry.name, chunk.offsets)].relative_path
                owner = (len(file), file, seen[file, entry.name])  # the length sorts __2_0 before __10_0
                owners.setdefault(owner, []).append((entry, chunk))
                seen[file, entry.name] += 1
        for owner in sorted(owners):
            yield owners[owner]


def _save(path: Path, content: dict[str, Any]) -> None:
    with synced(path) as file, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Serializing tensors on the meta device")
        torch.save(content, file)


def _place(file: str, offsets: Sequence[int], shape: Sequence[int]) -> dict[str, Any]:
    return {"file": file, "offsets": list(offsets), "shape": list(shape)}
