"""Commands, one file each. Importing this package makes Keel's own packages come before others of the same names.

Names such as `models` and `configs` are common: a user's folder on PYTHONPATH, or another package in the same
environment, may have them. Only these names are looked up here; everything else is found where Python finds it.
"""

import base64
import hashlib
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
NAMES = ("checkpoint", "configs", "models", "parallelisms", "scripts", "train", "trainer")
"""Keel's top-level names."""


class OwnPackages:
    """Finds Keel's top-level packages in Keel's folder."""

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find one of Keel's packages; None for any other name."""
        return PathFinder.find_spec(name, [str(ROOT)]) if name in NAMES else None


def packages_in_the_way() -> Iterator[str]:
    """Yield a message for each of Keel's names that belongs to another package in this process or on the disk."""
    for name in NAMES:
        file = getattr(sys.modules.get(name), "__file__", None)
        if file and ROOT not in Path(file).resolve().parents:
            yield f"{Path(file).parent} was imported as {name}, which is the name of a package of Keel's; rename it"
    for record in ROOT.glob("keel-*.dist-info/RECORD"):  # installed, and not editable
        hashes = dict(line.split(",")[:2] for line in record.read_text().splitlines())
        for file in (*(f"{name}/__init__.py" for name in NAMES if name != "train"), "train.py"):
            if file in hashes and hashes[file] != _hash(ROOT / file):
                yield (
                    f"{ROOT / file} is not Keel's: another package of that name was installed over it. "
                    "Install Keel in an environment of its own"
                )


def _hash(file: Path) -> str:
    """A file's hash as RECORD has it."""
    content = file.read_bytes() if file.exists() else b""
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")


if OwnPackages not in sys.meta_path:
    sys.meta_path.insert(0, OwnPackages)
    for message in packages_in_the_way():
        sys.exit(f"error: {message}")
