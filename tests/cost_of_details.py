"""What `metrics.details_interval` adds to a step that it measures: python -m tests.cost_of_details [JOB] [--steps 10]

In one process, measured and plain steps take turns, and so do steps of which only the norms are measured. The figures
are ratios of median processor times, which do not depend on what else the machine does.
"""

import argparse
import statistics
import sys
import time
from collections import defaultdict
from contextlib import closing

import torch

from configs.layout import mesh_sizes
from configs.load import load
from parallelisms.mesh import build_mesh, start_process_group
from scripts.command import without_overrides
from trainer.data.loader import build_loader
from trainer.details import Details
from trainer.step import build_learner

SYNTHETIC = ("--data.sources", '[{name = "noise", kind = "synthetic"}]', "--data.prepare", "none")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("job", nargs="?", default="debug.toml")
    parser.add_argument("--steps", type=int, default=10, help="of each kind")
    own, words = without_overrides(sys.argv[1:])
    options = parser.parse_args(own)
    config = load(options.job, (*SYNTHETIC, "--metrics.details_interval", "1", *words), 1).config
    learner = build_learner(config, build_mesh(mesh_sizes(config, 1), start_process_group("cpu", 600)))
    details, norms = Details(config, learner), Details(config, learner)
    norms._n_small = 0
    seconds = defaultdict(list)
    with closing(build_loader(config, 0, 1, 0)) as loader:
        for step in range(1, options.steps + 2):
            for name, measure in (("plain", None), ("norms", norms), ("details", details)):
                micro_batches, began = next(loader), time.process_time()
                if measure is None:
                    learner.step(micro_batches, 1e-4).result()
                else:
                    with measure.watching(step, micro_batches):
                        gradients = learner.gradients(micro_batches)
                    queued = learner.judge(micro_batches, gradients, details=measure.numbers())
                    learner.update(queued, 1e-4)
                    measure.read(queued.result().details)
                seconds[name].append(time.process_time() - began)
    median = {name: statistics.median(each[1:]) for name, each in seconds.items()}  # the first steps allocate
    threads, plain = torch.get_num_threads(), median["plain"]
    print(
        f"a plain step takes {plain:.3f} s of processor time ({threads} threads); norms alone add "
        f"{100 * (median['norms'] / plain - 1):.1f}%, all details {100 * (median['details'] / plain - 1):.1f}%"
    )


if __name__ == "__main__":
    main()
