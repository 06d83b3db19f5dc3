"""Measures Keel against a bare loop and other frameworks, each in a process of its own, in its own Python.

    python -m tests.peers [JOB] --litgpt PYTHON --transformers PYTHON --torchtitan PYTHON --json peers.json

All train a Llama of the same shape on random tokens: the same tokens per step, types and settings of AdamW, one
process. transformers also trains other families, such as Qwen3. Each is its project's own training step
(`NAME_adapter.py` says what it brings along), eager and compiled. Compiled, a process begins twice, each time until its
first step is done: with an empty cache of compiled code, then with what the first has left there. The second then takes
turns with the others.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from checkpoint.export.hf_config import hf_class_of, to_hf
from configs.architectures.parts import head_dim, n_kv_heads
from configs.errors import ConfigError, KeelError, UserError
from configs.exportable import not_exportable
from configs.load import load
from configs.schema import Config, is_described
from scripts.benchmarks.turns import ratios, spread, take_turns
from scripts.command import without_overrides
from tests.peers.serve import LACKING

OURS = ("bare", "keel")
PEERS = ("torchtitan", "litgpt", "transformers")
_SERVE = str(Path(__file__).parent / "serve.py")
_ROOT = Path(__file__).parents[2]
_GIB = 2**30
_WARM_UP_STEPS = 2  # after the first


@dataclass
class Row:
    """What was measured of a framework in one mode."""

    version: str
    torch: str
    device: str
    cold_start_seconds: float | None
    """From the start to the end of the first step, with no compiled code at hand; null if nothing is compiled."""
    cold_start_cpu_seconds: float | None
    """The same in CPU time, with that of compilers."""
    warm_start_seconds: float
    """As above, with the code that the cold start has compiled."""
    warm_start_cpu_seconds: float
    seconds: list[float] = field(default_factory=list)
    """Of a step, in each round."""
    cpu_seconds: list[float] = field(default_factory=list)
    """The same in CPU time of the process: what a busy machine changes less."""
    tokens_per_second: float = 0.0
    """At the median of `seconds`."""
    resident_peak_bytes: int = 0
    """Of the process, in the steps after the first: packages and weights included, what compiling took left out."""
    allocated_peak_bytes: int | None = None
    """On a GPU, of torch's allocator; null on a CPU."""
    reserved_peak_bytes: int | None = None


def measure(
    config_name: str,
    overrides: Sequence[str],
    pythons: Mapping[str, str],
    modes: Sequence[str],
    rounds: int,
    steps: int,
) -> dict[str, Any]:
    """Measure Keel, the bare loop, and each framework whose Python is given.

    Args:
        config_name, overrides: the job; of its settings, those count that `_job` names.
        pythons: interpreter by framework.
        modes: of "eager" and "compiled".
        rounds, steps: turns of each, and steps per turn.

    Raises:
        KeelError: the job is not valid, an interpreter lacks a package, or a framework failed.
    """
    config = load(config_name, overrides, world_size=1).config
    _require_same_model(config, pythons)
    job = _job(config) | {"file": config_name, "overrides": list(overrides)}
    chosen = {**dict.fromkeys(OURS, sys.executable), **pythons}
    for name, python in pythons.items():
        _require(name, python)
    with ExitStack() as stack:
        workers = {
            f"{name}-{mode}": stack.enter_context(_started(name, python, job | {"compile": mode == "compiled"}))
            for mode in modes
            for name, python in chosen.items()
        }
        seconds = take_turns({name: partial(worker.turn, steps) for name, worker in workers.items()}, rounds)
    tokens = job["global_batch_size"] * job["seq_len"]
    rows = {name: worker.row for name, worker in workers.items()}
    for name, row in rows.items():
        row.tokens_per_second = tokens / statistics.median(seconds[name])
    return {
        "job": config.job.name,
        "settings": job,
        "threads": os.environ.get("OMP_NUM_THREADS", "all"),
        "rows": {name: asdict(row) for name, row in rows.items()},
        "over_bare": {name: asdict(_Ratio.of(rows, name)) for name in rows},
    }


def lines(figures: dict[str, Any]) -> Iterator[str]:
    """Format the figures for printing."""
    yield (
        f"{'':22s} {'tokens/s':>9s}  {'over bare, median (least to most)':34s} {'in CPU time':28s} "
        f"{'first step, s: cold, warm':>26s}  {'peak GiB':>8s}"
    )
    for name, row in figures["rows"].items():
        ratio = figures["over_bare"][name]
        cold = "-" if row["cold_start_seconds"] is None else f"{row['cold_start_seconds']:.1f}"
        peak = row["allocated_peak_bytes"] or row["resident_peak_bytes"]
        yield (
            f"{name:22s} {row['tokens_per_second']:9,.0f}  {spread(ratio['speed'], '.3f'):34s} "
            f"{spread(ratio['cpu_speed'], '.3f'):28s} {cold:>12s}, {row['warm_start_seconds']:12.1f}  "
            f"{peak / _GIB:8.2f}"
        )
    yield "versions: " + ", ".join(sorted({f"{n.split('-')[0]} {r['version']}" for n, r in figures["rows"].items()}))


@dataclass
class _Ratio:
    """The bare loop's seconds over another's, in each round: above 1 the other is faster."""

    speed: list[float]
    cpu_speed: list[float]

    @classmethod
    def of(cls, rows: Mapping[str, Row], name: str) -> "_Ratio":
        bare, row = rows[f"bare-{name.rpartition('-')[2]}"], rows[name]
        return cls(ratios(bare.seconds, row.seconds), ratios(bare.cpu_seconds, row.cpu_seconds))


def _require_same_model(config: Config, frameworks: Iterable[str]) -> None:
    model = config.model
    if not is_described(model):
        raise ConfigError('model.architecture: not every framework has the same; it must be "llama"')
    if reason := not_exportable(model):
        raise ConfigError(f"[model]: transformers has no such model: {reason}")
    others = [f"--{name}" for name in frameworks if name != "transformers"]
    if others and hf_class_of(model).model_type != "llama":
        raise ConfigError(f"{', '.join(others)}: trains Llama here, not {hf_class_of(model).name}; leave it out")


def _job(config: Config) -> dict[str, Any]:
    """What every framework is told, in plain words."""
    model, training, optimizer = config.model, config.training, config.optimizer
    assert is_described(model)
    unlike = {
        "model.rope_scaling": model.rope_scaling is not None,
        "training.dtype": training.dtype != "float32",
        "optimizer.name": optimizer.name != "adamw",
        "data.document_mask": config.data.document_mask,
        "activation_checkpoint": config.activation_checkpoint.mode != "none",
    }
    if keys := [key for key, is_set in unlike.items() if is_set]:
        raise ConfigError(f"{', '.join(keys)}: not every framework has the same; leave it at its default")
    return {
        "hf_config": to_hf(model, "float32", training.seq_len, None, None),
        "dim": model.dim,
        "n_layers": model.n_layers,
        "n_heads": model.n_heads,
        "n_kv_heads": n_kv_heads(model),
        "head_dim": head_dim(model),
        "ffn_dim": model.ffn_dim,
        "vocab_size": model.vocab_size,
        "rope_theta": model.rope_theta,
        "norm_eps": model.norm_eps,
        "tie_embeddings": model.tie_embeddings,
        "seq_len": training.seq_len,
        "global_batch_size": training.global_batch_size,
        "micro_batch_size": training.micro_batch_size,
        "compute_dtype": training.compute_dtype,
        "max_norm": training.max_norm,
        "seed": training.seed,
        "lr": optimizer.lr,
        "betas": list(optimizer.betas),
        "weight_decay": optimizer.weight_decay,
    }


def _require(name: str, python: str) -> None:
    """Check that an interpreter has what its adapter needs, before minutes go into others."""
    try:
        done = subprocess.run([python, _SERVE, name], capture_output=True, text=True)
    except OSError as error:
        raise ConfigError(f"--{name}: {python} can't be started ({error.strerror})") from None
    if done.returncode == LACKING:
        raise ConfigError(f"--{name}: {done.stderr.strip().splitlines()[-1]}; install {name} there")


def _started(name: str, python: str, job: dict[str, Any]) -> "_Worker":
    """A worker whose first step is done; what it compiled was compiled before, by one that has ended."""
    if not job["compile"]:
        worker = _Worker(name, python, job, {})
        worker.warm_up()
        return worker
    with tempfile.TemporaryDirectory() as cache:  # what is loaded and warm needs its files no more
        caches = {"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton"}
        with _Worker(name, python, job, caches) as cold:
            pass
        warm = _Worker(name, python, job, caches)
        warm.warm_up()
    warm.row.cold_start_seconds = cold.row.warm_start_seconds
    warm.row.cold_start_cpu_seconds = cold.row.warm_start_cpu_seconds
    return warm


class _Worker:
    """A process that trains with one framework when it is asked to; a context that ends it."""

    def __init__(self, name: str, python: str, job: dict[str, Any], environment: Mapping[str, str]) -> None:
        """Start it, and wait for its first step.

        Raises:
            UserError: the framework failed.
        """
        self._name = name
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed with the worker
        started = time.perf_counter()
        self._process = subprocess.Popen(
            [python, _SERVE, name, json.dumps(job)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=os.environ | dict(environment) | ({"PYTHONPATH": str(_ROOT)} if name in OURS else {}),
        )
        first = self._answer()
        self.row = Row(
            **{key: first[key] for key in ("version", "torch", "device")},
            cold_start_seconds=None,
            cold_start_cpu_seconds=None,
            warm_start_seconds=time.perf_counter() - started,
            warm_start_cpu_seconds=first["cpu_seconds"],
        )

    def warm_up(self) -> None:
        """Train steps that are not measured: some code is compiled in the second."""
        self._ask(f"{_WARM_UP_STEPS}\n")
        self._answer()

    def turn(self, steps: int) -> float:
        """Train some steps; returns the seconds of one."""
        self._ask(f"{steps}\n")
        answer = self._answer()
        self.row.seconds.append(answer["seconds"])
        self.row.cpu_seconds.append(answer["cpu_seconds"])
        for key in ("resident_peak_bytes", "allocated_peak_bytes", "reserved_peak_bytes"):
            setattr(self.row, key, answer[key])
        return answer["seconds"]

    def __enter__(self) -> "_Worker":
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._ask("\n")
            self._process.wait()
        self._errors.close()

    def _ask(self, line: str) -> None:
        assert self._process.stdin
        self._process.stdin.write(line)
        self._process.stdin.flush()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if line:
            return json.loads(line)
        code = self._process.wait()
        self._errors.seek(0)
        said = self._errors.read().strip().splitlines() or ["no message"]
        raise UserError(f"{self._name} ended with exit code {code}:\n" + "\n".join(said[-20:]))


def main() -> int:
    """Measure, print and write the figures; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("job", nargs="?", default="benchmark_10m.toml")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    parser.add_argument("--rounds", type=int, default=5, help="number of turns of each case (default: 5)")
    parser.add_argument("--steps", type=int, default=2, help="steps per turn (default: 2)")
    parser.add_argument("--modes", nargs="+", choices=("eager", "compiled"), default=["eager", "compiled"])
    for name in PEERS:
        parser.add_argument(f"--{name}", metavar="PYTHON", help=f"the Python of an environment with {name}")
    own, overrides = without_overrides(sys.argv[1:])
    options = parser.parse_args(own)
    pythons = {name: python for name in PEERS if (python := getattr(options, name))}
    try:
        figures = measure(options.job, overrides, pythons, options.modes, options.rounds, options.steps)
    except KeelError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print("\n".join(lines(figures)))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
