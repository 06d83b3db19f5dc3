"""lm-eval for real on local tasks: through Keel's model, the export, the command, and beside a run."""

import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from checkpoint.export.hf import export_hf
from configs.errors import UserError
from configs.schema import Evaluation
from scripts import evaluate as script
from tests.end_to_end.launch import ROOT, launch, launch_here, records
from tests.evaluation_tasks import TASKS, write_tasks
from trainer.data.hf_tokenizer import tokenizer_files
from trainer.data.tokenizer import train_sentencepiece
from trainer.evaluation.tasks import evaluate, find_tasks
from trainer.sampling.load import load_trained

pytestmark = pytest.mark.skipif(find_spec("lm_eval") is None, reason="the extra evaluation is not installed")
VOCAB = 320
TEXT = "def main(argv):\n    return [str(x) for x in argv]\n\n\nclass A(dict):\n    'naïve 漢字 🙂 for x in y: pass'\n"


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A folder with a tokenizer, the tasks, and a run with checkpoints of steps 4 and 8."""
    root = tmp_path_factory.mktemp("evaluation")
    train_sentencepiece(iter([TEXT * 20]), root / "tokenizer.model", VOCAB)
    write_tasks(root / "tasks")
    (root / "text.txt").write_text(TEXT * 200)
    assert launch_here(root, *words(root), "--training.steps", "8", "--metrics.tensorboard", "true") == 0
    return root


def words(root: Path) -> tuple[str, ...]:
    source = f'[{{name = "text", kind = "text", path = "{root / "text.txt"}", virtual_shards = 1}}]'
    return (
        *("--tokenizer.path", str(root / "tokenizer.model"), "--model.vocab_size", str(VOCAB)),
        *("--training.seq_len", "64", "--data.sources", source, "--checkpoint.interval", "4"),
    )


def settings(root: Path, *tasks: str, **others: object) -> Evaluation:
    return Evaluation(tasks=[*(tasks or TASKS)], task_folder=str(root / "tasks"), **others)


def evaluations(run: Path) -> list[tuple[int, set[str]]]:
    """Step and tasks of each evaluation in metrics.jsonl."""
    return [(record["step"], {*record["evaluation"]}) for record in records(run) if "evaluation" in record]


def test_the_scores_are_those_of_the_export_in_transformers(trained: Path, tmp_path: Path):
    """And do not depend on the batch; rolling likelihoods there need no BOS, since lm-eval puts it there."""
    lm_eval = pytest.importorskip("lm_eval")
    pytest.importorskip("accelerate", reason="lm-eval needs accelerate for models of transformers")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from trainer.evaluation.lm import KeelLM

    model = load_trained(trained / "run", None, "cpu", "float32")
    ours = evaluate(model, settings(trained))
    alone = evaluate(model, settings(trained, batch_size=1))
    export_hf(trained / "run/checkpoints/step-00000008", tmp_path / "hf", tokenizer_files(trained / "tokenizer.model"))
    for tasks, with_bos in ((["local_choice", "local_text"], True), (["local_bytes"], False)):
        hf = HFLM(pretrained=str(tmp_path / "hf"), dtype="float32", device="cpu", add_bos_token=with_bos)
        manager = find_tasks(settings(trained))
        theirs = lm_eval.simple_evaluate(model=hf, tasks=tasks, task_manager=manager, log_samples=False)
        if with_bos:
            for wanted in ({"until": ["e"], "max_gen_toks": 24}, {"until": ["\n", "("], "max_gen_toks": 40}):
                asked = [
                    Instance("generate_until", {}, (text, wanted), 0) for text in ("def ", "class A", "x for", "é")
                ]
                assert KeelLM(model, 2).generate_until(asked) == hf.generate_until(asked)
        for task in tasks:
            for name, value in theirs["results"][task].items():
                if isinstance(value, float):
                    assert ours[task][name.removesuffix(",none")] == pytest.approx(value, rel=1e-5), (task, name)
            assert ours[task] == pytest.approx(alone[task], rel=1e-5)
    assert 0 < ours["local_choice"]["acc"] < 1
    assert ours["local_bytes"]["bits_per_byte"] < 8


def test_the_command_adds_results_to_the_record_and_the_curves(trained: Path, tmp_path: Path, capsys):
    run = shutil.copytree(trained / "run", tmp_path / "run")
    before = (run / "metrics.jsonl").read_text().splitlines()
    chosen = ["--tasks", "local_choice", "--task-folder", str(trained / "tasks"), "--examples", "5", "--device", "cpu"]
    for step in ("8", "4"):
        assert script.main([str(run), "--step", step, *chosen]) == 0
    said = capsys.readouterr().out
    assert "evaluation of step 4: local_choice acc 0." in said
    assert (run / "metrics.jsonl").read_text().splitlines()[: len(before)] == before
    assert evaluations(run) == [(8, {"local_choice"}), (4, {"local_choice"})]
    (score,) = {r["evaluation"]["local_choice"]["acc"] for r in records(run) if "evaluation" in r and r["step"] == 8}
    events = EventAccumulator(str(run / "tensorboard")).Reload()
    curve = {event.step: event.value for event in events.Scalars("evaluation/local_choice/acc")}
    assert curve.keys() == {4, 8}
    assert curve[8] == pytest.approx(score)
    assert len(events.Scalars("train/loss")) == 8  # nothing was purged
    # The run goes on from step 4: what belongs to step 8 is no longer true.
    assert launch_here(tmp_path, *words(trained), "--checkpoint.load", "4", "--checkpoint.go_back", "1") == 0
    assert evaluations(run) == [(4, {"local_choice"})]
    assert [r["step"] for r in records(run) if "loss" in r] == list(range(1, 21))
    assert (run / "evaluations/abandoned-001/step-00000008").is_dir()


def test_a_run_that_trains_records_what_others_have_evaluated(trained: Path, tmp_path: Path, capsys):
    """While a run has its folder, the command leaves the result to it."""
    run = shutil.copytree(trained / "run", tmp_path / "run")
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD_LOCK, str(run)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    before = (run / "metrics.jsonl").read_bytes()
    chosen = ["--tasks", "local_choice", "--task-folder", str(trained / "tasks"), "--examples", "2", "--device", "cpu"]
    assert script.main([str(run), *chosen]) == 0
    holder.communicate()
    assert "the run is training, and records the result at its next checkpoint" in capsys.readouterr().out
    assert (run / "metrics.jsonl").read_bytes() == before
    for steps in ("10", "12"):
        assert launch_here(tmp_path, *words(trained), "--training.steps", steps) == 0
        assert evaluations(run) == [(8, {"local_choice"})]


HOLD_LOCK = """
import pathlib, sys
from checkpoint.lock import lock
lock(pathlib.Path(sys.argv[1]), print)
print("held", flush=True)
sys.stdin.read()
"""


def test_the_process_beside_a_run_ends_with_it(trained: Path, tmp_path: Path):
    """However the run dies, the process's standard input ends."""
    run = shutil.copytree(trained / "run", tmp_path / "run")
    command = [sys.executable, "-m", "trainer.evaluation.program", str(run), "8"]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    process.communicate(timeout=600)
    assert process.returncode == 1
    assert not (run / "evaluations").exists()


def test_beside_a_run_every_due_checkpoint_is_evaluated_and_training_is_the_same(trained: Path, tmp_path: Path):
    """The last one's evaluation is waited for; a failing task is a warning."""
    chosen = f'--evaluation.tasks [\\"local_choice\\",\\"local_bytes\\"] --evaluation.task_folder {trained / "tasks"}'
    job = " ".join(f"'{word}'" for word in words(trained))
    launch(tmp_path, f"{job} {chosen} --training.steps 8 --evaluation.interval 4 --evaluation.examples 3")
    run = tmp_path / "run"
    assert evaluations(run) == [(4, {"local_choice", "local_bytes"}), (8, {"local_choice", "local_bytes"})]
    losses = [(r["step"], r["loss"], r["grad_norm"]) for r in records(run) if "loss" in r]
    assert losses == [(r["step"], r["loss"], r["grad_norm"]) for r in records(trained / "run") if "loss" in r]
    events = EventAccumulator(str(run / "tensorboard")).Reload()
    assert {event.step for event in events.Scalars("evaluation/local_bytes/bits_per_byte")} == {4, 8}
    log = (run / "run.log").read_text()
    assert [log.count(f"evaluation of step {step}") for step in (4, 8)] == [1, 1]  # with the scores; no complaint
    assert "evaluation of step 8: local_bytes" in log or "evaluation of step 8: local_choice" in log
    assert json.loads(next((run / "evaluations/step-00000008").glob("*.json")).read_text())["step"] == 8


def test_a_folder_that_cannot_be_written_is_a_warning(trained: Path, tmp_path: Path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/evaluations").write_text("in the way")
    chosen = ("--evaluation.tasks", '["local_choice"]', "--evaluation.task_folder", str(trained / "tasks"))
    assert launch_here(tmp_path, *words(trained), *chosen, "--training.steps", "4", "--evaluation.interval", "4") == 0
    assert "run/evaluations can't be used" in (tmp_path / "run/run.log").read_text()


def test_an_evaluation_that_fails_is_a_warning(trained: Path, tmp_path: Path):
    """Here the data of the task are gone when the first checkpoint is saved."""
    tasks = write_tasks(tmp_path / "tasks")
    (tasks / "data.jsonl").unlink()
    chosen = ("--evaluation.tasks", '["local_choice"]', "--evaluation.task_folder", str(tasks))
    where = ("--training.steps", "4", "--evaluation.interval", "4")
    assert launch_here(tmp_path, *words(trained), *chosen, *where) == 0
    said = [line for line in (tmp_path / "run/run.log").read_text().splitlines() if "evaluation of step 4" in line]
    assert len(said) == 1
    assert "warning: evaluation of step 4 failed, training continues: lm-eval can't run local_choice: " in said[0]
    assert evaluations(tmp_path / "run") == []


def test_a_task_that_is_unknown_is_one_message_before_anything_is_built(trained: Path, tmp_path: Path, monkeypatch):
    import lm_eval.tasks

    own = lm_eval.tasks.TaskManager
    monkeypatch.setattr(
        lm_eval.tasks,
        "TaskManager",
        lambda include_path=None, **_: own(include_path=include_path, include_defaults=False),
    )
    with pytest.raises(UserError, match=r"lm-eval has no task no_such_task, nor in .*/tasks; lm-eval ls tasks"):
        find_tasks(settings(trained, "no_such_task", "local_text"))
    chosen = ("--evaluation.tasks", '["no_such_task"]', "--evaluation.interval", "4")
    assert launch_here(tmp_path, *words(trained), *chosen) == 78
    assert not list((tmp_path / "run/checkpoints").glob("step-*"))


def test_texts_that_do_not_fit_are_one_message(trained: Path):
    model = load_trained(trained / "run", None, "cpu", "float32")
    from trainer.evaluation.lm import KeelLM

    with pytest.raises(
        UserError, match=r"a text of 65 tokens must be scored in one piece, and the model's seq_len is 64"
    ):
        KeelLM(model, 2)._loglikelihood_tokens([(None, [1], [5] * 65)])
