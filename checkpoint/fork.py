"""Begins another run's checkpoints with a checkpoint of a run, sharing its files.

The new checkpoint has files of its own, hard links where the file system has them, so that either run may remove its
checkpoints without a loss to the other. The manifest and the trainer's state are new files; all others are shared.
"""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from checkpoint.manifest import TRAINER_NAME, Manifest, Origin, RunChange, config_hash, step_folder
from checkpoint.storage import FolderStorage, commit


def fork_checkpoint(
    source: Path,
    manifest: Manifest,
    root: Path,
    config: dict[str, Any],
    changes: list[str],
    trainer_state: Mapping[str, Any],
) -> Path:
    """Commit a checkpoint that a run with another config resumes from; returns its folder.

    Args:
        source, manifest: the checkpoint.
        root: the new run's `checkpoints/`; created if missing.
        config: of the new run, as JSON-able tables.
        changes: run keys that differ, a line each.
        trainer_state: of the new run.

    The caller keeps the checkpoint from being removed.

    Raises:
        OSError: the disk refuses.
    """
    checkpoint = step_folder(root, manifest.step)
    root.mkdir(parents=True, exist_ok=True)
    storage = FolderStorage()
    draft = replace(
        manifest,
        config=config,
        config_hash=config_hash(config),
        run_id=uuid4().hex,
        parent=Origin(manifest.run_id, manifest.step),
        run_changes=[*manifest.run_changes, *([RunChange(manifest.step, changes)] if changes else [])],
        times_gone_back=0,
    )
    files = {name: entry for name, entry in manifest.files.items() if name != TRAINER_NAME}
    unfinished = storage.begin(checkpoint)
    for name in files:
        _share(source / name, unfinished / name)
    commit(storage, unfinished, checkpoint, draft, files, json.dumps(trainer_state))
    return checkpoint


def _share(source: Path, target: Path) -> None:
    """Link a file, or copy it if the two are on file systems that can't be linked."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
        with target.open("rb") as copied:
            os.fsync(copied.fileno())
