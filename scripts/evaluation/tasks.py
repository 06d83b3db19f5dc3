"""Runs tasks of lm-eval (the extra `evaluation`) on a model of Keel."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.errors import KeelError, UserError, listed
from configs.files import is_folder, whole
from trainer.report.evaluations import Scores
from trainer.report.sinks.choose import require_package

if TYPE_CHECKING:
    from scripts.sampling.load import Trained


@dataclass(frozen=True)
class Tasks:
    """What is to be run."""

    names: Sequence[str]
    """Tasks, or groups of them."""
    folder: Path | None = None
    """Further tasks, in lm-eval's YAML format."""
    examples: int | None = None
    """First examples of each task to use; None: all."""
    num_fewshot: int | None = None
    """Solved examples in each prompt; None: the task's own."""
    batch_size: int = 16
    """Sequences computed at once."""


def evaluate(trained: "Trained", tasks: Tasks) -> Scores:
    """Run tasks on a model.

    Raises:
        UserError: a task is unknown, or lm-eval can't run it (no network, missing data).
    """
    manager = find_tasks(tasks)
    from lm_eval import evaluator

    from scripts.evaluation.lm import KeelLM

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    if hasattr(evaluator, "get_git_commit_hash"):  # it complains where there is no repository
        evaluator.get_git_commit_hash = lambda: None
    try:
        results = evaluator.simple_evaluate(
            KeelLM(trained, tasks.batch_size),
            tasks=[*tasks.names],
            num_fewshot=tasks.num_fewshot,
            limit=tasks.examples,
            task_manager=manager,
            log_samples=False,
        )
    except KeelError:
        raise
    except Exception as error:  # of lm-eval, datasets, a task's own code: without a common base
        raise UserError(f"lm-eval can't run {', '.join(tasks.names)}: {type(error).__name__}: {error}") from error
    assert results is not None  # this process has lm-eval's rank 0
    return {task: _numbers(found) for task, found in results["results"].items()}


def find_tasks(tasks: Tasks) -> Any:
    """lm-eval's TaskManager, which knows all of the tasks.

    Raises:
        UserError: lm-eval is not installed, or a task is unknown.
    """
    require_package("lm_eval", "an evaluation", "lm-eval")
    if tasks.folder and not is_folder(tasks.folder):
        raise UserError(f"--task-folder is {whole(tasks.folder)}: no such folder")
    from lm_eval.tasks import TaskManager

    folder = tasks.folder and str(tasks.folder)
    manager = TaskManager(include_path=folder, include_defaults=False)
    if _unknown(tasks, manager):
        manager = TaskManager(include_path=folder)  # reads 15,000 files: ten seconds
    if missing := _unknown(tasks, manager):
        place = f", nor in {folder}" if folder else ""
        own = "" if folder else "; --task-folder FOLDER has your own"
        raise UserError(f"lm-eval has no task {listed(missing, ', ')}{place}; lm-eval ls tasks lists its own{own}")
    return manager


def _unknown(tasks: Tasks, manager: Any) -> list[str]:
    return [name for name in tasks.names if name not in manager.all_tasks]


def _numbers(found: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a task's results, named `acc` instead of `acc,none`; other filters keep their name."""
    return {
        name.removesuffix(",none"): float(value)
        for name, value in found.items()
        if isinstance(value, (int, float)) and "," in name
    }
