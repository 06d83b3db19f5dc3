"""What makes a folder a checkpoint: MANIFEST.json, and the one way it comes to be there.

A checkpoint is written as `step-00000100.tmp/`. When all ranks are done, the manifest, which lists every file with its
size, is added; files and folder are synced to the disk and the folder is renamed to `step-00000100/`. A rename is
atomic, so at a crash at any moment there is either the whole checkpoint under its final name or a `.tmp` folder that
the next start removes. Nothing ever writes to a folder that has its final name.
"""

import json
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import xxhash
from pydantic import TypeAdapter, ValidationError

from configs.errors import UserError

FORMAT_VERSION = 1
MANIFEST_NAME = "MANIFEST.json"
TRAINER_NAME = "trainer.json"
UNFINISHED = ".tmp"


@dataclass(frozen=True)
class FileEntry:
    """What is known of one file of a checkpoint."""

    size: int
    """Bytes."""


@dataclass(frozen=True)
class Origin:
    """The checkpoint that a run went on from."""

    run_id: str
    step: int


@dataclass(frozen=True)
class RunChange:
    """Run keys that were changed on a resume, by `job.allow_run_change`."""

    step: int
    """The step from which on they count."""
    changes: list[str]
    """One line a key: its name, old and new value."""


@dataclass(frozen=True)
class Manifest:
    """MANIFEST.json: what the checkpoint is, how it came to be, and what belongs to it."""

    step: int
    tokens: int
    """Tokens trained on so far."""
    config: dict[str, Any]
    """The resolved job file."""
    config_hash: str
    """`config_hash(config)`."""
    mesh: dict[str, int]
    """Sizes of the mesh that wrote it; it can be read at any other."""
    torch_version: str
    run_id: str
    """Names the line of checkpoints, each of which goes on from the one before."""
    parent: Origin | None
    """The checkpoint before this one; None: trained from the initial weights."""
    run_changes: list[RunChange]
    """Every change of run keys on the way here."""
    files: dict[str, FileEntry]
    """Every file but this one."""
    format_version: int = FORMAT_VERSION


_MANIFEST = TypeAdapter(Manifest)


def config_hash(config: dict[str, Any]) -> str:
    """xxh3_128 of the config as canonical JSON, in hex."""
    return xxhash.xxh3_128_hexdigest(json.dumps(config, sort_keys=True, separators=(",", ":")).encode())


def damaged(folder: Path, reason: str) -> UserError:
    """The error for a checkpoint that must not be loaded."""
    return UserError(f"checkpoint {folder} is damaged: {reason}; move it away, or choose another by checkpoint.load")


def is_plain_name(name: Any) -> bool:
    """Whether `name` names something right inside a folder, so that it can't lead out of it."""
    return isinstance(name, str) and name == os.path.basename(name) and name not in ("", ".", "..")


def step_folder(root: Path, step: int) -> Path:
    """Where the checkpoint of `step` has its place."""
    return root / f"step-{step:08d}"


def steps_in(root: Path) -> list[int]:
    """Steps that have a folder under their final name, in order."""
    matches = (re.fullmatch(r"step-(\d{8,})", path.name) for path in root.iterdir() if path.is_dir())
    return sorted(int(match[1]) for match in matches if match)


def remove_unfinished(root: Path) -> list[str]:
    """Remove what saves that did not come to their end have left behind; returns the names."""
    leftovers = sorted(root.glob(f"step-*{UNFINISHED}"))
    for folder in leftovers:
        shutil.rmtree(folder)
    return [folder.name for folder in leftovers]


def begin(folder: Path) -> Path:
    """Make the empty folder in which the checkpoint `folder` is written; returns it."""
    unfinished = folder.with_name(folder.name + UNFINISHED)
    unfinished.mkdir()
    return unfinished


def commit(unfinished: Path, draft: Manifest, names: Iterable[str], trainer_state: str) -> Manifest:
    """Turn a written folder into a checkpoint.

    `draft` is the manifest but for its files; `names` are the files that the ranks say they have written, synced;
    `trainer_state` is JSON. Returns the whole manifest.
    Raises: UserError if this rank can't see all the files; OSError if the disk refuses.
    """
    _write_synced(unfinished / TRAINER_NAME, trainer_state)
    manifest = replace(draft, files={name: _entry(unfinished / name) for name in sorted({*names, TRAINER_NAME})})
    _write_synced(unfinished / MANIFEST_NAME, json.dumps(asdict(manifest), indent=1))
    _sync(unfinished)
    unfinished.rename(unfinished.with_suffix(""))
    _sync(unfinished.parent)
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint, all of whose files are there in their full size.

    Raises: UserError for a folder that is no whole checkpoint, or one of a newer format.
    """
    try:
        text = (folder / MANIFEST_NAME).read_text()
        content = json.loads(text)
    except FileNotFoundError:
        raise UserError(f"{folder} is no checkpoint: it has no {MANIFEST_NAME}") from None
    except (OSError, ValueError) as error:
        raise damaged(folder, f"{MANIFEST_NAME} can't be read: {error}") from None
    version = content.get("format_version") if isinstance(content, dict) else None
    if isinstance(version, int) and version > FORMAT_VERSION:
        message = f"checkpoint {folder} has format {version}; this Keel reads up to {FORMAT_VERSION}: take a newer one"
        raise UserError(message)
    try:
        manifest = _MANIFEST.validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise damaged(folder, f"{MANIFEST_NAME} is not of the form that Keel writes: {place}: {first['msg']}") from None
    _check_files(folder, manifest)
    return manifest


def _check_files(folder: Path, manifest: Manifest) -> None:
    for name, entry in manifest.files.items():
        if not is_plain_name(name):
            raise damaged(folder, f"{MANIFEST_NAME} names {name!r}, outside of the folder")
        path = folder / name
        if not path.is_file():
            raise damaged(folder, f"{name} is missing")
        if path.stat().st_size != entry.size:
            raise damaged(folder, f"{name} has {path.stat().st_size} bytes instead of {entry.size}")


def _entry(path: Path) -> FileEntry:
    try:
        return FileEntry(size=path.stat().st_size)
    except FileNotFoundError:
        hint = "is the folder on a disk that all nodes share? (job.output_dir)"
        raise UserError(f"{path} was written by another rank, but rank 0 can't see it: {hint}") from None


def _write_synced(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Make the folder's entries outlast a power cut; data files are synced by who wrote them, folders are not."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
