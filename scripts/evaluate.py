"""Run tasks of lm-eval on a trained model: scripts/evaluate.py MODEL [--step N] [--tasks NAME,NAME]

MODEL is a run folder (its newest checkpoint, or that of --step), a checkpoint saved on any mesh, or a Hugging Face
folder. The settings of a run's [evaluation] apply unless given, but for its task_folder. A run's results are also added
to its metrics.jsonl and its curves.
"""

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if not __package__:  # run as a file
    import keel  # noqa: F401 - Keel's packages come first

from checkpoint.find import find_model
from configs.errors import UserError
from configs.files import write_atomically
from configs.load import load
from configs.schema import Config, Evaluation
from scripts.command import add_computing_arguments, end, parser_of, positive, require_file, run_command
from trainer.report.console import Console

if TYPE_CHECKING:
    from trainer.sampling.load import Trained


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the evaluation; returns the exit code."""
    options = _parser().parse_args(arguments)

    def work(console: Console) -> None:
        os.environ.setdefault("TQDM_DISABLE", "1")  # lm-eval's and transformers' bars
        find_model(options.model, options.step)  # a wrong path costs no import of torch
        require_file(options.tokenizer, "--tokenizer")
        config = _config_of(options.model)
        settings = _settings(options, config)
        from trainer.evaluation.tasks import evaluate, find_tasks

        find_tasks(settings)  # before minutes go into reading the model
        from trainer.evaluation.results import described, write_result
        from trainer.report.metrics import EvaluationMetrics
        from trainer.sampling.load import load_trained

        trained = load_trained(options.model, options.step, options.device, options.dtype, options.tokenizer)
        step = _step_of(trained)
        console.line(f"{trained.folder}: {', '.join(settings.tasks)}")
        scores = evaluate(trained, settings)
        name = None if step is not None else f"evaluation of {trained.folder}"
        console.line(described(EvaluationMetrics(step or 0, scores, 0.0), name))
        if options.json:
            write_atomically(options.json, [json.dumps(scores, indent=2) + "\n"])
        if config is not None and step is not None:
            write_result(options.model, step, scores)
            _record(options.model, config, console)
        else:
            console.line(f"written to {options.json}" if options.json else "recorded nowhere; --json FILE writes it")

    return run_command(work, "stopped")


def _config_of(model: Path) -> Config | None:
    """The config of a run; None if the folder is a checkpoint or a model."""
    path = model / "config.toml"
    return load(str(path)).config if path.is_file() else None


def _settings(options: argparse.Namespace, config: Config | None) -> Evaluation:
    settings: dict[str, Any] = (config.evaluation if config else Evaluation()).model_dump()
    settings["task_folder"] = options.task_folder  # tasks may run code, which no run folder may name
    given = {
        "tasks": options.tasks.split(",") if options.tasks else None,
        "examples": options.examples,
        "num_fewshot": options.num_fewshot,
        "batch_size": options.batch_size,
    }
    settings |= {key: value for key, value in given.items() if value is not None}
    if not settings["tasks"]:
        raise UserError("no task to run; name some of lm-eval's: --tasks hellaswag,arc_easy")
    return Evaluation.model_validate(settings)


def _step_of(trained: "Trained") -> int | None:
    """The step of a run's checkpoint."""
    from checkpoint.manifest import MANIFEST_NAME, read_manifest

    return read_manifest(trained.folder).step if (trained.folder / MANIFEST_NAME).exists() else None


def _record(run: Path, config: Config, console: Console) -> None:
    """Add the results that are not recorded yet to metrics.jsonl and the curves, unless the run itself will."""
    from checkpoint.lock import FolderInUse, lock
    from trainer.evaluation.results import recorded, unrecorded
    from trainer.report.metrics import METRICS_NAME, MetricsLog, last_step
    from trainer.report.sinks.choose import choose_sinks
    from trainer.report.sinks.worker import Sinks

    path = run / METRICS_NAME
    try:
        lock(run, console.warning)
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


def _natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 0")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("model", type=Path, metavar="MODEL", help="run folder, checkpoint or Hugging Face folder")
    add("--step", type=int, metavar="N", help="the run's checkpoint of this step (default: the newest)")
    add("--tasks", metavar="NAME,...", help="tasks of lm-eval, or groups of them (default: the run's evaluation.tasks)")
    add("--task-folder", metavar="FOLDER", help="folder of further tasks, in lm-eval's YAML format")
    add("--examples", type=positive, metavar="N", help="first examples of each task to use (default: all)")
    add("--num-fewshot", type=_natural, metavar="N", help="solved examples in each prompt (default: the task's own)")
    add("--batch-size", type=positive, metavar="N", help="sequences computed at once (default: 16)")
    add("--json", type=Path, metavar="FILE", help="also write the scores to FILE")
    add_computing_arguments(parser)
    return parser


if __name__ == "__main__":
    end(main)
