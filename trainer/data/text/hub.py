"""Datasets of the Hugging Face hub, `hub:NAME[:CONFIG][@REVISION][#SPLIT]`, read by the package `datasets`.

A dataset can change under its name, so it is pinned to a commit before it is read. Without a split, `train` is read.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from configs.errors import OutageError, UserError
from configs.files import exists
from trainer.data.text.inputs import HUB, import_package

_COMMIT = re.compile("[0-9a-f]{40}")


@dataclass(frozen=True)
class _Dataset:
    """The parts of a dataset's name; "" for a missing one."""

    name: str
    config: str
    revision: str
    split: str

    @classmethod
    def parse(cls, text: str) -> "_Dataset":
        text, _, split = text.removeprefix(HUB).partition("#")
        text, _, revision = text.partition("@")
        name, _, config = text.partition(":")
        return cls(name, config, revision, split)

    def __str__(self) -> str:
        parts = ((":", self.config), ("@", self.revision), ("#", self.split))
        return HUB + self.name + "".join(mark + part for mark, part in parts if part)

    @property
    def is_pinned(self) -> bool:
        return bool(_COMMIT.fullmatch(self.revision))


def pin(input: str, before: str | None = None) -> str:
    """Pin a hub dataset, which can change under its name, to the commit at which it is read.

    `hub:NAME@REVISION` (a branch or tag; by default the main branch) becomes `hub:NAME@COMMIT`: the commit of `before`,
    if that is the same dataset, pinned in an earlier launch, and otherwise the revision's current commit. A commit, and
    an input that is not a hub dataset, stay unchanged.

    Raises:
        UserError: the hub has no such dataset or revision, or does not answer.
    """
    if not input.startswith(HUB):
        return input
    dataset = _Dataset.parse(input)
    if exists(dataset.name) or dataset.is_pinned:
        return input
    earlier = _Dataset.parse(before) if before and before.startswith(HUB) else None
    if earlier and earlier.is_pinned and replace(earlier, revision=dataset.revision) == dataset:
        return str(earlier)
    return str(replace(dataset, revision=_commit(dataset.name, dataset.revision)))


def shards(input: str) -> int:
    """Number of files that a pinned dataset is divided into.

    Raises:
        UserError: the hub has no such dataset, or does not answer.
    """
    return _open(input).num_shards


def rows(input: str, shard: int) -> Iterator[dict[str, Any]]:
    """The rows of a shard, in order.

    Raises:
        UserError: they can't be read.
    """
    dataset = _open(input)
    try:
        yield from dataset.shard(num_shards=dataset.num_shards, index=shard)
    except Exception as error:
        raise _error(input, "read", error) from None


def _open(input: str) -> Any:
    dataset = _Dataset.parse(input)
    datasets = import_package("datasets", input)
    try:
        return datasets.load_dataset(
            dataset.name,
            dataset.config or None,
            split=dataset.split or "train",
            streaming=True,
            revision=dataset.revision or None,
        )
    except Exception as error:
        raise _error(input, "open", error) from None


@cache  # all of one launch is read at one commit
def _commit(name: str, revision: str) -> str:
    import_package("datasets", f"{HUB}{name}")  # it brings the other, and is what to install
    hub = import_package("huggingface_hub", f"{HUB}{name}")
    try:
        return hub.HfApi().dataset_info(name, revision=revision or None).sha
    except Exception as error:
        raise _error(f"{HUB}{name}", "open", error) from None


def _error(input: str, what: str, error: Exception) -> UserError:
    """One message for errors of the network, of the hub and of a dataset's own files, which have a dozen types."""
    kind = OutageError if isinstance(error, ConnectionError | TimeoutError) else UserError
    return kind(f"{input}: cannot {what} the dataset ({type(error).__name__}: {error})")
