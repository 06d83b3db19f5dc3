"""What torch.compile and Triton need of a host: a compiler, and folders for what they have compiled.

Both are used in the first step at the earliest, when the weights are drawn: minutes after the start of a large job. So
the start asks for them. The checks of folders import no torch, because torch reads these variables when it is imported.
"""

import getpass
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import MutableMapping
from contextlib import suppress
from functools import cache
from pathlib import Path

from configs.errors import ConfigError
from configs.files import exists, is_folder
from configs.load import LoadedConfig

INDUCTOR_FOLDER = "TORCHINDUCTOR_CACHE_DIR"
TRITON_FOLDER = "TRITON_CACHE_DIR"
_TRITON_CAPABILITY = (8, 0)
"""The oldest GPUs for which Keel's kernels are written."""


def require_cache_folders(environment: MutableMapping[str, str]) -> None:
    """Check the folders that the user has named; keep Triton's kernels beside torch's where the home is read-only.

    Raises:
        ConfigError: a folder that the user has named can't be written.
    """
    for variable in (INDUCTOR_FOLDER, TRITON_FOLDER):
        named = environment.get(variable)
        if named and (reason := _unwritable(Path(named))):
            raise ConfigError(
                f"the environment variable {variable} is {named}, but that folder can't be written ({reason}); set it "
                "to another folder, or unset it"
            )
    is_open = TRITON_FOLDER not in environment and "TRITON_HOME" not in environment
    if is_open and _unwritable(_nearest(Path.home() / ".triton" / "cache")):
        environment[TRITON_FOLDER] = str(_own_folder(Path(tempfile.gettempdir()) / f"triton_{_user()}"))


def require_compiler(job: LoadedConfig, device_type: str) -> None:
    """Check that torch.compile finds the compiler that it needs, if the job compiles.

    Raises:
        ConfigError: it does not.
    """
    if not job.config.compile.enable:
        return
    is_gpu = device_type == "cuda"
    if (c_compiler() if is_gpu else cpp_compiler()) is None:
        raise job.error(
            "compile.enable",
            f"torch.compile needs a {'C' if is_gpu else 'C++'} compiler, and this host has none on its PATH, nor does "
            f"the environment variable {'CC' if is_gpu else 'CXX'} name one: install it (apt install "
            f"{'gcc' if is_gpu else 'g++'}), or set compile.enable = false",
        )


@cache
def has_triton() -> bool:
    """Whether Triton can compile a kernel and its launcher here, for the GPU that is there."""
    import torch  # not before the folders have been checked

    has_both = importlib.util.find_spec("triton") is not None and c_compiler() is not None
    is_nvidia = torch.cuda.is_available() and torch.version.hip is None
    return has_both and is_nvidia and torch.cuda.get_device_capability() >= _TRITON_CAPABILITY


def c_compiler() -> str | None:
    """The path of the compiler with which Triton builds its launchers; None if there is none."""
    named = os.environ.get("CC")
    return shutil.which(named) if named else shutil.which("gcc") or shutil.which("clang")


def cpp_compiler() -> str | None:
    """The path of the compiler with which torch.compile builds a CPU's kernels; None if there is none."""
    return shutil.which(os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++"))


def _unwritable(folder: Path) -> str:
    """Why no file can be made in a folder, which may have to be made; "" if one can.

    `os.access` would not tell: it lets root write anywhere.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def _own_folder(folder: Path) -> Path:
    """The folder, which other users must not write to, since what is in it is run; another one if it is somebody's."""
    with suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        if is_folder(folder) and folder.stat().st_uid == os.getuid():
            return folder
    return Path(tempfile.mkdtemp(prefix=f"{folder.name}_"))


def _nearest(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next(each for each in (folder, *folder.parents) if exists(each))


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container's user without a name
        return str(os.getuid())
