"""A checkpoint written again into another number of files.

No run needs it: loading fits any mesh to the files of any other. It is for people and file systems: a checkpoint of 512
ranks becomes a few files to copy or archive; one of a single rank becomes several, which many nodes read at a time.
The tensors pass through one by one, so it takes the memory of the largest, not of the model.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from checkpoint import manifest as manifests
from checkpoint.manifest import Manifest
from checkpoint.pin import Pin
from checkpoint.safe_read import read_metadata
from checkpoint.tensor_stream import entry_of, n_bytes, read_tensor, write_tensors
from checkpoint.verify import check, shares
from configs.errors import UserError


def reshard(source: Path, output: Path, n_files: int, progress: Callable[[int, int], Any]) -> Manifest:
    """Write the checkpoint `source` again as `output`, with its tensors in `n_files` files of about the same size.

    Each tensor lies whole in one of them. All else (trainer state, lineage, config) is as in `source`, so a run goes
    on from the one as from the other. `progress` is told the bytes done and those in all.
    Raises: UserError if `source` is damaged, `output` exists, there are fewer tensors than files, or the disk refuses.
    """
    with Pin(source):
        return _reshard(source, output, n_files, progress)


def _reshard(source: Path, output: Path, n_files: int, progress: Callable[[int, int], Any]) -> Manifest:
    manifest = check(source)
    metadata, trainer_state = read_metadata(source), json.dumps(manifests.read_trainer_state(source))
    sizes = {name: _n_bytes(metadata, name) for name in metadata.state_dict_metadata}
    if not 1 <= n_files <= len(sizes):
        raise UserError(f"{source} has {len(sizes)} tensors, so it can be written to 1 to {len(sizes)} files")
    unfinished = output.with_name(output.name + manifests.UNFINISHED)
    for path in (output, unfinished):
        if path.exists():
            raise UserError(f"{path} exists already; nothing was written")
    follow = _follow(sizes, progress)
    files = [follow(_tensors(source, metadata, names)) for names in shares(sizes, n_files)]
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        manifests.begin(output)
        return manifests.commit(unfinished, manifest, write_tensors(unfinished, *files), trainer_state)
    except OSError as error:
        raise UserError(f"{output} could not be written: {error}; remove {unfinished}, and make room") from None


def _tensors(source: Path, metadata: Metadata, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    for name in names:
        yield name, read_tensor(source, metadata, name)


def _follow(
    sizes: dict[str, int], progress: Callable[[int, int], Any]
) -> Callable[[Iterator[tuple[str, Tensor]]], Iterator[tuple[str, Tensor]]]:
    """A wrapper that reports each tensor when the next is asked for: when it is written."""
    done, total = 0, sum(sizes.values())

    def follow(tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        nonlocal done
        for name, tensor in tensors:
            yield name, tensor
            done += sizes[name]
            progress(done, total)

    return follow


def _n_bytes(metadata: Metadata, name: str) -> int:
    entry = entry_of(metadata, name)
    return n_bytes(entry.size, entry.properties.dtype)
