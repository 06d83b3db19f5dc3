"""Runs of several families beside their plans: seconds of a step and memory, as a run's last record compares them."""

import json
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.gpu.runs import IS_NULL, SYNTHETIC, run_python

COMMON = (
    """--tokenizer.path '""' --metrics.interval 1 --metrics.tensorboard false --checkpoint.interval 0 """
    "--lr_schedule.warmup_steps 2 --training.steps 20"
)
_1B = "llama_1b.toml --model.n_layers 8 --training.global_batch_size 16"
_ONE_RANK = "--mesh.dp_shard 1 --mesh.ep 1"
RUNS = {
    "1B of 8 layers": _1B,
    "1B of 8 layers, metrics.fingerprint": f"{_1B} --metrics.fingerprint true",
    "1B of 8 layers, Muon": f"{_1B} --optimizer.name muon",
    "Qwen3 0.6B of 14 layers": "qwen3_0.6b.toml --model.n_layers 14 --training.global_batch_size 8",
    "Qwen3 30B-A3B of 2 layers": (
        f"qwen3_30b_a3b.toml {_ONE_RANK} --model.n_layers 2 --training.micro_batch_size 2 "
        "--training.global_batch_size 8"
    ),
    "Qwen3-Next of 4 layers and 32 experts": (
        f"qwen3_next_80b_a3b.toml {_ONE_RANK} --model.n_layers 4 --model.n_experts 32 --training.micro_batch_size 2 "
        "--training.global_batch_size 4"
    ),
}


class Compared(NamedTuple):
    """A quantity that a run's plan says."""

    quantity: str
    planned: float
    measured: float


def compared(folder: Path, name: str) -> Iterator[Compared]:
    """Train one of RUNS in `folder`, which is emptied. Raises: Failed, LookupError."""
    shutil.rmtree(folder, ignore_errors=True)
    program = "tests/null_gpu/train.py" if IS_NULL else "train.py"
    run_python(program, *shlex.split(f"--config {RUNS[name]} {COMMON}"), *SYNTHETIC, "--job.output_dir", str(folder))
    shutil.rmtree(folder / "checkpoints")
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    if "plan" not in last:
        raise LookupError("the last record has no plan")
    for quantity, pair in last["plan"].items():
        yield Compared(quantity, pair["planned"], pair["measured"])
