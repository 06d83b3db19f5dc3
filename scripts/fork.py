"""Begin another run at a checkpoint of a run: scripts/fork.py RUN [--at STEP] [--table.key VALUE ...]

The new run goes on from there with the keys that you give, and with everything else as RUN has it: weights, optimizer
state, learning rate, position in the data. `--without SOURCE` leaves a source of data out; data.sources may also have
other weights and further sources. Each source goes on where RUN has left it, so no sample of an epoch is read twice or
left out. What differs from RUN is printed. The new folder shares the checkpoint's files with RUN, and neither needs the
other. Nothing is trained yet: `keel train` with the new folder's config.toml does that.
"""

import argparse
import os
import shlex
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

if not __package__:  # run as a file
    import keel  # noqa: F401 - Keel's packages come first

from checkpoint.bucket_storage import FORKED, put_as_saves_do, with_tensors
from checkpoint.export.output import unfinished_folder
from checkpoint.find import find_checkpoint, keep_tokenizer, require_run, tokenizer_of
from checkpoint.lock import Gone, ReadLock
from checkpoint.manifest import (
    MANIFEST_NAME,
    Manifest,
    read_manifest,
    read_trainer_state,
    step_folder,
    steps_in,
)
from configs.errors import ConfigError, UserError, listed
from configs.files import exists, is_file, write_atomically
from configs.load import LoadedConfig, load
from configs.places import COPIES, is_url
from configs.reading.keys import dotted, key_path
from configs.reading.overrides import split_flags
from configs.reading.toml_text import value_text
from configs.run_stages import later_diff, require_counted, stage_of
from configs.schema import ParameterGroup
from configs.table import with_keys
from scripts.command import (
    end,
    folder_for,
    parsed,
    parser_of,
    place,
    place_argument,
    positive,
    refuse_keys,
    run_command,
)
from trainer.report.console import Console
from trainer.report.metrics import METRICS_NAME, cut_back
from trainer.report.units import count

_OF_THE_FORK = {"checkpoint.load": "latest", "checkpoint.go_back": "0", "job.allow_run_change": "false"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = _parser()
    options, overrides = parsed(parser, arguments)
    if options.at is not None and options.at_tokens is not None:
        parser.error("--at and --at-tokens name two places; leave one out")
    return run_command(lambda console: _fork(options, overrides, console), "stopped; nothing was written")


def _fork(options: argparse.Namespace, overrides: Sequence[str], console: Console) -> None:
    from trainer.teacher import teacher_seal

    refuse_keys(overrides, ["job.output_dir", "job.name"], "--output FOLDER names the new run, and its folder")
    refuse_keys(overrides, _OF_THE_FORK, "a fork sets it itself; leave it out")
    run: Path = options.run
    output: str = options.output or str(_beside(run))
    require_run(run)
    if not is_url(output) and exists(output):
        raise UserError(f"{output} exists; name another folder with --output")
    checkpoint = _checkpoint(run, options.at, options.at_tokens)
    with ReadLock(checkpoint) as lock:  # a run that trains would remove it meanwhile
        manifest = read_manifest(checkpoint)
        job = _job_of(run, output, options.without, overrides, manifest.step)
        config = job.config.model_dump(mode="json")
        changes = later_diff(manifest.config, config, manifest.step)
        teacher = teacher_seal(job.config)
        if teacher != manifest.teacher:
            changes.append(f"checkpoint of distillation.teacher: {manifest.teacher} -> {teacher}")
        require_counted(manifest.config, config, manifest.step, manifest.tokens)
        _require_fitting(checkpoint, manifest, job)
        saved = read_trainer_state(checkpoint)
        position = _position(saved, manifest, job, tokenizer_of(checkpoint))
        inside = f"checkpoints/step-{manifest.step:08d}"
        with (
            folder_for(output, f"{inside}/{FORKED}/{MANIFEST_NAME}", console, put_as_saves_do) as folder,
            unfinished_folder(folder) as unfinished,
        ):
            begun = replace(manifest, teacher=teacher)
            _write(unfinished, run, checkpoint, begun, job, changes, {**saved, "data": position})
            if is_url(output):
                _move_into(unfinished / inside, FORKED)
            lock.require_there()
            unfinished.rename(folder)
    console.line(f"{output} begins at step {manifest.step} of {run} ({count(manifest.tokens)} tokens)")
    for line in changes or ["nothing of what is learned differs"]:
        console.line(f"  {line}")
    start = position.get("start")
    if start and start["sample"] == position["next_sample"]:
        read = ", ".join(f"{name} after {n:,}" for name, n in start["read"].items())
        console.line(
            f"the samples differ from number {start['sample']:,} on, the first of step {manifest.step + 1}; "
            f"each source goes on where it was left: {read} sequences"
        )
    for warning in job.warnings:
        console.warning(warning)
    command = shlex.join(["keel", "train", str(place(output) / "config.toml"), "--ranks", "N"])
    console.line(f"to train it: {command}")


def _beside(run: Path) -> Path:
    """The folder of a run's fork if none is named; "." and ".." have no name of their own."""
    named = Path(os.path.abspath(run)) if run.name in ("", "..") else run
    return (Path("runs") if COPIES in run.parents else named.parent) / f"{named.name}-fork"


def _move_into(folder: Path, name: str) -> None:
    """Move the files of a folder into a new one in it."""
    files = list(folder.iterdir())
    (folder / name).mkdir()
    for file in files:
        file.rename(folder / name / file.name)


def _checkpoint(run: Path, step: int | None, tokens: int | None) -> Path:
    """The checkpoint to begin at: of a step, or the newest with at most so many tokens, or the newest."""
    if tokens is None:
        return find_checkpoint(run, step)
    root = run / "checkpoints"
    found: dict[int, int] = {}
    for step in steps_in(root):
        with suppress(Gone), ReadLock(step_folder(root, step)):
            found[step] = read_manifest(step_folder(root, step)).tokens
    fitting = [step for step, seen in found.items() if seen <= tokens]
    if not fitting:
        had = listed([f"{count(seen)} (step {step})" for step, seen in found.items()], ", ") or "no checkpoint"
        raise UserError(f"{run} has no checkpoint of at most {tokens:,} tokens; it has {had}")
    return step_folder(root, fitting[-1])


def _job_of(run: Path, output: str, without: Sequence[str], overrides: Sequence[str], step: int) -> LoadedConfig:
    """The new run's job, which begins after `step` steps.

    Raises:
        ConfigError: a key is wrong or has no effect, or a source that is to be left out is not there.
    """
    file = str(run / "config.toml")
    own = [f"--{key}={value}" for key, value in _OF_THE_FORK.items()]
    words = [*overrides, *own, "--job.output_dir", output, "--job.name", Path(output).name]
    job = load(file, words, is_stored=True)
    _require_effect(overrides, job, step)
    return load(file, [*words, *_words_without(without, run, job, step)], is_stored=True) if without else job


def _require_effect(overrides: Sequence[str], job: LoadedConfig, step: int) -> None:
    """Raise ConfigError if a stage that has begun sets what the command line sets for the stages before it."""
    present = stage_of(job.stages, step + 1).layers
    for flag, _ in split_flags(overrides):
        path = key_path(flag.removeprefix("--"))
        is_of_all = path[0] != "stages" and flag in job.layers.origins.values()
        if is_of_all and flag not in present.origins.values():
            where = present.where(path)
            table = next(stage.border.table for stage in job.stages if stage.layers.where(path) == where)
            raise ConfigError(
                f"{flag}: without effect from step {step + 1:,} on, where a stage sets it ({where}); set it in that "
                f"stage: --stages.{table}.{dotted(path)}"
            )


def _words_without(names: Sequence[str], run: Path, job: LoadedConfig, step: int) -> list[str]:
    """The words that leave sources out of the stage that step `step` + 1 belongs to, and of all later ones."""
    lists = {"data.sources": job.stages[0]}
    for stage in job.later_stages:
        if "sources" in (job.layers.values["stages"][stage.border.table].get("data") or {}):
            lists.setdefault(f"stages.{stage.border.table}.data.sources", stage)
    present = [key for key, stage in lists.items() if stage.border.after <= step][-1]
    sources = {
        key: {source.name: source for source in stage.config.data.sources}
        for key, stage in lists.items()
        if key == present or stage.border.after > step
    }
    there = dict.fromkeys(name for each in sources.values() for name in each)
    for name in names:
        if name not in there:
            raise ConfigError(f"--without {name}: {run} has no such source of data; it has {', '.join(there)}")
    words = []
    for key, each in sources.items():
        kept = [source.model_dump(exclude_none=True) for name, source in each.items() if name not in names]
        if not kept:
            raise ConfigError(f"--without {' '.join(names)}: no source of data is left; add others with --{key}")
        words += [f"--{key}", value_text(kept)] if len(kept) < len(each) else []
    return words


def _require_fitting(checkpoint: Path, manifest: Manifest, job: LoadedConfig) -> None:
    """Raise ConfigError if the new run's model or optimizer has other tensors than the checkpoint."""
    from checkpoint.compare import shape_differences
    from checkpoint.index import metadata_of, read_index
    from trainer.planning.skeleton import skeleton
    from trainer.planning.states import always_frozen

    optimizer = job.config.optimizer
    rule = manifest.value("optimizer", "name", str)
    dtype = manifest.value("training", "dtype", str)
    rounding = manifest.value("optimizer", "rounding", str) or "nearest"
    has_row_averages = manifest.value("optimizer", "neuron_beta", float) is not None
    remedy = f"to start another run from its weights, set checkpoint.init_from = {value_text(str(checkpoint))} in a job"
    if rule != optimizer.name:
        raise job.error(
            "optimizer.name",
            f"the checkpoint has the state of {rule}, which is of no use to {optimizer.name}; {remedy}",
        )
    if dtype != job.config.training.dtype:
        raise job.error("training.dtype", f"the checkpoint has weights and state in {dtype}; {remedy}")
    if rule == "muon" and rounding != optimizer.rounding:
        raise job.error(
            "optimizer.rounding",
            f"the checkpoint has muon's state with {value_text(rounding)}, which has other tensors; {remedy}",
        )
    if rule == "muon" and has_row_averages != (optimizer.neuron_beta is not None):
        what = "with" if has_row_averages else "without"
        raise job.error("optimizer.neuron_beta", f"the checkpoint has muon's state {what} averages of rows; {remedy}")
    metadata = metadata_of(read_index(checkpoint), checkpoint)
    model = skeleton(job.config.model)
    shapes = {f"model.{name}": shape for name, shape in model.saved.items()}
    if differences := shape_differences(metadata, shapes, model.balance):
        raise ConfigError(
            f"{checkpoint} is of another model; {len(differences)} tensors differ:\n  {listed(differences)}\n"
            "Change [model] back"
        )
    groups = [ParameterGroup.model_construct(**each) for each in manifest.value("optimizer", "groups", list) or []]
    before = with_keys(job.config, optimizer={"groups": groups})
    if others := sorted(always_frozen(before, model) ^ always_frozen(job.config, model)):
        raise job.error(
            "optimizer.groups",
            "the checkpoint has state of the parameters that it trained alone, and other ones are frozen now "
            f"({listed(others, ', ')}); {remedy}",
        )


def _position(saved: dict[str, Any], manifest: Manifest, job: LoadedConfig, tokenizer: Path | None) -> dict[str, Any]:
    """Where the new run reads on; `tokenizer` is the run's, for a job whose path leads nowhere from this folder."""
    from trainer.data.fork import forked_position
    from trainer.guards.saved_state import check_saved_state

    check_saved_state(saved)
    config = stage_of(job.stages, manifest.step + 1).config
    path = config.tokenizer.path
    if tokenizer and path and not (is_url(path) or exists(path)):
        config = with_keys(config, tokenizer={"path": str(tokenizer)})
    return forked_position(saved["data"], manifest.in_effect, config)


def _write(
    folder: Path,
    run: Path,
    checkpoint: Path,
    manifest: Manifest,
    job: LoadedConfig,
    changes: list[str],
    trainer_state: dict[str, Any],
) -> None:
    """Write the run folder: its checkpoint, its job file, the tokenizer, and the metrics of the steps before."""
    from checkpoint.fork import fork_checkpoint

    config = job.config.model_dump(mode="json")
    fork_checkpoint(with_tensors(checkpoint), manifest, folder / "checkpoints", config, changes, trainer_state)
    write_atomically(folder / "config.toml", [job.to_toml()])
    tokenizer = tokenizer_of(checkpoint)
    if tokenizer and is_file(tokenizer):
        keep_tokenizer(tokenizer, folder)
    if is_file(run / METRICS_NAME):
        shutil.copyfile(run / METRICS_NAME, folder / METRICS_NAME)
        cut_back(folder / METRICS_NAME, manifest.step)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("run", type=place_argument, metavar="RUN", help="run folder")
    add("--at", type=positive, metavar="STEP", help="step of one of its checkpoints (default: the newest)")
    add("--at-tokens", type=positive, metavar="TOKENS", help="instead: the newest checkpoint of at most so many tokens")
    add("--output", metavar="FOLDER", help="folder of the new run, or s3://BUCKET/NAME (default: RUN-fork)")
    add("--without", action="append", default=[], metavar="SOURCE", help="leave out a source of data; may be repeated")
    return parser


if __name__ == "__main__":
    end(main)
