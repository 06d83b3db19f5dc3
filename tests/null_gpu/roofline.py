"""What steps ask of a GPU, and how fast an H200 could do it: a table of jobs, counted without a GPU.

    python -m tests.null_gpu.roofline --json now.json --markdown table.md [--before before.json] [--jobs "1B*"]

Each job's step is counted by `tests.null_gpu.step`; jobs that are in the JSON file already are not counted again. With
--before, a file of an earlier commit, each cell has both figures. Tokens per second follow from the counts at the rates
below, which are assumptions: the work's parts run one after another, and collectives are hidden behind them.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from configs.architectures.parts import head_dim
from configs.load import load
from tests.null_gpu.step import ROOT, SYNTHETIC
from trainer.planning.flops import flops_per_token

JOBS: dict[str, tuple[str, int, str]] = {
    # name: (job file, ranks of which rank 0 is counted, words); one GPU: 65,536 tokens a step
    "1B, 1 GPU": ("llama_1b.toml", 1, "--training.global_batch_size 32"),
    "3B, 1 GPU, 8,192 tokens": (
        "llama_3b.toml",
        1,
        "--training.seq_len 8192 --training.micro_batch_size 2 --training.global_batch_size 8",
    ),
    "8B, 1 GPU, in 132 GiB": (
        "llama_8b.toml",
        1,
        "--training.global_batch_size 8 --activation_checkpoint.memory_limit_gib 132",
    ),
    "8B, 1 GPU, in 132 GiB, bfloat16 moments": (
        "llama_8b.toml",
        1,
        "--training.global_batch_size 8 --activation_checkpoint.memory_limit_gib 132 "
        "--optimizer.moments_dtype bfloat16",
    ),
    "7B, FSDP 8": ("llama_7b.toml", 8, ""),
    "7B, FSDP 4 x TP 2, full recomputation": (
        "llama_7b.toml",
        8,
        "--mesh.tp 2 --training.micro_batch_size 16 --activation_checkpoint.mode full",
    ),
}
PEAK = 989.5e12
"""Of bfloat16 products on an H200, by its data sheet; MFU is relative to it."""
GEMM = 0.86 * 790e12
"""Operations per second of large bfloat16 products: 790e12 were measured on an H200 at best."""
GEMM_FLOAT8 = 1.6 * GEMM
BYTES = 0.88 * 4.3e12
"""Bytes per second of elementwise kernels: a copy reached 4.3e12."""
ATTENTION = {
    # (head size, sequence length): operations per second of the causal half, forward and backward (cuDNN)
    (64, 2048): (330e12, 250e12),
    (64, 8192): (430e12, 340e12),
    (128, 2048): (420e12, 330e12),
    (128, 8192): (580e12, 450e12),
}
GAP = 1.5e-6
"""Seconds that the device idles between two kernels."""
WAIT = 4e-3
"""Seconds that it idles when the host has waited for it."""
_GIB = 2**30


@dataclass(frozen=True)
class Estimate:
    """A step's time on a GPU, by part."""

    milliseconds: dict[str, float]
    tokens_per_second: float
    """Of one GPU."""
    mfu: float
    """Of `PEAK`, without the masked half of attention."""


def estimate(result: Mapping[str, Any], config: str, ranks: int, words: Sequence[str]) -> Estimate:
    """How long a step takes whose counts `tests.null_gpu.step.measure` returned, for that job."""
    job = load(config, [*words, "--data.sources", SYNTHETIC], ranks).config
    work = {"gemm_flops": 0, "gemm_flops_float8": 0, "generated_bytes": 0, "operator_bytes": 0} | result["work"]
    forward, backward = attention_rates(head_dim(job.model), job.training.seq_len)
    seconds = {
        "products": work["gemm_flops"] / GEMM + work["gemm_flops_float8"] / GEMM_FLOAT8,
        "attention": work["attention_flops_forward"] / forward + work["attention_flops_backward"] / backward,
        "generated kernels": work["generated_bytes"] / BYTES,
        "torch's kernels": work["operator_bytes"] / BYTES,
        "update": work["update_bytes"] / BYTES,
        "gaps": result["launches"] * GAP + result["syncs"] * WAIT,
    }
    tokens = job.training.global_batch_size * job.training.seq_len / ranks
    speed = tokens / sum(seconds.values())
    mfu = speed * flops_per_token(job.model, job.training.seq_len).causal / PEAK
    return Estimate({part: 1e3 * each for part, each in seconds.items()}, speed, mfu)


def attention_rates(head_dim: int, seq_len: int) -> tuple[float, float]:
    """The rates of the nearest shape in `ATTENTION`."""
    return min(ATTENTION.items(), key=lambda item: (abs(item[0][0] - head_dim), abs(item[0][1] - seq_len)))[1]


def cells(result: Mapping[str, Any], guess: Estimate) -> dict[str, str]:
    """A row of the table: heading -> figure."""
    work = result["work"]
    peak, reserved = (result[f"peak_{name}_bytes"] / _GIB for name in ("allocated", "reserved"))
    return {
        "launches": f"{result['launches']:,}",
        "waits": f"{result['syncs']}",
        "NCCL calls": f"{result['nccl_calls']}",
        "GB by generated kernels": f"{work.get('generated_bytes', 0) / 1e9:.1f}",
        "by torch's": f"{work.get('operator_bytes', 0) / 1e9:.1f}",
        "by the update": f"{work['update_bytes'] / 1e9:.1f}",
        "host, ms": f"{result['host_ms']:.0f}",
        "peak GiB, allocated / reserved": f"{peak:.2f} / {reserved:.2f}",
        "tokens/s a GPU": f"{guess.tokens_per_second:,.0f}",
        "MFU": f"{guess.mfu:.1%}",
    }


def table(results: Mapping[str, Any], before: Mapping[str, Any]) -> str:
    """The results as Markdown; where there is an earlier result, before it."""
    rows = {name: cells(results[name], estimate(results[name], *_job(name))) for name in JOBS if name in results}
    earlier = {name: cells(before[name], estimate(before[name], *_job(name))) for name in rows if name in before}
    headings = ["job", *next(iter(rows.values()), {})]
    written = [_row(headings), _row(["---"] * len(headings))]
    for name, row in rows.items():
        old = earlier.get(name, row)
        both = [each if old[key] == each else f"{old[key]} → {each}" for key, each in row.items()]
        written.append(_row([name, *both]))
    parts = {name: estimate(results[name], *_job(name)).milliseconds for name in rows}
    headings = ["ms a step", *next(iter(parts.values()), {})]
    written += ["", _row(headings), _row(["---"] * len(headings))]
    written += [_row([name, *(f"{each:.1f}" for each in part.values())]) for name, part in parts.items()]
    return "\n".join(written) + "\n"


def _row(texts: Sequence[str]) -> str:
    return f"| {' | '.join(texts)} |"


def _job(name: str) -> tuple[str, int, list[str]]:
    config, ranks, words = JOBS[name]
    return config, ranks, words.split()


def count(name: str, file: Path) -> dict[str, Any]:
    """Count a job's step in a process of its own; raises RuntimeError with what it printed."""
    config, ranks, words = _job(name)
    command = [sys.executable, "-m", "tests.null_gpu.step", "--config", config, "--ranks", str(ranks)]
    done = subprocess.run(
        [*command, "--timed", "1", "--json", str(file), *words], cwd=ROOT, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{name}:\n{done.stderr[-4000:]}")
    return json.loads(file.read_text())


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="A table of what steps ask of a GPU, counted without one.")
    parser.add_argument("--json", type=Path, required=True, help="keep the counts in this file")
    parser.add_argument("--markdown", type=Path, help="write the table to this file, too")
    parser.add_argument("--before", type=Path, help="counts of an earlier commit, to stand beside")
    parser.add_argument("--jobs", default="*", help="only jobs whose name matches (default: all)")
    options = parser.parse_args()
    results = json.loads(options.json.read_text()) if options.json.exists() else {}
    for name in JOBS:
        if name not in results and fnmatchcase(name, options.jobs):
            print(f"counting {name}", file=sys.stderr, flush=True)
            results[name] = count(name, options.json.with_suffix(".part"))
            options.json.write_text(json.dumps(results, indent=2) + "\n")
            options.json.with_suffix(".part").unlink()
    text = table(results, json.loads(options.before.read_text()) if options.before else {})
    print(text, end="")
    if options.markdown:
        options.markdown.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
