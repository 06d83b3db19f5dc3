"""Pairs of runs of a small job that must agree on a GPU: with a CPU, compiled, in 8 bits, stopped, repeated."""

import os
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.gpu.runs import Curve, Failed, train

STEPS = 8
AT_ONCE = 8
"""Runs side by side on one GPU: none is timed."""
FLOAT32 = "--training.compute_dtype float32 --compile.enable false"
DOCUMENTS = """--data.document_mask true --data.sources '[{name = "r", kind = "synthetic", document_length = 100}]'"""
LATENT = (
    """--model.attention latent --model.n_kv_heads '"none"' --model.head_dim 96 --model.latent.query_rank 192 """
    "--model.latent.key_value_rank 128 --model.latent.rope_head_dim 32 --model.latent.value_head_dim 64"
)
STATE = (
    """--model.layers '["delta", "delta", "delta", "full"]' --model.delta.key_heads 4 --model.delta.value_heads 8 """
    "--model.delta.key_head_dim 64 --model.delta.value_head_dim 64 --model.attention_gate true "
    "--model.norm_offset true --model.qk_norm head --model.rope_fraction 0.25"
)
DEEPSEEK = (
    "--model.n_experts 8 --model.experts_per_token 2 --model.n_shared_experts 1 --model.n_dense_layers 1 "
    "--model.router.scoring sigmoid --model.router.n_groups 4 --model.router.groups_per_token 2 "
    "--model.router.load_balance bias --model.router.scaling_factor 2.5 --model.multi_token.depth 1"
)
GEMMA = (
    "--model.norm_position both --model.norm_offset true --model.activation geglu --model.embedding_scale sqrt_dim "
    "--model.window 128 --model.window_pattern 2 --model.window_rope_theta 10000 --model.query_scale 32"
)
OPTIONS = {
    "plain": "",
    "documents": DOCUMENTS,
    "windows": "--model.qk_norm head --model.window 128 --model.window_pattern 2",
    "windows, documents": f"--model.window 128 --model.window_pattern 2 {DOCUMENTS}",
    "both norms, GeGLU, tied": "--model.norm_position both --model.activation geglu --model.tie_embeddings true",
    "latent attention": LATENT,
    "8 experts": "--model.n_experts 8 --model.experts_per_token 2",
    "Muon": "--optimizer.name muon",
    "layers with a state": STATE,
    "layers with a state, documents": f"{STATE} {DOCUMENTS}",
    "groups of experts, a shared one, a further token": DEEPSEEK,
    "Gemma 3": GEMMA,
    "muP, AdEMAMix": "--model.mup_base_dim 256 --optimizer.name ademamix --optimizer.slow_warmup_steps 4",
    "Lion, cautious": "--optimizer.name lion --optimizer.cautious_weight_decay true",
    "Muon, polar express, by heads": (
        "--optimizer.name muon --optimizer.orthogonalization polar_express --optimizer.split_heads true"
    ),
}
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


@dataclass(frozen=True)
class Pair:
    """Two runs by their names, and the differences that are expected at most."""

    one: str
    other: str
    loss: float
    """In nats."""
    norm: float
    """Of gradient norms, relative."""

    @property
    def name(self) -> str:
        return f"{self.one} | {self.other}"


def runs_and_pairs() -> tuple[dict[str, list[str]], list[Pair]]:
    """The runs by their names, each a list of words, of which several are a run that is stopped and goes on."""
    runs: dict[str, list[str]] = {}
    pairs: list[Pair] = []

    whole = f"--training.steps {STEPS}"
    for name, words in OPTIONS.items():
        runs[f"{name}, CPU"] = [f"{FLOAT32} {words} {whole} --job.device cpu"]
        runs[f"{name}, float32"] = [f"{FLOAT32} {words} {whole}"]
        runs[f"{name}, eager"] = [f"{words} {whole} --compile.enable false"]
        runs[f"{name}, compiled"] = [f"{words} {whole}"]
        by_sign = "Lion" in name  # whose steps round-off turns around: a CPU in float64 differs as much from float32
        pairs.append(Pair(f"{name}, CPU", f"{name}, float32", *((5e-4, 1e-2) if by_sign else (2e-5, 1e-4))))
        pairs.append(Pair(f"{name}, eager", f"{name}, compiled", 0.02, 0.05))
    for recipe in RECIPES:
        runs[f"{recipe}, emulated"] = [f"--float8.recipe {recipe} {whole} --float8.emulate true"]
        runs[f"{recipe}"] = [f"--float8.recipe {recipe} {whole}"]
        pairs.append(Pair(f"{recipe}, emulated", recipe, 0.02, 0.05))
    for name in ("plain", "documents"):
        words = f"{OPTIONS[name]} --training.deterministic true"
        runs[f"{name}, deterministic"] = [f"{words} {whole}"]
        runs[f"{name}, beside saves"] = [f"{words} {whole} --checkpoint.interval 3"]
        runs[f"{name}, stopped"] = [f"{words} --training.steps {STEPS // 2}", f"{words} {whole}"]
        pairs += [Pair(f"{name}, deterministic", f"{name}, {other}", 0, 0) for other in ("beside saves", "stopped")]
    exact = f"--training.deterministic true --training.reduction exact {whole}"
    runs |= {"exact sums": [exact], "exact sums, again": [exact]}
    pairs.append(Pair("exact sums", "exact sums, again", 0, 0))
    return runs, pairs


def differences(folder: Path, only: Sequence[str] = ()) -> Iterator[tuple[Pair, float | None, float | None, str]]:
    """Of each pair the largest differences, of losses and of norms; or, without them, why a run has failed.

    Args:
        folder: for the runs.
        only: names of runs; pairs without one of these are left out.
    """
    shutil.rmtree(folder, ignore_errors=True)
    runs, pairs = runs_and_pairs()
    if only:
        pairs = [pair for pair in pairs if {pair.one, pair.other} & set(only)]
        runs = {name: words for pair in pairs for name, words in runs.items() if name in (pair.one, pair.other)}
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // AT_ONCE)))

    def curve(name: str) -> Curve:
        return [train(folder / name.replace(", ", "-").replace(" ", "_"), words) for words in runs[name]][-1]

    with ThreadPoolExecutor(AT_ONCE) as pool:
        curves = {name: pool.submit(curve, name) for name in runs}
        for pair in pairs:
            try:
                one, other = (curves[name].result() for name in (pair.one, pair.other))
                found = _largest(one, other)
            except Failed as failure:
                yield pair, None, None, str(failure)
            except Exception as failure:  # of this pair; the others follow
                yield pair, None, None, f"{type(failure).__name__}: {failure}"
            else:
                yield pair, *found, ""


def _largest(one: Curve, other: Curve) -> tuple[float, float]:
    """The largest differences of losses, and of norms, relative."""
    if one.keys() != other.keys():
        raise Failed(f"steps {sorted(one)} and {sorted(other)}")
    return (
        max(abs(one[step][0] - other[step][0]) for step in one),
        max(abs(one[step][1] / other[step][1] - 1) for step in one),
    )
