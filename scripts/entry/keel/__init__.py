"""The command `keel` where Keel is installed, and `keel.prove` for other trainers.

This name is Keel's alone, so nothing on PYTHONPATH is in its way. Keel's other packages have common names, such as
`models`; only `run` imports them, so a trainer that imports `prove` keeps its own.
"""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scripts.proving.equal import Report, prove

__all__ = ["Report", "prove", "run"]

_ROOT = next(folder for folder in Path(__file__).resolve().parents if (folder / "parallelisms").is_dir())


def __getattr__(name: str) -> Any:
    if name == "run":
        return _run()
    if name in ("Report", "prove"):
        return getattr(_equal(), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _run() -> Any:
    """The command's function, from Keel's folder, which from then on has Keel's packages."""
    sys.path.insert(0, str(_ROOT))
    from scripts.keel import run

    sys.path.remove(str(_ROOT))
    return run


def _equal() -> Any:
    """The file with `prove`, as a module of this package: it needs nothing else of Keel's."""
    name = f"{__name__}.equal"
    if name not in sys.modules:
        spec = spec_from_file_location(name, _ROOT / "scripts/proving/equal.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]
