"""How two checkpoints differ, tensor by tensor, whatever mesh wrote each, or one from what it should contain."""

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import Metadata

from checkpoint.index import read_metadata
from checkpoint.tensor_stream import entry_of, read_tensor
from configs.errors import UserError, listed

MODEL = "model."
"""What the names of the model's tensors begin with."""


@dataclass(frozen=True)
class TensorDifference:
    """A tensor that is not the same in both checkpoints."""

    name: str
    what: str
    """The difference in words: only in one, another shape or dtype, or how many values differ and by how much."""


def compare(a: Path, b: Path) -> Iterator[TensorDifference]:
    """Yield the tensors that differ between two checkpoints, by name; bits are compared, so a NaN equals itself.

    Holds one tensor of each checkpoint at a time.

    Raises:
        Damaged: a file can't be read.
    """
    metadata_a = read_metadata(a)
    metadata_b = read_metadata(b)
    names_a = metadata_a.state_dict_metadata.keys()
    names_b = metadata_b.state_dict_metadata.keys()
    for name in sorted(names_a | names_b):
        if name not in names_a or name not in names_b:
            yield TensorDifference(name, f"only in {a if name in names_a else b}")
            continue
        kinds = [
            (entry.properties.dtype, list(entry.size))
            for entry in (entry_of(metadata_a, name), entry_of(metadata_b, name))
        ]
        if kinds[0] != kinds[1]:
            yield TensorDifference(name, " against ".join(f"{dtype} {size}" for dtype, size in kinds))
        elif what := _difference(read_tensor(a, metadata_a, name), read_tensor(b, metadata_b, name)):
            yield TensorDifference(name, what)


def _difference(a: torch.Tensor, b: torch.Tensor) -> str | None:
    """How the values of two tensors of one shape and dtype differ; None if they are bitwise equal."""
    a = a.contiguous().flatten()
    b = b.contiguous().flatten()
    if torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
        return None
    unequal = (a.view(-1, 1).view(torch.uint8) != b.view(-1, 1).view(torch.uint8)).any(1)
    gap = (a.double() - b.double()).abs()
    how_many = f"all {len(a):,}" if unequal.all() else f"{int(unequal.sum()):,} of {len(a):,}"
    return f"{how_many} values differ, at most by {gap.max():.3g} (largest value {a.abs().max():.3g})"


def shape_differences(
    metadata: Metadata, shapes: Mapping[str, Sequence[int]], may_lack: Container[str] = ()
) -> list[str]:
    """A line for each tensor of the model by which a checkpoint differs from `shapes`, which has them all, by name.

    The checkpoint need not have those of `may_lack`.
    """
    saved = metadata.state_dict_metadata.items()
    there = {name: list(entry.size) for name, entry in saved if name.startswith(MODEL) and hasattr(entry, "size")}
    here = {name: list(shape) for name, shape in shapes.items()}
    return [
        f"{name}: {there.get(name, 'no such tensor')} in the checkpoint, {here.get(name, 'no such tensor')} here"
        for name in {**here, **there}
        if there.get(name) != here.get(name) and (name in there or name not in may_lack)
    ]


def require_same(what: str, found: Mapping[str, str], expected: Mapping[str, str]) -> None:
    """Raise UserError, with a message that begins with `what`, unless the tensors are the expected ones.

    Args:
        what: the beginning of the message.
        found, expected: descriptions by tensor name.
    """
    lines = [
        f"{name}: {found.get(name, 'missing')}, expected: {expected.get(name, 'no such tensor')}"
        for name in sorted(found.keys() | expected.keys())
        if found.get(name) != expected.get(name)
    ]
    if lines:
        raise UserError(f"{what}:\n  {listed(lines)}")


def described(shape: Sequence[int], dtype: torch.dtype | None = None) -> str:
    """A short description of a tensor."""
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}" if dtype else str(list(shape))
