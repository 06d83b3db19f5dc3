"""The file that makes a folder a checkpoint: MANIFEST.json, and the only way to create it.

A checkpoint is written as `step-00000100.tmp/`. When all ranks are done, the manifest, which lists every file with its
size and hash, is added; files and folder are synced to the disk, and the folder is renamed to `step-00000100/`. A
rename is atomic, so after a crash at any moment there is either the complete checkpoint under its final name or a
`.tmp` folder that the next start removes. Nothing ever writes to a folder that has its final name.

The hash is xxh3. It finds every accident (a flipped bit, a lost page, a truncated file) at the speed of memory, but it
is not a signature: an attacker can forge it. Protection from a stranger's checkpoint is the task of index. In every
version of the format, the manifest ends in the hash of its own text, its *seal*.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import xxhash
from pydantic import Field, TypeAdapter, ValidationError

from configs.errors import UserError
from configs.files import sync_folder, synced
from configs.untrusted import MAX_JSON_BYTES, parse_json, printable, read_file, require_64_bits

FORMAT_VERSION = 2
MANIFEST_NAME = "MANIFEST.json"
TRAINER_NAME = "trainer.json"
UNFINISHED = ".tmp"
_REMOVED = f".removed{UNFINISHED}"
_MAX_NAME_BYTES = 255


Count = Annotated[int, Field(ge=0, lt=2**63)]
Value = TypeVar("Value")


class Damaged(UserError):
    """The files of a checkpoint are not what was written, so it must not be loaded."""


@dataclass(frozen=True)
class FileEntry:
    """The record of one file of a checkpoint."""

    size: Count
    """Size in bytes."""
    xxh3: str
    """xxh3_128 of the content as written, in hex."""


@dataclass(frozen=True)
class Origin:
    """The checkpoint from which a run resumed."""

    run_id: str
    step: Count


@dataclass(frozen=True)
class RunChange:
    """Run keys that were changed on a resume, with `job.allow_run_change`."""

    step: Count
    """Steps completed before the resume: the changes apply from the next one on."""
    changes: list[str]
    """One line per key: its name, old and new value."""


@dataclass(frozen=True)
class Manifest:
    """MANIFEST.json: what the checkpoint is, where it came from, and which files belong to it."""

    step: Count
    tokens: Count
    """Tokens trained on so far."""
    config: dict[str, Any]
    """The resolved job file."""
    config_hash: str
    """`config_hash(config)`."""
    mesh: dict[str, int]
    """Sizes of the mesh that wrote it; any other mesh can read it."""
    torch_version: str
    run_id: str
    """Identifies the line of checkpoints, each of which continues the previous one."""
    parent: Origin | None
    """The previous checkpoint; None: trained from the initial weights."""
    run_changes: list[RunChange]
    """Every change of run keys up to this checkpoint."""
    files: dict[str, FileEntry]
    """Every file except this one."""
    initialized_from: Origin | None = None
    """The checkpoint whose weights were the initial ones, by `checkpoint.init_from`; None: they were drawn."""
    tokenizer_hash: str | None = None
    """xxh3_128 of the tokenizer's file; None: the run has no tokenizer."""
    data_fingerprint: dict[str, str] = field(default_factory=dict)
    """Hash of the content of each source of `[data]`, by the source's name."""
    validation_loss: float | None = None
    """The loss measured at exactly this step; None: not measured, or not finite."""
    environment: dict[str, str] = field(default_factory=dict)
    """What else decides the bits of the run (Keel's code, the device, threads, ...), by name; empty: not recorded."""
    times_gone_back: Count = 0
    """The `checkpoint.go_back` up to which the run has gone back: what tells a repeated command from a new one."""
    format_version: int = FORMAT_VERSION

    def value(self, table: str, key: str, kind: type[Value]) -> Value | None:
        """The config's value of a key; None if it is missing or of another type, as in a stranger's checkpoint."""
        keys = self.config.get(table)
        found = keys.get(key) if isinstance(keys, dict) else None
        return found if type(found) is kind else None


_MANIFEST = TypeAdapter(Manifest)


def manifest_of(told: Mapping[str, Any]) -> Manifest:
    """The inverse of `dataclasses.asdict`."""
    return _MANIFEST.validate_python(told)


def config_hash(config: dict[str, Any]) -> str:
    """xxh3_128 of the config as canonical JSON, in hex."""
    return xxhash.xxh3_128_hexdigest(json.dumps(config, sort_keys=True, separators=(",", ":")).encode())


def damaged(folder: Path, reason: str) -> Damaged:
    """Create the error for a checkpoint that must not be loaded."""
    remedy = "move it away, or choose another (checkpoint.load, checkpoint.go_back)"
    return Damaged(f"checkpoint {folder} is damaged: {reason}; {remedy}")


def is_plain_name(name: Any) -> bool:
    """Whether `name` is a valid name of an entry directly inside a folder, so that it can't lead out of it."""
    if not isinstance(name, str) or printable(name) != name or name in ("", ".", ".."):
        return False
    return name == os.path.basename(name) and len(name.encode()) <= _MAX_NAME_BYTES


def step_folder(root: Path, step: int) -> Path:
    """The path of the checkpoint of `step`."""
    return root / f"step-{step:08d}"


def steps_in(root: Path) -> list[int]:
    """The steps that have a folder under their final name, in order; none if `root` does not exist."""
    if not root.is_dir():
        return []
    # A link counts even if its target is missing: skipping it would silently resume from an older step.
    folders = (path for path in root.iterdir() if path.is_symlink() or path.is_dir())
    matches = (re.fullmatch(r"step-(\d{8,})", path.name) for path in folders)
    return sorted(int(match[1]) for match in matches if match)


def remove_unfinished(root: Path, log: Callable[[str], None], warn: Callable[[str], None]) -> None:
    """Remove what interrupted saves and removals have left behind, calling `log` with a line for each.

    What can't be removed, such as a mount point or a file that NFS keeps because a process has it open, does no harm,
    and is reported to `warn`.
    """
    for folder in sorted([*root.glob(f"step-*{UNFINISHED}"), *root.glob(f"abandoned-*{UNFINISHED}")]):
        try:
            _remove_tree(_renamed_away(folder))
            log(f"removed {folder}, which an interrupted save, export or removal has left behind")
        except OSError as error:
            warn(f"{folder}, which an interrupted save, export or removal has left behind, can't be removed: {error}")


def _renamed_away(folder: Path) -> Path:
    """Rename what is to be removed, as a whole, so that a launch that still writes there can't commit it."""
    if folder.name.endswith(_REMOVED):
        return folder
    doomed = folder.with_name(folder.name.removesuffix(UNFINISHED) + _REMOVED)
    folder.rename(doomed)
    return doomed


def remove(folder: Path) -> None:
    """Remove a checkpoint, or a folder of them, so that a crash midway leaves no part of it under its final name."""
    doomed = folder.with_name(folder.name + _REMOVED)
    folder.rename(doomed)
    _remove_tree(doomed)


def _remove_tree(folder: Path) -> None:
    """Remove a folder with its content; if it is a link, only the link, since its target is not ours."""
    if folder.is_symlink() or not folder.is_dir():
        folder.unlink()
    else:
        shutil.rmtree(folder)


def begin(folder: Path, mark: str = "") -> Path:
    """Create and return the empty folder in which the checkpoint `folder` is written; its name has the `mark`."""
    unfinished = folder.with_name(folder.name + mark + UNFINISHED)
    if os.path.lexists(unfinished):  # left by a failed save whose cleanup failed as well
        _remove_tree(unfinished)
    unfinished.mkdir()
    return unfinished


def commit(
    unfinished: Path,
    draft: Manifest,
    files: Mapping[str, FileEntry],
    trainer_state: str,
    mark: str = "",
    may_commit: Callable[[], None] = lambda: None,
    note: Callable[[str], None] = lambda line: None,
) -> Manifest:
    """Turn a written folder into a checkpoint.

    A file system may report an error for a rename that it has done (NFS does if it has to repeat the request), or fail
    to sync the parent folder afterwards. The checkpoint counts if it is there.

    Args:
        unfinished: the folder, from `begin`.
        draft: the manifest without its files.
        files: the files that the ranks have written and synced.
        trainer_state: JSON.
        mark: as in `begin`.
        may_commit: called last; its error leaves the folder unfinished.
        note: called with a line for the user if an error came although the checkpoint is there.

    Returns:
        The complete manifest.

    Raises:
        UserError: this rank can't see all the files.
        OSError: a file can't be written, or the folder not renamed.
    """
    _check_visible(unfinished, files)
    manifest = describe(unfinished, draft, files, trainer_state)
    sync_folder(unfinished)
    may_commit()
    folder = unfinished.with_name(unfinished.name.removesuffix(mark + UNFINISHED))
    try:
        unfinished.rename(folder)
        sync_folder(folder.parent)
    except OSError as error:
        if not _is_there(folder, manifest):
            raise
        note(f"checkpoint {folder.name} is complete, although the file system reported: {error}")
    return manifest


def _is_there(folder: Path, manifest: Manifest) -> bool:
    try:
        return read_manifest(folder) == manifest
    except (OSError, UserError):
        return False


def describe(unfinished: Path, draft: Manifest, files: Mapping[str, FileEntry], trainer_state: str) -> Manifest:
    """Write trainer.json and MANIFEST.json; the arguments, the result and the errors are `commit`'s."""
    trainer = trainer_state.encode()
    with synced(unfinished / TRAINER_NAME) as file:
        file.write(trainer)
    entry = FileEntry(len(trainer), xxhash.xxh3_128_hexdigest(trainer))
    manifest = replace(draft, files={**dict(sorted(files.items())), TRAINER_NAME: entry})
    with synced(unfinished / MANIFEST_NAME) as file:
        file.write(sealed(json.dumps(asdict(manifest), indent=1)).encode())
    return manifest


def sealed(text: str) -> str:
    """The text of a JSON object with one more, last entry: `seal`, the hash of everything before it."""
    body = text.removesuffix("\n}")
    return f'{body},\n "seal": "{xxhash.xxh3_128_hexdigest(body.encode())}"\n}}'


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint, and check that exactly its files exist, with their full size.

    Raises:
        Damaged: the folder is not a complete checkpoint.
        UserError: the checkpoint has another format.
    """
    text = sealed_text(folder)
    try:
        version = parse_json(text).get("format_version")  # the seal guarantees an object
    except ValueError as error:
        raise damaged(folder, f"{MANIFEST_NAME} can't be read: {error}") from None
    if isinstance(version, int) and version != FORMAT_VERSION:
        keel = "a newer Keel" if version > FORMAT_VERSION else "the Keel that wrote it"
        raise UserError(f"checkpoint {folder} has format {version}; this Keel reads {FORMAT_VERSION}: use {keel}")
    try:
        manifest = _MANIFEST.validate_json(text, strict=True)
        require_64_bits(manifest.config)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise damaged(folder, f"{MANIFEST_NAME} is not in the form that Keel writes: {place}: {first['msg']}") from None
    except ValueError as error:
        raise damaged(folder, f"{MANIFEST_NAME} can't be read: {error}") from None
    for name in manifest.files:
        if not is_plain_name(name):
            raise damaged(folder, f"{MANIFEST_NAME} names {name!r}, outside of the folder")
    _check_files(folder, manifest)
    return manifest


def read_trainer_state(folder: Path) -> dict[str, Any]:
    """Read the trainer's state in a checkpoint, as JSON.

    Raises:
        Damaged: it can't be read.
    """
    try:
        return parse_json(read_file(folder / TRAINER_NAME, MAX_JSON_BYTES))
    except OSError as error:
        raise damaged(folder, f"{TRAINER_NAME} can't be read: {error.strerror}") from None
    except ValueError as error:
        raise damaged(folder, f"{TRAINER_NAME} can't be read: {error}") from None


def content_damage(folder: Path, name: str, entry: FileEntry) -> str | None:
    """Read a whole file and describe what is wrong with its content; None if nothing is."""
    try:
        with (folder / name).open("rb") as file:
            digest = hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()  # type: ignore[arg-type]
    except OSError as error:
        return f"{name} can't be read: {error.strerror}"
    return None if digest == entry.xxh3 else f"{name} has changed since it was written (its hash differs)"


def seal_of(folder: Path) -> str:
    """The seal of a checkpoint's manifest, which identifies the checkpoint.

    Raises:
        Damaged: the manifest can't be read, or has changed since it was written.
    """
    return parse_json(sealed_text(folder))["seal"]


def sealed_text(folder: Path) -> str:
    """Read MANIFEST.json of the checkpoint in `folder`, and check its seal.

    Raises:
        Damaged: it can't be read, or has changed since it was written.
    """
    try:
        text = read_file(folder / MANIFEST_NAME, MAX_JSON_BYTES).decode()
    except FileNotFoundError:
        raise Damaged(f"{folder} is not a checkpoint (no {MANIFEST_NAME} in it); {_hint(folder)}") from None
    except OSError as error:
        raise damaged(folder, f"{MANIFEST_NAME} can't be read: {error.strerror}") from None
    except ValueError as error:
        raise damaged(folder, f"{MANIFEST_NAME} can't be read: {error}") from None
    body = text.rpartition(',\n "seal": ')[0]
    if not body.startswith("{") or text != sealed(body):
        raise damaged(folder, f"{MANIFEST_NAME} has changed since it was written (its seal does not match)")
    return text


def _hint(folder: Path) -> str:
    """Where a checkpoint is instead: the newest in a run's folder."""
    for root in (folder / "checkpoints", folder):
        if steps := steps_in(root):
            return f"the newest in it is {step_folder(root, steps[-1])}"
    return "a checkpoint is a folder such as checkpoints/step-00000100"


def _check_files(folder: Path, manifest: Manifest) -> None:
    for name, entry in manifest.files.items():
        path = folder / name
        if path.is_symlink() or not path.is_file():
            raise damaged(folder, f"{name} is {'no plain file' if path.is_symlink() or path.exists() else 'missing'}")
        if path.stat().st_size != entry.size:
            raise damaged(folder, f"{name} has {path.stat().st_size} bytes instead of {entry.size}")
    extra = sorted({path.name for path in folder.iterdir()} - manifest.files.keys() - {MANIFEST_NAME})
    if extra:
        raise damaged(folder, f"{', '.join(extra)} is in the folder, but not in {MANIFEST_NAME}")


def _check_visible(folder: Path, files: Mapping[str, FileEntry]) -> None:
    for name in files:
        if not (folder / name).is_file():
            hint = "is the folder on a disk that all nodes share? (job.output_dir)"
            raise UserError(f"{folder / name} was written by another rank, but rank 0 can't see it: {hint}")
