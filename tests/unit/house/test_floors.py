"""Imports run downward only: each floor of the house knows nothing of those above it."""

import ast
import subprocess
import sys

import pytest

from tests.conftest import ROOT

MAY_IMPORT = {
    "configs": set(),
    "models": {"configs"},
    "parallelisms": {"configs"},
    "checkpoint": {"configs"},
    "trainer": {"configs", "models", "parallelisms", "checkpoint"},
    "scripts": {"configs", "models", "parallelisms", "checkpoint", "trainer", "train"},  # beside it: the command `keel`
}
FLOORS = set(MAY_IMPORT) | {"tests", "train"}


ON_EVERY_FLOOR = "parallelisms.ranks"


def imported(path):
    """First parts of the names that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.module != ON_EVERY_FLOOR:
            yield node.module.split(".")[0]


def test_what_every_floor_may_import_knows_only_the_configs():
    assert set(imported(ROOT / f"{ON_EVERY_FLOOR.replace('.', '/')}.py")) & FLOORS <= {"configs"}


@pytest.mark.parametrize("floor", MAY_IMPORT)
def test_imports_run_downward(floor):
    files = list((ROOT / floor).rglob("*.py"))
    assert files
    for path in files:
        upward = set(imported(path)) & FLOORS - MAY_IMPORT[floor] - {floor}
        assert not upward, f"{path.relative_to(ROOT)} imports {upward}"


def test_configs_do_not_know_torch():
    for path in (ROOT / "configs").rglob("*.py"):
        assert "torch" not in set(imported(path)), path.name


def test_the_trainer_knows_no_placement():
    """Sharding is the business of parallelisms/ (and of the checkpoint, which stores it)."""
    for path in (ROOT / "trainer").rglob("*.py"):
        text = path.read_text()
        assert not any(name in text for name in ("torch.distributed.tensor", "device_mesh")), path.name


@pytest.mark.parametrize(
    "module", ["train", "configs.command_line", "trainer.lifecycle", "trainer.report.console", "trainer.report.metrics"]
)
def test_what_runs_before_torch_does_not_import_it(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
