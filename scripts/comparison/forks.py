"""The steps that two runs have in common, because one was forked from the other, or both from a third."""

from pathlib import Path

from checkpoint.manifest import read_manifest, step_folder, steps_in


def common_steps(first: Path, second: Path) -> int:
    """The number of steps that two run folders have in common; 0 if their checkpoints record none.

    A fork's first checkpoint names its run and step. Where a folder and its copy part is not recorded.

    Raises:
        UserError: a checkpoint is damaged.
    """
    ours = _runs_of(first)
    theirs = _runs_of(second)
    if not ours or not theirs or list(ours)[-1] == list(theirs)[-1]:
        return 0
    return max((min(ours[run], theirs[run]) for run in ours.keys() & theirs.keys()), default=0)


def _runs_of(folder: Path) -> dict[str, int]:
    """The runs whose steps a run folder has, by id, and up to which step; the newest comes last."""
    steps: dict[str, int] = {}
    root = folder / "checkpoints"
    for step in steps_in(root):
        manifest = read_manifest(step_folder(root, step))
        if manifest.parent:
            steps.setdefault(manifest.parent.run_id, manifest.parent.step)
        steps[manifest.run_id] = step
    return steps
