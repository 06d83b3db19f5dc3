"""The CUDA device that computes nothing (device.c): built, put under a process, and read out.

A process gets it by `environment()`, before it starts: the library is preloaded. In such a process `Counters` reads
what torch has asked of the device.
"""

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("device.c")
HEADERS = ("nvidia/cu13/include", "triton/backends/nvidia/include")  # as torch's CUDA wheels bring them


class Unavailable(Exception):
    """The device can't be built here; the message says what is lacking."""


def library() -> Path:
    """The built library, from the user's cache folder; built first if it is not there in this version.

    Raises:
        Unavailable: there is no CUDA build of torch, no compiler or no headers.
    """
    version = importlib.metadata.version("torch")
    if importlib.util.find_spec("triton") is None:
        raise Unavailable(
            f"torch {version} here is no CUDA build; in an environment of its own: pip install torch==2.11.0"
        )
    folders = [Path(sysconfig.get_path("purelib")) / name for name in HEADERS]
    if missing := [str(folder) for folder in folders if not folder.is_dir()]:
        raise Unavailable(f"the CUDA headers are not where torch's wheels put them: {', '.join(missing)}")
    if shutil.which("gcc") is None:
        raise Unavailable("gcc is needed to build the device; install it")
    key = hashlib.sha256(SOURCE.read_bytes() + version.encode()).hexdigest()[:16]
    built = cache_folder() / f"null-gpu-{key}" / "libcuda.so.1"
    if not built.exists():
        _build(built, folders)
    return built


def cache_folder() -> Path:
    """Where Keel's tests keep what takes long to make."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "keel"


def environment(devices: int = 1) -> dict[str, str]:
    """What a process must find in its environment, beside its own, to see the device. Raises: Unavailable."""
    built = library()
    return {
        "LD_PRELOAD": str(built),
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, (str(built.parent), os.environ.get("LD_LIBRARY_PATH")))),
        "TRITON_LIBCUDA_PATH": str(built.parent),
        "KEEL_NULL_GPUS": str(devices),
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(devices))),  # a session of tests hides the machine's own
        "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1",  # cuDNN calls the driver past this library; FlashAttention is torch's
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",  # as every command of Keel's has it
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # its worker processes would start with the library, too
        "TRITON_CACHE_DIR": str(built.parent / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(built.parent / "inductor"),
    }


class Counters:
    """What torch has asked of the device in this process."""

    def __init__(self) -> None:
        """
        Raises:
            Unavailable: the process was not started with `environment()`.
        """
        if "KEEL_NULL_GPUS" not in os.environ:
            raise Unavailable("this process was started without the device; see tests.null_gpu.device.environment")
        self._library = ctypes.CDLL(os.environ["LD_PRELOAD"])
        self._library.null_gpu_names.restype = ctypes.c_char_p
        self._library.null_gpu_count.restype = ctypes.c_long
        self._library.null_gpu_idle_seconds.restype = ctypes.c_double
        self._names = self._library.null_gpu_names().decode().split()

    def reset(self) -> None:
        """Count from zero."""
        self._library.null_gpu_reset()

    def read(self) -> dict[str, int]:
        """Every counter by name."""
        return {name: self._library.null_gpu_count(name.encode()) for name in self._names}

    def idle_seconds(self) -> float:
        """CPU time of the process from each synchronization to the launch that follows, in all."""
        return self._library.null_gpu_idle_seconds()


def _build(built: Path, headers: list[Path]) -> None:
    built.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=built.parent) as folder:
        made = Path(folder) / built.name
        includes = [f"-I{folder}" for folder in headers]
        command = [
            "gcc",
            "-O1",
            "-shared",
            "-fPIC",
            *includes,
            str(SOURCE),
            "-o",
            str(made),
            f"-Wl,-soname,{built.name}",
        ]
        done = subprocess.run([*command, "-ldl", "-lpthread"], capture_output=True, text=True)
        if done.returncode:
            raise Unavailable(f"gcc could not build {SOURCE}:\n{done.stderr}")
        devices = Path(folder) / "libnvidia-ml.so.1"
        devices.symlink_to(built.name)
        devices.replace(built.parent / devices.name)
        made.replace(built)  # in one go: another process may be at it
