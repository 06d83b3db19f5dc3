"""The mean of checkpoints, or the average that a run has kept in one: a checkpoint with the weights alone.

What reads weights reads it: export, sampling, evaluation, and the start of another run (`checkpoint.init_from`).
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from checkpoint.compare import described, require_same
from checkpoint.export.output import unfinished_folder, write_bytes
from checkpoint.find import tokenizer_of
from checkpoint.index import read_metadata
from checkpoint.lock import ReadLock
from checkpoint.manifest import config_hash, read_manifest
from checkpoint.mean import mean_of
from checkpoint.reader import AVERAGE, MODEL, UPDATES
from checkpoint.storage import FolderStorage, commit
from checkpoint.tensor_stream import Counter, Progress, entry_of, n_bytes, read_tensor, write_tensors
from checkpoint.verify import check_tensors
from configs.errors import UserError


def average(checkpoints: Sequence[Path], output: Path, progress: Progress, place: str | None = None) -> None:
    """Write a checkpoint with averaged weights; it takes the memory of a few times the largest tensor.

    Args:
        checkpoints: one that has an average ([average]), which is taken as it is, or several, whose weights' mean is
            computed in float64 (Izmailov et al. 2018, arXiv:1803.05407; of the last of a run: Kaddour 2022, LAWA,
            arXiv:2209.14981). Buffers and weights that are not averaged are the last one's.
        output: folder to create.
        progress: is told the bytes.
        place: where the output will be, for what is written into it; None: where it is.

    Raises:
        UserError: one is damaged, has no average or other tensors, or the output exists or can't be written.
    """
    with ExitStack() as locks:
        held = [locks.enter_context(ReadLock(checkpoint)) for checkpoint in checkpoints]
        sources = [_Source(checkpoint, len(checkpoints) == 1) for checkpoint in checkpoints]
        last = sources[-1]
        for other in sources[:-1]:
            require_same(f"{other.folder} is of another model than {last.folder}", other.tensors(), last.tensors())
        with unfinished_folder(output) as folder:
            files = write_tensors(FolderStorage(), folder, _means(sources, progress))
            config = dict(last.manifest.config)
            if tokenizer := tokenizer_of(last.folder):
                name = f"tokenizer{tokenizer.suffix}"
                files[name] = write_bytes(folder / name, tokenizer.read_bytes())
                config["tokenizer"] = config["tokenizer"] | {"path": f"{place or output.resolve()}/{name}"}
            draft = replace(last.manifest, config=config, config_hash=config_hash(config), validation_loss=None)
            for each in held:
                each.require_there()
            commit(FolderStorage(), folder, output, draft, files, "{}")


class _Source:
    """A checkpoint whose weights are averaged."""

    def __init__(self, folder: Path, has_average: bool) -> None:
        """`has_average`: its own average is read in place of the weights.

        Raises:
            UserError: it is damaged, or should have an average and has none.
        """
        self.folder = folder
        self.manifest = read_manifest(folder)
        self.metadata = read_metadata(folder)
        self.names = [name for name in self.metadata.state_dict_metadata if name.startswith(MODEL)]
        self._has_average = has_average
        self._copies: list[int] = []  # of an average that is the mean of copies, those that were made
        if has_average and not any(name.startswith(AVERAGE) for name in self.metadata.state_dict_metadata):
            raise UserError(
                f"{folder} has no average of the weights; name several checkpoints, whose mean to take (--last N), or "
                "train with average.interval"
            )
        prefixes = (MODEL, AVERAGE) if has_average else (MODEL,)
        check_tensors(folder, self.manifest, self.metadata, *prefixes)
        if has_average:
            updates = read_tensor(folder, self.metadata, UPDATES)
            if not updates.any():
                raise UserError(f"{folder}: the average has not begun yet; it does so after average.start_step")
            self._copies = [index for index, step in enumerate(updates.tolist()) if step] if updates.ndim else []

    def tensors(self) -> dict[str, str]:
        """The weights, described."""
        return {name: described(entry_of(self.metadata, name).size) for name in self.names}

    def read(self, name: str) -> Tensor:
        """A weight, or its average, in the weight's type."""
        dtype = entry_of(self.metadata, name).properties.dtype
        stem = name.removeprefix(MODEL)
        names = [f"{AVERAGE}{index}.{stem}" for index in self._copies] or [AVERAGE + stem]
        if not self._has_average or names[0] not in self.metadata.state_dict_metadata:
            names = [name]
        return mean_of([read_tensor(self.folder, self.metadata, each) for each in names], dtype)


def _means(sources: Sequence[_Source], progress: Progress) -> Iterator[tuple[str, Tensor]]:
    names = sources[-1].names
    entries = [entry_of(sources[-1].metadata, name) for name in names]
    count = Counter(progress, sum(n_bytes(entry.size, entry.properties.dtype) for entry in entries))
    for name in names:
        yield name, count(_mean(sources, name))


def _mean(sources: Sequence[_Source], name: str) -> Tensor:
    last = sources[-1].read(name)
    if len(sources) == 1 or not last.is_floating_point():
        return last
    total = last.double()
    for source in sources[:-1]:
        total += source.read(name).double()
    return (total / len(sources)).to(last.dtype)
