"""What each part of a recipe adds to a step:

    python -m tests.cost_of_recipe [JOB] [--rounds 15]
    torchrun --nproc-per-node 2 -m tests.cost_of_recipe [JOB]

In each round every case trains one step, on the same sequences, so that drifts of the machine's speed affect all
equally. The figures are medians over the rounds: seconds, and the ratio to AdamW's step in the same round. On several
ranks, Muon that gathers matrices (FSDP) is compared with Muon that owns them.
"""

import argparse
import os
import statistics
import sys
import time
from collections import defaultdict
from contextlib import closing

import torch
import torch.distributed as dist

from configs.layout import mesh_sizes
from configs.load import load
from parallelisms.mesh import build_mesh, start_process_group
from scripts.command import without_overrides
from tests.cost_of_details import SYNTHETIC
from trainer.data.loader import build_loader
from trainer.step import Learner, build_learner

MUON = ("--optimizer.name", "muon")
OWNER = ("--fsdp.partition", "owner")
ALONE = {
    "AdamW": (),
    "Lion": ("--optimizer.name", "lion"),
    "AdEMAMix": ("--optimizer.name", "ademamix"),
    "torch.optim:Adamax": ("--optimizer.name", "torch.optim:Adamax"),
    "Muon": MUON,
    "NorMuon": (*MUON, "--optimizer.neuron_beta", "0.95"),
    "average, each step": ("--average.interval", "1"),
    "average in bfloat16, each step": ("--average.interval", "1", "--average.dtype", "bfloat16"),
    "average, each 10th step": ("--average.interval", "10"),
    "QK-clip": ("--optimizer.qk_clip", "100"),
    "z-loss": ("--training.z_loss_weight", "1e-4"),
    "document mask": ("--data.document_mask", "true"),
}
TOGETHER = {
    "AdamW, FSDP": (),
    "Muon, FSDP": MUON,
    "AdamW, owners": OWNER,
    "Muon, owners": (*MUON, *OWNER),
}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("job", nargs="?", default="debug.toml")
    parser.add_argument("--rounds", type=int, default=15)
    own, words = without_overrides(sys.argv[1:])
    options = parser.parse_args(own)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    device = start_process_group("cpu", 600)
    learners = {}
    for name, of_case in (ALONE if ranks == 1 else TOGETHER).items():
        mesh = "dp_replicate" if OWNER[0] in of_case else "dp_shard"
        overrides = (*SYNTHETIC, f"--mesh.{mesh}", str(ranks), *words, *of_case)
        config = load(options.job, overrides, ranks).config
        learners[name] = build_learner(config, build_mesh(mesh_sizes(config, ranks), device))
    seconds = measure(learners, options.rounds, ranks)
    if dist.get_rank() == 0:
        print(f"{options.job}, ranks: {ranks}, threads of each: {torch.get_num_threads()}")
        first = next(iter(seconds.values()))
        for name, each in seconds.items():
            ratio = statistics.median(own / other for own, other in zip(each, first, strict=True))
            print(f"{name:<32}{statistics.median(each):8.3f} s{100 * (ratio - 1):+8.1f}%")


def measure(learners: dict[str, Learner], rounds: int, ranks: int) -> dict[str, list[float]]:
    """Seconds of each step of each case; the first two rounds compile and allocate, and are left out."""
    seconds = defaultdict(list)
    config = next(iter(learners.values())).config
    with closing(build_loader(config, dist.get_rank(), ranks, 0)) as loader:
        for number in range(1, rounds + 3):
            micro_batches = next(loader)
            for name, learner in learners.items():
                dist.barrier()
                began = time.perf_counter()
                step = learner.step(micro_batches, 1e-4)
                learner.update_average(number, step.skip)
                step.result()
                seconds[name].append(time.perf_counter() - began)
    return {name: each[2:] for name, each in seconds.items()}


if __name__ == "__main__":
    main()
