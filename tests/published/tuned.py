"""What `keel plan --tune` finds beside published choices: `python -m tests.published.tuned [--rows NAME ...]`.

The job of a row, as published, is estimated as the search estimates its own. The batch, the sequence and float8 are
those of the row, and so is what the search leaves alone, such as the kernel of attention.
"""

import argparse
import time

import tomli

from configs.layout import mesh_sizes
from configs.load import load
from tests.published.compare import _DATA, ROWS
from trainer.planning.devices import device_named
from trainer.planning.memory import estimate_memory
from trainer.planning.search import Search
from trainer.planning.step_time import estimate_step

DEFAULT = (
    ("torchtitan", "8B, 8 GPUs, compiled"),
    ("torchtitan", "70B, 256 GPUs, tp 8, float8, async TP"),
    ("torchtitan", "405B, 512 GPUs, tp 8, pp 8, interleaved"),
    ("megatron_bridge", "26.04.01: Qwen3 30B-A3B, 16 GPUs, ep 16"),
)
"""Families and names of rows."""


def compare(row: dict) -> tuple[float, str]:
    """The published choice's time over that of the best, and a line that says so."""
    config = load(row["job"], [*row["words"].split(), *_DATA], row["ranks"]).config
    device = device_named(row["device"])
    hosts = row.get("gpus_per_host", 8)
    began = time.perf_counter()
    search = Search(config, row["ranks"], device, hosts, device.memory_gib * 2**30)
    outcome = search.run()
    took = time.perf_counter() - began
    published = estimate_step(config, row["ranks"], device, hosts).seconds
    memory = estimate_memory(config, mesh_sizes(config, row["ranks"]), "cuda").device
    place = sum(found.seconds < published * (1 - 1e-9) for found in outcome.best) + 1
    best = outcome.best[0]
    ratio = published / best.seconds
    line = (
        f"{row['name']}: published {published:.4g} s ({memory / 2**30:.1f} of {search.limit / 2**30:.1f} GiB), place "
        f"{place if place <= len(outcome.best) else f'below {len(outcome.best)}'}, {ratio:.3f} times the best, "
        f"{best.seconds:.4g} s: {mesh_sizes(best.config, row['ranks'])}, micro-batch "
        f"{best.config.training.micro_batch_size}, {best.config.activation_checkpoint.mode}; searched in {took:.0f} s"
    )
    return ratio, line


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="What keel plan --tune finds beside published choices.")
    parser.add_argument("--rows", nargs="*", help="names of rows, in whatever family")
    options = parser.parse_args()
    for row in tomli.loads(ROWS.read_text())["rows"]:
        if row["name"] in options.rows if options.rows else (row["family"], row["name"]) in DEFAULT:
            print(compare(row)[1], flush=True)


if __name__ == "__main__":
    main()
