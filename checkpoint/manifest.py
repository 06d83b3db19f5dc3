"""The file that makes a folder a checkpoint: MANIFEST.json, which lists every file with its size and hash.

The hash is xxh3. It finds every accident (a flipped bit, a lost page, a truncated file) at the speed of memory, but it
is not a signature: an attacker can forge it. Protection from a stranger's checkpoint is the task of index. In every
version of the format, the manifest ends in the hash of its own text, its *seal*.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

import xxhash
from pydantic import Field, TypeAdapter, ValidationError

from configs.errors import UserError
from configs.files import exists, is_file, is_folder, is_link
from configs.run_stages import in_effect
from configs.untrusted import MAX_JSON_BYTES, first_fault, parse_json, printable, read_file, require_64_bits

FORMAT_VERSION = 3
"""Since 3, each rank has an index of its own (`checkpoint.index`)."""
OLDEST_VERSION = 2
"""The oldest that is read."""
MANIFEST_NAME = "MANIFEST.json"
TRAINER_NAME = "trainer.json"
INDEX_NAME = "index.json"
UNFINISHED = ".tmp"
_MAX_NAME_BYTES = 255


Count = Annotated[int, Field(ge=0, lt=2**63)]
Value = TypeVar("Value")


class Damaged(UserError):
    """The files of a checkpoint are not what was written, so it must not be loaded."""

    reason = ""
    """What is wrong, without the checkpoint's name and the remedy."""
    which = ""
    """The checkpoint and what is wrong, without the remedy."""


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
    """Identifies the lineage of checkpoints, each of which continues the previous one."""
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
    teacher: str | None = None
    """Seal of the checkpoint from which the run learned; None: it learned from the text alone."""
    data_fingerprint: dict[str, str] = field(default_factory=dict)
    """Hash of the content of each source of `[data]`, by the source's name."""
    validation_loss: float | None = None
    """The loss measured at exactly this step; None: not measured, or not finite."""
    environment: dict[str, str] = field(default_factory=dict)
    """What else decides the bits of the run (Keel's code, the device, threads, ...), by name; empty: not recorded."""
    times_gone_back: Count = 0
    """The `checkpoint.go_back` up to which the run has gone back: what tells a repeated command from a new one."""
    format_version: int = FORMAT_VERSION

    @property
    def in_effect(self) -> dict[str, Any]:
        """The keys with which the last step was trained: of a run with stages, the last one's that had begun."""
        return in_effect(self.config, self.step)

    def value(self, table: str, key: str, kind: type[Value]) -> Value | None:
        """A key's value at the last step; None if it is missing or of another type, as in a stranger's checkpoint."""
        keys = self.in_effect.get(table)
        found = keys.get(key) if isinstance(keys, dict) else None
        return found if type(found) is kind else None

    @property
    def rewind_interval(self) -> int:
        """Steps between the checkpoints that a spike of the loss returns to; 0: none does."""
        spikes = self.value("fault", "spikes", dict) or {}
        interval = spikes.get("rewind_interval")
        return interval if spikes.get("action") == "rewind" and type(interval) is int else 0


_MANIFEST = TypeAdapter(Manifest)


def manifest_of(told: Mapping[str, Any]) -> Manifest:
    """The inverse of `dataclasses.asdict`."""
    return _MANIFEST.validate_python(told)


def config_hash(config: dict[str, Any]) -> str:
    """xxh3_128 of the config as canonical JSON, in hex."""
    return xxhash.xxh3_128_hexdigest(json.dumps(config, sort_keys=True, separators=(",", ":")).encode())


def damaged(folder: Path, reason: str) -> Damaged:
    """Create the error for a checkpoint that must not be loaded."""
    keys = "checkpoint.load or checkpoint.go_back of a job, --step or --at of a command"
    which = f"checkpoint {folder} is damaged: {reason}"
    error = Damaged(f"{which}; move it away, or choose another ({keys})")
    error.reason = reason
    error.which = which
    return error


@contextmanager
def readable(folder: Path, name: str) -> Iterator[None]:
    """Raise Damaged if the file `name` of the checkpoint in `folder` can't be read in the block, or says nothing."""
    try:
        yield
    except OSError as error:
        raise damaged(folder, f"{name} can't be read: {error.strerror}") from None
    except ValidationError as error:
        raise damaged(folder, f"{name} can't be read: {first_fault(error)}") from None
    except ValueError as error:
        raise damaged(folder, f"{name} can't be read: {error}") from None


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
    if not is_folder(root):
        return []
    # A link counts even if its target is missing: skipping it would silently resume from an older step.
    folders = (path for path in root.iterdir() if is_link(path) or is_folder(path))
    matches = (re.fullmatch(r"step-(\d{8,})", path.name) for path in folders)
    return sorted(int(match[1]) for match in matches if match)


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
    with readable(folder, MANIFEST_NAME):
        version = parse_json(text).get("format_version")  # the seal guarantees an object
    if isinstance(version, int) and not OLDEST_VERSION <= version <= FORMAT_VERSION:
        keel = "a newer Keel" if version > FORMAT_VERSION else "the Keel that wrote it"
        formats = f"{OLDEST_VERSION} to {FORMAT_VERSION}"
        raise UserError(f"checkpoint {folder} has format {version}; this Keel reads {formats}: use {keel}")
    with readable(folder, MANIFEST_NAME):
        manifest = _MANIFEST.validate_json(text, strict=True)
        require_64_bits(manifest.config)
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
    with readable(folder, TRAINER_NAME):
        return parse_json(read_file(folder / TRAINER_NAME, MAX_JSON_BYTES))


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
    with readable(folder, MANIFEST_NAME):
        try:
            text = read_file(folder / MANIFEST_NAME, MAX_JSON_BYTES).decode()
        except FileNotFoundError:
            raise Damaged(f"{folder} is not a checkpoint (no {MANIFEST_NAME} in it); {_hint(folder)}") from None
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
        if is_link(path) or not is_file(path):
            raise damaged(folder, f"{name} is {'no plain file' if is_link(path) or exists(path) else 'missing'}")
        if path.stat().st_size != entry.size:
            raise damaged(folder, f"{name} has {path.stat().st_size} bytes instead of {entry.size}")
    extra = sorted({path.name for path in folder.iterdir()} - manifest.files.keys() - {MANIFEST_NAME})
    if extra:
        raise damaged(folder, f"{', '.join(extra)} is in the folder, but not in {MANIFEST_NAME}")


def is_fork(root: Path) -> bool:
    """Whether the first checkpoint in `root` continues one of another run, as after `keel fork`."""
    try:
        first = [read_manifest(step_folder(root, step)) for step in steps_in(root)[:1]]
    except UserError:
        return False
    return any(manifest.parent is not None and manifest.parent.run_id != manifest.run_id for manifest in first)
