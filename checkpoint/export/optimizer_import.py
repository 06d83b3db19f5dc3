"""Imports a plain torch optimizer's state, and optionally a model's weights, into a checkpoint to resume from.

The source is what `optimizer_export` writes, or any torch optimizer's `state_dict`: a file for each of the job's
optimizers (`adamw.pt`; with Muon, also `muon.pt`), and the parts of tensors that stayed sharded. Everything else, such
as the step and the position in the data, is copied from a checkpoint of the same run. Tensors are processed one by one,
on the CPU, from memory-mapped files.

Parameters are identified by name if the file has names (`torch.optim.AdamW(model.named_parameters())` keeps them, and
so does an export), otherwise by their position in groups of the same sizes.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from checkpoint import manifest as manifests
from checkpoint.compare import described, require_same
from checkpoint.export.optimizer_export import PREFIX, StateDict
from checkpoint.export.output import unfinished_folder
from checkpoint.manifest import Origin, RunChange
from checkpoint.pin import Pin
from checkpoint.safe_read import read_metadata, require_stored
from checkpoint.tensor_stream import Counter, Progress, entry_of, read_tensor, write_tensors
from checkpoint.verify import check_tensors
from configs.errors import UserError
from configs.untrusted import shortened

MODEL = "model."
_NOT_COMPARED = {"params", "param_names", "lr", "initial_lr", "fused", "foreach", "capturable", "differentiable"}
"""Keys of a group that do not affect learning, or that the job sets: its schedule sets the learning rate."""


@dataclass(frozen=True)
class _State:
    """One optimizer's state."""

    path: Path
    content: Mapping[str, Any]
    numbers: Mapping[str, int]
    """Number of each parameter in `content`, by name."""
    parts: list[Mapping[str, Any]] = field(default_factory=list)
    """Owners' files, with the parts of tensors that are on the meta device in `content`."""

    def described(self) -> dict[str, str]:
        """Shapes of the tensors, by their names in a checkpoint."""
        entries = ((name, self.content["state"].get(number, {})) for name, number in self.numbers.items())
        return {f"{PREFIX}{name}.{key}": described(t.shape) for name, entry in entries for key, t in entry.items()}

    def tensor(self, name: str, key: str, like: Tensor) -> Tensor:
        """Return one tensor, assembled if it is in parts."""
        number = self.numbers[name]
        tensor = self.content["state"][number][key]
        if tensor.is_meta:
            tensor = torch.full(tensor.shape, torch.nan, dtype=tensor.dtype)
            for part in self.parts:
                _put_in(tensor, part, number, key)
        _check_values(self.path, f"{PREFIX}{name}.{key}", tensor, like.dtype)
        return tensor


def import_optimizer(
    checkpoint: Path,
    source: Path,
    output: Path,
    optimizers: Mapping[str, StateDict],
    weights: Path | None = None,
    verify: Literal["size", "hash"] = "hash",
    progress: Progress = lambda done, total: None,
) -> list[str]:
    """Write a copy of a checkpoint with the optimizer state, and optionally the weights, of plain torch.

    Args:
        checkpoint: folder of a checkpoint of the run to continue.
        source: a folder with the optimizers' files, such as an export; or the file of the job's only optimizer.
        output: folder to create.
        optimizers: by file name, the `state_dict` of each optimizer with meta tensors; its groups have `param_names`.
        weights: a file of `torch.save(model.state_dict(), ...)`; None: the checkpoint's weights.
        verify: hash: first compare the content of the checkpoint's files with their hashes.
        progress: called with the bytes done and in total.

    Returns:
        A line for each optimizer setting that differs between the job and the source; the job's applies.

    Raises:
        UserError: the source is of another model or optimizer or can't be read, the checkpoint is damaged, or the
            output exists or can't be written.
    """
    with Pin(checkpoint):
        manifest, metadata = manifests.read_manifest(checkpoint), read_metadata(checkpoint)
        states = {name: _read_state(source, name, expected, optimizers) for name, expected in optimizers.items()}
        for name, expected in optimizers.items():
            of_job = {f"{PREFIX}{p}.{key}": described(t.shape) for p, key, t in _entries(expected)}
            what = f"{states[name].path} is not the state of the job's optimizer"
            require_same(what, states[name].described(), of_job)
        model = [name for name in metadata.state_dict_metadata if not name.startswith(PREFIX)]
        loaded = None if weights is None else _read_weights(weights, metadata, model)
        with unfinished_folder(output) as folder:
            if verify == "hash":
                check_tensors(checkpoint, manifest, metadata, MODEL)
            count = Counter(progress, sum(t.nbytes for each in optimizers.values() for _, _, t in _entries(each)))

            def tensors() -> Iterator[tuple[str, Tensor]]:
                for name in model:
                    yield name, read_tensor(checkpoint, metadata, name) if loaded is None else loaded[name]
                for file, expected in optimizers.items():
                    for name, key, like in _entries(expected):
                        yield f"{PREFIX}{name}.{key}", count(states[file].tensor(name, key, like))

            files = write_tensors(folder, tensors())
            came = [f"optimizer state: imported from {source}"]
            came += [] if weights is None else [f"weights: imported from {weights}"]
            draft = replace(
                manifest,
                run_id=uuid4().hex,
                parent=Origin(manifest.run_id, manifest.step),
                run_changes=[*manifest.run_changes, RunChange(manifest.step, came)],
                validation_loss=manifest.validation_loss if weights is None else None,
            )
            trainer_state = json.dumps(manifests.read_trainer_state(checkpoint))
            manifests.commit(folder, draft, files, trainer_state)
    return [line for name, expected in optimizers.items() for line in _other_settings(states[name], expected)]


def _entries(state_dict: StateDict) -> list[tuple[str, str, Tensor]]:
    """List (parameter, key, tensor) of an optimizer's state."""
    names = [name for group in state_dict["param_groups"] for name in group["param_names"]]
    return [(names[number], key, t) for number, state in state_dict["state"].items() for key, t in state.items()]


def _read_state(source: Path, name: str, expected: StateDict, optimizers: Mapping[str, StateDict]) -> _State:
    """Read the optimizer's file in the source, and its parts."""
    if source.is_dir():
        path, parts = source / f"{name}.pt", sorted(source.glob(f"{name}-*-of-*.pt"))
    elif len(optimizers) == 1:
        path, parts = source, []
    else:
        raise UserError(
            f"{source} is one file, but the job has several optimizers; name a folder with {_files(optimizers)}"
        )
    if not path.is_file():
        raise UserError(f"{source} has no {path.name}; the job's optimizers need {_files(optimizers)}")
    content = _load(path)
    if not _is_state_dict(content):
        raise UserError(f"{path} is not an optimizer's state_dict")
    groups = content["param_groups"]
    ids = [number for group in groups for number in group["params"]]
    names = [each for group in groups for each in group.get("param_names", ())]
    names = names or _names_by_place(path, groups, expected)
    if not len(ids) == len(set(ids)) == len(names) == len(set(names)):
        raise UserError(f"{path} has {len(ids)} parameters and {len(names)} names; each must have its own")
    return _State(path, content, dict(zip(names, ids, strict=True)), [_load(part) for part in parts])


def _is_state_dict(content: Any) -> bool:
    """Whether `content` has the form of an optimizer's state dict with only tensors in its state."""
    if not isinstance(content, dict) or not {"state", "param_groups"} <= content.keys():
        return False
    state, groups = content["state"], content["param_groups"]
    if not isinstance(state, dict) or not _all_are(dict, groups) or not _all_are(dict, list(state.values())):
        return False
    lists = ((int, group.get("params")) for group in groups), ((str, group.get("param_names", [])) for group in groups)
    return all(_all_are(kind, each) for pairs in lists for kind, each in pairs) and _are_tensors(*state.values())


def _all_are(kind: type, values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, kind) for value in values)


def _are_tensors(*of: Mapping[Any, Any]) -> bool:
    """Whether all items are strided tensors (or on the meta device) by name."""
    items = (item for each in of for item in each.items())
    return all(
        isinstance(key, str) and isinstance(tensor, Tensor) and tensor.layout == torch.strided for key, tensor in items
    )


def _put_in(tensor: Tensor, part: Mapping[str, Any], number: int, key: str) -> None:
    """Copy an owner's part of a tensor into the tensor, if the owner has one."""
    try:
        if key in part["state"].get(number, {}):
            value, start = part["state"][number][key], part["offsets"][number][key]
            tensor[tuple(slice(at, at + n) for at, n in zip(start, value.shape, strict=True))] = value
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(f"a part of {key} of parameter {number} is malformed; export it again: {error}") from None


def _names_by_place(path: Path, groups: Any, expected: StateDict) -> list[str]:
    """Name unnamed parameters after the job's, if the groups have the same sizes."""
    sizes, of_job = ([len(group["params"]) for group in each] for each in (groups, expected["param_groups"]))
    if sizes != of_job:
        raise UserError(
            f"{path} has no parameter names, and groups of {sizes} where the job has {of_job}; create the optimizer "
            "with names, as in torch.optim.AdamW(model.named_parameters())"
        )
    return [name for group in expected["param_groups"] for name in group["param_names"]]


def _files(optimizers: Mapping[str, StateDict]) -> str:
    return " and ".join(f"{name}.pt" for name in optimizers)


def _read_weights(path: Path, metadata: Metadata, names: list[str]) -> dict[str, Tensor]:
    """Read a plain model's state dict, by the names of its tensors in a checkpoint."""
    content = _load(path)
    if not isinstance(content, dict) or not _are_tensors(content):
        raise UserError(f"{path} is not a model's state_dict")
    found = {f"{MODEL}{name}": tensor for name, tensor in content.items()}
    known = {tensor.data_ptr() for name, tensor in found.items() if name in names}
    found = {n: t for n, t in found.items() if n in names or t.data_ptr() not in known}  # a tied head has two names
    entries = {name: entry_of(metadata, name) for name in names}
    require_same(
        f"{path} is not of the job's model",
        {name: described(tensor.shape, tensor.dtype) for name, tensor in found.items()},
        {name: described(entry.size, entry.properties.dtype) for name, entry in entries.items()},
    )
    for name, tensor in found.items():
        _check_values(path, name, tensor, tensor.dtype)
    return found


def _check_values(path: Path, name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    """Check that a run can resume from a tensor; moments may be bfloat16 (`checkpoint.optimizer_dtype`), and moments
    that the job keeps in bfloat16 may come in float32.

    Raises:
        UserError: its type differs, or it has non-finite values.
    """
    if tensor.dtype not in (dtype, torch.bfloat16, torch.float32 if dtype == torch.bfloat16 else dtype):
        found, wanted = (str(each).removeprefix("torch.") for each in (tensor.dtype, dtype))
        raise UserError(f"{path}: {name} is {found}, but the job's is {wanted} (training.dtype)")
    if not tensor.isfinite().all():
        raise UserError(f"{path}: {name} has non-finite values, or a part of it is missing")


def _load(path: Path) -> Any:
    """Load a file of torch.save, memory-mapped; no code in it runs."""
    if not path.is_file():  # opening a pipe would wait for a writer
        raise UserError(f"{path} can't be read: no such file")
    try:
        with path.open("rb") as file:
            require_stored(file)
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    # Damaged bytes may raise any exception, and all mean the same here.
    except Exception as error:
        raise UserError(f"{path} can't be read: {(str(error) or type(error).__name__).splitlines()[0]}") from None


def _other_settings(state: _State, expected: StateDict) -> list[str]:
    """Return a line for each setting that a file and the job both have, with different values."""
    names = {number: name for name, number in state.numbers.items()}
    theirs = {names[number]: group for group in state.content["param_groups"] for number in group["params"]}
    differing: dict[tuple[str, str, str], int] = {}
    for group in expected["param_groups"]:
        for key, value in group.items():
            for name in group["param_names"] if key not in _NOT_COMPARED else ():
                other = theirs.get(name, {}).get(key, value)
                if other is not None and json.dumps(other, default=str) != json.dumps(value, default=str):
                    line = (key, repr(value), shortened(repr(other), 100))
                    differing[line] = differing.get(line, 0) + 1
    return [f"{key} of {n} parameters: {ours}, in {state.path} {other}" for (key, ours, other), n in differing.items()]
