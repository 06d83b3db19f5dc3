"""The command `keel` where Keel is installed. This name is Keel's alone, so nothing on PYTHONPATH is in its way."""

import sys
from pathlib import Path

_ROOT = str(next(folder for folder in Path(__file__).resolve().parents if (folder / "parallelisms").is_dir()))
sys.path.insert(0, _ROOT)
from scripts.keel import run  # noqa: E402 - from Keel's folder, which from then on has Keel's packages

sys.path.remove(_ROOT)

__all__ = ["run"]
