"""The seals of manifests, by which each checkpoint records the one that it continues (see `checkpoint.manifest`)."""

from pathlib import Path

from checkpoint.manifest import Origin, read_manifest, sealed_text, step_folder
from configs.errors import UserError
from configs.untrusted import parse_json


def seal_of(folder: Path) -> str:
    """The seal of a checkpoint's manifest.

    Raises:
        Damaged: the manifest can't be read, or has changed since it was written.
    """
    return parse_json(sealed_text(folder))["seal"]


def seal_of_parent(root: Path, parent: Origin | None) -> str:
    """The seal of the checkpoint in `root` that another one continues; "" if it is not there."""
    if parent is None:
        return ""
    folder = step_folder(root, parent.step)
    try:
        return seal_of(folder) if read_manifest(folder).run_id == parent.run_id else ""
    except UserError:
        return ""
