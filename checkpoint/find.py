"""Finds the model that a path names (a run's newest checkpoint, a checkpoint, a Hugging Face folder) and its tokenizer.

A run folder holds a copy of its tokenizer, `tokenizer.model` or `tokenizer.json`, so that its checkpoints can be used
from any folder and on any machine. After a change that `job.allow_run_change` allowed, earlier checkpoints find theirs
as `tokenizer-HASH.model`. Nothing here imports torch: a path that is wrong is reported at once.
"""

from collections.abc import Iterator
from pathlib import Path

import xxhash

from checkpoint.bucket_storage import with_tensors
from checkpoint.manifest import MANIFEST_NAME, read_manifest, step_folder, steps_in
from configs.errors import UserError, listed
from configs.files import exists, is_file, is_folder, is_link, replacing, whole
from configs.untrusted import read_file

HF_CONFIG_NAME = "config.json"
"""The file that makes a folder a Hugging Face model."""
OPTIMIZER_INDEX_NAME = "index.json"
"""The file that makes a folder an export of an optimizer's state."""
MAX_TOKENIZER_BYTES = 256 << 20
"""Limit on the size of a tokenizer's file; the largest in use have 35 MB."""
_SUFFIXES = (".model", ".json")
"""Suffixes of a SentencePiece model and of a tokenizer.json."""

# --------------------------------------------------------------------------- the model


def find_checkpoint(source: Path, step: int | None = None) -> Path:
    """The checkpoint that `source` names: itself, or a run's checkpoint of `step`, or its newest.

    Of a copy of what is in object storage, its tensors may be placeholders (`with_tensors`).

    Raises:
        UserError: there is none.
    """
    found = _find(source, step, may_be_hf=False)
    if exists(found / HF_CONFIG_NAME) and not exists(found / MANIFEST_NAME):
        raise UserError(f"{whole(source)} is a Hugging Face folder, not a checkpoint; keel import makes one of it")
    return found


def find_model(source: Path, step: int | None = None) -> Path:
    """The checkpoint or Hugging Face folder that `source` names; of a run, the checkpoint of `step`, or the newest.

    Raises:
        UserError: there is none.
    """
    return with_tensors(_find(source, step, may_be_hf=True))


def _find(source: Path, step: int | None, may_be_hf: bool) -> Path:
    is_model = exists(source / MANIFEST_NAME) or exists(source / HF_CONFIG_NAME)
    if is_model and step is not None:
        raise UserError(f"{source} is one checkpoint, so --step {step} has no meaning; leave it out, or name the run")
    if is_model:
        return source
    if not is_folder(source):
        kinds = ", a checkpoint or a Hugging Face folder" if may_be_hf else " or a checkpoint"
        raise UserError(f"{whole(source)}: {_missing(source)}; name a run (runs/debug){kinds}")
    root = source if source.name == "checkpoints" else source / "checkpoints"
    steps = steps_in(root)
    if not steps and not is_folder(root) and not exists(source / "config.toml"):
        kinds = ", nor a run, nor a Hugging Face folder" if may_be_hf else ", nor a run"
        raise UserError(f"{whole(source)} is not a checkpoint (no {MANIFEST_NAME} in it){kinds}{_runs_said(source)}")
    if not steps:
        raise UserError(
            f"{whole(source)} has no checkpoint yet; train the run until it saves one, every checkpoint.interval steps "
            "and at its end"
        )
    if step is not None and step not in steps:
        raise UserError(f"{whole(source)} has no checkpoint of step {step}; it has {listed([*map(str, steps)], ', ')}")
    return step_folder(root, steps[-1] if step is None else step)


def require_run(folder: Path) -> None:
    """Raise UserError if `folder` is not a run's."""
    if not is_folder(folder):
        raise UserError(f"{whole(folder)}: {_missing(folder)}; name a run folder, such as runs/debug")
    if not is_file(folder / "config.toml"):
        raise UserError(f"{whole(folder)} is not a run folder: it has no config.toml{_runs_said(folder)}")


def _missing(folder: Path) -> str:
    """What is wrong with a path that is no folder, for a message."""
    return "not a folder" if exists(folder) else "no such folder"


def _runs_said(folder: Path) -> str:
    """The runs in a folder, for a message; empty if there are none."""
    runs = sorted(str(path.parent) for path in folder.glob("*/config.toml"))
    return f"; the runs in it: {listed(runs, ', ')}" if runs else ""


# --------------------------------------------------------------------------- its tokenizer


def tokenizer_of(checkpoint: Path) -> Path | None:
    """The tokenizer that a checkpoint was trained with: next to it, or in its run folder, or else where its job says.

    None if the job names none. That the file of the job is the same one, or exists, is for the caller to check.

    Raises:
        UserError: the checkpoint is damaged.
    """
    manifest = read_manifest(checkpoint)
    for place in _places(checkpoint) if manifest.tokenizer_hash else ():
        for copy in _copies(place):
            if _hash(copy) == manifest.tokenizer_hash:
                return copy
    path = manifest.value("tokenizer", "path", str)
    return Path(path) if path else None


def kept_tokenizer(run: Path) -> Path | None:
    """The copy of the tokenizer that a run was last launched with; None if its folder has none."""
    return next((path for path in _current(run) if is_file(path)), None)


def keep_tokenizer(tokenizer: Path, run: Path) -> None:
    """Copy a run's tokenizer into its folder; another one that is there is kept under a name with its hash.

    Raises:
        OSError: the tokenizer can't be read, or the disk refuses.
    """
    content = read_file(tokenizer, MAX_TOKENIZER_BYTES)
    digest = xxhash.xxh3_128_hexdigest(content)
    target = run / f"tokenizer{'.json' if tokenizer.suffix == '.json' else '.model'}"
    if not is_link(target) and _hash(target) == digest:
        return
    for before in _current(run):
        if old := _hash(before):
            before.replace(run / f"tokenizer-{old[:8]}{before.suffix}")
    with replacing(target) as file:
        file.write(content)


def _places(checkpoint: Path) -> Iterator[Path]:
    """The folders that may hold a checkpoint's tokenizer: its own, as an import's does, and its run's."""
    yield checkpoint
    yield from (parent.parent for parent in checkpoint.absolute().parents if parent.name == "checkpoints")


def _current(run: Path) -> list[Path]:
    return [run / f"tokenizer{suffix}" for suffix in _SUFFIXES]


def _copies(folder: Path) -> list[Path]:
    return _current(folder) + [path for suffix in _SUFFIXES for path in sorted(folder.glob(f"tokenizer-*{suffix}"))]


def _hash(path: Path) -> str:
    """xxh3_128 of a file's content; empty if it can't be read."""
    try:
        return xxhash.xxh3_128_hexdigest(read_file(path, MAX_TOKENIZER_BYTES))
    except OSError:
        return ""
