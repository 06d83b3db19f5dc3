"""What a step of some jobs may ask of a GPU at most: recorded in limits.json, held by test_limits.py.

    python -m tests.null_gpu.limits          measures the jobs and writes the file anew

A change that needs less is recorded by that command in the same commit, and so is one that needs more on purpose.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.null_gpu.device import Unavailable, environment
from tests.null_gpu.step import join, measure

FILE = Path(__file__).with_suffix(".json")
FIGURES = ("launches", "memcpys", "syncs", "nccl_calls", "peak_allocated_bytes")
"""Of `measure`, those that are the same every time; what the allocator reserves is not, to half a percent."""
_LAYERS = "--model.n_layers 4"
JOBS = {
    # name: (job file, ranks of which it is rank 0, words)
    "1B of 4 layers, eager": (
        "llama_1b.toml",
        1,
        f"{_LAYERS} --training.global_batch_size 16 --compile.enable false",
    ),
    "1B of 4 layers": ("llama_1b.toml", 1, f"{_LAYERS} --training.global_batch_size 16"),
    "1B of 4 layers, transient copies": (
        "llama_1b.toml",
        1,
        f"{_LAYERS} --training.global_batch_size 16 --fsdp.reshard_after_forward always",
    ),
    "7B of 4 layers, FSDP 8, selective": ("llama_7b.toml", 8, _LAYERS),
    "8B of 4 layers, FSDP 4 x TP 2, selective": (
        "llama_8b.toml",
        8,
        f"{_LAYERS} --mesh.tp 2 --training.global_batch_size 8",
    ),
    "8B of 4 layers, PP 2 x FSDP 4, eager": (
        "llama_8b.toml",
        8,
        f"{_LAYERS} --mesh.pp 2 --training.global_batch_size 16 --compile.enable false",
    ),
}


def measured(settings: dict[str, str]) -> dict[str, Any]:
    """The version of torch, and each job's figures, from one process with the device."""
    command = [sys.executable, "-m", "tests.null_gpu.limits", "--print"]
    surroundings = {name: value for name, value in os.environ.items() if name != "RANK"} | settings
    done = subprocess.run(command, env=surroundings, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def _figures(config: str, ranks: int, words: str) -> dict[str, int]:
    import torch.distributed as dist

    join(ranks)
    result = measure(config, words.split(), timed=1)
    dist.destroy_process_group()
    return {name: result[name] for name in FIGURES}


def main() -> int:
    """Write the file; with --print, in a process with the device, say what would be in it."""
    if "--print" in sys.argv:
        import torch

        print(json.dumps({"torch": torch.__version__, "jobs": {name: _figures(*job) for name, job in JOBS.items()}}))
        return 0
    try:
        settings = environment()
    except Unavailable as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    FILE.write_text(json.dumps(measured(settings), indent=2) + "\n")
    print(f"written: {FILE}")
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # NCCL's threads wait for a device that never answers
