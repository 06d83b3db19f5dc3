"""A small corpus of real text, prepared once by a run of its own."""

import shutil
import sysconfig
from pathlib import Path

import pytest

from tests.end_to_end.launch import TEXT, launch


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `text/`, the tokenizer and token files in `data/`, and the `run` of 20 steps that made them."""
    folder = tmp_path_factory.mktemp("prepared")
    (folder / "text").mkdir()
    for module in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-c]*.py")):
        shutil.copy(module, folder / "text")
    outcome = launch(folder, config=TEXT)
    (folder / "stdout").write_text(outcome.out)
    return folder


@pytest.fixture
def corpus(prepared: Path, tmp_path: Path) -> Path:
    """A folder of a test's own with `text/` and `data/`, to be damaged at will."""
    for name in ("text", "data"):
        shutil.copytree(prepared / name, tmp_path / name)
    return tmp_path
