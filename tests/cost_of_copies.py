"""What a copy of the state to other hosts' memory costs: python -m tests.cost_of_copies [JOB] [--hosts 2] [--ranks 1]

The ranks of a real job (`--table.key VALUE` changes it) pretend to be on several hosts. Per host, it prints the bytes
sent and held; per copy, the seconds for which training waits (nothing trains meanwhile), and the processor seconds of a
rank until the copy is complete, which do not depend on what else the machine does. Medians of `--times` copies.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from checkpoint.incarnation import claim
from checkpoint.manager import CheckpointManager
from checkpoint.memory_copies import PARENT
from configs.layout import mesh_sizes
from configs.load import load
from parallelisms.mesh import build_mesh
from parallelisms.ranks import gather, on_rank_zero
from scripts.command import without_overrides
from scripts.rank_pool import RankPool
from trainer.step import build_learner

COPIES = ("--elastic.enable", "true", "--checkpoint.memory_copies", "1", "--checkpoint.memory_interval", "1")


def measure(base: Path, job: str, words: list[str], ranks_per_host: int, times: int) -> tuple[float, float, float, int]:
    """On one rank: median seconds of the stall, of its processor and of the clock; bytes on its host."""
    n, rank = dist.get_world_size(), dist.get_rank()
    host = base / f"host{rank // ranks_per_host}"
    host.mkdir(exist_ok=True)
    os.environ[PARENT] = str(host)
    config = load(job, (*COPIES, "--training.micro_batch_size", "1", *words), n).config
    state = build_learner(config, build_mesh(mesh_sizes(config, n), torch.device("cpu"))).state()
    incarnation = on_rank_zero(None, lambda: claim(base, {}))
    ignore = (lambda old, new: [], False, lambda line: None, lambda line: None)
    manager = CheckpointManager(base / "checkpoints", config.checkpoint, {}, {}, *ignore, incarnation=incarnation)
    manager.find()
    manager.begin_line()
    manager.check_room(state)
    stalls, processor, clock = [], [], []
    for step in range(1, times + 2):  # the first one allocates
        began, used = time.perf_counter(), time.process_time()
        manager.save(step, state, {"tokens": step}, in_memory=True)
        stalls.append(time.perf_counter() - began)
        manager.wait()
        processor.append(time.process_time() - used)
        clock.append(time.perf_counter() - began)
    newest = max(host.glob("*/step-*"))
    held = sum(path.stat().st_size for path in newest.iterdir())
    gather(None)  # closing removes the copies
    manager.close()
    return statistics.median(stalls[1:]), statistics.median(processor[1:]), statistics.median(clock[1:]), held


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("job", nargs="?", default="debug.toml")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=1, help="on each host")
    parser.add_argument("--times", type=int, default=5)
    own, words = without_overrides(sys.argv[1:])
    options = parser.parse_args(own)
    pool = RankPool(options.hosts * options.ranks, timeout_seconds=600)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as base:
        arguments = (Path(base), options.job, words, options.ranks, options.times)
        found = pool.run(pool.size, measure, *arguments)
    pool.close()
    stall, processor, clock, held = (max(each) for each in zip(*found, strict=True))
    sent = held / 2 if options.hosts > 1 else 0
    print(
        f"{options.hosts} hosts of {options.ranks} ranks: each sends {sent / 1e6:.1f} MB, holds {held / 1e6:.1f} MB a "
        f"copy; training waits {stall:.3f} s, a rank computes {processor:.2f} s, complete after {clock:.2f} s"
    )


if __name__ == "__main__":
    main()
