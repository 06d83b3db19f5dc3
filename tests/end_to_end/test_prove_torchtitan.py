"""`keel.prove` of torchtitan's own Llama 3, where torchtitan 0.3 is installed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.launch import ENVIRONMENT, ROOT

EXAMPLE = Path(__file__).with_name("prove_torchtitan.py").read_text()
A_WRONG_LOSS = "value = loss(model, part)\n"


def proved(folder: Path, text: str, ranks: int) -> subprocess.CompletedProcess[str]:
    """Run a program on ranks of this machine."""
    program = folder / "prove_torchtitan.py"
    program.write_text(text)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    path = {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    return subprocess.run(
        [*launcher, str(program)], cwd=folder, env=ENVIRONMENT | path, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_torchtitan_is_its_own_model_in_one_process(tmp_path: Path, ranks: int):
    pytest.importorskip("torchtitan")
    ran = proved(tmp_path, EXAMPLE, ranks)
    assert ran.returncode == 0, ran.stderr
    assert "equal: loss, norm and 45 gradients" in ran.stdout


@pytest.mark.slow
def test_a_loss_that_is_not_divided_is_found(tmp_path: Path):
    pytest.importorskip("torchtitan")
    text = EXAMPLE.replace("value = loss(model, part) / dims.dp_shard\n", A_WRONG_LOSS)
    assert A_WRONG_LOSS in text
    ran = proved(tmp_path, text, 4)
    assert ran.returncode != 0
    assert "45 of 45 gradients" in ran.stdout
