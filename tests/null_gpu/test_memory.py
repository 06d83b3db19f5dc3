"""Keel's estimate of a rank's memory (trainer/planning/memory.py) against what torch's allocator says on a null GPU.

The jobs are those of the repository, with meshes and activation checkpointing mixed, each as rank 0 of a fake cluster;
of a pipeline, rank 0 is the one with most micro-batches in flight.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest

from configs.reading.hf_config import is_too_old
from tests.fsdp_at_degree_1 import fsdp_at_degree_1
from tests.null_gpu.step import join, load_job

EVERY_SECOND = "--activation_checkpoint.mode selective --activation_checkpoint.save_every_nth_matmul 2"
ATTENTION = '--activation_checkpoint.save_ops ["*._scaled_dot_product_*attention*"]'
FIRST_LAYERS = '[{pattern="embed_tokens.*",freeze=true},{pattern="layers.?.*",freeze=true}]'
FREED = "--fsdp.reshard_after_forward always"
EIGHT_LAYERS = "--model.n_layers 8 --training.global_batch_size 2 --activation_checkpoint.mode full"
DEEPSEEK = (
    "--mesh.pp 1 --mesh.ep 1 --model.n_layers 6 --model.n_experts 16 --model.experts_per_token 4 "
    "--training.global_batch_size 8"
)
NARROWED = (
    "--model.dim 512 --model.n_heads 8 --model.ffn_dim 2048 --model.vocab_size 32000 --compile.enable false "
    "--training.compute_dtype float32 --training.global_batch_size 8"
)
HYBRID = "--mesh.dp_shard 1 --mesh.ep 1 --model.n_layers 4 --model.n_experts 16 --training.seq_len 2048"
JOBS = {
    # name: (job file, ranks, words)
    "Qwen3-Next of 4 layers": ("qwen3_next_80b_a3b.toml", 1, f"{HYBRID} --training.global_batch_size 2"),
    "1B": ("llama_1b.toml", 1, "--training.global_batch_size 16"),
    "1B, FSDP at degree 1": ("llama_1b.toml", 1, f"--training.global_batch_size 16 {FREED}"),
    "1B, transient copies": ("llama_1b.toml", 1, f"--training.global_batch_size 16 {FREED}"),
    "1B, transient copies, one micro-batch, eager": (
        "llama_1b.toml",
        1,
        f"--training.global_batch_size 8 --compile.enable false {FREED}",
    ),
    "1B, transient copies, the first ten layers frozen": (
        "llama_1b.toml",
        1,
        f"--training.global_batch_size 16 --model.tie_embeddings false --optimizer.groups {FIRST_LAYERS} {FREED}",
    ),
    "8B of 8 layers, FSDP at degree 1, full": ("llama_8b.toml", 1, f"{EIGHT_LAYERS} {FREED}"),
    "8B of 8 layers, transient copies, full": ("llama_8b.toml", 1, f"{EIGHT_LAYERS} {FREED}"),
    "1B, ZeRO 1": ("llama_1b.toml", 1, "--training.global_batch_size 16 --fsdp.zero_stage 1"),
    "1B, the first ten layers frozen": (
        "llama_1b.toml",
        1,
        f"--training.global_batch_size 16 --model.tie_embeddings false --optimizer.groups {FIRST_LAYERS}",
    ),
    "1B, bfloat16 moments": (
        "llama_1b.toml",
        1,
        "--training.global_batch_size 16 --optimizer.moments_dtype bfloat16",
    ),
    "1B, weights in bfloat16": (
        "llama_1b.toml",
        1,
        "--training.global_batch_size 16 --training.dtype bfloat16 --optimizer.rounding stochastic",
    ),
    "3B, FSDP 8, a tied embedding and matrices frozen": (
        "llama_3b.toml",
        8,
        '--training.global_batch_size 64 --optimizer.groups [{pattern="embed*",freeze=true},'
        '{pattern="*.mlp.*",freeze=true}]',
    ),
    "1B, PP 2 x FSDP 4, eager": (
        "llama_1b.toml",
        8,
        "--mesh.pp 2 --model.tie_embeddings false --training.micro_batch_size 4 --training.global_batch_size 128 "
        "--compile.enable false",
    ),
    "3B, FSDP 4 x TP 2, full": (
        "llama_3b.toml",
        8,
        "--mesh.tp 2 --activation_checkpoint.mode full --training.global_batch_size 32",
    ),
    "3B, ZeRO 2, every second product": (
        "llama_3b.toml",
        8,
        f"--fsdp.zero_stage 2 --training.global_batch_size 64 {EVERY_SECOND}",
    ),
    "7B, FSDP 8, every second product": ("llama_7b.toml", 8, EVERY_SECOND),
    "7B, FSDP 8, selective": ("llama_7b.toml", 8, ""),
    "7B, FSDP 8, attention kept": ("llama_7b.toml", 8, ATTENTION),
    "7B, FSDP 8, selective in the layers that a limit chooses": (
        "llama_7b.toml",
        8,
        "--activation_checkpoint.memory_limit_gib 71",
    ),
    "7B, FSDP 8, selective, eager": ("llama_7b.toml", 8, "--compile.enable false"),
    "7B, HSDP 2 x 4, budget": (
        "llama_7b.toml",
        8,
        "--mesh.dp_replicate 2 --mesh.dp_shard 4 --activation_checkpoint.mode budget --training.global_batch_size 128",
    ),
    "8B, CP 2 x FSDP 4, full, eager": (
        "llama_8b.toml",
        8,
        "--mesh.cp 2 --activation_checkpoint.mode full --compile.enable false --training.global_batch_size 8",
    ),
    "8B, FSDP 4 x TP 2, every second product": (
        "llama_8b.toml",
        8,
        f"--mesh.tp 2 --training.global_batch_size 8 {EVERY_SECOND}",
    ),
    "Mixtral 8x7B, FSDP 64, selective, eager": (
        "mixtral_8x7b.toml",
        64,
        "--training.global_batch_size 64 --compile.enable false",
    ),
    "DeepSeek-V3 of 6 layers, FSDP 8, full, eager": (
        "deepseek_v3.toml",
        8,
        f"{DEEPSEEK} --activation_checkpoint.mode full --compile.enable false",
    ),
    "DeepSeek-V3 of 6 layers, FSDP 4 x TP 2, selective": (
        "deepseek_v3.toml",
        8,
        f"{DEEPSEEK} --mesh.tp 2 --activation_checkpoint.mode selective",
    ),
    "1B narrowed, float32, eager": ("llama_1b.toml", 1, f"{NARROWED} --model.n_kv_heads 8"),
    "1B narrowed, float32, grouped queries, eager": ("llama_1b.toml", 1, f"{NARROWED} --model.n_kv_heads 2"),
}
HF = "tests/null_gpu/hf.toml"
PUBLISHED = "--model.hf tests/published"
if not is_too_old():  # to train; the oldest version that pyproject.toml allows is
    JOBS |= {
        "Qwen3 0.6B of transformers": (HF, 1, ""),
        "the same in float32": (HF, 1, "--training.compute_dtype float32 --training.micro_batch_size 1"),
        "Qwen3 0.6B of transformers, PP 2 x FSDP 4, eager": (
            HF,
            8,
            "--mesh.pp 2 --training.micro_batch_size 2 --training.global_batch_size 64 --compile.enable false",
        ),
        "Gemma 3 270M of transformers, FSDP 8, full": (
            HF,
            8,
            f"{PUBLISHED}/gemma-3-270m.json --training.global_batch_size 64 --activation_checkpoint.mode full",
        ),
        "OLMo 2 1B of transformers, FSDP 4 x TP 2": (
            HF,
            8,
            f"{PUBLISHED}/olmo-2-1b.json --mesh.tp 2 --training.global_batch_size 32",
        ),
        "SmolLM3 3B of transformers, FSDP 8, selective": (
            HF,
            8,
            f"{PUBLISHED}/smollm3-3b.json --training.global_batch_size 64 --activation_checkpoint.mode selective",
        ),
    }
WITHIN = 0.05
WITHIN_WITH_COPIES = 0.005
"""Where a single rank computes with copies, nothing is gathered or reduced, and so little is unknown: only what
the ops of Gated DeltaNet hold inside, which no fake tensor shows."""


def converting(name: str) -> AbstractContextManager:
    """FSDP at degree 1 in the jobs that are named so."""
    return fsdp_at_degree_1() if "at degree 1" in name else nullcontext()


def peak_bytes(name: str) -> int:
    """In a process with the device: what a warmed-up step of a job allocates at its peak."""
    import torch
    import torch.distributed as dist

    from tests.null_gpu.step import build

    config, ranks, words = JOBS[name]
    join(ranks)
    with converting(name):
        learner, loader = build(load_job(config, words.split(), ranks))
    for _ in range(2):
        learner.step(next(loader), lr=1e-4)
    loader.close()
    peak = torch.cuda.max_memory_allocated()
    del learner
    dist.destroy_process_group()
    return peak


class Peaks:
    """What a step of each job allocates at its peak, in bytes, found when it is asked for, by one process for all."""

    def __init__(self, null_gpus: dict[str, str], log: Path) -> None:
        environment = {name: value for name, value in os.environ.items() if name != "RANK"} | null_gpus
        self._found: dict[str, int] = {}
        self._log = log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.null_gpu.test_memory"],
                env=environment,
                cwd=Path(__file__).parents[2],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def __getitem__(self, name: str) -> int:
        if name not in self._found:
            self._process.stdin.write(f"{name}\n")
            self._process.stdin.flush()
            answers = (line for line in self._process.stdout if line.startswith(ANSWER))
            answer = next(answers, None)
            assert answer is not None, self._log.read_text()[-5000:]
            self._found[name] = int(answer.removeprefix(ANSWER))
        return self._found[name]

    def close(self) -> None:
        """End the process."""
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


ANSWER = "peak: "  # begins the line that the process prints for a job; others may be torch's


@pytest.fixture(scope="module")
def peaks(null_gpus: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peaks]:
    peaks = Peaks(null_gpus, tmp_path_factory.mktemp("peaks") / "log")
    yield peaks
    peaks.close()


@pytest.mark.long
@pytest.mark.parametrize("name", JOBS)
def test_the_estimate_is_near_what_is_allocated(peaks, name):
    from configs.layout import mesh_sizes
    from trainer.planning.by_memory import chosen, planned_choice
    from trainer.planning.memory import RankMemory

    config, ranks, words = JOBS[name]
    job = load_job(config, words.split(), ranks)
    job = chosen(job, planned_choice(job, ranks, None))
    with converting(name):
        estimate = RankMemory(job, mesh_sizes(job, ranks), "cuda", pipeline_rank=0).estimate()
    print(f"{name}: estimated {estimate.device:,}, allocated {peaks[name]:,}: {estimate.device / peaks[name] - 1:+.2%}")
    is_exact = estimate.copies and config != HF and "delta" not in job.model.layers
    within = WITHIN_WITH_COPIES if is_exact else WITHIN
    assert estimate.device == pytest.approx(peaks[name], rel=within), estimate.peak


@pytest.mark.long
@pytest.mark.parametrize("job", ["1B, {}", "8B of 8 layers, {}, full"])
def test_transient_copies_take_no_more_than_fsdp(peaks, job):
    assert peaks[job.format("transient copies")] <= peaks[job.format("FSDP at degree 1")]


if __name__ == "__main__":
    for line in sys.stdin:
        print(f"{ANSWER}{peak_bytes(line.strip())}", flush=True)
    os._exit(0)  # NCCL's threads wait for a device that never answers
