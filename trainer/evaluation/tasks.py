"""Runs tasks of lm-eval (the extra `evaluation`) on a model of Keel."""

import logging
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.errors import KeelError, UserError, listed
from configs.files import whole
from configs.schema import Evaluation
from trainer.report.sinks.choose import require_package

if TYPE_CHECKING:
    from trainer.sampling.load import Trained

Scores = dict[str, dict[str, float]]
"""Metrics, such as `acc` and `acc_stderr`, by task and group of tasks."""


def evaluate(trained: "Trained", settings: Evaluation) -> Scores:
    """Run the tasks of `settings` on a model.

    Raises:
        UserError: a task is unknown, or lm-eval can't run it (no network, missing data).
    """
    manager = find_tasks(settings)
    from lm_eval import evaluator

    from trainer.evaluation.lm import KeelLM

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    if hasattr(evaluator, "get_git_commit_hash"):  # it complains where there is no repository
        evaluator.get_git_commit_hash = lambda: None
    try:
        results = evaluator.simple_evaluate(
            KeelLM(trained, settings.batch_size),
            tasks=[*settings.tasks],
            num_fewshot=settings.num_fewshot,
            limit=settings.examples,
            task_manager=manager,
            log_samples=False,
        )
    except KeelError:
        raise
    except Exception as error:  # of lm-eval, datasets, a task's own code: without a common base
        raise UserError(f"lm-eval can't run {', '.join(settings.tasks)}: {type(error).__name__}: {error}") from error
    assert results is not None  # this process has lm-eval's rank 0
    return {task: _numbers(found) for task, found in results["results"].items()}


def find_tasks(settings: Evaluation) -> Any:
    """lm-eval's TaskManager, which knows all tasks of `settings`.

    Raises:
        UserError: lm-eval is not installed, or a task is unknown.
    """
    require_package("lm_eval", "an evaluation", "lm-eval")
    if settings.task_folder and not Path(settings.task_folder).is_dir():
        raise UserError(f"evaluation.task_folder is {whole(settings.task_folder)}: no such folder")
    places = _folders_of_lm_eval() + ([Path(settings.task_folder)] if settings.task_folder else [])
    _require_known(named_nowhere(settings.tasks, places), settings)
    from lm_eval.tasks import TaskManager

    own = TaskManager(include_path=settings.task_folder, include_defaults=False)
    if not _unknown(settings.tasks, own):
        return own
    manager = TaskManager(include_path=settings.task_folder)  # reads 15,000 files: ten seconds
    _require_known(_unknown(settings.tasks, manager), settings)
    return manager


def named_nowhere(tasks: Sequence[str], folders: Sequence[Path]) -> list[str]:
    """The tasks whose names stand in no YAML file of the folders; parsing these files would take ten seconds."""
    left = list(tasks)
    for file in chain.from_iterable(folder.rglob("*.y*ml") for folder in folders):
        if not left:
            break
        content = file.read_bytes()
        left = [task for task in left if task.encode() not in content]
    return left


def _folders_of_lm_eval() -> list[Path]:
    """Where its own tasks are; it is not imported for that."""
    spec = find_spec("lm_eval")
    return [Path(place) / "tasks" for place in (spec and spec.submodule_search_locations) or ()]


def _require_known(missing: Sequence[str], settings: Evaluation) -> None:
    if missing:
        folder = f", nor in {settings.task_folder}" if settings.task_folder else ""
        own = "" if settings.task_folder else "; --task-folder FOLDER has your own"
        raise UserError(f"lm-eval has no task {listed(missing, ', ')}{folder}; lm-eval ls tasks lists its own{own}")


def _unknown(tasks: Sequence[str], manager: Any) -> list[str]:
    return [task for task in tasks if task not in manager.all_tasks]


def _numbers(found: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a task's results, named `acc` instead of `acc,none`; other filters keep their name."""
    return {
        name.removesuffix(",none"): float(value)
        for name, value in found.items()
        if isinstance(value, (int, float)) and "," in name
    }
