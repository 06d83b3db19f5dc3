"""The command `keel reproduce`, as two people use it: one writes the file, another computes with it elsewhere."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.end_to_end.launch import ENVIRONMENT, ROOT, TIMEOUT_SECONDS, keel, launch, launch_here
from tests.end_to_end.test_documented_commands import make_clone
from tests.marked import marked
from tests.unit.scripts.test_reproduce import VOCAB, first_steps, recorded, write_tokens  # noqa: F401 - a fixture
from trainer.data.token_file import TokenFolder
from trainer.step import Learner


def reproduce(folder: Path, words: str, root: Path = ROOT) -> tuple[int, str]:
    """Run the command in `folder`; returns its exit code and what it printed."""
    if root == ROOT:
        done = keel(folder, "reproduce", *words.split())
        return done.code, done.out + done.err
    command = [sys.executable, str(root / "scripts" / "keel.py"), "reproduce", *words.split()]
    other = subprocess.run(
        command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=TIMEOUT_SECONDS
    )
    return other.returncode, other.stdout + other.stderr


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory) -> Path:
    """A folder with nothing but the file of a run."""
    first, second = tmp_path_factory.mktemp("first"), tmp_path_factory.mktemp("second")
    launch(first, "--metrics.fingerprint true")
    code, said = reproduce(first, "run --write run.json --steps 2 5 9")
    assert code == 0, said
    assert "with the fingerprints of the steps 1, 2, 5, 9" in said
    shutil.copy(first / "run.json", second)
    shutil.rmtree(first)
    return second


@pytest.mark.parametrize(
    "mesh",
    marked(
        ["--ranks 2", "--ranks 2 --mesh.tp 2 --training.micro_batch_size 4"],
        slow=["--ranks 2 --mesh.tp 2 --training.micro_batch_size 4"],
        long=["--ranks 2"],
    ),
)
def test_another_mesh_is_equal_within_rounding(elsewhere, mesh):
    code, said = reproduce(elsewhere, f"run.json {mesh}")
    assert code == 0, said
    assert "computing steps again, from the initial weights, to compare the steps 1, 2, 5, 9" in said
    assert "equal within the bound: steps 1 to 9" in said
    assert [path.name for path in elsewhere.iterdir()] == ["run.json"]


@pytest.mark.slow
def test_a_run_key_that_differs_from_the_checkpoint_is_named(tmp_path):
    """As it is from the initial weights; the place of the data is such a key, too."""
    launch(tmp_path, "--metrics.fingerprint true --training.steps 4 --checkpoint.interval 2")
    assert reproduce(tmp_path, "run --write run.json --begin 2")[0] == 0
    code, said = reproduce(tmp_path, "run.json --checkpoint run/checkpoints/step-00000002 --optimizer.lr 2e-2")
    assert code == 1
    assert "NOT EQUAL: step 4 is the first that differs from its replay" in said
    assert "job: optimizer.lr: 0.01 -> 0.02" in said


@pytest.mark.slow
def test_a_changed_line_of_code_is_named(elsewhere, tmp_path):
    clone = make_clone(tmp_path)
    file = clone / "models" / "feed_forward.py"
    changed = file.read_text().replace("F.silu(", "F.gelu(")
    assert changed != file.read_text()
    file.write_text(changed)
    code, said = reproduce(elsewhere, "run.json", clone)
    assert code == 1, said
    assert "NOT EQUAL: step 1 is the first that differs by more than round-off" in said
    assert re.search(r"code: Keel's code \w+ -> \w+, in models\n", said)
    assert "values:" not in said


@pytest.mark.slow
def test_one_other_token_is_named_on_another_mesh(recorded, tmp_path):  # noqa: F811
    """Somebody else has the data, but for one token."""
    ids = TokenFolder(recorded / "code", VOCAB + 20).read(0, 4000)
    place, step = next((place, step) for place, step in first_steps(recorded, "code").items() if step > 4)
    ids[place] += 1
    for name in ("run.json", "t.model"):
        shutil.copy(recorded / name, tmp_path)
    shutil.copytree(recorded / "web", tmp_path / "web")
    write_tokens(tmp_path, "code", ids)
    places = "--data.sources.0.path web --data.sources.1.path code --tokenizer.path t.model"
    code, said = reproduce(tmp_path, f"run.json --ranks 2 {places}")
    assert code == 1, said
    assert f"NOT EQUAL: step {step} is the first that differs" in said
    assert f"data: step {step} is the first that read other tokens (code: other content)" in said
    assert "values:" not in said
    code, said = reproduce(tmp_path, f"run.json --ranks 2 {places} --steps {step - 1}")
    assert code == 0, said


@pytest.mark.slow
def test_a_flipped_bit_of_a_weight_is_named_on_another_mesh(tmp_path, monkeypatch):
    """Memory has flipped one before step 6 of the run that is recorded."""
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    here.mkdir()
    gradients = Learner.gradients
    seen = []

    def flipped(learner: Learner, *arguments):
        seen.append(1)
        if len(seen) == 6:
            weight = learner.parameters["layers.1.mlp.up_proj.weight"].detach()
            weight.view(torch.int32).view(-1)[5] ^= 1 << 29
        return gradients(learner, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Learner, "gradients", flipped)
        assert launch_here(there, "--metrics.fingerprint", "true", "--training.steps", "8") == 0
    code, said = reproduce(there, "run --write run.json")
    assert code == 0, said
    shutil.move(there / "run.json", here)
    code, said = reproduce(here, "run.json --ranks 2")
    assert code == 1, said
    assert "NOT EQUAL: step 6 is the first that differs by more than round-off" in said
    assert "values: data, job, code and torch are the same" in said


def test_words_that_go_with_one_form_only(tmp_path):
    for words, why in (
        ("run --write f --ranks 2", "--write computes nothing"),
        ("run --write f --optimizer.lr 1", "--write computes nothing"),
        ("f --begin 3", "--begin goes with --write"),
        (".", "a run folder goes with --write FILE"),
    ):
        code, said = reproduce(tmp_path, words)
        assert code == 2
        assert why in said
