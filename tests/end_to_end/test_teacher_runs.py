"""Runs that learn from a teacher: what they log, that a stop and another folder leave no trace, what is refused."""

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.end_to_end.launch import TINY, launch, launch_here, records, run_script
from tests.hf_families import NEEDS_TRANSFORMERS

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


@pytest.mark.slow
def test_a_damaged_teacher_is_named_by_its_key(tmp_path, teacher):
    shutil.copytree(teacher, tmp_path / "teacher")
    checkpoint = tmp_path / "teacher" / "checkpoints" / "step-00000005"
    (file,) = checkpoint.glob("*.distcp")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    for name, reason in ((file.name, "has changed since"), ("MANIFEST.json", "")):
        found = launch(tmp_path, f"{TAUGHT} 4 --distillation.teacher teacher", expect=1 if reason else 78)
        said = f"distillation.teacher: checkpoint teacher/checkpoints/step-00000005 is damaged: {name} {reason}"
        assert said in found.said
        assert "checkpoint.load" not in found.said
        (checkpoint / "MANIFEST.json").write_text("{}")


def test_a_fork_changes_the_teacher_and_says_so(tmp_path, teacher):
    launch(tmp_path, f"{TAUGHT} 3 --distillation.teacher {teacher}")
    older = str(teacher / "checkpoints" / "step-00000003")
    for name, other in (("other", older), ("without", "none")):
        words = ("run", "--output", name, "--distillation.teacher", other, "--training.steps", "5")
        assert "checkpoint of distillation.teacher: " in run_script(tmp_path, "fork.py", *words).out
        launch(tmp_path, config=tmp_path / name / "config.toml")
    assert [each["distillation_loss"] for each in records(tmp_path / "other")][-1] > 0
    assert "distillation_loss" not in records(tmp_path / "without")[-1]


@pytest.mark.slow
def test_the_micro_batch_is_chosen_by_memory_beside_a_teacher(tmp_path, teacher):
    words = f"{TAUGHT} 2 --distillation.teacher {teacher}"
    launch(tmp_path, f"{words} --job.output_dir given")
    chosen = "--training.micro_batch_size auto --fsdp.zero_stage auto --activation_checkpoint.memory_limit_gib 1"
    launch(tmp_path, f"{words} --job.output_dir chosen {chosen}", ranks=2)
    given, found = records(tmp_path / "given"), records(tmp_path / "chosen")
    for key in ("loss", "grad_norm", "distillation_loss"):
        assert [each[key] for each in found] == pytest.approx([each[key] for each in given], rel=1e-5), key


@pytest.mark.slow
def test_steps_are_computed_again_with_the_teacher_of_the_run_alone(tmp_path, teacher):
    launch(tmp_path, f"{TAUGHT} 3 --distillation.teacher {teacher} --metrics.fingerprint true")
    run_script(tmp_path, "reproduce.py", "run", "--write", "run.json")
    older = str(teacher / "checkpoints" / "step-00000003")
    for words in (("replay.py", "run", "--step", "3"), ("reproduce.py", "run.json")):
        assert "equal in bits: steps 1 to 3" in run_script(tmp_path, *words).out
        refused = run_script(tmp_path, *words, "--distillation.teacher", older)
        assert refused.code == 1
        assert "another checkpoint than the one that the run learned from" in refused.said
        refused = run_script(tmp_path, *words, "--distillation.teacher", "nowhere")
        assert refused.code == 1
        assert "nowhere: no such folder" in refused.said


def test_without_its_teacher_a_run_is_scored(tmp_path, teacher):
    shutil.copytree(teacher, tmp_path / "teacher")
    launch(tmp_path, f"{TAUGHT} 3 {HELD_OUT} --distillation.teacher teacher")
    shutil.rmtree(tmp_path / "teacher")
    validated = [each["validation_loss"] for each in records(tmp_path / "run") if "validation_loss" in each]
    found = run_script(tmp_path, "score.py", "run")
    assert found.code == 0, found.err
    assert f"loss {validated[-1]:.5f} on 4 validation sequences" in found.out


@NEEDS_TRANSFORMERS
@pytest.mark.slow
def test_a_teacher_may_have_dropout_which_it_does_not_use(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 256, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
    GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained(tmp_path / "with")
    shutil.copytree(tmp_path / "with", tmp_path / "without")
    config = json.loads((tmp_path / "with" / "config.json").read_text())
    rates = {name: 0.0 for name in config if name.endswith("pdrop")}
    assert all(config[name] > 0 for name in rates)
    (tmp_path / "without" / "config.json").write_text(json.dumps(config | rates))
    found = []
    for name in ("with", "without"):
        assert run_script(tmp_path, "import_hf.py", name, f"of_{name}", "--as-it-is").code == 0
        launch(tmp_path, f"{TAUGHT} 2 --distillation.teacher of_{name} --job.output_dir taught_{name}")
        found.append([each["distillation_loss"] for each in records(tmp_path / f"taught_{name}")])
    assert found[0] == found[1]
    assert min(found[0]) > 0


PHI = {"model_type": "phi", "vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
FLOAT64 = "--training.dtype float64 --training.compute_dtype float64 --training.reduce_dtype float64"


@NEEDS_TRANSFORMERS
@pytest.mark.slow
def test_a_model_of_transformers_teaches_and_learns(tmp_path):
    """Its head has a bias; a teacher of one kind and a model of another are split in different ways."""
    (tmp_path / "phi").mkdir()
    (tmp_path / "phi" / "config.json").write_text(json.dumps({**PHI, "num_attention_heads": 4}))
    table = re.compile(r"\[model\].*?\n\n", re.DOTALL)
    (tmp_path / "phi.toml").write_text(table.sub('[model]\narchitecture = "hf"\nhf = "phi"\n\n', TINY.read_text()))
    jobs = {"llama": TINY, "phi": tmp_path / "phi.toml"}
    for name, job in jobs.items():
        launch(tmp_path, f"{FLOAT64} --training.steps 2 --job.output_dir of_{name}", config=job)
    for model, teacher in (("llama", "phi"), ("phi", "llama")):
        found = {}
        for mesh, ranks in {"": 0, "--mesh.tp 2": 2, "--mesh.pp 2": 2}.items():
            words = (
                f"{FLOAT64} --training.steps 3 --distillation.teacher of_{teacher} --job.output_dir {model}{len(found)}"
            )
            launch(tmp_path, f"{words} {mesh}", ranks, config=jobs[model])
            logged = records(tmp_path / f"{model}{len(found)}")
            found[mesh] = [each[key] for each in logged for key in ("loss", "grad_norm", "distillation_loss")]
        assert all(numbers == pytest.approx(found[""], rel=1e-10) for numbers in found.values())
