"""The command `keel replay`, as a person starts it, on another mesh than the run's."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.launch import ENVIRONMENT, ROOT, TIMEOUT_SECONDS, launch, snapshot

COMMAND = """--checkpoint.after_save '[{name = "touch", command = "touch {output}/x", every = 10}]'"""
RECORDED = f"--metrics.fingerprint true --checkpoint.interval 10 {COMMAND} --training.reduction"


def keel(folder: Path, words: str) -> tuple[int, str]:
    """Run the command in `folder`; returns its exit code and what it printed."""
    command = [sys.executable, str(ROOT / "scripts" / "keel.py"), *words.split()]
    done = subprocess.run(
        command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=TIMEOUT_SECONDS
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("reduction", "words", "expected"),
    [
        pytest.param(
            "fast",
            "--ranks 2 --mesh.tp 2",
            "equal within the bound: steps 11 to 14; the difference nearest to it is ",
            marks=pytest.mark.long,
        ),
        pytest.param("exact", "--ranks 2", "equal in bits: steps 11 to 14", marks=pytest.mark.slow),
    ],
)
def test_another_mesh(reduction, words, expected, tmp_path):
    launch(tmp_path, f"{RECORDED} {reduction}")
    before = snapshot(tmp_path / "run")
    code, said = keel(tmp_path, f"replay run --step 14 {words}")
    assert code == 0, said
    assert expected in said
    assert ("the bits may differ, because of mesh.tp 1 -> 2" in said) == (reduction == "fast")
    assert snapshot(tmp_path / "run") == before
