"""What a rank does from its launch to the first step that depends on the number of ranks: python -m tests.scale.start

Ranks are simulated: one process does the work of the first rank, or of any where all do the same. No collective runs,
so their time on a network is not in the figures. What is read from disk does not depend on the number of ranks, but all
read it at once; so the files that each opens are counted.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist

from configs.layout import mesh_sizes
from configs.load import LoadedConfig, load
from parallelisms import mesh as mesh_module
from parallelisms.fake_ranks import fake_ranks
from parallelisms.mesh import build_mesh
from parallelisms.torch_internals import process_groups
from scripts.plan import shard_bytes
from tests.conftest import ROOT
from tests.scale.store import Recorded
from trainer.guards.agreement import compare_launches
from trainer.guards.environment import code_hashes
from trainer.guards.peers import Peers

NO_TEXT = ("--data.sources", '[{name = "random", kind = "synthetic"}]', "--tokenizer.path", "none")
IMPORTS = """
import json, sys, time
opened = []
sys.addaudithook(lambda event, arguments: opened.append(str(arguments[0])) if event == "open" else None)
began = time.perf_counter()
import train, trainer.run
own = [path for path in opened if path.startswith(sys.argv[1]) and "/.venv/" not in path]
print(json.dumps([time.perf_counter() - began, len(own), len(opened) - len(own)]))
"""


def seconds(work: Callable[[], object]) -> float:
    """How long `work` takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def imports() -> str:
    """What importing everything that training needs reads, in a process of its own, and the hashing of the code."""
    command = [sys.executable, "-c", IMPORTS, str(ROOT)]
    took, own, others = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    code_hashes.cache_clear()
    hashing = seconds(code_hashes)
    return (
        f"imports: {took:.1f} s, {own} files of Keel and {others:,} others opened; "
        f"hash of the code: {hashing:.2f} s, {len(code_hashes())} files"
    )


def names_of_an_attempt(ranks: int) -> tuple[float, int]:
    """Seconds and requests of the first rank, which answers every other one's question in a restarted job."""
    store = Recorded(dist.HashStore())
    for rank in range(1, ranks):
        store.store.set(f"attempt/asked by {rank}", f"question {rank}")
        store.store.set(f"attempt 1/{rank} knows", "")
    took = seconds(lambda: mesh_module._attempt(store, 0, ranks, 600))
    return took, store.requests.total()


def mesh(job: LoadedConfig, ranks: int) -> tuple[float, int]:
    """Seconds for the mesh, and process groups of a rank."""
    sizes = mesh_sizes(job.config, ranks)
    with fake_ranks(ranks, ranks // 2 + 1):
        took = seconds(lambda: build_mesh(sizes, torch.device("cpu")))
        return took, len(process_groups())


def agreement(job: LoadedConfig, ranks: int) -> float:
    """Seconds to compare what all ranks have told of their config, code and machine."""

    def alike(parts: list[torch.Tensor], mine: torch.Tensor, **_: object) -> None:
        for part in parts:
            part.copy_(mine)

    with fake_ranks(ranks), patch.object(dist, "all_gather", alike):
        return seconds(lambda: compare_launches(job, torch.device("cpu")))


def heartbeats(ranks: int) -> int:
    """Requests of a rank until it has read the first heartbeats that it watches; the others have sent theirs."""
    store = Recorded(dist.HashStore())
    with tempfile.TemporaryDirectory() as folder:
        here = Peers(store, 0, ranks, Path(folder) / "0")
        for rank in here.watched:
            Peers(store.store, rank, ranks, Path(folder) / str(rank))
        here.silent(1.0, here.watched)
        here.hear()
    return store.requests.total()


def row(name: str, ranks: int, environment: Mapping[str, str]) -> str:
    """The table's row for a number of ranks."""
    job = load(name, ("--training.global_batch_size", str(max(ranks, 2048)), *NO_TEXT), ranks)
    with patch.dict("os.environ", environment):
        named, asked = names_of_an_attempt(ranks)
        built, groups = mesh(job, ranks)
        compared = agreement(job, ranks)
        model = seconds(lambda: shard_bytes(job.config, ranks))
        return (
            f"| {ranks:,} | {named:.2f} | {asked:,} | {built:.2f} | {groups} | {compared:.2f} | {model:.1f} "
            f"| {heartbeats(ranks)} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--job", default="llama_405b.toml")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 512, 4096, 16384])
    options = parser.parse_args()
    print(imports())
    print(
        "| ranks | names of an attempt, s | requests | mesh, s | groups | agreement, s | model on meta, s "
        "| first heartbeats, requests |\n|---|---|---|---|---|---|---|---|"
    )
    for ranks in options.ranks:
        print(row(options.job, ranks, {"WORLD_SIZE": str(ranks)}), flush=True)


if __name__ == "__main__":
    main()
