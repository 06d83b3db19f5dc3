"""The command `keel reproduce`, as two people use it: one writes the file, another computes with it elsewhere."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.launch import ENVIRONMENT, ROOT, TIMEOUT_SECONDS, launch
from tests.end_to_end.test_documented_commands import make_clone
from tests.marked import marked


def keel(folder: Path, words: str, root: Path = ROOT) -> tuple[int, str]:
    """Run the command in `folder`; returns its exit code and what it printed."""
    command = [sys.executable, str(root / "scripts" / "keel.py"), "reproduce", *words.split()]
    done = subprocess.run(
        command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=TIMEOUT_SECONDS
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory) -> Path:
    """A folder with nothing but the file of a run."""
    first, second = tmp_path_factory.mktemp("first"), tmp_path_factory.mktemp("second")
    launch(first, "--metrics.fingerprint true")
    code, said = keel(first, "run --write run.json --steps 2 5 9")
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
    code, said = keel(elsewhere, f"run.json {mesh}")
    assert code == 0, said
    assert "computing steps again, from the initial weights, to compare the steps 1, 2, 5, 9" in said
    assert "equal within the bound: steps 1 to 9" in said
    assert [path.name for path in elsewhere.iterdir()] == ["run.json"]


@pytest.mark.slow
def test_a_changed_line_of_code_is_named(elsewhere, tmp_path):
    clone = make_clone(tmp_path)
    file = clone / "models" / "feed_forward.py"
    changed = file.read_text().replace("F.silu(", "F.gelu(")
    assert changed != file.read_text()
    file.write_text(changed)
    code, said = keel(elsewhere, "run.json", clone)
    assert code == 1, said
    assert "NOT EQUAL: step 1 is the first that differs by more than round-off" in said
    assert re.search(r"code: Keel's code \w+ -> \w+, in models\n", said)
    assert "values:" not in said


def test_words_that_go_with_one_form_only(tmp_path):
    for words, why in (
        ("run --write f --ranks 2", "--write computes nothing"),
        ("run --write f --optimizer.lr 1", "--write computes nothing"),
        ("f --begin 3", "--begin goes with --write"),
        (".", "a run folder goes with --write FILE"),
    ):
        code, said = keel(tmp_path, words)
        assert code == 2
        assert why in said
