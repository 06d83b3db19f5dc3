"""Run tasks of lm-eval on a trained model: scripts/evaluate.py MODEL --tasks NAME,NAME [--step N]

MODEL is a run folder (its newest checkpoint, or that of --step), a checkpoint saved on any mesh, or a Hugging Face
folder. The results of a run's checkpoint are added to the run's metrics.jsonl and its curves; while the run trains, it
adds them itself.
"""

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a file
    import keel  # noqa: F401 - Keel's packages come first

from checkpoint.find import find_model
from checkpoint.lock import FolderInUse, Gone, ReadLock, lock
from checkpoint.manifest import MANIFEST_NAME, read_manifest, seal_of
from configs.errors import UserError
from configs.files import exists, is_file, write_json
from configs.load import load
from scripts.command import (
    add_computing_arguments,
    check_computing_arguments,
    end,
    not_negative,
    parser_of,
    place_argument,
    positive,
    require_places,
    run_command,
)
from trainer.lifecycle import read_status
from trainer.report.console import Console

_POLL_SECONDS = 0.2
_PATIENCE_SECONDS = 30.0
"""Recording takes another evaluation less; a run that trains may have found no room for its status."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the evaluation; returns the exit code."""
    options = _parser().parse_args(arguments)

    def work(console: Console) -> None:
        require_places({"--json": options.json})
        os.environ.setdefault("TQDM_DISABLE", "1")  # lm-eval's and transformers' bars
        model = find_model(options.model, options.step)  # a wrong path costs no import of torch
        check_computing_arguments(options)
        with ReadLock(model):  # a run that trains would remove it meanwhile
            _evaluate(model, options, console)

    return run_command(work, "stopped")


def _evaluate(model: Path, options: argparse.Namespace, console: Console) -> None:
    from scripts.evaluation.tasks import Tasks, evaluate, find_tasks

    names = options.tasks.split(",")
    tasks = Tasks(names, options.task_folder, options.examples, options.num_fewshot, options.batch_size)
    find_tasks(tasks)  # before minutes go into reading the model
    from scripts.sampling.load import load_trained
    from trainer.report.evaluations import described, write_result
    from trainer.report.metrics import EvaluationMetrics

    seal = _seal_at(model)
    step = None if seal is None else read_manifest(model).step
    trained = load_trained(model, None, options.device, options.dtype, options.tokenizer)
    console.line(f"{trained.folder}: {', '.join(names)}")
    scores = evaluate(trained, tasks)
    name = None if step is not None else f"evaluation of {trained.folder}"
    console.line(described(EvaluationMetrics(step or 0, scores, 0.0), name))
    if options.json:
        write_json(options.json, scores, writer=str(os.getpid()))
    run = _run_of(model)
    if run is None or step is None:
        console.line(f"written to {options.json}" if options.json else "recorded nowhere; --json FILE writes it")
    elif _seal_at(model) != seal:
        raise Gone(f"the result is not recorded: meanwhile {run} has gone back, and {model} is no longer its own")
    else:
        write_result(run, step, scores)
        _record(run, console)


def _seal_at(model: Path) -> str | None:
    """The seal of a checkpoint; None if there is none, as of a Hugging Face folder."""
    return seal_of(model) if exists(model / MANIFEST_NAME) else None


def _run_of(checkpoint: Path) -> Path | None:
    """The run folder of a checkpoint; None if it is in none."""
    root = checkpoint.absolute().parent
    return root.parent if root.name == "checkpoints" and is_file(root.parent / "config.toml") else None


def _record(run: Path, console: Console) -> None:
    """Add the results that are not recorded yet to metrics.jsonl and the curves, unless the run itself will."""
    from trainer.report.evaluations import recorded, unrecorded
    from trainer.report.metrics import METRICS_NAME, MetricsLog, last_step
    from trainer.report.sinks.choose import choose_sinks
    from trainer.report.sinks.worker import Sinks

    config = load(str(run / "config.toml"), is_stored=True).config
    path = run / METRICS_NAME
    try:
        _lock(run, console)
        sinks = Sinks(choose_sinks(config.metrics, run, with_own=False), console.warning)
        path.touch()
        resolved = config.model_dump(mode="json")
        log = MetricsLog(run, console.outages, last_step(path), sinks, config.job.name, resolved)
    except FolderInUse:
        console.line("the run is training, and records the result at its next checkpoint")
        return
    except OSError as error:
        raise UserError(f"{error.filename or run} can't be written: {error.strerror}") from None
    for result in unrecorded(run, recorded(run)):
        log.write(result)
    log.close()
    console.line(f"recorded in {path}")
    if config.metrics.sink:
        console.line(f"metrics.sink {config.metrics.sink} is not told: Keel runs no code that a run folder names")


def _lock(run: Path, console: Console) -> None:
    """Lock the run's folder, which another evaluation may have for a moment; raises as `lock`."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            return lock(run, console.warning)
        except FolderInUse:
            if read_status(run).get("state") == "running" or time.monotonic() > deadline:
                raise
            time.sleep(_POLL_SECONDS)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("model", type=place_argument, metavar="MODEL", help="run folder, checkpoint or Hugging Face folder")
    add("--tasks", required=True, metavar="NAME,...", help="tasks of lm-eval, or groups of them")
    add("--step", type=int, metavar="N", help="the run's checkpoint of this step (default: the newest)")
    add("--task-folder", type=Path, metavar="FOLDER", help="folder of further tasks, in lm-eval's YAML format")
    add("--examples", type=positive, metavar="N", help="first examples of each task to use (default: all)")
    add("--num-fewshot", type=not_negative, metavar="N", help="solved examples in each prompt (default: the task's)")
    add("--batch-size", type=positive, default=16, metavar="N", help="sequences computed at once (default: 16)")
    add("--json", type=Path, metavar="FILE", help="also write the scores to FILE")
    add_computing_arguments(parser)
    return parser


if __name__ == "__main__":
    end(main)
