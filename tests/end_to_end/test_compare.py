"""`keel compare` and `keel score`: what is trained, what is not trained again, and what is reported."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from checkpoint.storage import FolderStorage
from configs import own_code
from configs.errors import UserError
from scripts import compare, fork, score
from scripts.comparison import runs
from scripts.comparison import score as scripts_score
from scripts.comparison.score import Scores, read_scores, write_scores
from tests.a_against_a import EQUAL, gather_text, launch_here, trials_of_the_command
from tests.end_to_end.launch import ENVIRONMENT, ROOT, TIMEOUT_SECONDS, TINY, records, status
from trainer.lifecycle import EXIT_PREEMPTED

HELD_OUT = '--validation.sources=[{name = "held out", kind = "synthetic"}]'
JOB = (HELD_OUT, "--validation.interval", "20", "--validation.sequences", "13", "--metrics.tensorboard", "false")
SWEEP = (str(TINY), "--sweep", "optimizer.lr=1e-2,1e-3", *JOB)


class Launches:
    """Runs commands in this process, and remembers them."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []

    def __call__(self, command):
        self.seen.append((command[0], next((word for word in reversed(command) if "seed-" in word), command[1])))
        return launch_here(command)


def run_compare(folder, *words, launch=None):
    """Exit code, report and launches of a comparison in `folder`."""
    launches = launch or Launches()
    code = compare.main([*words, "--output", str(folder / "runs"), "--json", str(folder / "report.json")], launches)
    report = folder / "report.json"
    return code, json.loads(report.read_text()) if report.exists() else None, getattr(launches, "seen", [])


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    """A comparison of two learning rates with two seeds."""
    folder = tmp_path_factory.mktemp("experiment")
    code, report, seen = run_compare(folder, *SWEEP, "--seeds", "2")
    assert code == 0
    return folder, report, seen


@pytest.mark.slow
def test_the_report_is_of_what_was_trained(experiment):
    folder, report, seen = experiment
    assert [name for name, _ in seen] == ["train", "score"] * 4
    assert [config["label"] for config in report["configs"]] == ["optimizer.lr=1e-2", "optimizer.lr=1e-3"]
    found = []
    for number, config in enumerate(report["configs"]):
        assert config["seeds"] == [0, 1]
        for run, seed, loss in zip(config["runs"], config["seeds"], config["losses"], strict=True):
            assert Path(run) == folder / "runs" / f"{number}-{config['label']}" / f"seed-{seed}"
            assert loss == pytest.approx(records(Path(run))[-1]["validation_loss"], rel=1e-6)
            scores = read_scores(Path(run))
            assert np.mean(scores.losses) == pytest.approx(loss, rel=1e-12)
            assert (scores.step, scores.tokens, len(scores.losses)) == (20, 20 * 8 * 16, 13)
        found.append(config["losses"])
    [comparison] = report["comparisons"]
    assert comparison["difference"] == pytest.approx(np.subtract(found[1], found[0]).mean())
    assert comparison["differs"] == ["optimizer.lr: 0.01 -> 0.001"]
    assert comparison["pairing"] == "initial weights: the same bits; samples: the same in every step"
    low, high = comparison["interval"]
    assert high - low == pytest.approx(2 * comparison["paired"])
    assert report["sequences"] == 13
    assert comparison["confidence"] == 0.98


def test_a_signal_before_a_command_handles_it_is_a_stop(tmp_path, monkeypatch):
    (tmp_path / "keel.py").write_text("import os, sys\nos.kill(os.getpid(), int(sys.argv[1]))\n")
    monkeypatch.setattr(runs, "_KEEL", tmp_path / "keel.py")
    assert runs.run_process([str(int(signal.SIGTERM))]) == EXIT_PREEMPTED
    assert runs.run_process([str(int(signal.SIGKILL))]) == -signal.SIGKILL


def test_a_run_that_was_killed_has_no_message_above():
    said = "^keel train for a/run was killed by SIGKILL; the same command continues$"
    with pytest.raises(runs.Failed, match=said) as failed:
        runs.run_to_its_end(["train"], Path("a/run"), lambda command: -signal.SIGKILL)
    assert failed.value.exit_code == 1


def test_a_signal_while_a_command_is_being_started_reaches_it(tmp_path, monkeypatch):
    class Started(subprocess.Popen):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            signal.raise_signal(signal.SIGTERM)

    (tmp_path / "keel.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setattr(runs, "_KEEL", tmp_path / "keel.py")
    monkeypatch.setattr(subprocess, "Popen", Started)
    assert runs.run_process([]) == EXIT_PREEMPTED


def test_a_loss_that_is_not_finite_names_its_run():
    whole = Scores(20, "seal", 2560, "digest", [3.0, 2.0], [16, 16])
    sides = [
        compare.Side("a", None, [Path("runs/a")], [whole]),
        compare.Side("b", None, [Path("runs/b")], [replace(whole, losses=[3.0, math.nan])]),
    ]
    with pytest.raises(UserError, match=r"^runs/b: the loss of a validation sequence is not finite"):
        compare._report(sides, 0.98)


@pytest.mark.slow
def test_what_is_finished_is_not_run_again(experiment, tmp_path, capsys):
    folder, report, _ = experiment
    assert run_compare(folder, *SWEEP, "--seeds", "2") == (0, report, [])
    told = capsys.readouterr().out
    assert "optimizer.lr: 0.01 -> 0.001" in told
    assert "98% interval" in told
    for run in folder.glob("runs/*/seed-1"):
        (run / "scores.json").unlink()
    code, again, seen = run_compare(folder, *SWEEP, "--seeds", "3")
    assert code == 0
    runs = [folder / "runs" / f"{number}-optimizer.lr={lr}" for number, lr in enumerate(("1e-2", "1e-3"))]
    assert seen == [
        *(("score", str(run / "seed-1")) for run in runs),
        *((name, str(run / "seed-2")) for run in runs for name in ("train", "score")),
    ]
    assert [config["losses"][:2] for config in again["configs"]] == [config["losses"] for config in report["configs"]]


def test_two_finished_runs(experiment, tmp_path, capsys):
    _, report, _ = experiment
    runs = [config["runs"][0] for config in report["configs"]]
    code, found, seen = run_compare(tmp_path, *runs)
    assert (code, seen) == (0, [])
    [comparison] = found["comparisons"]
    first, second = (config["losses"][0] for config in report["configs"])
    assert comparison["difference"] == pytest.approx(second - first, rel=1e-9)
    assert comparison["verdict"].startswith("undecided: ")
    assert "one seed says nothing about another training" in comparison["verdict"]
    capsys.readouterr()
    scores = read_scores(Path(runs[1]))
    others = type(scores)(**{**vars(scores), "digest": "other"})
    write_scores(Path(runs[1]), others)
    try:
        assert run_compare(tmp_path, *runs, launch=lambda _: write_scores(Path(runs[1]), others) or 0)[0] == 1
        assert "scored on different sequences" in capsys.readouterr().err
    finally:
        write_scores(Path(runs[1]), scores)


def test_runs_without_validation_are_one_message(experiment, tmp_path, capsys):
    _, report, _ = experiment
    runs = [config["runs"][0] for config in report["configs"]]
    code, _, seen = run_compare(tmp_path, *runs, "--validation.sources=[]", "--validation.interval=0")
    assert (code, seen) == (78, [])
    assert capsys.readouterr().err.startswith("error: validation.sources is empty, so there are no sequences to score")


def test_a_finished_run_is_not_taken_for_one_of_other_keys(tmp_path, capsys):
    """Also where the job file allows it to change: its model would be scored as if it had been trained with them."""
    job = tmp_path / "job.toml"
    job.write_text(f'base = "{TINY}"\njob.allow_run_change = true\n')
    words = (str(job), "--sweep", "optimizer.lr=1e-2,1e-3", *JOB, "--seeds", "1", "--training.steps", "2")
    assert run_compare(tmp_path, *words)[0] == 0
    code, _, seen = run_compare(tmp_path, *words, "--optimizer.weight_decay", "0.3")
    assert (code, len(seen)) == (78, 1)
    assert "optimizer.weight_decay: 0.1 -> 0.3" in capsys.readouterr().err
    assert run_compare(tmp_path, *words)[0] == 0


def test_scores_of_other_sequences_or_of_another_training_are_not_taken_for_these(experiment, tmp_path):
    """As many sequences, and the same step: only their content tells that they are others."""
    _, report, _ = experiment
    runs = [shutil.copytree(config["runs"][0], tmp_path / f"{n}") for n, config in enumerate(report["configs"])]
    other = HELD_OUT.replace("held out", "other")
    code, found, seen = run_compare(tmp_path, *map(str, runs), other)
    assert (code, [name for name, _ in seen]) == (0, ["score", "score"])
    assert [config["losses"] for config in found["configs"]] != [c["losses"][:1] for c in report["configs"]]
    before = read_scores(runs[0])
    again = ("--checkpoint.load", "none", "--training.seed", "7", "--job.output_dir", str(runs[0]))
    assert launch_here(["train", str(TINY), *JOB, *again]) == 0
    code, _, seen = run_compare(tmp_path, *map(str, runs), other)
    assert (code, [name for name, _ in seen]) == (0, ["score"])
    after = read_scores(runs[0])
    assert after.digest == before.digest
    assert after.losses != before.losses


@pytest.mark.slow
def test_a_fork_is_compared_from_its_fork_on(tmp_path):
    words = (*JOB, "--validation.interval", "4", "--training.steps", "8", "--checkpoint.interval", "4")
    run, forked, again = (tmp_path / name for name in ("run", "forked", "again"))
    assert launch_here(["train", str(TINY), *words, "--job.output_dir", str(run)]) == 0
    for folder, lr in ((forked, "2e-3"), (again, "3e-3")):
        assert fork.main([str(run), "--at", "4", "--output", str(folder), "--optimizer.lr", lr]) == 0
        assert launch_here(["train", str(folder / "config.toml")]) == 0
    for first, second, change in ((run, forked, "0.01 -> 0.002"), (forked, again, "0.002 -> 0.003")):
        code, report, _ = run_compare(tmp_path, str(first), str(second))
        assert code == 0
        [comparison] = report["comparisons"]
        assert comparison["differs"] == [f"from step 5 on: optimizer.lr: {change}"]
        shared = "steps 1 to 4, as one is a fork; samples after them: the same in every step"
        assert comparison["pairing"] == shared
        curves = [records(folder) for folder in (first, second)]
        same = [one["loss"] == other["loss"] and one["lr"] == other["lr"] for one, other in zip(*curves, strict=True)]
        assert same == [True] * 4 + [False] * 4
        losses = [curve[-1]["validation_loss"] for curve in curves]
        assert comparison["difference"] == pytest.approx(losses[1] - losses[0], abs=2e-6)


@pytest.mark.slow
def test_runs_with_stages_are_scored_as_they_were_validated(tmp_path):
    """The model turns positions as its last stage does, and sequences have that stage's length."""
    stages = "[[stages]]\nat_step = 5\ntraining.seq_len = 24\nmodel.rope_theta = {}\n"
    for name, theta in (("one", "50.0"), ("other", "900.0")):
        (tmp_path / f"{name}.toml").write_text(f'base = "{TINY}"\n{stages.format(theta)}')
        words = (*JOB, "--validation.interval", "10", "--training.steps", "10", "--job.output_dir")
        assert launch_here(["train", str(tmp_path / f"{name}.toml"), *words, str(tmp_path / name)]) == 0
    code, report, _ = run_compare(tmp_path, str(tmp_path / "one"), str(tmp_path / "other"))
    assert code == 0
    [comparison] = report["comparisons"]
    assert comparison["differs"] == ["from step 6 on: model.rope_theta: 50.0 -> 900.0"]
    losses = [records(tmp_path / name)[-1]["validation_loss"] for name in ("one", "other")]
    assert [config["losses"] for config in report["configs"]] == [[pytest.approx(loss, rel=1e-6)] for loss in losses]
    assert abs(losses[1] - losses[0]) > 1e-6
    assert score.main([str(tmp_path / "one"), "--model.rope_theta", "900.0"]) == 0
    assert abs(np.mean(read_scores(tmp_path / "one").losses) - losses[0]) > 1e-6


def test_code_that_the_job_names_is_named_to_what_scores_its_runs(tmp_path, monkeypatch):
    """The command that scores is a process of its own, which takes no code from a run folder."""

    def launch(command):
        with monkeypatch.context() as other_process:
            other_process.setattr(own_code, "_admitted", {})
            return launch_here(command)

    words = (*SWEEP, "--optimizer.name", "torch.optim:Adamax", "--validation.interval", "2", "--training.steps", "2")
    code, report, _ = run_compare(tmp_path, *words, "--seeds", "1", launch=launch)
    assert code == 0
    losses = [config["losses"] for config in report["configs"]]
    folders = sorted((tmp_path / "runs").glob("*/seed-0"))
    assert losses == [[pytest.approx(records(folder)[-1]["validation_loss"], rel=1e-6)] for folder in folders]


def test_another_micro_batch_scores_the_same_sequences(experiment, tmp_path):
    _, report, _ = experiment
    run = shutil.copytree(report["configs"][0]["runs"][0], tmp_path / "run")
    before = read_scores(run)
    assert score.main([str(run), "--training.micro_batch_size", "4"]) == 0
    assert read_scores(run).digest == before.digest


def test_a_checkpoint_that_is_scored_is_kept_meanwhile(experiment, tmp_path, monkeypatch, capsys):
    _, report, _ = experiment
    run = shutil.copytree(report["configs"][0]["runs"][0], tmp_path / "run")
    monkeypatch.setattr(scripts_score, "score", lambda _, checkpoint, *others: FolderStorage().remove(checkpoint))
    assert score.main([str(run)]) == 1
    assert "step-00000020 is being read" in capsys.readouterr().err


def test_the_loss_is_said_if_the_folder_refuses_the_file(experiment, tmp_path, capsys):
    _, report, _ = experiment
    run = shutil.copytree(report["configs"][0]["runs"][0], tmp_path / "run")
    before = read_scores(run)
    (run / "scores.json").unlink()
    (run / "scores.json").mkdir()
    assert score.main([str(run)]) == 1
    said = capsys.readouterr()
    assert f"loss {before.loss:.5f} on {len(before.losses)} validation sequences" in said.out
    assert "scores.json: Is a directory" in said.err


def test_other_sequences_are_scored_again(experiment):
    _, report, _ = experiment
    run = report["configs"][0]["runs"][1]
    before = read_scores(Path(run))
    try:
        assert score.main([run, "--validation.sequences", "5"]) == 0
        fewer = read_scores(Path(run))
        assert fewer.losses == before.losses[:5]
        assert fewer.digest != before.digest
    finally:
        write_scores(Path(run), before)
    assert score.main([run, "--step", "7"]) == 1
    assert read_scores(Path(run)) == before


@pytest.mark.slow
def test_a_config_against_its_copy_is_equal_to_the_last_bit(tmp_path):
    copy = tmp_path / "copy.toml"
    copy.write_text(f'base = "{TINY}"\n[job]\nname = "copy"\n')
    code, report, _ = run_compare(tmp_path, str(TINY), str(copy), "--seeds", "2", *JOB, "--training.steps", "3")
    assert code == 0
    [comparison] = report["comparisons"]
    assert comparison["verdict"] == "equal to the last bit"
    assert comparison["differs"] == []
    assert report["configs"][0]["losses"] == report["configs"][1]["losses"]


@pytest.mark.slow
def test_several_values_are_compared_with_the_first_at_a_joint_confidence(tmp_path):
    values = "optimizer.weight_decay=0.1,0.2,0.3,0.4"
    words = (str(TINY), "--sweep", values, "--seeds", "2", *JOB, "--training.steps", "3", "--confidence", "0.9")
    code, report, _ = run_compare(tmp_path, *words)
    assert code == 0
    assert [found["second"] for found in report["comparisons"]] == [f"optimizer.weight_decay=0.{n}" for n in (2, 3, 4)]
    assert {found["first"] for found in report["comparisons"]} == {"optimizer.weight_decay=0.1"}
    assert all(found["confidence"] == pytest.approx(1 - 0.1 / 3) for found in report["comparisons"])


@pytest.mark.parametrize(
    ("code", "said"), [(75, "the same command continues there"), (78, "failed for"), (1, "failed")]
)
def test_a_run_that_ends_otherwise_ends_the_comparison(tmp_path, capsys, code, said):
    assert run_compare(tmp_path, *SWEEP, launch=lambda command: code)[0] == code
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ((str(TINY), str(TINY)), 78, "validation.sources is empty"),
        ((str(TINY), *JOB), 78, "give two job files"),
        ((str(TINY), "--sweep", "training.seq_len=8,16", *JOB), 78, "training.seq_len: 8 -> 16"),
        ((str(TINY), "--sweep", "optimizer.lr=1e-3", *JOB), 78, "at least two values"),
        ((str(TINY), "--sweep", "optimizer.l=1,2", *JOB), 78, "optimizer.l"),
        ((".", "."), 1, "is not a run folder"),
    ],
)
def test_mistakes_end_in_one_message_before_anything_is_trained(tmp_path, capsys, words, code, said):
    found, report, seen = run_compare(tmp_path, *words)
    assert (found, report, seen) == (code, None, [])
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error


@pytest.fixture
def with_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # restores the current folder
    gather_text(tmp_path)
    return tmp_path


@pytest.mark.long  # many runs for one probability; the others see one comparison each
def test_equal_configs_that_never_are_equal_are_not_called_different(with_text):
    """A short form of `python -m tests.a_against_a`; real differences are called; near configs gain by pairing."""
    found = list(trials_of_the_command(3, EQUAL, 3, with_text))
    assert all(each["differs"] == ['data.sources.0.name: "text" -> "other"'] for each in found)
    assert all(each["difference"] for each in found)
    assert sum(each["is_decided"] for each in found) <= 1, found
    [real] = trials_of_the_command(1, "optimizer.lr=1e-2,1e-4", 3, with_text)
    assert real["is_decided"], real
    assert real["difference"] > real["paired"] > 0
    [near] = trials_of_the_command(1, "optimizer.lr=1e-2,1.1e-2", 3, with_text)
    assert near["paired"] * 3 < near["unpaired"], near  # 10 times in the median of trials


@pytest.mark.long
def test_processes_of_their_own_stopped_and_continued(tmp_path):
    """Two ranks, and a SIGTERM during the first training: it saves, and the same command goes on from there."""
    words = [*SWEEP, "--seeds", "1", "--ranks", "2", "--output", "runs", "--json", "report.json"]
    command = [sys.executable, str(ROOT / "scripts" / "keel.py"), "compare", *words, "--training.steps", "300"]
    options = {"cwd": tmp_path, "env": ENVIRONMENT, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    first = tmp_path / "runs" / "0-optimizer.lr=1e-2" / "seed-0"
    with subprocess.Popen(command, **options) as process:
        while not (first / "metrics.jsonl").is_file() or not records(first):
            assert process.poll() is None, process.communicate()
        process.send_signal(signal.SIGTERM)
        _, error = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == 75, error
    assert "the same command continues there" in error
    assert status(first)["state"] == "preempted"
    stopped = status(first)["step"]
    finished = subprocess.run(command, **options, timeout=2 * TIMEOUT_SECONDS, check=False)
    assert finished.returncode == 0, finished.stderr
    assert "verdict" in finished.stdout
    assert 0 < stopped < 300
    assert len(records(first)) == 300
    report = json.loads((tmp_path / "report.json").read_text())
    assert [config["steps"] for config in report["configs"]] == [[300], [300]]
    assert "RANK" not in os.environ
