"""The example of docs/evaluation.md: Optuna searches, and Keel trains."""

import subprocess
import sys

import pytest

from configs.load import load
from tests.end_to_end.launch import ENVIRONMENT, ROOT, TIMEOUT_SECONDS, TINY, records, status

pytestmark = pytest.mark.slow

JOB = (
    '--validation.sources=[{name = "held out", kind = "synthetic"}]',
    *("--validation.interval", "5", "--metrics.tensorboard", "false"),
)


@pytest.fixture
def optuna():
    """The package, which the example needs and Keel does not."""
    return pytest.importorskip("optuna")


def search(optuna, folder, *words):
    command = [sys.executable, str(ROOT / "scripts" / "examples" / "optuna_search.py"), str(TINY), *words, *JOB]
    done = subprocess.run(
        command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, optuna.load_study(study_name="search", storage=f"sqlite:///{folder}/runs/search/study.db")


def enqueue(optuna, folder, *rates):
    """Make the study, if there is none, and say which values it tries next."""
    (folder / "runs" / "search").mkdir(parents=True, exist_ok=True)
    storage = f"sqlite:///{folder}/runs/search/study.db"
    study = optuna.create_study(study_name="search", storage=storage, load_if_exists=True)
    for lr in rates:
        study.enqueue_trial({"optimizer.lr": lr, "optimizer.weight_decay": 0.1})


def test_a_search_with_optuna(optuna, tmp_path):
    """Two trials; then one that is worse from its first validation on, which is stopped, and has saved."""
    enqueue(optuna, tmp_path, 1e-4, 2e-4)
    out, study = search(optuna, tmp_path, "--trials", "2")
    for trial, lr in zip(study.trials, (1e-4, 2e-4), strict=True):
        run = tmp_path / "runs" / "search" / str(trial.number)
        losses = {record["step"]: record["validation_loss"] for record in records(run) if "validation_loss" in record}
        assert trial.intermediate_values == losses
        assert list(losses) == [5, 10, 15, 20]
        assert trial.value == losses[20]
        assert status(run)["state"] == "done"
        assert load(str(run / "config.toml")).config.optimizer.lr == lr
    assert f"best: {study.best_params}" in out
    enqueue(optuna, tmp_path, 3e-2)
    _, study = search(optuna, tmp_path, "--trials", "1", "--training.steps", "100000")
    assert study.trials[2].state == optuna.trial.TrialState.PRUNED
    run = tmp_path / "runs" / "search" / "2"
    assert status(run)["state"] == "preempted"
    assert (run / "checkpoints" / f"step-{status(run)['step']:08d}").is_dir()
