"""Inspect, verify, compare and prune checkpoints: scripts/checkpoint.py COMMAND ...

  list FOLDER                  list a run's checkpoints, abandoned lines and interrupted saves
  show CHECKPOINT              describe a checkpoint and its history; --tensors, --config
  verify PATH                  read and hash all files of one checkpoint or all in a folder; exit 1 if one is damaged
  diff A B                     list config keys and tensors that differ; exit 1 if any does
  prune FOLDER --keep-last N   remove checkpoints as [checkpoint] would; --keep-every, --keep-best, --abandoned
  average CHECKPOINT... OUTPUT make a checkpoint of the average that a run has kept, or the mean of several; --last N
  metadata CHECKPOINT OUTPUT   make a folder that torch's own tools open: links to the files, and DCP's .metadata

FOLDER is a run folder or its checkpoints/. CHECKPOINT, A and B are folders such as checkpoints/step-00000100, or run
folders, for their newest. No command runs code from a checkpoint, so checkpoints of unknown origin are safe to inspect.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from math import prod
from pathlib import Path

if not __package__:  # run as a file
    import keel  # noqa: F401 - Keel's packages come first

from checkpoint import manifest as manifests
from checkpoint.bucket_storage import local_copy, put_as_saves_do, taken, with_tensors
from checkpoint.find import find_checkpoint, require_run
from checkpoint.folder import to_be_pruned
from checkpoint.lock import BeingRead, Gone, ReadLock, lock
from checkpoint.manifest import MANIFEST_NAME, Manifest, Origin, damaged, read_manifest, step_folder, steps_in
from checkpoint.storage import FolderStorage
from configs.errors import UserError
from configs.files import exists, is_folder, whole
from configs.layout import named_axes
from configs.places import is_url, standing_for
from configs.reading.keys import flat
from configs.reading.toml_text import table_text
from configs.schema import Checkpoint
from scripts.command import (
    checkpoint_in,
    end,
    folder_argument,
    folder_for,
    parser_of,
    place_argument,
    positive,
    run_command,
)
from trainer.report.console import Console, Row
from trainer.report.metrics import METRICS_NAME, repeated_validations
from trainer.report.units import count, duration, size


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    options = _parser().parse_args(arguments)
    return run_command(lambda console: options.command(options, console), "stopped")


# --------------------------------------------------------------------------- commands


def list_(options: argparse.Namespace, console: Console) -> int:
    """Print a line for each checkpoint, without reading its tensors."""
    root = _root(options.folder)
    if not any(path.name.startswith(("step-", "abandoned-")) for path in root.iterdir()):
        runs = sorted(path.parent.name for path in root.glob("*/checkpoints"))
        raise UserError(f"{root}: no checkpoints here" + (f"; runs in this folder: {', '.join(runs)}" if runs else ""))
    console.line("      step      tokens        size  validation loss  run id    written")
    for folder in _checkpoints(root):
        with suppress(Gone):  # a run that trains has removed it, or gone back
            console.line(_list_line(folder))
    for aside in sorted(root.glob("abandoned-*")):
        steps = ", ".join(map(str, steps_in(aside)))
        console.line(f"{aside.name}: an abandoned line; steps {steps or 'none'}")
    for unfinished in sorted(root.glob(f"step-*{manifests.UNFINISHED}")):
        console.line(f"{unfinished.name}: left by an interrupted save or removal; the next start removes it")
    return 0


def show(options: argparse.Namespace, console: Console) -> int:
    """Describe a checkpoint and its history; of a run folder, the newest."""
    checkpoint = find_checkpoint(options.checkpoint)
    from checkpoint.index import read_metadata
    from checkpoint.tensor_stream import entry_of

    with ReadLock(checkpoint):  # a run that trains would remove it meanwhile
        manifest = read_manifest(checkpoint)
        metadata = read_metadata(checkpoint)
    entries = {name: entry_of(metadata, name) for name in sorted(metadata.state_dict_metadata)}
    parameters = sum(prod(entry.size) for name, entry in entries.items() if name.startswith("model."))
    rows = [*_history(manifest), ("tensors", f"{len(entries)}, with {count(parameters)} parameters of the model")]
    console.table(str(checkpoint), rows)
    files = [(name, f"{size(entry.size):>10}   xxh3 {entry.xxh3}") for name, entry in manifest.files.items()]
    console.table("Files", files)
    if options.tensors:
        described = {name: f"{entry.properties.dtype} {list(entry.size)}" for name, entry in entries.items()}
        console.table("Tensors", [(name, text.removeprefix("torch.")) for name, text in described.items()])
    if options.config:
        console.line("\n" + table_text(manifest.config))
    return 0


def verify(options: argparse.Namespace, console: Console) -> int:
    """Read and hash every file; exit code 1 if one is damaged."""
    is_one = exists(options.path / MANIFEST_NAME)
    folders = [options.path] if is_one else list(_checkpoints(_root(options.path)))
    if not folders:
        raise UserError(f"{whole(options.path)} is not a checkpoint and contains none")
    from checkpoint.verify import check

    n_damaged = 0
    for folder in folders:
        started = time.perf_counter()
        try:
            with ReadLock(folder):  # a run that trains would remove it meanwhile
                manifest = check(with_tensors(folder))
        except UserError as error:
            if not is_one and isinstance(error, Gone):
                console.line(f"{folder}: is no longer there: the run has removed it, or gone back")
                continue
            n_damaged += 1
            console.error(str(error))
            continue
        spent = duration(time.perf_counter() - started)
        console.line(f"{folder}: {_size(manifest)} in {len(manifest.files)} files verified ({spent})")
    return 1 if n_damaged else 0


def diff(options: argparse.Namespace, console: Console) -> int:
    """Print what differs; exit code 1 if anything does. Of a run folder, the newest checkpoint is compared."""
    first = checkpoint_in(options.a, console)
    second = checkpoint_in(options.b, console)
    from checkpoint.compare import compare

    with ReadLock(first), ReadLock(second):  # a run that trains would remove them meanwhile
        facts_a = _facts(read_manifest(first))
        facts_b = _facts(read_manifest(second))
        tensors = [(difference.name, difference.what) for difference in compare(first, second)]
    rows = [
        (key, f"{facts_a.get(key)} -> {facts_b.get(key)}")
        for key in sorted(facts_a.keys() | facts_b.keys())
        if facts_a.get(key) != facts_b.get(key)
    ]
    if rows:
        console.table("Config and history", rows)
    if tensors:
        console.table("Tensors", tensors)
    if not rows and not tensors:
        console.line("no difference")
    return 1 if rows or tensors else 0


def prune(options: argparse.Namespace, console: Console) -> int:
    """Remove checkpoints, if no run is using the folder and the newest checkpoint is undamaged."""
    with _taken(options.folder, console) as (root, storage):
        return _prune(options, root, storage, console)


@contextmanager
def _taken(name: str, console: Console) -> Iterator[tuple[Path, FolderStorage]]:
    """The folder of a run's checkpoints, and where they are; no launch has the run meanwhile."""
    if is_url(name):
        require_run(local_copy(name))
        with taken(name, console.warning) as storage:
            yield standing_for(name) / "checkpoints", storage
        return
    root = _root(Path(name))
    try:
        lock(root.parent, console.warning)
    except OSError as error:
        raise UserError(f"{root.parent} can't be written: {error}") from None
    yield root, FolderStorage()


def _prune(options: argparse.Namespace, root: Path, storage: FolderStorage, console: Console) -> int:
    settings = Checkpoint(keep_last=options.keep_last, keep_every=options.keep_every, keep_best=options.keep_best)
    doomed = to_be_pruned(root, settings, repeated_validations(root.parent / METRICS_NAME))
    if options.abandoned:
        doomed += storage.abandoned(root)
    steps = steps_in(root)
    if doomed and not steps:
        raise UserError(
            f"{root} has checkpoints only in abandoned lines, of which nothing would be left; remove those by hand"
        )
    if doomed and not options.dry_run:
        newest = step_folder(root, steps[-1])
        files = read_manifest(newest).files.items()
        if damages := [damage for name, entry in files if (damage := storage.damage(newest, name, entry))]:
            raise damaged(newest, "; ".join(damages))
    for folder in doomed:
        try:
            if not options.dry_run:
                storage.remove(folder)
        except BeingRead as error:
            console.warning(str(error))
            continue
        except OSError as error:
            raise UserError(f"{folder} can't be removed: {error}") from None
        console.line(f"{folder}: {'would be removed' if options.dry_run else 'removed'}")
    if not doomed:
        console.line("nothing to remove")
    return 0


def average(options: argparse.Namespace, console: Console) -> int:
    """Make a checkpoint with averaged weights: the average that a run has kept (average.interval), or the mean of
    several checkpoints, or of the last of a run (--last N). Export, sampling, evaluation and checkpoint.init_from read
    it."""
    checkpoints = [found for path in options.checkpoint for found in _last(path, options.last)]
    from checkpoint.export.average import average as write_average

    home = options.output if is_url(options.output) else None
    with (
        folder_for(options.output, MANIFEST_NAME, console, put_as_saves_do) as output,
        console.progress(f"Averaging to {options.output}", in_bytes=True) as report,
    ):
        write_average(checkpoints, output, report, home)
    names = ", ".join(str(checkpoint) for checkpoint in checkpoints)
    console.line(f"{options.output}: the {'average in' if len(checkpoints) == 1 else 'mean of'} {names}")
    return 0


def metadata(options: argparse.Namespace, console: Console) -> int:
    """Make a folder that torch's own tools open (dcp.load, dcp_to_torch_save): links to a checkpoint's files of
    tensors, and DCP's index of them, .metadata, which a checkpoint of many ranks does not have."""
    checkpoint = checkpoint_in(options.checkpoint, console)
    from checkpoint.export.torch_index import write_torch_index

    started = time.perf_counter()
    n_parts = write_torch_index(checkpoint, options.output)
    spent = duration(time.perf_counter() - started)
    console.line(f"{options.output}: DCP's index of {n_parts:,} parts in {checkpoint} ({spent})")
    return 0


# --------------------------------------------------------------------------- helpers


def _root(folder: Path) -> Path:
    """Find the folder of the checkpoints: `folder` itself, or its checkpoints/.

    Raises:
        UserError: there is none.
    """
    root = folder / "checkpoints" if is_folder(folder / "checkpoints") else folder
    if not is_folder(root):
        raise UserError(f"{whole(folder)}: {'a file, not a folder' if exists(folder) else 'no such folder'}")
    return root


def _last(folder: Path, n: int | None) -> list[Path]:
    """The newest `n` checkpoints of a run, oldest first; without a number, the one that `folder` names.

    Raises:
        UserError: there are not as many.
    """
    if n is None:
        return [with_tensors(find_checkpoint(folder))]
    root = _root(folder)
    found = [with_tensors(folder) for folder in list(_checkpoints(root))[-n:]]
    if len(found) < n:
        raise UserError(f"--last {n}: {root} has only {len(found)}")
    return found


def _checkpoints(root: Path) -> Iterator[Path]:
    return (step_folder(root, step) for step in steps_in(root))


def _list_line(folder: Path) -> str:
    try:
        with ReadLock(folder):
            manifest = read_manifest(folder)
            written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime((folder / MANIFEST_NAME).stat().st_mtime))
    except Gone:
        raise
    except UserError as error:
        return f"{folder.name}: {error}"
    loss = "" if manifest.validation_loss is None else f"{manifest.validation_loss:.4f}"
    numbers = f"{manifest.step:>10}  {count(manifest.tokens):>10}  {_size(manifest):>10}  {loss:>15}"
    return f"{numbers}  {manifest.run_id[:8]}  {written}"


def _history(manifest: Manifest) -> list[Row]:
    changes = [f"after step {change.step}: {'; '.join(change.changes)}" for change in manifest.run_changes]
    rows = [
        ("step", f"{manifest.step:,}"),
        ("tokens", f"{manifest.tokens:,}"),
        ("size", _size(manifest)),
        ("line", manifest.run_id),
        ("previous", _origin(manifest.parent) or "none: the first of its run"),
        ("initial weights", _origin(manifest.initialized_from)),
        ("validation loss", "" if manifest.validation_loss is None else str(manifest.validation_loss)),
        ("run keys changed", "\n".join(changes)),
        ("written by", f"torch {manifest.torch_version} on {named_axes(manifest.mesh)}"),
        ("environment", "\n".join(f"{name}: {value}" for name, value in manifest.environment.items())),
        ("config", f"xxh3 {manifest.config_hash}"),
        ("tokenizer", f"xxh3 {manifest.tokenizer_hash}" if manifest.tokenizer_hash else ""),
        ("data", "\n".join(f"{name}: {value}" for name, value in manifest.data_fingerprint.items())),
    ]
    return [(label, text) for label, text in rows if text]


def _origin(origin: Origin | None) -> str:
    return f"step {origin.step} of {origin.run_id}" if origin else ""


def _size(manifest: Manifest) -> str:
    return size(sum(entry.size for entry in manifest.files.values()))


def _facts(manifest: Manifest) -> dict[str, object]:
    """The properties that `diff` compares, by name."""
    facts = {"step": manifest.step, "tokens": manifest.tokens, "tokenizer's hash": manifest.tokenizer_hash}
    data = {f"hash of {name}": value for name, value in manifest.data_fingerprint.items()}
    return facts | data | flat(manifest.config)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__, keeps_lines=True)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, function: object, *paths: str) -> argparse.ArgumentParser:
        child = commands.add_parser(name, description=function.__doc__)
        child.set_defaults(command=function)
        for path in paths:
            child.add_argument(
                path,
                type=str if function is prune else folder_argument if path == "output" else place_argument,
                metavar=path.upper(),
            )
        return child

    command("list", list_, "folder")
    shown = command("show", show, "checkpoint")
    shown.add_argument("--tensors", action="store_true", help="list the name, type and shape of each tensor")
    shown.add_argument("--config", action="store_true", help="print the complete config of its job")
    command("verify", verify, "path")
    command("diff", diff, "a", "b")
    averaged = commands.add_parser("average", description=average.__doc__)
    averaged.set_defaults(command=average)
    averaged.add_argument(
        "checkpoint", type=place_argument, nargs="+", metavar="CHECKPOINT", help="run folders or checkpoints"
    )
    averaged.add_argument("output", metavar="OUTPUT", help="folder to create, or s3://BUCKET/NAME")
    averaged.add_argument("--last", type=positive, metavar="N", help="of each run folder, the newest N checkpoints")
    command("metadata", metadata, "checkpoint", "output")
    pruned = command("prune", prune, "folder")
    pruned.add_argument("--keep-last", type=positive, required=True, metavar="N", help="keep the newest N")
    pruned.add_argument(
        "--keep-every", type=positive, default=0, metavar="N", help="also keep steps that are multiples of N"
    )
    pruned.add_argument(
        "--keep-best", type=positive, default=0, metavar="N", help="also keep the N with the lowest validation loss"
    )
    pruned.add_argument("--abandoned", action="store_true", help="also remove all abandoned lines")
    pruned.add_argument("--dry-run", action="store_true", help="only print what would be removed")
    return parser


if __name__ == "__main__":
    end(main)
