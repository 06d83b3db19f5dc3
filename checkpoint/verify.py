"""Checks by all ranks together that the files of a checkpoint are still what was written.

Each rank reads its share of the files, so hashing takes as long as reading the checkpoint once, not once per rank.
"""

from collections.abc import Mapping
from heapq import heapreplace
from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata

from checkpoint.index import files_of
from checkpoint.manifest import INDEX_NAME, MANIFEST_NAME, FileEntry, Manifest, content_damage, damaged, read_manifest
from checkpoint.storage import FolderStorage
from parallelisms.ranks import gather, on_each_rank


def content_damages(
    storage: FolderStorage, folder: Path, files: Mapping[str, FileEntry], group: dist.ProcessGroup
) -> list[str]:
    """Look what is wrong with `files` in `folder`, by `FolderStorage.damage`; all ranks of `group` must call it.

    Returns:
        One line for every damaged file, with its name; the same on all ranks.

    Raises:
        OSError: a rank can't look, as in an outage of a bucket. All ranks raise it.
    """
    sizes = {name: entry.size for name, entry in files.items()}
    mine = shares(sizes, dist.get_world_size(group))[dist.get_rank(group)]
    found: list[str] = []

    def look() -> None:
        found.extend(problem for name in mine if (problem := storage.damage(folder, name, files[name])))

    on_each_rank(group, look)
    return sorted(line for problems in gather(found, group) for line in problems)


def check(folder: Path) -> Manifest:
    """Read and check all files of a checkpoint in this process alone; returns its manifest.

    Raises:
        Damaged: files are not as they were written; the message names each of them.
        UserError: the checkpoint has another format.
    """
    manifest = read_manifest(folder)
    found = [content_damage(folder, name, entry) for name, entry in manifest.files.items()]
    if problems := [problem for problem in found if problem]:
        raise damaged(folder, "; ".join(problems))
    return manifest


def check_tensors(folder: Path, manifest: Manifest, metadata: Metadata, *prefixes: str) -> None:
    """Compare every file that says or holds a part of a tensor whose name starts with a prefix with its hash.

    Raises:
        Damaged: a file has changed, or can't be read.
    """
    for name in sorted(files_of(metadata, prefixes)):
        if name not in manifest.files:
            raise damaged(folder, f"{INDEX_NAME} names {name}, which {MANIFEST_NAME} does not")
        if damage := content_damage(folder, name, manifest.files[name]):
            raise damaged(folder, damage)


def shares(sizes: Mapping[str, int], n: int) -> list[list[str]]:
    """The names in `n` lists of about equal total size: the largest first, each to the smallest list."""
    names: list[list[str]] = [[] for _ in range(n)]
    totals = [(0, number) for number in range(n)]  # a heap: the smallest is the first
    for name, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        total, least = totals[0]
        names[least].append(name)
        heapreplace(totals, (total + size, least))
    return names
