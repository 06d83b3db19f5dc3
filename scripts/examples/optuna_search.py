"""Search a learning rate and a weight decay with Optuna: scripts/examples/optuna_search.py JOB [--table.key VALUE]

Optuna (`pip install optuna`) chooses the values; Keel trains each trial as a run of its own in runs/search/, under the
same seed, so that trials differ in the values alone. The losses of the validations are reported as they appear in
metrics.jsonl. A trial without prospects is pruned by SIGTERM: it saves, and could be continued. The search itself is
kept in runs/search/study.db, so the same command adds trials to it. Confirm what is found with `keel compare`, over
several seeds: the best of many noisy trials is, in part, the luckiest.
"""

import json
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path

import optuna

FOLDER = Path("runs/search")
KEEL = Path(__file__).resolve().parents[1] / "keel.py"


def main() -> None:
    """Run the search."""
    parser = ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("job", help="job file with [validation]")
    parser.add_argument("--trials", type=int, default=20)
    options, words = parser.parse_known_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    study = optuna.create_study(
        study_name="search",
        storage=f"sqlite:///{FOLDER}/study.db",
        load_if_exists=True,
        direction="minimize",
        sampler=optuna.samplers.TPESampler(seed=0),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=2),
    )
    study.optimize(lambda trial: train(trial, options.job, words), n_trials=options.trials)
    print(f"best: {study.best_params}, loss {study.best_value:.5f}, {FOLDER}/{study.best_trial.number}")


def train(trial: optuna.Trial, job: str, words: list[str]) -> float:
    """Train a trial; returns its last validation loss."""
    lr = trial.suggest_float("optimizer.lr", 1e-4, 3e-2, log=True)
    decay = trial.suggest_float("optimizer.weight_decay", 0.0, 0.3)
    folder = FOLDER / str(trial.number)
    values = ["--optimizer.lr", repr(lr), "--optimizer.weight_decay", repr(decay), "--job.output_dir", str(folder)]
    command = [sys.executable, str(KEEL), "train", job, *words, *values]
    loss = None
    seen = 0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as run:
        while True:
            is_over = run.poll() is not None  # before reading, so that the last lines are read
            found = list(validations(folder / "metrics.jsonl"))
            for step, loss in found[seen:]:
                trial.report(loss, step)
                if not is_over and trial.should_prune():  # at each step, since it looks at the last reported one only
                    run.terminate()
                    run.wait()
                    raise optuna.TrialPruned
            seen = len(found)
            if is_over:
                break
            time.sleep(0.5)
    if run.returncode or loss is None:
        raise RuntimeError(f"{folder} ended with exit code {run.returncode}; see {folder}/run.log")
    return loss


def validations(metrics: Path) -> Iterator[tuple[int, float]]:
    """The steps that were validated, with their losses."""
    lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
    for record in (json.loads(line) for line in lines if line.endswith("\n")):
        if record.get("validation_loss") is not None:
            yield record["step"], record["validation_loss"]


if __name__ == "__main__":
    main()
