"""The jobs whose speed and memory are measured on a real GPU, and what is predicted for them."""

import json
import shlex
from dataclasses import dataclass
from pathlib import Path

PREDICTED = Path(__file__).with_name("predicted.json")
DEVICES = ("h100", "h200")


@dataclass(frozen=True)
class Job:
    """A job of benchmark.py."""

    name: str
    words: str
    rounds: int = 3
    steps: int = 3
    beside_bare: bool = False
    """Measured in turns with a bare loop, which has the same model, data in memory and no micro-batches."""

    def split(self) -> list[str]:
        """Job file and overrides, as words of a command line."""
        return shlex.split(self.words)


@dataclass(frozen=True)
class Prediction:
    """Of one job on one kind of GPU."""

    tokens_per_second: float | None
    """As `keel plan --device` estimates."""
    peak_bytes: float | None
    """As torch's allocator counts on the null GPU (tests/null_gpu)."""


_1B = "llama_1b.toml --training.global_batch_size 32"
_1B_8K = "llama_1b.toml --training.seq_len 8192 --training.micro_batch_size 2 --training.global_batch_size 8"
_3B_8K = "llama_3b.toml --training.seq_len 8192 --training.micro_batch_size 2 --training.global_batch_size 8"
_8B = "llama_8b.toml --training.global_batch_size 4"
_FULL = "--activation_checkpoint.mode full --activation_checkpoint.save_every_nth_matmul 1"
JOBS: dict[str, list[Job]] = {
    "1b": [
        Job("1B at 2,048", _1B),
        Job("1B at 2,048, transient copies", f"{_1B} --fsdp.reshard_after_forward always"),
        Job("1B at 2,048, float8 tensorwise", f"{_1B} --float8.recipe tensorwise"),
        Job("1B at 2,048, float8 rowwise", f"{_1B} --float8.recipe rowwise"),
        Job("1B at 2,048, eager", f"{_1B} --compile.enable false"),
        Job("1B at 8,192", _1B_8K),
        Job("1B at 2,048, 8 sequences", "llama_1b.toml --training.global_batch_size 8", beside_bare=True),
    ],
    "large": [
        Job("8B at 8,192, full", f"{_8B} {_FULL}", 2, 1),
        Job("8B at 8,192, bfloat16 moments", f"{_8B} --optimizer.moments_dtype bfloat16", 2, 1),
        Job("8B at 8,192, float8 tensorwise, full", f"{_8B} {_FULL} --float8.recipe tensorwise", 2, 1),
        Job(
            "3B at 8,192, nothing recomputed",
            f"{_3B_8K} --activation_checkpoint.mode none --activation_checkpoint.save_every_nth_matmul 1",
            2,
            1,
        ),
    ],
}


def predicted(name: str, device_name: str) -> Prediction:
    """What predicted.json says of a job on a GPU of this name."""
    of_job = json.loads(PREDICTED.read_text())["jobs"].get(name)
    if of_job is None:
        return Prediction(None, None)
    known = next((device for device in DEVICES if device in device_name.lower()), "")
    return Prediction(of_job["tokens_per_second"].get(known), of_job["peak_bytes"])
