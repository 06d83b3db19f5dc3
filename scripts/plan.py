"""See whether a job fits before asking for the machines: build it for any number of ranks, in this one process.

    python scripts/plan.py --config llama_7b.toml --ranks 8

The model is built on the meta device and parallelized over a fake process group, as on the cluster: the same code,
every check, no memory for the weights. Prints what rank 0 would hold, counted from its shards, and the estimate of the
rest.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from configs.errors import KeelError
from configs.layout import mesh_sizes, parameter_count
from configs.load import LoadedConfig, load
from models import build_model
from parallelisms.mesh import build_mesh
from parallelisms.parallelize import parallelize
from trainer.console import Console, Row, count, duration, size
from trainer.memory import estimate_memory
from trainer.metrics import memory_peak_bytes


def shard_bytes(job: LoadedConfig, ranks: int) -> int:
    """Bytes of the parameters that rank 0 of `ranks` holds, after everything was applied to the model."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        mesh = build_mesh(mesh_sizes(job.config, ranks), torch.device("cpu"))
        with torch.device("meta"):
            model = build_model(job.config.model).to(getattr(torch, job.config.training.dtype))
        stages = parallelize(model, mesh, job.config).values()
        locals_ = [p.to_local() if isinstance(p, DTensor) else p for stage in stages for p in stage.parameters()]
        assert all(p.is_meta for p in locals_)
        return sum(p.numel() * p.element_size() for p in locals_)
    finally:
        dist.destroy_process_group()


def rows(job: LoadedConfig, ranks: int) -> list[Row]:
    """What the plan says."""
    started = time.perf_counter()
    held = shard_bytes(job, ranks)
    config, sizes = job.config, mesh_sizes(job.config, ranks)
    estimate = estimate_memory(config, sizes, "cuda")
    return [
        ("model", f"{count(parameter_count(config.model))} parameters"),
        ("ranks", f"{ranks}: {sizes}"),
        ("held by rank 0", f"{size(held)} of parameters; with gradients and optimizer {size(estimate.states)}"),
        ("at the peak", f"about {size(estimate.device)} of a GPU's memory (estimate)"),
        ("built in", duration(time.perf_counter() - started)),
        ("this process", f"{size(memory_peak_bytes('cpu'))} at its peak"),
    ]


def main() -> int:
    """Print the plan; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], epilog="Further words override the config.")
    parser.add_argument("--config", required=True, help="job file, or its name in configs/")
    parser.add_argument("--ranks", type=int, required=True, help="how many ranks the job is to run on")
    arguments, overrides = parser.parse_known_args()
    try:
        job = load(arguments.config, overrides, arguments.ranks)
        Console().table(f"{job.config.job.name} on {arguments.ranks} ranks", rows(job, arguments.ranks))
    except KeelError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
