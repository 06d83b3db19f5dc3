"""lm-eval for real on local tasks: through Keel's model, the export, the command, and beside a run."""

import json
import shutil
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoConfig, AutoModelForCausalLM

from checkpoint.export.hf_export import export_hf
from checkpoint.folder import set_aside
from checkpoint.lock import BeingRead
from checkpoint.manifest import steps_in
from checkpoint.storage import FolderStorage
from configs.errors import UserError
from scripts import evaluate as script
from scripts.evaluation.tasks import Tasks, evaluate, find_tasks
from scripts.export.hf_tokenizer import tokenizer_files
from scripts.sampling.load import load_trained
from tests.end_to_end.launch import ROOT, launch_here, records
from tests.evaluation_tasks import TASKS, write_tasks
from tests.hf_families import NEEDS_TRANSFORMERS, write_config
from trainer.data.tokenizer import train_sentencepiece
from trainer.lifecycle import write_status

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("lm_eval") is None, reason="the extra evaluation is not installed"),
]
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
    source = f'[{{name = "text", kind = "text", path = "{root / "text.txt"}"}}]'
    return (
        *("--tokenizer.path", str(root / "tokenizer.model"), "--model.vocab_size", str(VOCAB)),
        *("--training.seq_len", "64", "--data.sources", source, "--checkpoint.interval", "4"),
    )


def chosen(root: Path, *tasks: str, batch_size: int = 16) -> Tasks:
    return Tasks(tasks or tuple(TASKS), root / "tasks", batch_size=batch_size)


def beside(command: str, every: int = 4) -> tuple[str, ...]:
    """The words for a command after every fourth step, run by this Python."""
    script = f"{sys.executable} {ROOT / 'scripts/evaluate.py'} {command}"
    table = f'{{name = "evaluate", command = {json.dumps(script)}, every = {every}}}'
    return "--checkpoint.after_save", f"[{table}]"


def evaluations(run: Path) -> list[tuple[int, set[str]]]:
    """Step and tasks of each evaluation in metrics.jsonl."""
    return [(record["step"], {*record["evaluation"]}) for record in records(run) if "evaluation" in record]


def test_the_scores_are_those_of_the_export_in_transformers(trained: Path, tmp_path: Path):
    """And do not depend on the batch; rolling likelihoods there need no BOS, since lm-eval puts it there."""
    lm_eval = pytest.importorskip("lm_eval")
    pytest.importorskip("accelerate", reason="lm-eval needs accelerate for models of transformers")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from scripts.evaluation.lm import KeelLM

    model = load_trained(trained / "run", None, "cpu", "float32", None)
    ours = evaluate(model, chosen(trained))
    alone = evaluate(model, chosen(trained, batch_size=1))
    export_hf(trained / "run/checkpoints/step-00000008", tmp_path / "hf", tokenizer_files(trained / "tokenizer.model"))
    for tasks, with_bos in ((["local_choice", "local_text"], True), (["local_bytes"], False)):
        hf = HFLM(pretrained=str(tmp_path / "hf"), dtype="float32", device="cpu", add_bos_token=with_bos)
        manager = find_tasks(chosen(trained))
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


@NEEDS_TRANSFORMERS
@pytest.mark.parametrize(("family", "fields"), [("phi", {}), ("gemma2", {"final_logit_softcapping": 2.0})])
def test_a_familys_head_may_have_a_bias_or_softcapping(trained: Path, tmp_path: Path, family, fields):
    pytest.importorskip("accelerate", reason="lm-eval needs accelerate for models of transformers")
    from lm_eval.models.huggingface import HFLM

    from scripts.evaluation.lm import KeelLM

    folder = write_config(tmp_path / family, family, vocab_size=VOCAB, **fields)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5)
    model.save_pretrained(folder)
    for name, content in tokenizer_files(trained / "tokenizer.model").files.items():
        (folder / name).write_bytes(content)
    asked = [(None, [1, 5, 9], [7, 30]), (None, [1], [4])]
    found = KeelLM(load_trained(folder, None, "cpu", "float32", None), 2)._loglikelihood_tokens(asked)
    expected = HFLM(pretrained=str(folder), dtype="float32", device="cpu")._loglikelihood_tokens(asked)
    assert [score for score, _ in found] == pytest.approx([score for score, _ in expected], rel=1e-5)


def test_the_command_adds_results_to_the_record_and_the_curves(trained: Path, tmp_path: Path, capsys):
    run = shutil.copytree(trained / "run", tmp_path / "run")
    before = (run / "metrics.jsonl").read_text().splitlines()
    chosen = ["--tasks", "local_choice", "--task-folder", str(trained / "tasks"), "--examples", "5", "--device", "cpu"]
    assert script.main([str(run), "--step", "8", *chosen]) == 0
    assert script.main([str(run / "checkpoints/step-00000004"), *chosen]) == 0
    said = capsys.readouterr()
    assert "evaluation of step 4: local_choice acc 0." in said.out
    assert "Tokenizing" not in said.err
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


@pytest.mark.parametrize("state", ["running", "preempted"])
def test_a_run_that_trains_records_what_others_have_evaluated(
    trained: Path, tmp_path: Path, capsys, monkeypatch, state
):
    """While a run has its folder, the command leaves the result to it, also if its disk has no room for its status."""
    monkeypatch.setattr(script, "_PATIENCE_SECONDS", 0.5)
    run = shutil.copytree(trained / "run", tmp_path / "run")
    write_status(run, state, 8)
    holder = holding(run)
    before = (run / "metrics.jsonl").read_bytes()
    chosen = ["--tasks", "local_choice", "--task-folder", str(trained / "tasks"), "--examples", "2", "--device", "cpu"]
    assert script.main([str(run), *chosen]) == 0
    holder.communicate()
    assert "the run is training, and records the result at its next checkpoint" in capsys.readouterr().out
    assert (run / "metrics.jsonl").read_bytes() == before
    for steps in ("10", "12"):
        assert launch_here(tmp_path, *words(trained), "--training.steps", steps) == 0
        assert evaluations(run) == [(8, {"local_choice"})]


def holding(run: Path) -> "subprocess.Popen[bytes]":
    """A process that has locked a run's folder, until its standard input is closed."""
    command = [sys.executable, "-c", HOLD_LOCK, str(run)]
    holder = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    return holder


def test_an_evaluation_waits_for_another_that_records_its_own_result(trained: Path, tmp_path: Path, monkeypatch):
    run = shutil.copytree(trained / "run", tmp_path / "run")
    other = holding(run)
    assert other.stdin is not None
    end = threading.Timer(1, other.stdin.close)

    def evaluated(*_):
        end.start()
        return {"local_choice": {"acc": 0.5}}

    monkeypatch.setattr("scripts.evaluation.tasks.evaluate", evaluated)
    assert script.main([str(run), *CHOSEN, str(trained / "tasks")]) == 0
    end.join()
    other.wait()
    assert evaluations(run) == [(8, {"local_choice"})]


def test_what_is_evaluated_is_not_removed_meanwhile(trained: Path, tmp_path: Path, monkeypatch, capsys):
    """And a result of a checkpoint that the run has left, going back, is not recorded for the one that follows it."""
    run = shutil.copytree(trained / "run", tmp_path / "run")
    checkpoint = run / "checkpoints/step-00000008"

    def removing(*_):
        with pytest.raises(BeingRead):
            FolderStorage().remove(checkpoint)
        return {"local_choice": {"acc": 0.5}}

    def going_back(*_):
        set_aside(checkpoint.parent, 4)
        shutil.copytree(checkpoint.with_name("step-00000004"), checkpoint)
        return {"local_choice": {"acc": 0.25}}

    for evaluates, code in ((removing, 0), (going_back, 1)):
        monkeypatch.setattr("scripts.evaluation.tasks.evaluate", evaluates)
        assert script.main([str(run), *CHOSEN, str(trained / "tasks")]) == code
    assert evaluations(run) == [(8, {"local_choice"})]
    assert "error: the result is not recorded: meanwhile " in capsys.readouterr().err


CHOSEN = ("--tasks", "local_choice", "--device", "cpu", "--task-folder")
HOLD_LOCK = """
import pathlib, sys
from checkpoint.lock import lock
lock(pathlib.Path(sys.argv[1]), print)
print("held", flush=True)
sys.stdin.read()
"""


def test_beside_a_run_every_due_checkpoint_is_evaluated_and_training_is_the_same(trained: Path, tmp_path: Path):
    """The command after the last checkpoint is waited for."""
    folder = trained / "tasks"
    command = f"{{checkpoint}} --tasks local_choice,local_bytes --task-folder {folder} --examples 3"
    tensorboard = ("--metrics.tensorboard", "true")
    assert launch_here(tmp_path, *words(trained), *beside(command), *tensorboard, "--training.steps", "8") == 0
    run = tmp_path / "run"
    assert evaluations(run) == [(4, {"local_choice", "local_bytes"}), (8, {"local_choice", "local_bytes"})]
    losses = [(r["step"], r["loss"], r["grad_norm"]) for r in records(run) if "loss" in r]
    assert losses == [(r["step"], r["loss"], r["grad_norm"]) for r in records(trained / "run") if "loss" in r]
    events = EventAccumulator(str(run / "tensorboard")).Reload()
    assert {event.step for event in events.Scalars("evaluation/local_bytes/bits_per_byte")} == {4, 8}
    log = (run / "run.log").read_text()
    assert [log.count(f"evaluation of step {step}: local_") for step in (4, 8)] == [1, 1]
    assert json.loads(next((run / "evaluations/step-00000008").glob("*.json")).read_text())["step"] == 8
    assert steps_in(run / "after_save/evaluate") == [4, 8]


def test_a_task_that_fails_is_a_warning(trained: Path, tmp_path: Path):
    """Here the data of the task are gone."""
    tasks = write_tasks(tmp_path / "tasks")
    (tasks / "data.jsonl").unlink()
    command = f"{{checkpoint}} --tasks local_choice --task-folder {tasks}"
    assert launch_here(tmp_path, *words(trained), *beside(command), "--training.steps", "4") == 0
    said = [line for line in (tmp_path / "run/run.log").read_text().splitlines() if "evaluate after step 4" in line]
    assert len(said) == 1
    assert "evaluate after step 4 failed, training continues: error: lm-eval can't run local_choice: " in said[0]
    assert evaluations(tmp_path / "run") == []


def test_a_task_that_is_unknown_is_one_message(trained: Path, monkeypatch):
    import lm_eval.tasks

    own = lm_eval.tasks.TaskManager
    monkeypatch.setattr(
        lm_eval.tasks,
        "TaskManager",
        lambda include_path=None, **_: own(include_path=include_path, include_defaults=False),
    )
    with pytest.raises(UserError, match=r"lm-eval has no task no_such_task, nor in .*/tasks; lm-eval ls tasks"):
        find_tasks(chosen(trained, "no_such_task", "local_text"))


def test_texts_that_do_not_fit_are_one_message(trained: Path):
    model = load_trained(trained / "run", None, "cpu", "float32", None)
    from scripts.evaluation.lm import KeelLM

    with pytest.raises(
        UserError, match=r"a text of 65 tokens must be scored in one piece, and the model's seq_len is 64"
    ):
        KeelLM(model, 2)._loglikelihood_tokens([(None, [1], [5] * 65)])
