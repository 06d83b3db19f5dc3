"""What decides the bits of a run besides its job file: Keel's code, the libraries, and the machine.

A sum of floating-point numbers depends on its order, which depends on the number of threads, the vector instructions,
the libraries and some environment variables. Ranks must agree on all of these, and a checkpoint records them.
"""

import os
import socket
from functools import cache
from pathlib import Path

import numpy as np
import torch
import xxhash

from checkpoint.reproducibility import CODE
from configs.load import LoadedConfig

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("checkpoint", "configs", "models", "parallelisms", "trainer")
VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NVIDIA_TF32_OVERRIDE",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)
"""Variables by which the libraries choose their algorithms, or the precision of their matrix products."""
_BFLOAT16_CAPABILITY = 8
_DEVICES = Path("/dev")
_FOLDER_DIGITS = 8
"""The length of a folder's hash; each launch's record, which must stay small, has those of all folders."""
THREADS = "threads (OMP_NUM_THREADS)"


def environment(device: torch.device, cpu_offload: bool) -> dict[str, str]:
    """The facts, by name, that decide the bits computed on `device` (and, with `cpu_offload`, on the CPU)."""
    facts = {CODE: code_hash(), "numpy": np.__version__, "device": device_name(device)}
    if device.type == "cuda":
        facts |= {"CUDA": str(torch.version.cuda), "cuDNN": str(torch.backends.cudnn.version())}
    if device.type == "cpu" or cpu_offload:
        facts |= {"CPU instructions": torch.backends.cpu.get_cpu_capability(), THREADS: threads()}
    return facts | {f"variable {name}": os.environ[name] for name in VARIABLES if name in os.environ}


def threads() -> str:
    """The number of threads over which torch splits an operation."""
    return str(torch.get_num_threads())


def device_name(device: torch.device) -> str:
    """The device's product name, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


@cache
def code_hashes() -> dict[str, str]:
    """xxh3_64 of each file of Keel's code that a run may execute, by its path in the repository."""
    files = [ROOT / "train.py", *(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))]
    return {path.relative_to(ROOT).as_posix(): xxhash.xxh3_64_hexdigest(path.read_bytes()) for path in sorted(files)}


def code_hash() -> str:
    """One xxh3_64 over all of Keel's code."""
    return xxhash.xxh3_64_hexdigest(repr(code_hashes()).encode())


def code_by_folder() -> dict[str, str]:
    """The start of an xxh3_64 over the files of each folder of code, without those below it, and over train.py."""
    files: dict[str, list[tuple[str, str]]] = {}
    for path, digest in code_hashes().items():
        files.setdefault(path.rpartition("/")[0] or path, []).append((path, digest))
    return {folder: xxhash.xxh3_64_hexdigest(repr(own).encode())[:_FOLDER_DIGITS] for folder, own in files.items()}


def device_type(job: LoadedConfig) -> str:
    """Choose "cpu" or "cuda".

    Raises:
        ConfigError: cuda is requested but unavailable, torch's CUDA build can't use this host's GPUs, there are too few
            of them, or they lack what the job needs.
    """
    wanted = job.config.job.device
    if wanted == "cpu":
        return "cpu"
    if not torch.cuda.is_available():
        if reason := _why_gpus_are_unusable():
            raise job.error(
                "job.device",
                f"host {socket.gethostname()} has GPUs, but torch {torch.__version__} can't use them: {reason}; mend "
                'that, or set job.device = "cpu" to train without them',
            )
        if wanted == "cuda":
            raise job.error("job.device", 'device is "cuda", but torch sees no CUDA device here; use "auto" or "cpu"')
        return "cpu"
    _check_gpu(job, int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return "cuda"


def _why_gpus_are_unusable() -> str:
    """What torch's CUDA build says of the NVIDIA GPUs that it can't use, such as a driver that is too old for it; "" if
    there are none, if they are not this process's (hidden, or another job's), or if the build is for CPUs."""
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1")
    if torch.version.cuda is None or is_hidden or not any(_DEVICES.glob("nvidia[0-9]*")):
        return ""
    try:
        torch.cuda.init()
    except RuntimeError as error:
        said = str(error).splitlines()[0].rstrip(".")
        return "" if said.startswith("No CUDA GPUs are available") else said
    return ""


def _check_gpu(job: LoadedConfig, local_rank: int, local_ranks: int) -> None:
    count = torch.cuda.device_count()
    host = socket.gethostname()
    if max(local_rank + 1, local_ranks) > count:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        raise job.error(
            "job.device",
            f"each rank needs its own GPU, but torch sees {count} on host {host} for {local_ranks} ranks (this "
            f"one has LOCAL_RANK {local_rank}): start torchrun with --nproc-per-node {count}, or with job.device = "
            f'"cpu"; every rank must see all GPUs of its host (CUDA_VISIBLE_DEVICES is {visible or "not set"})',
        )
    major, minor = torch.cuda.get_device_capability(local_rank)
    name = torch.cuda.get_device_name(local_rank)
    if job.config.training.compute_dtype == "bfloat16" and major < _BFLOAT16_CAPABILITY and torch.version.hip is None:
        raise job.error(
            "training.compute_dtype",
            f'compute_dtype is "bfloat16", but GPU {local_rank} of host {host}, {name}, has compute capability '
            f"{major}.{minor}, and bfloat16 needs {_BFLOAT16_CAPABILITY}.0 "
            '(Ampere) or higher: set compute_dtype = "float32"',
        )
