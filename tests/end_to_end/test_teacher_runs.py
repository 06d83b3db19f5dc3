"""Runs that learn from a teacher: what they log, that a stop and another folder leave no trace, what is refused."""

import shutil
from pathlib import Path

import pytest

from tests.end_to_end.launch import launch, launch_here, records, run_script

WIDER = ("--model.dim", "48", "--model.n_layers", "3", "--model.n_heads", "6", "--model.n_kv_heads", "3")
TAUGHT = "--distillation.weight 0.5 --distillation.temperature 2 --checkpoint.interval 3 --training.steps"
HELD_OUT = (
    '--validation.interval 3 --validation.sequences 4 --validation.sources \'[{name = "v", kind = "synthetic"}]\''
)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("teacher")
    assert launch_here(folder, *WIDER, "--training.steps", "5", "--checkpoint.interval", "3") == 0
    return folder / "run"


def test_a_stop_and_a_folder_that_moved_leave_no_trace(tmp_path, teacher):
    launch(tmp_path, f"{TAUGHT} 7 {HELD_OUT} --job.output_dir straight --distillation.teacher {teacher}")
    launch(tmp_path, f"{TAUGHT} 4 {HELD_OUT} --job.output_dir stopped --distillation.teacher {teacher}")
    shutil.copytree(teacher, tmp_path / "moved")
    found = launch(tmp_path, f"{TAUGHT} 7 {HELD_OUT} --job.output_dir stopped --distillation.teacher moved", ranks=2)
    assert "teacher      moved: llama, " in found.out
    straight, stopped = records(tmp_path / "straight"), records(tmp_path / "stopped")
    for key in ("loss", "grad_norm", "distillation_loss"):
        assert [each[key] for each in stopped] == pytest.approx([each[key] for each in straight], rel=1e-5), key
    assert all(each["distillation_loss"] > 0 for each in straight)


def test_what_another_teacher_would_do_is_refused(tmp_path, teacher):
    launch(tmp_path, f"{TAUGHT} 2 --distillation.teacher {teacher}")
    older = teacher / "checkpoints" / "step-00000003"
    found = launch(tmp_path, f"{TAUGHT} 4 --distillation.teacher {older}", expect=78)
    assert "checkpoint of distillation.teacher: " in found.said
    found = launch(tmp_path, f"{TAUGHT} 4 --distillation.teacher {older}/nothing", expect=78)
    assert f'distillation.teacher is "{older}/nothing": no such folder of a checkpoint or run' in found.said
    found = launch(tmp_path, f"{TAUGHT} 4 --distillation.teacher {teacher} --model.vocab_size 512", expect=78)
    assert "with model.vocab_size 256, and this job has 512; both must give probabilities of the same" in found.said
    found = launch(tmp_path, f"{TAUGHT} 4 --distillation.teacher {teacher} --mesh.tp 2", ranks=2, expect=1)
    assert "which does not fit mesh.tp: tp 2 does not divide" in found.said


def test_without_its_teacher_a_run_is_scored(tmp_path, teacher):
    shutil.copytree(teacher, tmp_path / "teacher")
    launch(tmp_path, f"{TAUGHT} 3 {HELD_OUT} --distillation.teacher teacher")
    shutil.rmtree(tmp_path / "teacher")
    validated = [each["validation_loss"] for each in records(tmp_path / "run") if "validation_loss" in each]
    found = run_script(tmp_path, "score.py", "run")
    assert found.code == 0, found.err
    assert f"loss {validated[-1]:.5f} on 4 validation sequences" in found.out
