"""The rows of the parity table: the ways to distribute a run over ranks, as overrides of a job file."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from scripts.parity_options import DOCUMENTS, FAMILIES, MOE, OPTIONS


@dataclass(frozen=True)
class Row:
    """One combination to prove."""

    name: str
    ranks: int
    overrides: tuple[str, ...]
    run_overrides: tuple[str, ...] = ()
    """Overrides of run keys, which the reference uses as well."""
    bounds: str = ""
    """Key of BOUNDS; default: the type that all rows are computed in."""


BOUNDS = {
    "float64": (1e-10, 1e-10, 1e-10, 1e-10),
    "float32": (1e-5, 3e-5, 1e-4, math.inf),
    "bfloat16": (1e-3, 2e-2, 1e-1, math.inf),
    "8-bit, other sums": (1e-4, 1e-2, 1e-2, math.inf),
    "own float32": (1e-6, 1e-5, 1e-5, 1e-3),
}
"""Largest relative difference of loss, norm, first-step gradients and weights. float32 weights are not compared:
Adam amplifies round-off where a gradient is near zero (5e-4 after three steps). Norms differ by less than 1e-6 with
Adam; Muon scales the smallest directions of a gradient up to the largest, and round-off with them (2e-5). bfloat16
means the mixed precision of the job files for GPUs, against a reference in float32. The next are for float8 matmuls
whose sums, of float32, a mesh cuts or orders differently from the reference (docs/float8.md derives them); and for
models that cast to float32 themselves, whatever type they are given."""


DTYPES = ("float64", "float32", "bfloat16")
"""Types to compute all rows in."""


@dataclass(frozen=True)
class Difference:
    """Relative differences of a row from the reference, by name in the order of the forward pass."""

    loss: float
    """The largest of all steps."""
    norm: float
    """The same."""
    first_loss: float
    """The first step's, before any update: often right where gradients are wrong."""
    first_norm: float
    """The same of the norm."""
    initial: dict[str, float]
    """Weights and buffers before the first step."""
    gradients: dict[str, float]
    """The first step's gradients, before clipping."""
    weights: dict[str, float]
    """Weights after the last step."""
    buffers: dict[str, float]
    """Buffers after the last step."""
    sha: str = ""
    """Digest of the bits of all losses and norms, and of the final weights."""
    stopped: str = ""
    """Why the run ended before its last step: the ranks hold different results; "" if it did not."""

    @property
    def values(self) -> tuple[float, float, float, float]:
        """The largest difference of loss, norm, gradients, and of weights and buffers; a NaN counts as infinite."""
        state = (_largest(each) for each in (self.initial, self.weights, self.buffers))
        return self.loss, self.norm, _largest(self.gradients), max(state)

    def passes(self, dtype: str) -> bool:
        """Whether all are within the bounds for the type; a NaN is not, nor is a run that stopped."""
        return self.is_within(BOUNDS[dtype])

    def is_within(self, bounds: Sequence[float]) -> bool:
        """The same for bounds of loss, norm, gradients and weights."""
        return not self.stopped and all(value <= bound for value, bound in zip(self.values, bounds, strict=True))

    def wrong(self, dtype: str = "float64") -> tuple[str, list[str]]:
        """What is wrong first in the course of the run, and the names of the tensors of which it is; ("", []): nothing.

        Gradients are in the order in which the backward pass reaches them, since an error spreads from the first.
        """
        loss_bound, norm_bound, bound, weight_bound = BOUNDS[dtype]
        kinds = {
            "initial value": (self.initial, weight_bound),
            "gradient": (dict(reversed(self.gradients.items())), bound),
            "value": ({"gradient norm": self.first_norm}, norm_bound),
            "buffer": (self.buffers, weight_bound),
            "weight": (self.weights, weight_bound),
            "later value": ({"loss": self.loss, "gradient norm": self.norm}, min(loss_bound, norm_bound)),
        }
        for kind, (values, limit) in kinds.items():
            if names := [name for name, value in values.items() if not value <= limit]:
                return kind, names
        return "", []


def exact(row: Row) -> Row:
    """The row with exact reductions, of one sequence per micro-batch, as all rows need that share their bits."""
    without = {"--fsdp.accumulate", "--training.micro_batch_size"}
    pairs = zip(row.overrides[::2], row.overrides[1::2], strict=True)
    kept = tuple(word for key, value in pairs if key not in without for word in (key, value))
    run = row.run_overrides + words({"training.reduction": "exact", "training.micro_batch_size": 1})
    return replace(row, overrides=kept, run_overrides=run)


def _largest(values: Mapping[str, float]) -> float:
    """The largest value; a NaN is larger than any."""
    return max((math.inf if math.isnan(value) else value for value in values.values()), default=0.0)


DECIDE_BITS = ("mesh.tp", "mesh.cp", "mesh.ep", "context.method", "compile.enable")
"""The machine keys that, with exact reductions, may change bits. What the compiler fuses depends on what is
checkpointed; without it, the same kernels run twice."""


def same_bits(row: Row) -> tuple[str, ...]:
    """The properties that an exact row must have in common with another to share its bits."""
    machine = dict(zip(row.overrides[::2], row.overrides[1::2], strict=True))
    decisive = (*DECIDE_BITS, *(("activation_checkpoint.mode",) if machine.get("--compile.enable") == "true" else ()))
    default = {"--compile.enable": "false"}
    return *row.run_overrides, *(f"{key} {machine.get(f'--{key}', default.get(f'--{key}', ''))}" for key in decisive)


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
        overrides = _by_key(sizes) | {
            "activation_checkpoint.mode": mode,
            "compile.enable": str(compiled).lower(),
            "training.micro_batch_size": micro_batch,
        }
        # Accumulating rows reduce only in the last micro-batch, so that the table has both ways.
        if accumulation > 1:
            overrides["fsdp.accumulate"] = "reduce_last"
        name = f"{mesh}, {mode}, {'compiled' if compiled else 'eager'}, accumulation {accumulation}"
        yield Row(name, ranks, words(overrides))
    yield from _zero_rows()
    yield from _document_rows()
    yield from _context_rows()
    yield from _mixed_rows()
    yield from moe_rows()
    yield from expert_rows()
    yield from owner_table()
    yield from freeze_rows()
    yield from memory_rows()
    yield from attention_rows()
    yield from moments_rows()
    yield from lion_rows()
    yield from ademamix_rows()
    yield from muon_rows()
    yield from float8_rows()
    yield from qk_norm_rows()
    yield from tied_rows()
    yield from further_rows()
    yield from option_rows()


MOMENTS: dict[str, object] = {"optimizer.moments_dtype": "bfloat16"}


def moments_rows() -> Iterator[Row]:
    """Moments in bfloat16, whose rounding no mesh may change; accumulating two steps (PP 2: four).

    In float64 the rows agree like all others. In float32 a gradient's last bit may turn a rounding the other way, which
    changes that moment by its last bit, 0.4 to 0.8%: the bounds on loss and norm hold all the same.
    """
    owner = {"fsdp.partition": "owner", "dp_replicate": 2, "dp_shard": 1}
    meshes: dict[str, tuple[dict[str, Any], dict[str, object]]] = {  # axes and machine's settings, the run's
        "1 process": ({}, {}),
        "DDP 2": ({"dp_replicate": 2, "dp_shard": 1}, {}),
        "FSDP 2": ({"dp_shard": 2}, {}),
        "FSDP 4": ({"dp_shard": 4}, {}),
        "HSDP 2x2": ({"dp_replicate": 2, "dp_shard": 2}, {}),
        "TP 2": ({"tp": 2}, {}),
        "FSDP 2 x TP 2": ({"dp_shard": 2, "tp": 2}, {}),
        "PP 2": ({"pp": 2}, {}),
        "CP 2": ({"cp": 2}, {}),
        "owner 2": (owner, {}),
        "owner 2 x TP 2": ({**owner, "tp": 2}, {}),
        "EP 2 x TP 2": ({"dp_shard": 2, "ep": 2, "tp": 2}, MOE),
        "frozen, FSDP 2": ({"dp_shard": 2}, {"optimizer.groups": groups_of(FROZEN)}),
    }
    for name, (sizes, run) in meshes.items():
        ranks = math.prod(size for key, size in sizes.items() if "." not in key and key != "ep")
        at_once = sizes.get("dp_replicate", 1) * sizes.get("dp_shard", 1)
        overrides = _selective(sizes, max(1, 4 // at_once), compiled=name == "FSDP 2 x TP 2")
        yield Row(f"bfloat16 moments, {name}", ranks, words(overrides), words(MOMENTS | run))


def lion_rows() -> Iterator[Row]:
    """Lion, over row shards and by owner."""
    owner = {"fsdp.partition": "owner", "dp_replicate": 2, "dp_shard": 1}
    run = {"optimizer.name": "lion", "optimizer.betas": "[0.9, 0.99]"}
    meshes: dict[str, tuple[int, dict[str, Any]]] = {  # ranks, axes and machine's settings
        "1 process": (1, {}),
        "HSDP 2x2": (4, {"dp_replicate": 2, "dp_shard": 2}),
        "FSDP 2 x TP 2": (4, {"dp_shard": 2, "tp": 2}),
        "CP 2": (2, {"cp": 2}),
        "owner 2 x PP 2 interleaved": (4, {**owner, "pp": 2, "pipeline.schedule": "interleaved_1f1b"}),
    }
    for name, (ranks, sizes) in meshes.items():
        yield Row(f"Lion, {name}", ranks, words(_selective(sizes, 2, compiled=False)), words(run))
    experts = words(_selective({"dp_shard": 2, "ep": 2}, 2, compiled=False))
    yield Row("Lion, EP 2", 2, experts, words(run | MOE))
    decay = {"optimizer.cautious_weight_decay": "true", "optimizer.weight_decay_by": "schedule"}
    overrides = words(_selective({"dp_shard": 2}, 2, compiled=False))
    yield Row("Lion, cautious, FSDP 2", 2, overrides, words(run | decay | {"optimizer.weight_decay": 1e-3}))


def ademamix_rows() -> Iterator[Row]:
    """AdEMAMix, whose slow average is still warming up, over row shards and by owner."""
    owner = {"fsdp.partition": "owner", "dp_replicate": 2, "dp_shard": 1}
    run: dict[str, object] = {"optimizer.name": "ademamix", "optimizer.slow_beta": 0.99}
    run |= {"optimizer.slow_warmup_steps": 4}
    meshes: dict[str, tuple[int, dict[str, Any], dict[str, object]]] = {  # ranks, axes and settings, the run's keys
        "1 process": (1, {}, {}),
        "HSDP 2x2": (4, {"dp_replicate": 2, "dp_shard": 2}, {}),
        "FSDP 2 x TP 2, cautious": (4, {"dp_shard": 2, "tp": 2}, {"optimizer.cautious_weight_decay": "true"}),
        "PP 2": (2, {"pp": 2}, {}),
        "owner 2": (2, owner, {"optimizer.groups": groups_of(FROZEN)}),
        "EP 2": (2, {"dp_shard": 2, "ep": 2}, MOE),
    }
    for name, (ranks, sizes, more) in meshes.items():
        overrides = _selective(sizes, 2, compiled=name == "FSDP 2 x TP 2, cautious")
        yield Row(f"AdEMAMix, {name}", ranks, words(overrides), words(run | more))


MUON: dict[str, object] = {"optimizer.name": "muon"}


def muon_rows() -> Iterator[Row]:
    """Muon, which exchanges parts of matrices, on each axis; with experts, each of which is a matrix of its own."""
    meshes: dict[str, tuple[int, dict[str, Any], dict[str, object]]] = {  # ranks, axes and settings, the run's keys
        "1 process": (1, {}, {}),
        "DDP 2": (2, {"dp_replicate": 2, "dp_shard": 1}, {}),
        "FSDP 3": (3, {"dp_shard": 3}, {"training.global_batch_size": 6}),
        "FSDP 4": (4, {"dp_shard": 4}, {}),
        "FSDP 4, ZeRO 2": (4, {"dp_shard": 4, "fsdp.zero_stage": 2}, {}),
        "FSDP 4, ZeRO 1": (4, {"dp_shard": 4, "fsdp.zero_stage": 1}, {}),
        "HSDP 2x2": (4, {"dp_replicate": 2, "dp_shard": 2}, {}),
        "TP 2": (2, {"tp": 2}, {}),
        "FSDP 2 x TP 2": (4, {"dp_shard": 2, "tp": 2}, {}),
        "CP 2": (2, {"cp": 2}, {}),
        "PP 2": (2, {"pp": 2}, {}),
        "PP 2 x FSDP 2 interleaved": (4, {"pp": 2, "dp_shard": 2, "pipeline.schedule": "interleaved_1f1b"}, {}),
        "PP 2 x TP 2 zero-bubble": (4, {"pp": 2, "tp": 2, "pipeline.schedule": "zero_bubble_v"}, {}),
        "frozen, FSDP 2 x TP 2": (4, {"dp_shard": 2, "tp": 2}, {"optimizer.groups": groups_of(FROZEN)}),
        "experts, 1 process": (1, {}, MOE),
        "experts, FSDP 4": (4, {"dp_shard": 4}, MOE),
        "experts, HSDP 2x2": (4, {"dp_replicate": 2, "dp_shard": 2}, MOE),
        "experts, owner 2": (2, {"dp_replicate": 2, "dp_shard": 1, "fsdp.partition": "owner"}, MOE),
        "experts, TP 2": (2, {"tp": 2}, MOE),
        "experts, PP 2": (2, {"pp": 2}, MOE),
        "experts, EP 2 x FSDP 2": (4, {"dp_shard": 4, "ep": 2}, MOE),
        "experts, EP 2 x TP 2": (4, {"dp_shard": 2, "ep": 2, "tp": 2}, MOE),
        "experts, EP 2, replicated": (4, {"dp_replicate": 2, "dp_shard": 2, "ep": 2}, MOE),
    }
    options: dict[str, object] = {"optimizer.nesterov": "false", "optimizer.orthogonalization": "polar_express"}
    options |= {"optimizer.split_heads": "true", "optimizer.cautious_weight_decay": "true"}
    options |= {"optimizer.weight_decay_by": "schedule", "optimizer.weight_decay": 1e-3}
    meshes |= {
        "options, FSDP 4": (4, {"dp_shard": 4}, options),
        "options, HSDP 2x2": (4, {"dp_replicate": 2, "dp_shard": 2}, options),
        "options, FSDP 2 x TP 2": (4, {"dp_shard": 2, "tp": 2}, options),
        "options, PP 2 x FSDP 2": (4, {"pp": 2, "dp_shard": 2}, options),
        "options, experts, EP 2 x FSDP 2": (4, {"dp_shard": 4, "ep": 2}, MOE | options),
        "options, owner 2 x TP 2": (4, {"dp_replicate": 2, "dp_shard": 1, "tp": 2, "fsdp.partition": "owner"}, options),
    }
    compiled = ("FSDP 4", "FSDP 2 x TP 2", "PP 2", "experts, EP 2 x FSDP 2")
    for name, (ranks, sizes, run) in meshes.items():
        for is_compiled in (False, True) if name in compiled else (False,):
            overrides = _selective(sizes, 1, is_compiled)
            if sizes.get("pipeline.schedule") == "zero_bubble_v":
                del overrides["activation_checkpoint.mode"]
            yield Row(f"Muon, {name}, {_how(is_compiled)}", ranks, words(overrides), words(MUON | run))


def qk_norm_rows() -> Iterator[Row]:
    """Norms of each head; a rank's gradient of their weights is one term of a sum over tensor-parallel ranks."""
    run: dict[str, object] = {"model.qk_norm": "head"}
    muon: dict[str, object] = {"optimizer.name": "muon", "fsdp.partition": "owner"}
    meshes: dict[str, tuple[int, dict[str, Any], dict[str, object]]] = {  # ranks, axes, further overrides of the run
        "1 process": (1, {}, {}),
        "FSDP 2": (2, {"dp_shard": 2}, {}),
        "TP 2": (2, {"tp": 2}, {}),
        "FSDP 2 x TP 2": (4, {"dp_shard": 2, "tp": 2}, {}),
        "CP 2": (2, {"cp": 2}, {}),
        "PP 2": (2, {"pp": 2}, {}),
        "EP 2 x TP 2": (4, {"dp_shard": 2, "ep": 2, "tp": 2}, MOE),
        "owner 2 x TP 2, Muon": (4, {"dp_replicate": 2, "dp_shard": 1, "tp": 2}, muon),
    }
    for (name, (ranks, sizes, more)), compiled in itertools.product(meshes.items(), (False, True)):
        overrides = _selective(sizes, 2, compiled)
        yield Row(f"qk_norm, {name}, {_how(compiled)}", ranks, words(overrides), words(run | more))


def tied_rows() -> Iterator[Row]:
    """Embedding and head that share a matrix, on both ends of a pipeline."""
    frozen: dict[str, object] = {"optimizer.groups": groups_of({"embed_tokens.*": "freeze_until_step = 2"})}
    muon: dict[str, object] = {"optimizer.name": "muon", "fsdp.partition": "owner"}
    owner = {"dp_replicate": 2, "dp_shard": 1, "fsdp.partition": "owner"}
    meshes: dict[str, tuple[int, dict[str, Any], dict[str, object]]] = {  # ranks, axes and settings, the run's keys
        "PP 2 gpipe": (2, {"pp": 2, "pipeline.schedule": "gpipe"}, {}),
        "PP 2 interleaved": (2, {"pp": 2, "pipeline.schedule": "interleaved_1f1b"}, {}),
        "PP 4": (4, {"pp": 4}, {}),
        "PP 2 x FSDP 2": (4, {"pp": 2, "dp_shard": 2}, {}),
        "PP 2 x DDP 2": (4, {"pp": 2, "dp_replicate": 2, "dp_shard": 1}, {}),
        "PP 2 x TP 2": (4, {"pp": 2, "tp": 2}, {}),
        "PP 2 x CP 2, documents": (4, {"pp": 2, "cp": 2}, DOCUMENTS),
        "PP 2, frozen for two steps": (2, {"pp": 2}, frozen),
        "owner 2 x PP 2": (4, {**owner, "pp": 2}, {}),
        "owner 2 x PP 2 interleaved, Muon": (4, {**owner, "pp": 2, "pipeline.schedule": "interleaved_1f1b"}, muon),
    }
    tied: dict[str, object] = {"model.tie_embeddings": "true"}
    for name, (ranks, sizes, run) in meshes.items():
        yield Row(f"tied, {name}, eager", ranks, words(_selective(sizes, 2, compiled=False)), words(tied | run))
    compiled = words(_selective({"pp": 2, "dp_shard": 2}, 2, compiled=True))
    yield Row("tied, PP 2 x FSDP 2, compiled", 4, compiled, words(tied))


def further_rows() -> Iterator[Row]:
    """Modules that predict further tokens, whose embedding a pipeline holds on both ends; `option_rows` has more."""
    owner = {"dp_replicate": 2, "dp_shard": 1, "fsdp.partition": "owner"}
    muon: dict[str, object] = {"optimizer.name": "muon", "training.z_loss_weight": 0.1}
    tied: dict[str, object] = {"model.tie_embeddings": "true"}
    meshes: dict[str, tuple[int, dict[str, Any], dict[str, object]]] = {  # ranks, axes and settings, the run's keys
        "1 process": (1, {}, tied),
        "FSDP 2, ZeRO 1": (2, {"dp_shard": 2, "fsdp.zero_stage": 1}, {}),
        "HSDP 2x2": (4, {"dp_replicate": 2, "dp_shard": 2}, {}),
        "FSDP 2 x TP 2": (4, {"dp_shard": 2, "tp": 2}, tied),
        "CP 2 ring, documents": (2, {"cp": 2, "context.method": "ring"}, DOCUMENTS),
        "CP 2 all_to_all": (2, {"cp": 2, "context.method": "all_to_all"}, {}),
        "PP 2 gpipe": (2, {"pp": 2, "pipeline.schedule": "gpipe"}, {}),
        "PP 2 interleaved": (2, {"pp": 2, "pipeline.schedule": "interleaved_1f1b"}, {}),
        "PP 2, tied": (2, {"pp": 2}, tied),
        "PP 2 x FSDP 2": (4, {"pp": 2, "dp_shard": 2}, muon),
        "PP 2 x TP 2": (4, {"pp": 2, "tp": 2}, {}),
        "PP 2 x CP 2, documents": (4, {"pp": 2, "cp": 2}, DOCUMENTS),
        "owner 2 x PP 2": (4, {**owner, "pp": 2}, {}),
    }
    further = OPTIONS["further tokens"]
    for name, (ranks, sizes, run) in meshes.items():
        yield Row(f"further, {name}, eager", ranks, words(_selective(sizes, 2, compiled=False)), words(further | run))
    for mode in ("none", "full", "selective"):
        overrides = _selective({"dp_shard": 2, "tp": 2}, 2, compiled=True) | {"activation_checkpoint.mode": mode}
        yield Row(f"further, FSDP 2 x TP 2, {mode}, compiled", 4, words(overrides), words(further))


def option_rows() -> Iterator[Row]:
    """Each option of a model on each axis; then those of a family together on more axes, eager and compiled."""
    axes: dict[str, dict[str, Any]] = {
        "FSDP 2": {"dp_shard": 2},
        "TP 2": {"tp": 2},
        "CP 2": {"cp": 2},
        "PP 2": {"pp": 2},
    }
    for (option, run), (mesh, sizes) in itertools.product(OPTIONS.items(), axes.items()):
        yield Row(f"{option}, {mesh}", 2, words(_selective(sizes, 2, compiled=False)), words(run))
    meshes: dict[str, tuple[int, dict[str, Any]]] = {  # ranks, axes and machine's settings
        "1 process": (1, {}),
        "FSDP 2 x TP 2": (4, {"dp_shard": 2, "tp": 2}),
        "CP 2 x TP 2": (4, {"cp": 2, "tp": 2}),
        "CP 4": (4, {"cp": 4}),
        "CP 2 all_to_all": (2, {"cp": 2, "context.method": "all_to_all"}),
        "PP 2 x FSDP 2": (4, {"pp": 2, "dp_shard": 2}),
    }
    products = itertools.product(FAMILIES.items(), meshes.items(), (False, True))
    for (family, run), (name, (ranks, sizes)), compiled in products:
        overrides = _selective(sizes, 2, compiled)
        yield Row(f"{family}, {name}, {_how(compiled)}", ranks, words(overrides), words(run))
    further: dict[str, tuple[int, dict[str, Any]]] = {
        "EP 2 x TP 2": (4, {"dp_shard": 2, "ep": 2, "tp": 2}),
        "EP 2 x PP 2": (4, {"dp_shard": 2, "ep": 2, "pp": 2}),
        "EP 2 x CP 2, ring": (4, {"dp_shard": 2, "ep": 2, "cp": 2, "context.method": "ring"}),
    }
    for (name, (ranks, sizes)), compiled in itertools.product(further.items(), (False, True)):
        overrides = _selective(sizes, 2, compiled)
        yield Row(f"DeepSeek-V3, {name}, {_how(compiled)}", ranks, words(overrides), words(FAMILIES["DeepSeek-V3"]))


def float8_rows() -> Iterator[Row]:
    """Emulated float8 matmuls on each axis, two micro-batches or more.

    Scales are over a micro-batch, so all rows have the reference's, but for the recipe whose scales are not.
    """
    tensorwise = "tensorwise"
    rowwise = "rowwise"
    by_token = "rowwise_with_gw_hp"
    gather: dict[str, object] = {"float8.fsdp_all_gather": "true"}
    selective: dict[str, object] = {
        "activation_checkpoint.mode": "selective",
        "activation_checkpoint.save_every_nth_matmul": 2,
    }
    meshes: list[tuple[str, str, int, dict[str, object]]] = [  # recipe, mesh, ranks, settings
        (tensorwise, "1 process", 1, {}),
        (tensorwise, "FSDP 2", 2, {}),
        (tensorwise, "FSDP 2, selective", 2, selective),
        (tensorwise, "FSDP 2, gathered in 8 bits", 2, gather),
        (tensorwise, "HSDP 2x2, gathered in 8 bits", 4, {"mesh.dp_replicate": 2, **gather}),
        (tensorwise, "ZeRO 1, gathered in 8 bits", 2, {"fsdp.zero_stage": 1, **gather}),
        (tensorwise, "PP 2, gathered in 8 bits", 4, {"mesh.pp": 2, **gather}),
        (tensorwise, "PP 2 interleaved, gathered in 8 bits", 4, {**INTERLEAVED, **gather}),
        (tensorwise, "owner 2", 2, {"mesh.dp_replicate": 2, **OWNER}),
        (tensorwise, "PP 2", 2, {"mesh.pp": 2}),
        (tensorwise, "TP 2", 2, {"mesh.tp": 2}),
        (tensorwise, "FSDP 2 x TP 2, gathered in 8 bits", 4, {"mesh.tp": 2, **gather}),
        (rowwise, "1 process", 1, {}),
        (rowwise, "FSDP 2, selective", 2, selective),
        (rowwise, "PP 2", 2, {"mesh.pp": 2}),
        (rowwise, "FSDP 2 x TP 2", 4, {"mesh.tp": 2}),
        (by_token, "1 process", 1, {}),
        (by_token, "FSDP 2, 2 at once", 2, {"training.micro_batch_size": 2}),
        (by_token, "TP 2", 2, {"mesh.tp": 2}),
        (by_token, "CP 2", 2, {"mesh.cp": 2}),
    ]
    for (recipe, mesh, ranks, settings), compiled in itertools.product(meshes, (False, True)):
        run = {"float8.recipe": recipe, "float8.emulate": "true", "training.micro_batch_size": 1}
        overrides = {"compile.enable": str(compiled).lower(), **settings}
        cuts_sums = bool(settings.keys() & {"mesh.tp", "mesh.cp", "training.micro_batch_size"})
        bounds = "8-bit, other sums" if cuts_sums else ""
        yield Row(f"float8 {recipe}, {mesh}, {_how(compiled)}", ranks, words(overrides), words(run), bounds)


def attention_rows() -> Iterator[Row]:
    """The kernel that a CPU can be told to use, on the axes that change attention; eager, accumulating two steps."""
    meshes: dict[str, tuple[dict[str, object], int]] = {  # sizes of the axes and other settings, micro-batch
        "FSDP 2": ({"dp_shard": 2}, 2),
        "TP 2": ({"tp": 2}, 4),
        "PP 2": ({"pp": 2}, 4),
        "CP 2, gather": ({"cp": 2, "context.method": "gather"}, 4),
        "CP 2, all_to_all": ({"cp": 2, "context.method": "all_to_all"}, 4),
    }
    for name, (sizes, micro_batch) in meshes.items():
        overrides = {"attention.backend": "flash2"} | _selective(sizes, micro_batch, compiled=False)
        yield Row(f"attention by flash2, {name}", 2, words(overrides))


def memory_rows() -> Iterator[Row]:
    """Recomputation chosen by a memory limit, which falls on some of the layers; accumulating two steps."""
    # Sizes of the axes, micro-batch, GiB in eager mode and compiled.
    meshes: dict[str, tuple[dict[str, int], int, tuple[str, str]]] = {
        "FSDP 2": ({"dp_shard": 2}, 2, ("0.0066", "0.0059")),
        "TP 2": ({"tp": 2}, 4, ("0.0063", "0.0055")),
        "PP 2": ({"pp": 2}, 4, ("0.0074", "0.0075")),
    }
    for (name, (sizes, micro_batch, limits)), compiled in itertools.product(meshes.items(), (False, True)):
        overrides = _by_key(sizes) | {
            "activation_checkpoint.memory_limit_gib": limits[compiled],
            "compile.enable": str(compiled).lower(),
            "training.micro_batch_size": micro_batch,
        }
        yield Row(f"memory limit, {name}, {_how(compiled)}", 2, words(overrides))


def _zero_rows() -> Iterator[Row]:
    """The stages of ZeRO at 2 and 4 ranks, accumulating two steps, plain and with all that may interfere."""
    harder = {"compile.enable": "true", "activation_checkpoint.mode": "selective"}
    for stage, ranks in itertools.product((1, 2, 3), (2, 4)):
        overrides = {"fsdp.zero_stage": stage, "training.micro_batch_size": 4 // ranks}
        yield Row(f"ZeRO {stage}, {ranks} ranks", ranks, words(overrides))
        if ranks == 4:
            replicas = {"mesh.dp_replicate": 2, **harder}
            yield Row(f"ZeRO {stage}, HSDP 2x2, compiled", ranks, words(overrides | replicas))


def _document_rows() -> Iterator[Row]:
    """A document mask, on each axis; selective checkpointing, accumulating two steps."""
    meshes: dict[str, tuple[dict[str, int], int]] = {  # sizes of the axes, micro-batch
        "1 process": ({}, 4),
        "FSDP 2": ({"dp_shard": 2}, 2),
        "TP 2": ({"tp": 2}, 4),
        "PP 2": ({"pp": 2}, 4),
    }
    for (name, (sizes, micro_batch)), compiled in itertools.product(meshes.items(), (False, True)):
        overrides = _selective(sizes, micro_batch, compiled)
        how = "compiled" if compiled else "eager"
        yield Row(f"documents, {name}, {how}", math.prod(sizes.values()), words(overrides), words(DOCUMENTS))
    zero_bubble = words({**ZERO_BUBBLE, "training.micro_batch_size": 4})
    yield Row("documents, PP 2 zero-bubble, eager", 2, zero_bubble, words(DOCUMENTS))


def _context_rows() -> Iterator[Row]:
    """Context parallelism by each method, alone and with each other axis, accumulating two steps."""
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
        run = words(DOCUMENTS) if masked else ()
        yield Row(f"{mesh}, {method}, {how}", math.prod(sizes.values()), words(overrides), run)


def _mixed_rows() -> Iterator[Row]:
    """Pairs that no other row has, and three axes on 8 ranks; selective checkpointing, accumulating two steps."""
    mixtures: dict[str, tuple[dict[str, int], int]] = {  # sizes of the axes, micro-batch
        "PP 2 x CP 2": ({"pp": 2, "cp": 2}, 4),
        "DDP 2 x TP 2": ({"dp_replicate": 2, "dp_shard": 1, "tp": 2}, 2),
        "FSDP 2 x TP 2 x PP 2": ({"dp_shard": 2, "tp": 2, "pp": 2}, 2),
        "FSDP 2 x CP 2 x TP 2": ({"dp_shard": 2, "cp": 2, "tp": 2}, 2),
        "HSDP 2x2 x TP 2": ({"dp_replicate": 2, "dp_shard": 2, "tp": 2}, 1),
        "PP 2 x CP 2 x FSDP 2": ({"pp": 2, "cp": 2, "dp_shard": 2}, 2),
    }
    for (name, (sizes, micro_batch)), compiled in itertools.product(mixtures.items(), (False, True)):
        overrides = _selective(sizes, micro_batch, compiled)
        how = "compiled" if compiled else "eager"
        yield Row(f"{name}, selective, {how}", math.prod(sizes.values()), words(overrides))


# A dense first layer, a shared expert, and so many experts that at every step but the first some get no token of the
# whole batch (others five times the mean). The auxiliary loss weighs much, so that a wrong share of it shows.
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
        overrides = _selective(sizes, micro_batch, compiled)
        how = "compiled" if compiled else "eager"
        yield Row(f"MoE {rule}, {name}, {how}", math.prod(sizes.values()), words(overrides), words(run))


def expert_rows() -> Iterator[Row]:
    """Expert parallelism, alone and with each other axis; selective checkpointing, accumulating two steps.

    Of 8 ranks each has a sequence of its own, so that their global batch is twice as large.
    """
    queues = {"comm.streams": "per_group", "comm.prefetch": 2}
    buffers = {"expert.exchange": "buffers", "expert.buffer_factor": 1.5}
    meshes: dict[str, tuple[dict[str, Any], int]] = {  # sizes of the axes and other settings, ranks
        "EP 2": ({"dp_shard": 2, "ep": 2}, 2),
        "EP 2 in buffers": ({"dp_shard": 2, "ep": 2, **buffers}, 2),
        "EP 2 x TP 2 in buffers": ({"dp_shard": 2, "ep": 2, "tp": 2, **buffers}, 4),
        "EP 2 x PP 2 in buffers": ({"dp_shard": 2, "ep": 2, "pp": 2, **buffers}, 4),
        "EP 4 over CP 2 in buffers": ({"dp_shard": 2, "cp": 2, "ep": 4, **buffers}, 4),
        "EP 4": ({"dp_shard": 4, "ep": 4}, 4),
        "EP 2 x FSDP 2": ({"dp_shard": 4, "ep": 2}, 4),
        "EP 2 x FSDP 2, a queue for each group": ({"dp_shard": 4, "ep": 2, **queues}, 4),
        "EP 2 x DDP 2": ({"dp_replicate": 2, "dp_shard": 2, "ep": 2}, 4),
        "EP 4 x FSDP 2": ({"dp_shard": 8, "ep": 4}, 8),
        "EP 2 x TP 2": ({"dp_shard": 2, "ep": 2, "tp": 2}, 4),
        "EP 2 x FSDP 2 x TP 2": ({"dp_shard": 4, "ep": 2, "tp": 2}, 8),
        "EP 2 x PP 2": ({"dp_shard": 2, "ep": 2, "pp": 2}, 4),
        "PP 2 x EP 2 x FSDP 2": ({"dp_shard": 4, "ep": 2, "pp": 2}, 8),
        "EP 2 x CP 2": ({"dp_shard": 2, "cp": 2, "ep": 2}, 4),
        "EP 4 over CP 2": ({"dp_shard": 2, "cp": 2, "ep": 4}, 4),
    }
    for (name, (sizes, ranks)), compiled in itertools.product(meshes.items(), (False, True)):
        at_once = sizes.get("dp_replicate", 1) * sizes["dp_shard"]
        overrides = _selective(sizes, max(1, 4 // at_once), compiled)
        run = MOE | ({"training.global_batch_size": 16} if at_once == 8 else {})
        yield Row(f"{name}, {'compiled' if compiled else 'eager'}", ranks, words(overrides), words(run))


def _by_key(settings: Mapping[str, object]) -> dict[str, object]:
    """Axes of the mesh under their full names, too."""
    return {key if "." in key else f"mesh.{key}": value for key, value in settings.items()}


def _selective(sizes: Mapping[str, object], micro_batch: int, compiled: bool) -> dict[str, object]:
    """Overrides for a mesh, with selective activation checkpointing."""
    return _by_key(sizes) | {
        "activation_checkpoint.mode": "selective",
        "compile.enable": str(compiled).lower(),
        "training.micro_batch_size": micro_batch,
    }


def words(overrides: Mapping[str, object]) -> tuple[str, ...]:
    """Return overrides as command-line words."""
    return tuple(itertools.chain(*((f"--{key}", str(value)) for key, value in overrides.items())))


def owner_table() -> Iterator[Row]:
    """The optimizer partitioned by owner: AdamW and Muon, alone on 1, 2 and 4 ranks and with other axes."""
    owner = ("--fsdp.partition", "owner")
    runs = {"AdamW": (), "Muon": ("--optimizer.name", "muon")}

    def row(what: str, ranks: int, overrides: Mapping[str, object], optimizer: str) -> Row:
        return Row(what, ranks, words({"mesh.dp_shard": 1, **overrides}) + owner, runs[optimizer])

    variants = {
        "accumulation 1": {},
        "accumulation 2": {"fsdp.accumulate": "reduce_last"},
        "selective, accumulation 2": {"activation_checkpoint.mode": "selective"},
        "compiled, accumulation 1": {"compile.enable": "true"},
    }
    for (variant, options), optimizer, ranks in itertools.product(variants.items(), runs, (1, 2, 4)):
        micro_batch = 8 // (ranks * (2 if "accumulation 2" in variant else 1))
        overrides = {"mesh.dp_replicate": ranks, "training.micro_batch_size": micro_batch, **options}
        yield row(f"owner {ranks}, {optimizer}, {variant}", ranks, overrides, optimizer)
    for axis, optimizer, compiled in itertools.product(("tp", "cp", "pp"), runs, (False, True)):
        how = "compiled" if compiled else "eager"
        beside = _selective({"dp_replicate": 2, axis: 2}, 2, compiled)
        yield row(f"owner 2 x {axis.upper()} 2, {optimizer}, {how}", 4, beside, optimizer)
    schedules = {"interleaved": "interleaved_1f1b", "zero-bubble": "zero_bubble_v"}
    for axis, optimizer, (named, schedule) in itertools.product(("dp_replicate", "cp"), runs, schedules.items()):
        overrides = _by_key({axis: 2, "pp": 2, "pipeline.schedule": schedule, "training.micro_batch_size": 2})
        yield row(f"owner over {axis} 2 x PP 2 {named}, {optimizer}", 4, overrides, optimizer)


# The embedding and a block are always frozen, so that no gradient flows back to them; others for some steps.
FROZEN = {"embed_tokens.*": "freeze = true", "layers.0.*": "freeze = true", "layers.1.*": "freeze_until_step = 3"}
FROZEN |= {"layers.3.mlp.*_proj*": "freeze_until_step = 2", "*norm.weight": "freeze_until_step = 4"}
# A tied embedding, whose gradient also comes from the head, and the experts of a mixture with its routers.
FROZEN_ENDS = {"embed_tokens.*": "freeze_until_step = 3", "*.experts.*": "freeze_until_step = 2"}
FROZEN_ENDS |= {"*.router.*": "freeze = true"}


def freeze_rows() -> Iterator[Row]:
    """Parameters that are frozen, always or in the first steps, on each axis; accumulating two steps."""
    meshes: dict[str, tuple[dict[str, Any], int]] = {  # sizes of the axes and other settings, micro-batch
        "1 process": ({}, 4),
        "FSDP 2": ({"dp_shard": 2}, 2),
        "HSDP 2x2, ZeRO 1": ({"dp_replicate": 2, "dp_shard": 2, "fsdp.zero_stage": 1}, 1),
        "FSDP 2 x TP 2": ({"dp_shard": 2, "tp": 2}, 2),
        "PP 4": ({"pp": 4}, 2),
        "PP 2 interleaved": ({"pp": 2, "pipeline.schedule": "interleaved_1f1b"}, 2),
        "CP 2": ({"cp": 2}, 4),
        "owner 2": ({"dp_shard": 1, "dp_replicate": 2, "fsdp.partition": "owner"}, 2),
        "owner 2 x TP 2": ({"dp_shard": 1, "dp_replicate": 2, "tp": 2, "fsdp.partition": "owner"}, 2),
    }
    for (name, (sizes, micro_batch)), compiled in itertools.product(meshes.items(), (False, True)):
        overrides = _selective(sizes, micro_batch, compiled)
        ranks = math.prod(size for key, size in sizes.items() if "." not in key)
        for optimizer in ("AdamW", "Muon") if "owner" in name else ("AdamW",):
            run = words({"optimizer.groups": groups_of(FROZEN)})
            run += ("--optimizer.name", "muon", "--fsdp.partition", "owner") if optimizer == "Muon" else ()
            yield Row(f"frozen, {name}, {optimizer}, {_how(compiled)}", ranks, words(overrides), run)
    zero_bubble = words({**ZERO_BUBBLE, "training.micro_batch_size": 2})
    yield Row("frozen, PP 2 zero-bubble, AdamW, eager", 2, zero_bubble, words({"optimizer.groups": groups_of(FROZEN)}))
    ends: dict[str, tuple[int, dict[str, object]]] = {
        "FSDP 2": (2, {"dp_shard": 2}),
        "EP 2 x TP 2": (4, {"dp_shard": 2, "ep": 2, "tp": 2}),
    }
    tied = MOE | {"model.tie_embeddings": "true", "optimizer.groups": groups_of(FROZEN_ENDS)}
    for (name, (n, sizes)), compiled in itertools.product(ends.items(), (False, True)):
        row = f"frozen, tied, experts, {name}, {_how(compiled)}"
        yield Row(row, n, words(_selective(sizes, 2, compiled)), words(tied))


def groups_of(settings: Mapping[str, str]) -> str:
    """`optimizer.groups`, by pattern."""
    return "[" + ", ".join(f'{{pattern = "{pattern}", {each}}}' for pattern, each in settings.items()) + "]"


def _how(compiled: bool) -> str:
    return "compiled" if compiled else "eager"


OWNER: dict[str, object] = {"fsdp.partition": "owner", "mesh.dp_shard": 1}
INTERLEAVED: dict[str, object] = {"mesh.pp": 2, "pipeline.schedule": "interleaved_1f1b"}
ZERO_BUBBLE: dict[str, object] = {"mesh.pp": 2, "pipeline.schedule": "zero_bubble_v"}
REFUSED: dict[str, tuple[int, dict[str, object], str]] = {
    "owner 2 x EP 2": (4, {**OWNER, "mesh.dp_replicate": 2, "mesh.cp": 2, "mesh.ep": 2, **MOE}, "whole"),
    "owner over row shards": (2, {"fsdp.partition": "owner", "mesh.dp_shard": 2}, "dp_shard"),
    "zero-bubble, compiled": (2, {**ZERO_BUBBLE, "compile.enable": "true"}, "compile"),
    "zero-bubble, selective": (2, {**ZERO_BUBBLE, "activation_checkpoint.mode": "selective"}, "selective"),
    "PP 2, layers left out": (2, {"mesh.pp": 2, "pipeline.split": "[2, 1]"}, "4"),
    "PP 4, 2 micro-batches": (4, {"mesh.pp": 4, "training.micro_batch_size": 4}, "micro-batches"),
    "CP 4, no 8 parts of the sequence": (4, {"mesh.cp": 4, "training.seq_len": 20}, "20"),
    "CP 4 all_to_all, 2 heads": (4, {"mesh.cp": 4, "context.method": "all_to_all", "model.n_kv_heads": 2}, "heads"),
    "TP 3": (3, {"mesh.tp": 3, "mesh.dp_shard": 1}, "does not divide"),
    "EP 2 of 1 rank": (2, {"mesh.ep": 2, "mesh.dp_replicate": 2, "mesh.dp_shard": 1, **MOE}, "mesh.ep"),
    "EP 2 without experts": (2, {"mesh.ep": 2}, "n_experts"),
    "EP 4, 6 experts": (4, {"mesh.ep": 4, **MOE, "model.n_experts": 6}, "6"),
}
"""Combinations that cannot work, so the config refuses them: ranks, overrides, and a part of the reason."""
