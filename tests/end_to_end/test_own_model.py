"""The model of docs/own_models.md from an empty folder: trained, moved to other meshes, sampled, and never imported
because a run folder names it."""

import os
import re
import shlex
import shutil
from pathlib import Path

import pytest

from tests.end_to_end.launch import TINY, keel, launch, records
from tests.marked import marked
from tests.own_code import WORDS, write_files

BOUND = 1e-10
FLOAT64 = " ".join(f"--training.{key} float64" for key in ("dtype", "compute_dtype", "reduce_dtype"))
TEXT = (
    "--model.options.vocab_size 384 --model.options.dim 32 --model.options.n_heads 4 --model.options.ffn_dim 64"
    """ --tokenizer.path data/tokenizer.model --tokenizer.train_on '["text"]' --data.prepare.input '["text"]'"""
    " --data.prepare.output data/tokens --data.sources.0.path data/tokens/train --validation.interval 0"
    " --data.prepare.validation_fraction 0"
    " --training.seq_len 32 --training.global_batch_size 8 --training.micro_batch_size 2 --training.max_norm 0.5"
    " --training.steps 4 --lr_schedule.total_steps 8 --lr_schedule.warmup_steps 1 --metrics.interval 1"
    f" --job.device cpu {FLOAT64}"
)
"""The page's job, small, on some text, in float64."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The page's files and a text, and nothing else; one process has trained four steps."""
    folder = write_files(tmp_path_factory.mktemp("empty"))
    (folder / "text").mkdir()
    for module in sorted(Path(os.__file__).parent.glob("[a-b]*.py")):
        shutil.copy(module, folder / "text")
    launch(folder, TEXT, config=folder / "my_model.toml")
    return folder


def curve(folder: Path, run: str) -> list[tuple[float, float]]:
    return [(record["loss"], record["grad_norm"]) for record in records(folder / "runs" / run)]


def assert_same_curve(folder: Path, run: str) -> None:
    expected = curve(folder, "my_model")
    found = curve(folder, run)
    assert len(found) == len(expected) == 4
    for pair, other in zip(found, expected, strict=True):
        assert pair == pytest.approx(other, rel=BOUND, abs=0)


MESHES = {"fsdp": "--mesh.dp_shard 2", "tp": "--mesh.tp 2", "pp": "--mesh.pp 2"}


@pytest.mark.parametrize("mesh", marked(MESHES, slow=["tp"], long=["fsdp", "pp"]))
def test_each_mesh_has_the_curve_of_one_process(folder, mesh):
    launch(folder, f"{TEXT} --job.name {mesh} {MESHES[mesh]}", ranks=2, config=folder / "my_model.toml")
    assert_same_curve(folder, mesh)


@pytest.mark.long
def test_a_run_resumes_on_another_mesh(folder):
    words = f"{TEXT} --job.name moved"
    launch(folder, f"{words} --training.steps 2 --mesh.dp_shard 2", ranks=2, config=folder / "my_model.toml")
    launch(folder, f"{words} --mesh.tp 2", ranks=2, config=folder / "my_model.toml")
    assert_same_curve(folder, "moved")


@pytest.mark.slow
def test_the_run_folder_holds_every_option_and_a_resume_refuses_another(folder):
    text = (folder / "runs" / "my_model" / "config.toml").read_text()
    assert "max_seq_len = 1024" in text  # a default
    other = f"{TEXT} --training.steps 6 --model.options.max_seq_len 64"
    refused = launch(folder, other, config=folder / "my_model.toml", expect=78)
    assert "model.options.max_seq_len: 1024 -> 64" in refused.err


@pytest.mark.slow
def test_commands_work_on_it(folder):
    proof = keel(folder, "prove", "my_model.toml", "--axes", "fsdp,tp,pp", "--ranks", "2")
    assert proof.code == 0, proof.out + proof.err
    assert re.search(r"\d equal", proof.out)
    plan = keel(folder, "plan", "my_model.toml", "--ranks", "4", "--mesh.tp", "2")
    assert plan.code == 0, plan.err
    assert "parameters" in plan.out
    needed = [
        word
        for key in ("vocab_size", "dim", "n_layers", "n_heads", "ffn_dim")
        for word in (f"--model.options.{key}", {"n_layers": "2", "n_heads": "4"}.get(key, "64"))
    ]
    named = keel(folder, "prove", "my_model:GPT2", "--axes", "fsdp", "--ranks", "2", *needed)
    assert named.code == 0, named.out + named.err
    run = folder / "runs" / "my_model"
    sampled = keel(folder, "sample", str(run), "import", "--max-tokens", "5", "--model.architecture", "my_model:GPT2")
    assert sampled.code == 0, sampled.err
    exported = keel(folder, "export", str(next((run / "checkpoints").glob("step-*"))), "exported")
    assert exported.code == 1
    assert "it is no model of transformers, but one's own" in exported.out + exported.err


@pytest.mark.slow
def test_a_run_is_computed_again_from_its_file_with_the_model_named(folder):
    words = f"{TEXT} --training.steps 2 --metrics.fingerprint true --job.output_dir recorded"
    launch(folder, words, config=folder / "my_model.toml")
    assert keel(folder, "reproduce", "recorded", "--write", "recorded.json").code == 0
    refused = keel(folder, "reproduce", "recorded.json")
    assert refused.code == 78
    assert "by the key that has it, as in --model.architecture module:Class" in refused.out + refused.err
    again = keel(folder, "reproduce", "recorded.json", "--model.architecture", "my_model:GPT2")
    assert again.code == 0, again.out + again.err
    assert "equal in bits: steps 1 to 2" in again.out
    # The gradient of its bias of keys is zero but for round-off, which every mesh changes.
    words = ("--model.architecture", "my_model:GPT2", "--ranks", "2", "--mesh.tp", "2")
    elsewhere = keel(folder, "reproduce", "recorded.json", *words)
    assert elsewhere.code == 0, elsewhere.out + elsewhere.err


@pytest.mark.slow
def test_no_command_runs_code_that_a_run_folder_names(folder, tmp_path):
    """The module writes a file when it is imported; a job that names another module does not import it either."""
    for name in ("runs", "data", "my_model.toml"):
        source = folder / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / name)
    shutil.copy(folder / "my_model.py", tmp_path / "other_model.py")
    (tmp_path / "my_model.py").write_text("open('imported', 'w').close()\nfrom other_model import GPT2\n")
    run = "runs/my_model"
    for words in (
        ("sample", run, "import", "--max-tokens", "2"),
        ("score", run, "--validation.sources.0.path", "data/tokens/train"),
        ("replay", run, "--step", "2"),
        ("data", "step", run, "1"),
        ("report", run),
        ("fork", run, "--output", "forked"),
        ("runs",),
        ("export", f"{run}/checkpoints/step-00000004", "exported"),
        ("checkpoint", "inspect", f"{run}/checkpoints/step-00000004"),
    ):
        said = keel(tmp_path, *words)
        assert "Traceback" not in said.err, said.err
        assert not (tmp_path / "imported").exists(), words
        if words[0] in ("sample", "score", "fork"):
            assert said.code == 78, said.out + said.err
            assert "Keel runs no code that a checkpoint or a run folder names; name it" in said.out + said.err
    job = (tmp_path / "my_model.toml").read_text()
    (tmp_path / "my_model.toml").write_text(job.replace("my_model:GPT2", "other_model:GPT2"))
    refused = launch(tmp_path, TEXT, config=tmp_path / "my_model.toml", expect=78)
    assert 'model.architecture: "my_model:GPT2" -> "other_model:GPT2"' in refused.err
    assert not (tmp_path / "imported").exists()


@pytest.mark.slow
def test_a_schedule_of_ones_own_is_its_formula_in_the_metrics(tmp_path):
    write_files(tmp_path)
    words = "--lr_schedule.name my_schedule:parabola --training.steps 20"
    launch(tmp_path, words, config=TINY)
    shapes = [1 / 3, 2 / 3, *((1 - step / 18) ** 2 for step in range(18))]
    expected = [1e-2 * (shape if step < 2 else 0.1 + 0.9 * shape) for step, shape in enumerate(shapes)]
    assert [record["lr"] for record in records(tmp_path / "run")] == pytest.approx(expected, rel=1e-12)


@pytest.mark.slow
def test_an_optimizers_state_is_exported_once_the_code_it_depends_on_is_named(tmp_path):
    write_files(tmp_path)
    schedule = ("--lr_schedule.name", "my_schedule:parabola")
    launch(tmp_path, f"{shlex.join(schedule)} --training.steps 3")
    assert keel(tmp_path, "export", "run", "out", "--optimizer").code == 78
    exported = keel(tmp_path, "export", "run", "out", "--optimizer", *schedule)
    assert exported.code == 0, exported.err
    assert (tmp_path / "out" / "adamw.pt").exists()
    other = keel(tmp_path, "export", "run", "out-2", "--optimizer", "--optimizer.lr", "1")
    assert "--optimizer.lr: without effect on an export" in other.err
    launch(tmp_path, "--optimizer.name torch.optim:NAdam --training.steps 1 --job.output_dir nadam")
    refused = keel(tmp_path, "export", "nadam", "out-3", "--optimizer")
    assert "has the state of torch.optim:NAdam, and only that of Keel's own is exported" in refused.err


@pytest.mark.slow
def test_a_source_of_ones_own_resumes_bit_for_bit(tmp_path):
    write_files(tmp_path)
    words = f"{' '.join(WORDS)} --data.sources.0.kind my_source:Counting --training.steps"
    launch(tmp_path, f"{words} 8", config=TINY)
    launch(tmp_path, f"{words} 3 --job.output_dir parts", config=TINY)
    launch(tmp_path, f"{words} 8 --job.output_dir parts", config=TINY)
    losses = [[record["loss"] for record in records(tmp_path / run)] for run in ("run", "parts")]
    assert losses[0] == losses[1]
    assert len(set(losses[0])) == 8
    source = (tmp_path / "my_source.py").read_text()
    (tmp_path / "my_source.py").write_text(source.replace('arithmetic sequences"}', 'others"}'))
    changed = launch(tmp_path, f"{words} 9 --job.output_dir parts", config=TINY, expect=78)
    assert "the data of the source 'noise' has changed since the checkpoint" in changed.err
