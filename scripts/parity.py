"""Prove that the mesh does not change the run: every combination against one process in eager mode.

    python scripts/parity.py [--config parity.toml] [--rows PATTERN] [--dtype float64|float32] [--list]

A row is a number of ranks and a set of overrides of the config. It passes if the loss, the gradient norm, the first
step's gradient of every parameter, and the final weights agree with the reference over all steps. The reference is
written independently of the trainer: plain PyTorch, whole logits, torch's own clipping and AdamW.
"""

import argparse
import itertools
import logging
import math
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from configs.errors import KeelError
from configs.layout import mesh_sizes
from configs.load import load
from configs.schema import Config, Optimizer
from models import build_model
from parallelisms.init import materialize
from parallelisms.mesh import build_mesh
from parallelisms.plan import plan_of
from parallelisms.rank_pool import RankPool
from trainer.data.loader import MicroBatch, build_loader
from trainer.lr_schedule import learning_rate
from trainer.step import build_learner

BOUNDS = {"float64": (1e-10, 1e-10, 1e-10, 1e-10), "float32": (1e-5, 1e-5, 1e-4, math.inf)}
"""Largest relative difference of loss, norm, first-step gradients and weights. float32 weights are not compared:
Adam amplifies round-off where a gradient is near zero (5e-4 after three steps)."""


@dataclass(frozen=True)
class Row:
    """One combination to prove."""

    name: str
    ranks: int
    overrides: tuple[str, ...]
    run_overrides: tuple[str, ...] = ()
    """Those of run keys, which the reference takes as well."""


@dataclass
class Trajectory:
    """What a run of a few steps computed."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Of the first step, after clipping."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    """After the last step."""


@dataclass(frozen=True)
class Difference:
    """Largest relative differences of a row from the reference."""

    loss: float
    norm: float
    gradient: float
    weight: float

    def passes(self, dtype: str) -> bool:
        """Whether all are within the bounds of the type; a NaN is not."""
        values = (self.loss, self.norm, self.gradient, self.weight)
        return all(value <= bound for value, bound in zip(values, BOUNDS[dtype], strict=True))


MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "1 process": (1, {}),
    "DDP 2": (2, {"dp_replicate": 2}),
    "FSDP 2": (2, {"dp_shard": 2}),
    "FSDP 4": (4, {"dp_shard": 4}),
    "HSDP 2x2": (4, {"dp_replicate": 2, "dp_shard": 2}),
    "TP 2": (2, {"tp": 2}),
    "FSDP 2 x TP 2": (4, {"dp_shard": 2, "tp": 2}),
    "PP 2": (2, {"pp": 2}),
    "PP 2 gpipe": (2, {"pp": 2, "pipeline.schedule": "gpipe"}),
    "PP 2 interleaved": (2, {"pp": 2, "pipeline.schedule": "interleaved_1f1b"}),
    "PP 2 zero-bubble": (2, {"pp": 2, "pipeline.schedule": "zero_bubble_v"}),
    "PP 2 of 3 + 1 layers": (2, {"pp": 2, "pipeline.split": "[3, 1]"}),
    "PP 4": (4, {"pp": 4}),
    "PP 4 gpipe": (4, {"pp": 4, "pipeline.schedule": "gpipe"}),
    "PP 2 x FSDP 2": (4, {"pp": 2, "dp_shard": 2}),
    "PP 2 x FSDP 2 interleaved": (4, {"pp": 2, "dp_shard": 2, "pipeline.schedule": "interleaved_1f1b"}),
    "PP 2 x FSDP 2 zero-bubble": (4, {"pp": 2, "dp_shard": 2, "pipeline.schedule": "zero_bubble_v"}),
    "PP 2 x DDP 2": (4, {"pp": 2, "dp_replicate": 2}),
    "PP 2 x TP 2": (4, {"pp": 2, "tp": 2}),
    "PP 2 x TP 2 zero-bubble": (4, {"pp": 2, "tp": 2, "pipeline.schedule": "zero_bubble_v"}),
}
"""Ranks, and settings: axes of the mesh, other keys by their full name."""


def table() -> Iterator[Row]:
    """Every mesh with every kind of activation checkpointing, eager and compiled, accumulating one and two steps.

    A pipeline accumulates as many times its number of ranks. What its schedule cannot do is left out.
    """
    for mesh, mode, compiled, accumulation in itertools.product(
        MESHES, ("none", "full", "selective"), (False, True), (1, 2)
    ):
        ranks, sizes = MESHES[mesh]
        if sizes.get("pipeline.schedule") == "zero_bubble_v" and (compiled or mode == "selective"):
            continue
        at_once = sizes.get("dp_replicate", 1) * sizes.get("dp_shard", 1) * sizes.get("pp", 1)
        micro_batch = 8 // (at_once * accumulation)
        overrides = {key if "." in key else f"mesh.{key}": size for key, size in sizes.items()} | {
            "activation_checkpoint.mode": mode,
            "compile.enable": str(compiled).lower(),
            "training.micro_batch_size": micro_batch,
        }
        # Accumulating rows skip the reduction of all but the last micro-batch, so that both ways are in the table.
        if accumulation > 1:
            overrides["fsdp.accumulate"] = "reduce_last"
        name = f"{mesh}, {mode}, {'compiled' if compiled else 'eager'}, accumulation {accumulation}"
        yield Row(name, ranks, _words(overrides))
    yield from _zero_rows()
    yield from _context_rows()
    yield from _mixed_rows()
    yield from moe_rows()
    yield from owner_table()


def _zero_rows() -> Iterator[Row]:
    """The stages of ZeRO at 2 and 4 ranks, accumulating two steps, plain and with all that may interfere."""
    harder = {"compile.enable": "true", "activation_checkpoint.mode": "selective"}
    for stage, ranks in itertools.product((1, 2, 3), (2, 4)):
        overrides = {"fsdp.zero_stage": stage, "training.micro_batch_size": 4 // ranks}
        yield Row(f"ZeRO {stage}, {ranks} ranks", ranks, _words(overrides))
        if ranks == 4:
            replicas = {"mesh.dp_replicate": 2, **harder}
            yield Row(f"ZeRO {stage}, HSDP 2x2, compiled", ranks, _words(overrides | replicas))


def _context_rows() -> Iterator[Row]:
    """Context parallelism by each method, alone and beside each other axis, accumulating two steps."""
    documents = {
        "data.document_mask": "true",
        "data.sources": '[{name = "documents", kind = "synthetic", document_length = 8}]',
    }
    beside: dict[str, dict[str, int]] = {
        "CP 2": {"cp": 2},
        "CP 4": {"cp": 4},
        "CP 2 x FSDP 2": {"cp": 2, "dp_shard": 2},
        "CP 2 x DDP 2": {"cp": 2, "dp_replicate": 2, "dp_shard": 1},
        "CP 2 x TP 2": {"cp": 2, "tp": 2},
    }
    for (mesh, sizes), method, compiled, masked in itertools.product(
        beside.items(), ("gather", "ring", "all_to_all"), (False, True), (False, True)
    ):
        overrides = {f"mesh.{axis}": size for axis, size in sizes.items()} | {
            "context.method": method,
            "activation_checkpoint.mode": "selective",
            "compile.enable": str(compiled).lower(),
            "training.micro_batch_size": 2 if "dp_replicate" in sizes or "dp_shard" in sizes else 4,
        }
        how = f"{'compiled' if compiled else 'eager'}{', documents' if masked else ''}"
        run = _words(documents) if masked else ()
        yield Row(f"{mesh}, {method}, {how}", math.prod(sizes.values()), _words(overrides), run)


def _mixed_rows() -> Iterator[Row]:
    """Pairs that no other row has, and three axes on 8 ranks; selective checkpointing, accumulating two steps."""
    mixtures: dict[str, tuple[dict[str, int], int]] = {  # sizes of the axes, micro-batch
        "PP 2 x CP 2": ({"pp": 2, "cp": 2}, 4),
        "PP 2 x owner 2": ({"pp": 2, "dp_replicate": 2, "dp_shard": 1}, 2),
        "FSDP 2 x TP 2 x PP 2": ({"dp_shard": 2, "tp": 2, "pp": 2}, 2),
        "FSDP 2 x CP 2 x TP 2": ({"dp_shard": 2, "cp": 2, "tp": 2}, 2),
        "HSDP 2x2 x TP 2": ({"dp_replicate": 2, "dp_shard": 2, "tp": 2}, 1),
        "PP 2 x CP 2 x FSDP 2": ({"pp": 2, "cp": 2, "dp_shard": 2}, 2),
    }
    for (name, (sizes, micro_batch)), compiled in itertools.product(mixtures.items(), (False, True)):
        overrides: dict[str, object] = {f"mesh.{axis}": size for axis, size in sizes.items()} | {
            "activation_checkpoint.mode": "selective",
            "compile.enable": str(compiled).lower(),
            "training.micro_batch_size": micro_batch,
        }
        if "owner" in name:
            overrides["fsdp.partition"] = "owner"
        how = "compiled" if compiled else "eager"
        yield Row(f"{name}, selective, {how}", math.prod(sizes.values()), _words(overrides))


# A dense first layer, a shared expert, and so many experts that at every step but the first some get no token of the
# whole batch (others five times the mean). The auxiliary loss weighs much, so that a wrong share of it shows.
MOE: dict[str, object] = {
    "model.n_experts": 64,
    "model.experts_per_token": 2,
    "model.n_shared_experts": 1,
    "model.expert_dim": 16,
    "model.n_dense_layers": 1,
    "model.router.auxiliary_loss_weight": 0.1,
}
MOE_BIAS: dict[str, object] = {
    **{key: value for key, value in MOE.items() if "auxiliary" not in key},
    "model.router.load_balance": "bias",
    "model.router.scoring": "sigmoid",
    "model.router.bias_update_rate": 0.01,
}


def moe_rows() -> Iterator[Row]:
    """A mixture of experts, each balance rule on each axis; selective checkpointing, accumulating two steps."""
    meshes: dict[str, tuple[dict[str, int], int]] = {  # sizes of the axes, micro-batch
        "1 process": ({}, 4),
        "FSDP 2": ({"dp_shard": 2}, 2),
        "HSDP 2x2": ({"dp_replicate": 2, "dp_shard": 2}, 1),
        "TP 2": ({"tp": 2}, 4),
        "PP 2": ({"pp": 2}, 4),
        "CP 2": ({"cp": 2}, 4),
        "FSDP 2 x CP 2 x TP 2": ({"dp_shard": 2, "cp": 2, "tp": 2}, 2),
    }
    rules = {"auxiliary loss": MOE, "bias": MOE_BIAS}
    for (name, (sizes, micro_batch)), (rule, run), compiled in itertools.product(
        meshes.items(), rules.items(), (False, True)
    ):
        overrides: dict[str, object] = {f"mesh.{axis}": size for axis, size in sizes.items()} | {
            "activation_checkpoint.mode": "selective",
            "compile.enable": str(compiled).lower(),
            "training.micro_batch_size": micro_batch,
        }
        how = "compiled" if compiled else "eager"
        yield Row(f"MoE {rule}, {name}, {how}", math.prod(sizes.values()), _words(overrides), _words(run))


def _words(overrides: Mapping[str, object]) -> tuple[str, ...]:
    """Overrides as on a command line."""
    return tuple(itertools.chain(*((f"--{key}", str(value)) for key, value in overrides.items())))


def owner_table() -> Iterator[Row]:
    """The optimizer shared out by owner: AdamW and Muon, over as many replicas as there are ranks."""
    owner = ("--fsdp.partition", "owner")
    runs = {"AdamW": (), "Muon": ("--optimizer.name", "muon", *owner)}  # Muon is refused without it
    variants = {
        "accumulation 1": {},
        "accumulation 2": {"fsdp.accumulate": "reduce_last"},
        "selective, accumulation 2": {"activation_checkpoint.mode": "selective"},
        "compiled, accumulation 1": {"compile.enable": "true"},
    }
    for (variant, options), name, ranks in itertools.product(variants.items(), runs, (1, 2, 4)):
        overrides = {"mesh.dp_replicate": ranks, "mesh.dp_shard": 1, **options}
        overrides["training.micro_batch_size"] = 8 // (ranks * (2 if "accumulation 2" in variant else 1))
        yield Row(
            f"owner {ranks}, {name}, {variant}", ranks, _words(overrides) + (() if runs[name] else owner), runs[name]
        )


def reference(config_name: str, overrides: tuple[str, ...], path: str) -> None:
    """Train in plain PyTorch, in one process and eager mode, and write the trajectory to `path`."""
    config = load(config_name, overrides, world_size=1).config
    with torch.device("meta"):
        model = build_model(config.model).to(getattr(torch, config.training.dtype))
    materialize(model, torch.device("cpu"), config.training.seed)
    optimizers = _plain_optimizers(config.optimizer, dict(model.named_parameters()))
    found = Trajectory()
    for step, micro_batches in enumerate(_batches(config, 0, 1)):
        tokens = torch.cat([batch.tokens for batch in micro_batches])
        targets = torch.cat([batch.targets for batch in micro_batches])
        document_ids = [ids for batch in micro_batches if (ids := batch.document_ids) is not None]
        choices = _Choices(model, config)
        logits = _each_document_alone(model, tokens, torch.cat(document_ids)) if document_ids else model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        (loss + choices.auxiliary_loss()).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.training.max_norm, config.training.norm_type)
        if step == 0:
            found.gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(config.lr_schedule, config.optimizer.lr, step)
            optimizer.step()
        choices.move_biases()
        model.zero_grad()
        found.losses.append(loss.item())
        found.norms.append(norm.item())
    found.weights = {name: p.detach() for name, p in model.named_parameters()}
    torch.save(vars(found), path)


class _Choices:
    """What each router of a model did with a global batch, computed once more, in plain words."""

    def __init__(self, model: torch.nn.Module, config: Config) -> None:
        """Watch the routers; to be made before the forward pass."""
        self.settings, self.k = config.model.router, config.model.experts_per_token
        self.inputs: dict[Any, Tensor] = {}
        self.tokens: dict[Any, Tensor] = {}
        self.hooks = [
            model.get_submodule(name).register_forward_hook(
                lambda router, inputs, _: self.inputs.__setitem__(router, inputs[0])
            )
            for name in plan_of(model).routers
        ]

    def auxiliary_loss(self) -> Tensor | float:
        """weight * sum over layers of the mean over sequences of sum over experts of f * P."""
        for hook in self.hooks:
            hook.remove()
        losses = []
        for router, x in self.inputs.items():
            shares, chosen = self._shares_and_choice(router, x)
            self.tokens[router] = chosen.sum(dim=(0, 1))
            f = chosen.mean(dim=1) * chosen.shape[2] / self.k
            losses += [(f * shares.mean(dim=1)).sum(dim=1).mean()]
        is_used = self.settings.load_balance == "auxiliary_loss"
        return self.settings.auxiliary_loss_weight * sum(losses) if is_used else 0.0

    def move_biases(self) -> None:
        """After `auxiliary_loss`: up for an expert with fewer tokens than the mean, down for one with more."""
        for router, tokens in self.tokens.items():
            if router.bias is not None:
                fewer, more = tokens < tokens.mean(), tokens > tokens.mean()
                router.bias[fewer] += self.settings.bias_update_rate
                router.bias[more] -= self.settings.bias_update_rate

    def _shares_and_choice(self, router: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        """Both (sequences, tokens, experts): shares of the scores, and 1 where an expert was chosen, else 0."""
        logits = x @ router.weight.T
        scores = logits.softmax(-1) if self.settings.scoring == "softmax" else logits.sigmoid()
        preference = scores if router.bias is None else scores + router.bias
        chosen = torch.zeros_like(scores).scatter(2, preference.argsort(2, descending=True)[..., : self.k], 1.0)
        return scores / scores.sum(2, keepdim=True), chosen


def _plain_optimizers(config: Optimizer, parameters: dict[str, torch.nn.Parameter]) -> list[torch.optim.Optimizer]:
    """Torch's own: AdamW, after Muon for the matrices between embedding and head where the config names it."""
    ends = ("embed_tokens.weight", "lm_head.weight")
    is_muons = {name: config.name == "muon" and p.ndim == 2 and name not in ends for name, p in parameters.items()}
    groups: list[dict[str, Any]] = [
        {"params": [p for n, p in parameters.items() if p.ndim >= 2 and not is_muons[n]]},
        {"params": [p for p in parameters.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    decay = config.weight_decay
    optimizers: list[torch.optim.Optimizer] = []
    if config.name == "muon":
        hidden = [p for name, p in parameters.items() if is_muons[name]]
        optimizers = [torch.optim.Muon(hidden, weight_decay=decay, momentum=0.95, adjust_lr_fn="match_rms_adamw")]
    betas = (config.betas[0], config.betas[1])
    adamw = torch.optim.AdamW(groups, betas=betas, eps=config.eps, weight_decay=decay, fused=False, foreach=False)
    return [*optimizers, adamw]


def _each_document_alone(model: torch.nn.Module, tokens: Tensor, document_ids: Tensor) -> Tensor:
    """The logits that a document mask must come to, without any mask."""
    rows = []
    for row, ids in zip(tokens, document_ids, strict=True):
        lengths = ids.unique_consecutive(return_counts=True)[1].tolist()
        rows.append(torch.cat([model(document[None]) for document in row.split(lengths)], dim=1))
    return torch.cat(rows)


def compare(config_name: str, overrides: tuple[str, ...], path: str) -> Difference | None:
    """Train as the trainer does, on this rank of the mesh; rank 0 returns the difference from the reference."""
    torch._dynamo.reset()
    found = _train(load(config_name, overrides, world_size=dist.get_world_size()).config)
    if dist.get_rank() > 0:
        return None
    expected = Trajectory(**torch.load(path))
    return Difference(
        loss=_largest_ratio(found.losses, expected.losses),
        norm=_largest_ratio(found.norms, expected.norms),
        gradient=_largest(found.gradients, expected.gradients),
        weight=_largest(found.weights, expected.weights),
    )


def _train(config: Config) -> Trajectory:
    mesh = build_mesh(mesh_sizes(config, dist.get_world_size()), torch.device("cpu"))
    learner = build_learner(config, mesh)
    found = Trajectory()

    def keep_first_gradients(*_: object) -> None:
        if not found.gradients:
            found.gradients = {name: _whole(p.grad) for name, p in learner.parameters.items() if p.grad is not None}

    learner.optimizer.register_step_pre_hook(keep_first_gradients)
    for step, micro_batches in enumerate(_batches(config, mesh.dp_rank, mesh.sizes.dp)):
        result = learner.step(micro_batches, learning_rate(config.lr_schedule, config.optimizer.lr, step))
        found.losses.append(result.loss)
        found.norms.append(result.grad_norm)
    learner.finish_update()
    found.weights = {name: _whole(p) for name, p in learner.parameters.items()}
    found.gradients, found.weights = _of_all_stages(found.gradients), _of_all_stages(found.weights)
    return found


def _of_all_stages(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of all ranks: a pipeline's rank has those of its own stages only."""
    by_rank: list[dict[str, Tensor]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(by_rank, tensors)
    return dict(item for tensors in by_rank for item in tensors.items())


def _batches(config: Config, dp_rank: int, dp_size: int) -> Iterable[list[MicroBatch]]:
    loader = build_loader(config, dp_rank, dp_size, start_sample=0)
    try:
        yield from itertools.islice(loader, config.training.steps)
    finally:
        loader.close()


def _whole(tensor: Tensor) -> Tensor:
    # Gathering FSDP x TP shards takes two collectives, of which torch warns; speed does not matter here.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def _largest_ratio(found: list[float], expected: list[float]) -> float:
    return max(abs(f - e) / abs(e) for f, e in zip(found, expected, strict=True))


def _largest(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    return max(_relative(found[name], expected[name]) for name in expected)


def _relative(found: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest expected value."""
    return ((found - expected).abs().max() / expected.abs().max()).item()


def run_rows(
    pool: RankPool, config_name: str, rows: Iterable[Row], overrides: tuple[str, ...] = ()
) -> Iterator[tuple[Row, Difference]]:
    """Compute the reference once for each run, then each row, and yield its difference."""
    references: dict[tuple[str, ...], str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for row in rows:
            run = overrides + row.run_overrides
            if run not in references:
                references[run] = str(Path(folder) / f"reference-{len(references)}.pt")
                pool.run(1, reference, config_name, run, references[run])
            yield row, pool.run(row.ranks, compare, config_name, run + row.overrides, references[run])[0]


def dtype_overrides(dtype: str) -> tuple[str, ...]:
    """Overrides that set all three types."""
    keys = ("dtype", "compute_dtype", "reduce_dtype")
    return tuple(itertools.chain(*((f"--training.{key}", dtype) for key in keys)))


def main() -> int:
    """Run the rows asked for, print a line for each and return the number that failed (at most 1)."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--config", default="parity.toml", help="job file: small, data synthetic (default: %(default)s)"
    )
    parser.add_argument("--rows", default="*", help='shell pattern of row names, e.g. "TP 2*compiled*"')
    parser.add_argument("--dtype", choices=BOUNDS, default="float64", help="type to compute in (default: %(default)s)")
    parser.add_argument("--list", action="store_true", help="print the rows and what they would take, and exit")
    arguments = parser.parse_args()
    rows = [row for row in table() if fnmatchcase(row.name, arguments.rows)]
    if arguments.list or not rows:
        print("\n".join(f"{row.name} ({row.ranks} ranks)" for row in rows) or f"no row matches {arguments.rows!r}")
        return 0 if rows else 1
    return _print_table(rows, arguments.config, arguments.dtype)


def _print_table(rows: list[Row], config_name: str, dtype: str) -> int:
    pool = RankPool(size=max(row.ranks for row in rows))
    failed = 0
    started = time.perf_counter()
    print(f"Largest relative difference from one process in eager mode, {dtype}")
    print(f"{'':52s} {'loss':>8s} {'norm':>8s} {'gradient':>8s} {'weights':>8s}")
    try:
        for row, difference in run_rows(pool, config_name, rows, dtype_overrides(dtype)):
            passes = difference.passes(dtype)
            failed += not passes
            figures = " ".join(f"{value:8.1e}" for value in vars(difference).values())
            print(f"{row.name:52s} {figures}  {'ok' if passes else 'FAILS'}", flush=True)
    except KeelError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    finally:
        pool.close()
    bounds = ", ".join(f"{bound:.0e}" for bound in BOUNDS[dtype])
    print(f"{len(rows) - failed} of {len(rows)} rows within {bounds}; {time.perf_counter() - started:.0f} s")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
