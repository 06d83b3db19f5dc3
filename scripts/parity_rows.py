"""The rows of the parity table: the ways to distribute a run over ranks, as overrides of a job file."""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from configs.reading.overrides import words
from scripts.parity_options import DOCUMENTS, FAMILIES, LATENT, MOE, OPTIONS


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
whose sums, of float32, a mesh cuts or orders differently from the reference (docs/performance.md derives them); and for
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


def can_be_exact(row: Row) -> bool:
    """Whether exact reductions make the bits of a row those of other meshes; not with a class of torch optimizers."""
    return not any(word.startswith("torch.optim:") for word in row.run_overrides)


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


PARTS: dict[str, dict[str, object]] = {
    "DDP 2": {"mesh.dp_replicate": 2, "mesh.dp_shard": 1},
    "FSDP 2": {"mesh.dp_shard": 2},
    "FSDP 3": {"mesh.dp_shard": 3},
    "FSDP 4": {"mesh.dp_shard": 4},
    "HSDP 2x2": {"mesh.dp_replicate": 2, "mesh.dp_shard": 2},
    "TP 2": {"mesh.tp": 2},
    "CP 2": {"mesh.cp": 2},
    "CP 4": {"mesh.cp": 4},
    "PP 2": {"mesh.pp": 2},
    "PP 4": {"mesh.pp": 4},
    "EP 2": {"mesh.dp_shard": 2, "mesh.ep": 2},
    "EP 4": {"mesh.dp_shard": 4, "mesh.ep": 4},
    "EP 2 x FSDP 2": {"mesh.dp_shard": 4, "mesh.ep": 2},
    "EP 4 x FSDP 2": {"mesh.dp_shard": 8, "mesh.ep": 4},
    "EP 4 over CP 2": {"mesh.dp_shard": 2, "mesh.cp": 2, "mesh.ep": 4},
    "owner 2": {"mesh.dp_replicate": 2, "mesh.dp_shard": 1, "fsdp.partition": "owner"},
    "owner 4": {"mesh.dp_replicate": 4, "mesh.dp_shard": 1, "fsdp.partition": "owner"},
    "replicated": {"mesh.dp_replicate": 2},
    "ZeRO 1": {"fsdp.zero_stage": 1},
    "ZeRO 2": {"fsdp.zero_stage": 2},
    "gpipe": {"pipeline.schedule": "gpipe"},
    "interleaved": {"pipeline.schedule": "interleaved_1f1b"},
    "zero-bubble": {"pipeline.schedule": "zero_bubble_v"},
    "of 3 + 1 layers": {"pipeline.split": "[3, 1]"},
    "gather": {"context.method": "gather"},
    "ring": {"context.method": "ring"},
    "all_to_all": {"context.method": "all_to_all"},
    "in buffers": {"expert.exchange": "buffers", "expert.buffer_factor": 1.5},
    "a queue for each group": {"comm.streams": "per_group", "comm.prefetch": 2},
}
"""What the parts of a mesh's name set; of two that set the same key, the later one counts."""


def settings_of(mesh: str) -> dict[str, Any]:
    """The settings that a mesh's name says, e.g. "PP 2 x FSDP 2 interleaved"."""
    settings: dict[str, Any] = {}
    for part, values in PARTS.items():
        if part in mesh:
            settings |= values
    return settings


def _row(
    name: str,
    mesh: str,
    run: Mapping[str, object],
    compiled: bool = False,
    micro_batch: int | None = None,
    also: Mapping[str, object] | None = None,
) -> Row:
    """A row with selective activation checkpointing, where the schedule of the pipeline can do it.

    Args:
        name: of the row, in which {mesh} and {how} are filled in: eager or compiled.
        mesh: names the settings of the mesh (`PARTS`).
        run: keys of the run.
        compiled: whether it is.
        micro_batch: sequences; default: so many that a rank accumulates two steps, if it has two sequences.
        also: further settings of the machine.
    """
    settings = settings_of(mesh)
    mode = "none" if settings.get("pipeline.schedule") == "zero_bubble_v" else "selective"
    data_ranks = settings.get("mesh.dp_replicate", 1) * settings.get("mesh.dp_shard", 1)
    settings |= {
        "activation_checkpoint.mode": mode,
        "compile.enable": str(compiled).lower(),
        "training.micro_batch_size": micro_batch or max(1, 4 // data_ranks),
        **(also or {}),
    }
    ranks = math.prod(size for key, size in settings.items() if key.startswith("mesh.") and key != "mesh.ep")
    how = "compiled" if compiled else "eager"
    return Row(name.format(mesh=mesh, how=how), ranks, words(settings), words(run))


def _both(name: str, meshes: Iterable[str], run: Mapping[str, object], micro_batch: int | None = None) -> Iterator[Row]:
    """The rows of these meshes, eager and compiled."""
    for mesh, compiled in itertools.product(meshes, (False, True)):
        yield _row(name, mesh, run, compiled, micro_batch)


MESHES = (
    "1 process",
    "DDP 2",
    "FSDP 2",
    "FSDP 4",
    "HSDP 2x2",
    "TP 2",
    "FSDP 2 x TP 2",
    "PP 2",
    "PP 2 gpipe",
    "PP 2 interleaved",
    "PP 2 zero-bubble",
    "PP 2 of 3 + 1 layers",
    "PP 4",
    "PP 4 gpipe",
    "PP 2 x FSDP 2",
    "PP 2 x FSDP 2 interleaved",
    "PP 2 x FSDP 2 zero-bubble",
    "PP 2 x DDP 2",
    "PP 2 x TP 2",
    "PP 2 x TP 2 zero-bubble",
)


def table() -> Iterator[Row]:
    """Every mesh with every kind of activation checkpointing, eager and compiled, accumulating one and two steps.

    A pipeline accumulates as many times its number of ranks. What its schedule cannot do is left out.
    """
    for mesh, mode, compiled, accumulation in itertools.product(
        MESHES, ("none", "full", "selective"), (False, True), (1, 2)
    ):
        if "zero-bubble" in mesh and (compiled or mode == "selective"):
            continue
        sizes = settings_of(mesh)
        at_once = math.prod(sizes.get(f"mesh.{axis}", 1) for axis in ("dp_replicate", "dp_shard", "pp"))
        also: dict[str, object] = {"activation_checkpoint.mode": mode}
        # Accumulating rows reduce only in the last micro-batch, so that the table has both ways.
        if accumulation > 1:
            also["fsdp.accumulate"] = "reduce_last"
        name = f"{{mesh}}, {mode}, {{how}}, accumulation {accumulation}"
        yield _row(name, mesh, {}, compiled, 8 // (at_once * accumulation), also)
    yield from _zero_rows()
    yield from _document_rows()
    yield from _context_rows()
    yield from _mixed_rows()
    yield from moe_rows()
    yield from expert_rows()
    yield from owner_table()
    yield from freeze_rows()
    yield from memory_rows()
    yield from auto_rows()
    yield from attention_rows()
    yield from moments_rows()
    yield from lion_rows()
    yield from ademamix_rows()
    yield from torch_rows()
    yield from muon_rows()
    yield from qk_clip_rows()
    yield from float8_rows()
    yield from qk_norm_rows()
    yield from tied_rows()
    yield from further_rows()
    yield from option_rows()
    yield from state_rows()


def moments_rows() -> Iterator[Row]:
    """Moments in bfloat16, whose rounding no mesh may change; accumulating two steps (PP 2: four).

    In float64 the rows agree like all others. In float32 a gradient's last bit may turn a rounding the other way, which
    changes that moment by its last bit, 0.4 to 0.8%: the bounds on loss and norm hold all the same.
    """
    name = "bfloat16 moments, {mesh}"
    run: dict[str, object] = {"optimizer.moments_dtype": "bfloat16"}
    for mesh in ("1 process", "DDP 2", "FSDP 2", "FSDP 4", "HSDP 2x2", "TP 2", "PP 2", "CP 2", "owner 2"):
        yield _row(name, mesh, run)
    yield _row(name, "FSDP 2 x TP 2", run, compiled=True)
    yield _row(name, "owner 2 x TP 2", run)
    yield _row(name, "EP 2 x TP 2", run | MOE)
    yield _row(name, "frozen, FSDP 2", run | {"optimizer.groups": groups_of(FROZEN)})


def lion_rows() -> Iterator[Row]:
    """Lion, over row shards and by owner."""
    name = "Lion, {mesh}"
    run: dict[str, object] = {"optimizer.name": "lion", "optimizer.betas": "[0.9, 0.99]"}
    for mesh in ("1 process", "HSDP 2x2", "FSDP 2 x TP 2", "CP 2", "owner 2 x PP 2 interleaved"):
        yield _row(name, mesh, run, micro_batch=2)
    yield _row(name, "EP 2", run | MOE, micro_batch=2)
    decay = {"optimizer.cautious_weight_decay": "true", "optimizer.weight_decay_by": "schedule"}
    yield _row(name, "cautious, FSDP 2", run | decay | {"optimizer.weight_decay": 1e-3}, micro_batch=2)


def ademamix_rows() -> Iterator[Row]:
    """AdEMAMix, whose slow average is still warming up, over row shards and by owner."""
    name = "AdEMAMix, {mesh}"
    run: dict[str, object] = {"optimizer.name": "ademamix", "optimizer.slow_beta": 0.99}
    run |= {"optimizer.slow_warmup_steps": 4}
    for mesh in ("1 process", "HSDP 2x2", "PP 2"):
        yield _row(name, mesh, run, micro_batch=2)
    cautious = run | {"optimizer.cautious_weight_decay": "true"}
    yield _row(name, "FSDP 2 x TP 2, cautious", cautious, compiled=True, micro_batch=2)
    yield _row(name, "owner 2", run | {"optimizer.groups": groups_of(FROZEN)}, micro_batch=2)
    yield _row(name, "EP 2", run | MOE, micro_batch=2)


def torch_rows() -> Iterator[Row]:
    """Classes of torch optimizers, over row shards and by owner."""
    options: dict[str, dict[str, object]] = {
        "Adamax": {},
        "NAdam": {"optimizer.options.decoupled_weight_decay": "true"},
        "RMSprop": {"optimizer.options.centered": "true", "optimizer.options.momentum": 0.9},
    }
    for kind, keys in options.items():
        run = {"optimizer.name": f"torch.optim:{kind}", **keys}
        for mesh in ("1 process", "FSDP 2", "TP 2", "PP 2", "owner 2"):
            yield _row(f"torch's {kind}, {{mesh}}", mesh, run, micro_batch=2)
    name = "torch's Adagrad, {mesh}"
    run = {"optimizer.name": "torch.optim:Adagrad", "optimizer.options.initial_accumulator_value": 0.1}
    yield _row(name, "owner 2 x TP 2", run | {"optimizer.groups": groups_of(FROZEN)}, micro_batch=2)
    yield _row(name, "EP 2", run | MOE, micro_batch=2)
    yield _row(name, "HSDP 2x2", run, compiled=True, micro_batch=2)


def muon_rows() -> Iterator[Row]:
    """Muon, which exchanges parts of matrices, on each axis; with experts, each of which is a matrix of its own."""
    muon: dict[str, object] = {"optimizer.name": "muon"}
    name = "Muon, {mesh}, {how}"

    def rows(meshes: Iterable[str], run: dict[str, object], what: str = "") -> Iterator[Row]:
        for mesh in meshes:
            yield _row(name, f"{what}{mesh}", muon | run, micro_batch=1)

    yield from _both(name, ("FSDP 4", "FSDP 2 x TP 2", "PP 2"), muon, micro_batch=1)
    yield from rows(("1 process", "DDP 2", "FSDP 4, ZeRO 2", "FSDP 4, ZeRO 1", "HSDP 2x2", "TP 2", "CP 2"), {})
    yield from rows(("PP 2 x FSDP 2 interleaved", "PP 2 x TP 2 zero-bubble"), {})
    yield from rows(("FSDP 3",), {"training.global_batch_size": 6})
    yield from rows(("frozen, FSDP 2 x TP 2",), {"optimizer.groups": groups_of(FROZEN)})
    yield from _both(name, ("experts, EP 2 x FSDP 2",), muon | MOE, micro_batch=1)
    yield from rows(("1 process", "FSDP 4", "HSDP 2x2", "owner 2", "TP 2", "PP 2"), MOE, "experts, ")
    yield from rows(("EP 2 x TP 2", "EP 2, replicated"), MOE, "experts, ")
    options: dict[str, object] = {"optimizer.nesterov": "false", "optimizer.orthogonalization": "polar_express"}
    options |= {"optimizer.split_heads": "true", "optimizer.cautious_weight_decay": "true"}
    options |= {"optimizer.weight_decay_by": "schedule", "optimizer.weight_decay": 1e-3, "optimizer.neuron_beta": 0.9}
    meshes = ("FSDP 4", "HSDP 2x2", "FSDP 2 x TP 2", "PP 2 x FSDP 2", "owner 2 x TP 2")
    yield from rows(meshes, options, "options, ")
    yield from rows(("EP 2 x FSDP 2",), MOE | options, "options, experts, ")


def qk_clip_rows() -> Iterator[Row]:
    """A limit that the logits of the first weights pass: each head is scaled by what all ranks have seen of it."""
    name = "QK-clip, {mesh}, {how}"
    run: dict[str, object] = {"optimizer.qk_clip": 1e-3}
    documents = run | DOCUMENTS
    muon = run | {"optimizer.name": "muon", "model.attention_bias": "true", "model.n_kv_heads": 8}
    yield from _both(name, ("1 process", "FSDP 2 x TP 2", "PP 2"), run, micro_batch=2)
    for mesh in ("CP 2 gather", "CP 2 ring", "CP 2 all_to_all", "CP 2 x TP 2 gather"):
        yield _row(name, f"documents, {mesh}", documents, micro_batch=2)
    for mesh in ("FSDP 4", "HSDP 2x2", "owner 2 x TP 2", "PP 2 x FSDP 2 interleaved"):
        yield _row(name, f"Muon, {mesh}", muon, micro_batch=1)
    yield from _both(name, ("latent attention, FSDP 2 x TP 2",), run | LATENT, micro_batch=2)
    further = run | OPTIONS["further tokens"] | {"model.window": 5}
    yield _row(name, "further tokens, window, CP 2 gather", further, micro_batch=2)


def qk_norm_rows() -> Iterator[Row]:
    """Norms of each head; a rank's gradient of their weights is one term of a sum over tensor-parallel ranks."""
    name = "qk_norm, {mesh}, {how}"
    run: dict[str, object] = {"model.qk_norm": "head"}
    meshes = ("1 process", "FSDP 2", "TP 2", "FSDP 2 x TP 2", "CP 2", "PP 2")
    yield from _both(name, meshes, run, micro_batch=2)
    yield from _both(name, ("EP 2 x TP 2",), run | MOE, micro_batch=2)
    yield from _both(name, ("owner 2 x TP 2, Muon",), run | OWNED_MUON, micro_batch=2)


def tied_rows() -> Iterator[Row]:
    """Embedding and head that share a matrix, on both ends of a pipeline."""
    name = "tied, {mesh}, {how}"
    tied: dict[str, object] = {"model.tie_embeddings": "true"}
    frozen = {"optimizer.groups": groups_of({"embed_tokens.*": "freeze_until_step = 2"})}
    yield from _both(name, ("PP 2 x FSDP 2",), tied, micro_batch=2)
    for mesh in ("PP 2 gpipe", "PP 2 interleaved", "PP 4", "PP 2 x DDP 2", "PP 2 x TP 2", "owner 2 x PP 2"):
        yield _row(name, mesh, tied, micro_batch=2)
    yield _row(name, "PP 2 x CP 2, documents", tied | DOCUMENTS, micro_batch=2)
    yield _row(name, "PP 2, frozen for two steps", tied | frozen, micro_batch=2)
    yield _row(name, "owner 2 x PP 2 interleaved, Muon", tied | OWNED_MUON, micro_batch=2)


def further_rows() -> Iterator[Row]:
    """Modules that predict further tokens, whose embedding a pipeline holds on both ends; `option_rows` has more."""
    name = "further, {mesh}, {how}"
    further = OPTIONS["further tokens"]
    muon: dict[str, object] = {"optimizer.name": "muon", "training.z_loss_weight": 0.1}
    tied: dict[str, object] = {"model.tie_embeddings": "true"}
    for mesh in ("HSDP 2x2", "CP 2 all_to_all", "PP 2 gpipe", "PP 2 interleaved", "PP 2 x TP 2", "owner 2 x PP 2"):
        yield _row(name, mesh, further, micro_batch=2)
    yield _row(name, "FSDP 2, ZeRO 1", further, micro_batch=2)
    for mesh in ("1 process", "FSDP 2 x TP 2", "PP 2, tied"):
        yield _row(name, mesh, further | tied, micro_batch=2)
    for mesh in ("CP 2 ring, documents", "PP 2 x CP 2, documents"):
        yield _row(name, mesh, further | DOCUMENTS, micro_batch=2)
    yield _row(name, "PP 2 x FSDP 2", further | muon, micro_batch=2)
    for mode in ("none", "full", "selective"):
        also = {"activation_checkpoint.mode": mode}
        yield _row(f"further, {{mesh}}, {mode}, {{how}}", "FSDP 2 x TP 2", further, True, 2, also)


def option_rows() -> Iterator[Row]:
    """Each option of a model on each axis; then those of a family together on more axes, eager and compiled."""
    for (option, run), mesh in itertools.product(OPTIONS.items(), ("FSDP 2", "TP 2", "CP 2", "PP 2")):
        yield _row(f"{option}, {{mesh}}", mesh, run, micro_batch=2)
    meshes = ("1 process", "FSDP 2 x TP 2", "CP 2 x TP 2", "CP 4", "CP 2 all_to_all", "PP 2 x FSDP 2")
    for family, run in FAMILIES.items():
        yield from _both(f"{family}, {{mesh}}, {{how}}", meshes, run, micro_batch=2)
    with_experts = ("EP 2 x TP 2", "EP 2 x PP 2", "EP 2 x CP 2, ring")
    yield from _both("DeepSeek-V3, {mesh}, {how}", with_experts, FAMILIES["DeepSeek-V3"], micro_batch=2)
    for family in ("Qwen3 with experts", "DeepSeek-V3", "Qwen3-Next"):
        run = FAMILIES[family] | DOCUMENTS | {"optimizer.name": "muon"}
        for mesh in ("EP 2 x CP 2 x PP 2 interleaved", "EP 2 x CP 2 x TP 2"):
            yield _row(f"{family}, {{mesh}}, Muon", mesh, run, micro_batch=2)
    # On four ranks a window reaches back over more than one chunk.
    for option in ("window", "window, every third layer whole", "window, documents"):
        yield from _both(f"{option}, {{mesh}}, {{how}}", ("CP 2 ring", "CP 4 ring"), OPTIONS[option], micro_batch=2)


def state_rows() -> Iterator[Row]:
    """States that pass over more ranks than there are heads, documents on more than one rank."""
    heads = {"model.delta": "{key_heads = 2, value_heads = 4, key_head_dim = 6, value_head_dim = 10}"}
    run = OPTIONS["delta, documents over chunks"] | heads
    yield from _both("states, {mesh}, {how}", ("CP 4",), run, micro_batch=2)
    for mesh in ("CP 2 ring", "CP 2 x TP 2", "CP 2 all_to_all"):
        yield _row("states, {mesh}", mesh, run, micro_batch=2)


def float8_rows() -> Iterator[Row]:
    """Emulated float8 matmuls on each axis, two micro-batches or more.

    Scales are over a micro-batch, so all rows have the reference's, but for the recipe whose scales are not.
    """
    gather: dict[str, object] = {"float8.fsdp_all_gather": "true"}
    selective: dict[str, object] = {
        "activation_checkpoint.mode": "selective",
        "activation_checkpoint.save_every_nth_matmul": 2,
    }
    meshes: list[tuple[str, str, int, dict[str, object]]] = [  # recipe, mesh, ranks, settings
        ("tensorwise", "1 process", 1, {}),
        ("tensorwise", "FSDP 2", 2, {}),
        ("tensorwise", "FSDP 2, selective", 2, selective),
        ("tensorwise", "FSDP 2, gathered in 8 bits", 2, gather),
        ("tensorwise", "HSDP 2x2, gathered in 8 bits", 4, {"mesh.dp_replicate": 2, **gather}),
        ("tensorwise", "ZeRO 1, gathered in 8 bits", 2, {"fsdp.zero_stage": 1, **gather}),
        ("tensorwise", "PP 2, gathered in 8 bits", 4, {"mesh.pp": 2, **gather}),
        ("tensorwise", "PP 2 interleaved, gathered in 8 bits", 4, {**INTERLEAVED, **gather}),
        ("tensorwise", "owner 2", 2, {"mesh.dp_replicate": 2, **OWNER}),
        ("tensorwise", "PP 2", 2, {"mesh.pp": 2}),
        ("tensorwise", "TP 2", 2, {"mesh.tp": 2}),
        ("tensorwise", "FSDP 2 x TP 2, gathered in 8 bits", 4, {"mesh.tp": 2, **gather}),
        ("rowwise", "1 process", 1, {}),
        ("rowwise", "FSDP 2, selective", 2, selective),
        ("rowwise", "PP 2", 2, {"mesh.pp": 2}),
        ("rowwise", "FSDP 2 x TP 2", 4, {"mesh.tp": 2}),
        ("rowwise_with_gw_hp", "1 process", 1, {}),
        ("rowwise_with_gw_hp", "FSDP 2, 2 at once", 2, {"training.micro_batch_size": 2}),
        ("rowwise_with_gw_hp", "TP 2", 2, {"mesh.tp": 2}),
        ("rowwise_with_gw_hp", "CP 2", 2, {"mesh.cp": 2}),
    ]
    for (recipe, mesh, ranks, settings), compiled in itertools.product(meshes, (False, True)):
        run = {"float8.recipe": recipe, "float8.emulate": "true", "training.micro_batch_size": 1}
        how = "compiled" if compiled else "eager"
        overrides = {"compile.enable": str(compiled).lower(), **settings}
        cuts_sums = bool(settings.keys() & {"mesh.tp", "mesh.cp", "training.micro_batch_size"})
        bounds = "8-bit, other sums" if cuts_sums else ""
        yield Row(f"float8 {recipe}, {mesh}, {how}", ranks, words(overrides), words(run), bounds)
    yield from _float8_experts_rows()


def _float8_experts_rows() -> Iterator[Row]:
    """Emulated float8 products of experts on each axis; all else but the last mesh's dense matrices is in float64.

    So are the sums, which emulation computes in the type of the rows: bounds are as without float8.
    """
    meshes: list[tuple[str, int, dict[str, object]]] = [  # mesh, ranks, settings
        ("1 process", 1, {}),
        ("FSDP 2, selective", 2, {"activation_checkpoint.mode": "selective"}),
        ("FSDP 2, full", 2, {"activation_checkpoint.mode": "full"}),
        ("FSDP 2, 2 at once", 2, {"training.micro_batch_size": 2}),
        ("HSDP 2x2", 4, {"mesh.dp_replicate": 2}),
        ("EP 2", 2, {"mesh.ep": 2}),
        ("EP 2 in buffers", 2, {"mesh.ep": 2, **PARTS["in buffers"]}),
        ("EP 2 over CP 2", 2, {"mesh.cp": 2, "mesh.ep": 2}),
        ("CP 2", 2, {"mesh.cp": 2}),
        ("TP 2", 2, {"mesh.tp": 2}),
        ("EP 2 x TP 2", 4, {"mesh.tp": 2, "mesh.ep": 2}),
        ("PP 2", 2, {"mesh.pp": 2}),
        ("FSDP 2, dense matrices too", 2, {"float8.skip": "[]"}),
    ]
    run: dict[str, object] = MOE | {"model.expert_dim": 32, "float8.recipe": "rowwise_with_gw_hp"}
    run |= {"float8.experts": "true", "float8.emulate": "true", "training.micro_batch_size": 1}
    for (mesh, ranks, settings), compiled in itertools.product(meshes, (False, True)):
        how = "compiled" if compiled else "eager"
        skip = settings.get("float8.skip", '["*.self_attn.*", "layers.0.*"]')
        overrides = {"compile.enable": str(compiled).lower(), **settings}
        overrides.pop("float8.skip", None)
        yield Row(f"float8 experts, {mesh}, {how}", ranks, words(overrides), words(run | {"float8.skip": skip}))


def attention_rows() -> Iterator[Row]:
    """The kernel that a CPU can be told to use, on the axes that change attention; eager, accumulating two steps."""
    for mesh in ("FSDP 2", "TP 2", "PP 2", "CP 2, gather", "CP 2, all_to_all"):
        yield _row("attention by flash2, {mesh}", mesh, {}, also={"attention.backend": "flash2"})


def memory_rows() -> Iterator[Row]:
    """Recomputation chosen by a memory limit, which falls on some of the layers; accumulating two steps."""
    limits = {"FSDP 2": ("0.0066", "0.0059"), "TP 2": ("0.0063", "0.0055"), "PP 2": ("0.0074", "0.0075")}
    for mesh, (eager, compiled) in limits.items():
        overrides = settings_of(mesh) | {"training.micro_batch_size": 2 if mesh == "FSDP 2" else 4}
        for how, gib in (("eager", eager), ("compiled", compiled)):
            overrides["activation_checkpoint.memory_limit_gib"] = gib
            overrides["compile.enable"] = str(how == "compiled").lower()
            yield Row(f"memory limit, {mesh}, {how}", 2, words(overrides))


AUTO: dict[str, object] = {
    "training.micro_batch_size": "auto",
    "fsdp.zero_stage": "auto",
    "activation_checkpoint.memory_limit_gib": 1,
}
"""ZeRO's stage and the micro-batch, chosen by a limit of memory that none exceeds."""


def auto_rows() -> Iterator[Row]:
    """ZeRO's stage and the micro-batch, chosen by memory; with a small limit, beside recomputation."""
    for mesh, compiled in (("FSDP 2", False), ("HSDP 2x2", True), ("FSDP 2 x TP 2", False), ("PP 2 x FSDP 2", False)):
        yield _row("chosen by memory, {mesh}, {how}", mesh, {}, compiled, also=AUTO)
    small = AUTO | {"activation_checkpoint.memory_limit_gib": "0.0059"}
    yield _row("chosen by little memory, {mesh}", "FSDP 2", {}, also=small)


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
    name = "documents, {mesh}, {how}"
    yield from _both(name, ("1 process", "FSDP 2", "TP 2", "PP 2"), DOCUMENTS)
    yield _row(name, "PP 2 zero-bubble", DOCUMENTS)


def _context_rows() -> Iterator[Row]:
    """Context parallelism by each method, alone and with each other axis, accumulating two steps."""
    meshes = ("CP 2", "CP 4", "CP 2 x FSDP 2", "CP 2 x DDP 2", "CP 2 x TP 2")
    for mesh, method in itertools.product(meshes, ("gather", "ring", "all_to_all")):
        yield from _both("{mesh}, {how}", (f"{mesh}, {method}",), {})
        yield from _both("{mesh}, {how}, documents", (f"{mesh}, {method}",), DOCUMENTS)


def _mixed_rows() -> Iterator[Row]:
    """Pairs that no other row has, and three axes on 8 ranks; selective checkpointing, accumulating two steps."""
    eight = ("FSDP 2 x TP 2 x PP 2", "FSDP 2 x CP 2 x TP 2", "HSDP 2x2 x TP 2", "PP 2 x CP 2 x FSDP 2")
    yield from _both("{mesh}, selective, {how}", ("PP 2 x CP 2", "DDP 2 x TP 2", *eight), {})


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
    meshes = ("1 process", "FSDP 2", "HSDP 2x2", "TP 2", "PP 2", "CP 2", "FSDP 2 x CP 2 x TP 2")
    yield from _both("MoE auxiliary loss, {mesh}, {how}", meshes, MOE)
    yield from _both("MoE bias, {mesh}, {how}", meshes, MOE_BIAS)


def expert_rows() -> Iterator[Row]:
    """Expert parallelism, alone, with each other axis and with owners; selective checkpointing, accumulating two steps.

    Of 8 ranks each has a sequence of its own, so that their global batch is twice as large.
    """
    meshes = (
        "EP 2",
        "EP 2 in buffers",
        "EP 2 x TP 2 in buffers",
        "EP 2 x PP 2 in buffers",
        "EP 4 over CP 2 in buffers",
        "EP 4",
        "EP 2 x FSDP 2",
        "EP 2 x FSDP 2, a queue for each group",
        "EP 2 x DDP 2",
        "EP 2 x TP 2",
        "EP 2 x FSDP 2 x TP 2",
        "EP 2 x PP 2",
        "PP 2 x EP 2 x FSDP 2",
        "EP 2 x CP 2",
        "EP 4 over CP 2",
    )
    yield from _both("{mesh}, {how}", meshes, MOE)
    yield from _both("{mesh}, {how}", ("EP 4 x FSDP 2",), MOE | {"training.global_batch_size": 16})
    owners = (
        "owner 2 x EP 2",
        "owner 2 x EP 2, in buffers",
        "owner 4 x EP 4",
        "owner 2 x TP 2 x EP 2",
        "owner 4 x TP 2 x EP 2",
        "owner 2 x CP 2 x EP 2",
        "owner 2 x CP 2 x EP 4",
        "owner 2 x PP 2 x EP 2",
        "owner 4 x PP 2 interleaved x EP 2",
    )
    for optimizer, run in {"AdamW": MOE, "Muon": MOE | {"optimizer.name": "muon"}}.items():
        name = f"{{mesh}}, {optimizer}, {{how}}"
        yield from _both(name, ("owner 4 x EP 2",), run)
        for mesh in owners:
            yield _row(name, mesh, run)


def owner_table() -> Iterator[Row]:
    """The optimizer partitioned by owner: AdamW and Muon, alone on 1, 2 and 4 ranks and with other axes."""
    runs: dict[str, dict[str, object]] = {"AdamW": {}, "Muon": {"optimizer.name": "muon"}}
    variants = {
        "accumulation 1": {},
        "accumulation 2": {"fsdp.accumulate": "reduce_last"},
        "selective, accumulation 2": {"activation_checkpoint.mode": "selective"},
        "compiled, accumulation 1": {"compile.enable": "true"},
    }
    for (variant, options), (optimizer, run), ranks in itertools.product(variants.items(), runs.items(), (1, 2, 4)):
        micro_batch = 8 // (ranks * (2 if "accumulation 2" in variant else 1))
        overrides = {**OWNER, "mesh.dp_replicate": ranks, "training.micro_batch_size": micro_batch, **options}
        yield Row(f"owner {ranks}, {optimizer}, {variant}", ranks, words(overrides), words(run))
    for optimizer, run in runs.items():
        meshes = ("owner 2 x TP 2", "owner 2 x CP 2", "owner 2 x PP 2")
        yield from _both(f"{{mesh}}, {optimizer}, {{how}}", meshes, run)
        for axis, schedule in itertools.product(("dp_replicate", "cp"), ("interleaved", "zero-bubble")):
            mesh = f"owner over {axis} 2 x PP 2 {schedule}"
            also = {**OWNER, f"mesh.{axis}": 2, "activation_checkpoint.mode": "none"}
            yield _row(f"{{mesh}}, {optimizer}", mesh, run, micro_batch=2, also=also)


# The embedding and a block are always frozen, so that no gradient flows back to them; others for some steps.
FROZEN = {"embed_tokens.*": "freeze = true", "layers.0.*": "freeze = true", "layers.1.*": "freeze_until_step = 3"}
FROZEN |= {"layers.3.mlp.*_proj*": "freeze_until_step = 2", "*norm.weight": "freeze_until_step = 4"}
# A tied embedding, whose gradient also comes from the head, and the experts of a mixture with its routers.
FROZEN_ENDS = {"embed_tokens.*": "freeze_until_step = 3", "*.experts.*": "freeze_until_step = 2"}
FROZEN_ENDS |= {"*.router.*": "freeze = true"}


def freeze_rows() -> Iterator[Row]:
    """Parameters that are frozen, always or in the first steps, on each axis; accumulating two steps."""
    name = "frozen, {mesh}, AdamW, {how}"
    run: dict[str, object] = {"optimizer.groups": groups_of(FROZEN)}
    owners = ("owner 2", "owner 2 x TP 2")
    meshes = ("1 process", "FSDP 2", "HSDP 2x2, ZeRO 1", "FSDP 2 x TP 2", "CP 2", *owners)
    yield from _both(name, meshes, run)
    yield from _both("frozen, {mesh}, Muon, {how}", owners, run | OWNED_MUON)
    yield from _both(name, ("PP 4", "PP 2 interleaved"), run, micro_batch=2)
    yield _row(name, "PP 2 zero-bubble", run, micro_batch=2)
    tied = MOE | {"model.tie_embeddings": "true", "optimizer.groups": groups_of(FROZEN_ENDS)}
    yield from _both("frozen, tied, experts, {mesh}, {how}", ("FSDP 2", "EP 2 x TP 2"), tied)


def groups_of(settings: Mapping[str, str]) -> str:
    """`optimizer.groups`, by pattern."""
    return "[" + ", ".join(f'{{pattern = "{pattern}", {each}}}' for pattern, each in settings.items()) + "]"


OWNER: dict[str, object] = {"fsdp.partition": "owner", "mesh.dp_shard": 1}
OWNED_MUON: dict[str, object] = {"optimizer.name": "muon", "fsdp.partition": "owner"}
INTERLEAVED: dict[str, object] = {"mesh.pp": 2, "pipeline.schedule": "interleaved_1f1b"}
ZERO_BUBBLE: dict[str, object] = {"mesh.pp": 2, "pipeline.schedule": "zero_bubble_v"}
REFUSED: dict[str, tuple[int, dict[str, object], str]] = {
    "owner 2 x EP 4": (2, {**OWNER, "mesh.dp_replicate": 2, "mesh.ep": 4, **MOE}, "dp_replicate"),
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
