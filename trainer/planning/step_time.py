"""How long a step takes on a kind of GPU, before there is one: counted work, divided by the rates of `devices`.

A micro-batch is followed through the layers of one pipeline rank. Each layer's forward pass, recomputation and backward
pass take the time of their matrix products, of attention, and of the bytes that elementwise kernels move. Collectives
of tensor, context and expert parallelism stand between these, so that all of their time shows. FSDP's run beside the
layers: what takes longer than the layer that hides it shows, and products are slower by the multiprocessors that the
hidden part takes. A pipeline waits for its slowest rank, and while it fills and drains.

What is counted is exact: FLOPs (`flops`), parameters and optimizer state (`memory`, `states`), bytes of collectives (as
`traffic` traces them; a test compares). What is modelled: the bytes of elementwise kernels per token, which were
counted once on jobs of this repository (docs/performance.md, "What a step asks of a GPU"), all rates, and what
overlaps.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from configs.architectures.llama import expert_dim, has_gate, is_mixture, latent_of
from configs.architectures.parts import head_dim, n_kv_heads
from configs.errors import UserError
from configs.float8 import choose
from configs.layout import (
    MeshSizes,
    accumulation_steps,
    attention_features,
    mesh_sizes,
    reduces_once,
    reshard_after_forward,
    tokens_per_step,
)
from configs.schema import Config, is_described
from configs.stages import stages_per_rank
from parallelisms.activation_checkpoint import resolve_ops, selected_layers
from trainer.planning.devices import Device
from trainer.planning.flops import flops_per_token, tokens_seen
from trainer.planning.memory import RankMemory
from trainer.planning.skeleton import Shape
from trainer.planning.states import BYTES, checkpoint_bytes, optimizer_bytes

Seconds = dict[str, float]
"""Seconds by part."""

_RAMP = 4e-6
"""Seconds in which a product's first and last tiles leave multiprocessors idle, and the gap to the next kernel;
measured on an H100 as what small products take beyond their FLOPs."""
_ROUTE = 150e-6
"""Seconds that a device idles at an exchange of expert parallelism, whose sizes the host must read first."""
_LAUNCH = 6e-6
"""Seconds that a host needs to launch a kernel; measured with torch 2.11."""
_LAUNCHES = {True: 54, False: 80}
"""Kernels of a layer, forward and backward, compiled and not, with FSDP's."""
_LAUNCHES_OF_EXPERTS = 47
"""Further kernels of a layer with experts."""


@dataclass(frozen=True)
class _Moved:
    """Bytes that elementwise kernels move for a token in a layer, in bfloat16: per unit of a width."""

    stream: tuple[int, int]
    """Forward and backward, per feature of the residual stream."""
    heads: tuple[int, int]
    """Per feature of queries, and of keys."""
    inner: tuple[int, int]
    """Per inner feature of the feed-forward."""


_COMPILED = _Moved(stream=(18, 108), heads=(4, 0), inner=(6, 24))
_EAGER = _Moved(stream=(25, 51), heads=(44, 46), inner=(18, 18))
_LOGIT_BYTES = 7
"""Bytes moved for each logit."""
_ROW_BYTES = 28
"""Bytes moved per feature of a row that is sorted to its expert and back, forward and backward."""


@dataclass(frozen=True)
class Collective:
    """The collectives of one kind that a rank issues in a step."""

    op: str
    axis: str
    calls: int
    n_bytes: int
    """Sum of the whole tensors, as `traffic.Traffic` counts them."""
    seconds: float
    exposed: float
    """Seconds in which nothing else runs."""


@dataclass(frozen=True)
class StepTime:
    """The estimate of a step, on the pipeline rank that takes the longest."""

    parts: Mapping[str, float]
    """Seconds by part; their sum is the step."""
    collectives: Sequence[Collective]
    tokens: int
    """Tokens of a step, of all ranks."""
    ranks: int
    steps: int
    """Steps of the run."""
    flops: int
    """Model FLOPs of a step, of all ranks, with the causal half of attention, without recomputation."""
    peak: float
    """FLOP/s by which MFU is measured."""
    checkpoint: int
    """Bytes of a checkpoint."""
    left_out: Sequence[str]
    """What the job does that the estimate does not contain."""

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def tokens_per_second(self) -> float:
        """Of one GPU."""
        return self.tokens / self.seconds / self.ranks

    @property
    def mfu(self) -> float:
        return self.flops / self.seconds / self.ranks / self.peak

    @property
    def gpu_hours(self) -> float:
        return self.steps * self.seconds * self.ranks / 3600


def estimate_step(config: Config, ranks: int, device: Device, gpus_per_host: int = 8) -> StepTime:
    """Estimate a step of the job on so many GPUs of a kind.

    Raises:
        ConfigError: the ranks cannot form the mesh.
        UserError: the device lacks what the job asks for, or the job's techniques are not modelled for its model.
    """
    sizes = mesh_sizes(config, ranks)
    _require_modelled(config, device)
    by_rank = [_Rank(config, sizes, device, gpus_per_host, place) for place in range(sizes.pp)]
    slowest = max(by_rank, key=lambda rank: sum(rank.step().values()))
    tokens = tokens_per_step(config)
    return StepTime(
        parts=slowest.step(),
        collectives=slowest.collectives(),
        tokens=tokens,
        ranks=ranks,
        steps=config.lr_schedule.total_steps,
        flops=tokens * flops_per_token(config.model, config.training.seq_len, slowest.memory.frozen).causal,
        peak=device.peak["bfloat16"],
        checkpoint=checkpoint_bytes(config),
        left_out=_left_out(config),
    )


def _require_modelled(config: Config, device: Device) -> None:
    if config.float8.recipe != "none" and not device.products_float8:
        raise UserError(f'{device.title} has no float8 products; set float8.recipe = "none"')
    if config.training.compute_dtype != "bfloat16":
        raise UserError(
            f'time is estimated for training.compute_dtype = "bfloat16" only, not "{config.training.compute_dtype}"'
        )
    split = [f"mesh.{axis} = {size}" for axis in ("tp", "cp", "ep") if (size := getattr(config.mesh, axis)) > 1]
    if split and not is_described(config.model):
        raise UserError(f"time is not estimated for {config.model.architecture} with {', '.join(split)}")


def _left_out(config: Config) -> list[str]:
    """What the job does that takes time and is not in the estimate."""
    asked = {
        "saves and validation": bool(config.checkpoint.interval or config.validation.interval),
        "transfers of fsdp.cpu_offload": config.fsdp.cpu_offload,
        "Muon's products": config.optimizer.name == "muon",
        "scores that data.document_mask hides are counted as if they were computed": config.data.document_mask,
        "recomputation of mode budget is taken as a share of the forward pass": (
            config.activation_checkpoint.mode == "budget"
        ),
        "experts of unequal load": bool(config.model.n_experts),
        "the host's time for data": True,
    }
    return [words for words, applies in asked.items() if applies]


# --------------------------------------------------------------------------- collectives


def _sum(*all_seconds: Seconds) -> Seconds:
    """The seconds of several pieces of work, part by part."""
    total: Seconds = defaultdict(float)
    for seconds in all_seconds:
        for part, each in seconds.items():
            total[part] += each
    return total


@dataclass(frozen=True)
class _Network:
    """Which link a group of ranks uses: neighbors in the mesh's order share hosts."""

    device: Device
    gpus_per_host: int

    def seconds(self, op: str, n_bytes: float, ranks: int, stride: int) -> float:
        """Time of a collective over `ranks` ranks that are `stride` apart.

        A ring passes each host with as many network cards as the group has ranks on it. Of `n_bytes`, the whole, each
        rank sends all but its own part, twice in an all-reduce; in an all-to-all, what goes to other hosts
        leaves by the rank's own card.
        """
        if ranks == 1:
            return 0.0
        here = min(ranks, max(1, self.gpus_per_host // stride))
        hosts = math.ceil(ranks / here)
        inside = self.device.inside
        between = self.device.between
        hops = (here - 1) * inside.latency + (hosts - 1) * between.latency
        if op == "send":
            return n_bytes / (inside if stride < self.gpus_per_host else between).bandwidth + between.latency
        if op == "all_to_all":
            by_network = n_bytes * (ranks - here) / ranks / between.bandwidth
            return max(n_bytes * (here - 1) / ranks / inside.bandwidth, by_network) + inside.latency + between.latency
        bandwidth = inside.bandwidth if hosts == 1 else min(inside.bandwidth, here * between.bandwidth)
        if op == "all_reduce":
            return 2 * n_bytes * (ranks - 1) / ranks / bandwidth + 2 * min(hops, 20 * between.latency)
        return n_bytes * (ranks - 1) / ranks / bandwidth + hops


@dataclass(frozen=True)
class _Matrix:
    """A product of a layer on one rank: (rows, inputs) times (inputs, outputs)."""

    name: str
    rows: float
    inputs: float
    outputs: float
    is_float8: bool
    is_grouped: bool
    is_frozen: bool


@dataclass(frozen=True)
class _Rank:
    """The step of one rank of the pipeline, or of any rank without a pipeline."""

    config: Config
    sizes: MeshSizes
    device: Device
    gpus_per_host: int
    place: int

    @cached_property
    def memory(self) -> RankMemory:
        return RankMemory(self.config, self.sizes, "cuda", self.place)

    @property
    def network(self) -> _Network:
        return _Network(self.device, self.gpus_per_host)

    @cached_property
    def tokens(self) -> int:
        """Tokens of a micro-batch on this rank, of which tensor-parallel ranks share the work."""
        return self.config.training.micro_batch_size * self.config.training.seq_len // self.sizes.cp

    @cached_property
    def micro_batches(self) -> int:
        return accumulation_steps(self.config, self.sizes)

    # ------------------------------------------------------------------------- work of a layer

    @cached_property
    def _float8(self) -> set[str]:
        if self.config.float8.recipe == "none":
            return set()
        return set(choose(self.memory.model.shapes, self.memory.model.plan, self.config).converted)

    def matrices(self, layer: int) -> Iterator[_Matrix]:
        """The products of a layer's forward pass, in order."""
        model = self.memory.model
        for name in model.of_block(layer):
            shape = model.shapes[name]
            if len(shape) > 1:
                yield self._matrix(name, shape)

    def _matrix(self, name: str, shape: Shape) -> _Matrix:
        rows: float = self.tokens
        outputs: float = shape[-2]
        inputs: float = shape[-1]
        if len(shape) > 2:
            rows *= self.config.model.experts_per_token or 1
        cut = self.memory.model.tp_dimension(name)
        if cut is None:
            rows /= self.sizes.tp
        elif cut == -1:
            inputs /= self.sizes.tp
        else:
            outputs /= self.sizes.tp
        is_float8 = name.removesuffix(".weight") in self._float8
        return _Matrix(name, rows, inputs, outputs, is_float8, len(shape) > 2, name in self.memory.frozen)

    def _product(self, matrix: _Matrix, in_float8: bool) -> float:
        """Seconds of one product; the gradients' have the same size."""
        device = self.device
        rate = device.products_float8 if in_float8 else device.grouped if matrix.is_grouped else device.products
        moved = 2 * (matrix.rows * (matrix.inputs + matrix.outputs) + matrix.inputs * matrix.outputs)
        return max(2 * matrix.rows * matrix.inputs * matrix.outputs / rate, moved / device.memory) + _RAMP

    def _forward_products(self, layer: int, names: Sequence[str] | None = None) -> float:
        return sum(
            self._product(each, each.is_float8) for each in self.matrices(layer) if names is None or each.name in names
        )

    def _backward_products(self, layer: int) -> float:
        weights_in_float8 = self.config.float8.recipe != "rowwise_with_gw_hp"
        return sum(
            self._product(each, each.is_float8)
            + (0 if each.is_frozen else self._product(each, each.is_float8 and weights_in_float8))
            for each in self.matrices(layer)
        )

    def _casts(self, layer: int) -> tuple[float, float]:
        """Seconds in which operands become float8: a pass for the scale and one for the cast, forward and backward."""
        chosen = [each for each in self.matrices(layer) if each.is_float8]
        of_weights = 0 if self.config.float8.fsdp_all_gather else 5
        forward = sum(5 * each.rows * each.inputs + of_weights * each.inputs * each.outputs for each in chosen)
        backward = sum(each.rows * (5 * each.outputs + 3 * each.inputs) for each in chosen)
        return forward / self.device.memory, backward / self.device.memory

    def attention(self, layer: int) -> tuple[float, float]:
        """Seconds of a layer's attention, forward and backward (2.5 times the operations)."""
        model = self.config.model
        if not model.n_heads:
            return 0.0, 0.0
        seen = tokens_seen(model, layer, self.config.training.seq_len)
        operations = attention_features(model) * seen * self.tokens / self.sizes.tp
        kernel = "flash2" if self.config.attention.backend in ("flash2", "flex") else "cudnn"
        forward, backward = self.device.attention_rates(kernel, head_dim(model), seen)
        return operations / forward + 2 * _RAMP, 2.5 * operations / backward + 2 * _RAMP

    def elementwise(self, layer: int) -> tuple[float, float]:
        """Seconds of a layer's other kernels, forward and backward."""
        model = self.config.model
        moved = _COMPILED if self.config.compile.enable else _EAGER
        heads = (model.n_heads + n_kv_heads(model)) * head_dim(model)
        rows, inner = self._inner(layer)
        tokens = self.tokens / self.sizes.tp
        both = [
            tokens * (stream * model.dim + of_heads * heads + of_inner * inner)
            for stream, of_heads, of_inner in zip(moved.stream, moved.heads, moved.inner, strict=True)
        ]
        routed = tokens * rows * _ROW_BYTES / 2 * model.dim
        forward, backward = ((each + routed) / self.device.memory for each in both)
        return forward, backward

    def _inner(self, layer: int) -> tuple[int, int]:
        """Experts that a token is sent to, and the inner features of all feed-forwards that compute it."""
        model = self.config.model
        if not is_described(model):
            shapes = [self.memory.model.shapes[name] for name in self.memory.model.of_block(layer)]
            return 0, max(max(shape[-2:]) for shape in shapes if len(shape) > 1)
        if not is_mixture(model, layer):
            return 0, model.ffn_dim if has_gate(model) else model.ffn_dim * 2 // 3
        return model.experts_per_token, (model.experts_per_token + model.n_shared_experts) * expert_dim(model)

    # ------------------------------------------------------------------------- collectives of a layer

    def _tensor_parallel(self, layer: int) -> list[tuple[str, float]]:
        """The collectives of a layer's forward pass over `tp`: op and bytes, in order."""
        if self.sizes.tp == 1:
            return []
        plan = self.memory.model.plan
        block = f"{plan.blocks[layer - plan.first_block]}."
        model = self.config.model
        latent = latent_of(model) if is_described(model) else None
        unit = self.tokens * self.memory.compute_bytes
        found: list[tuple[str, float]] = []
        for name, role in plan.tensor_parallel.items():
            if not name.startswith(block):
                continue
            shape = self.memory.model.shapes.get(f"{name}.weight", (model.dim, model.dim))
            if role in ("gather", "parts", "gather_column"):
                found.append(("all_gather", unit * (shape[-1] if role == "gather_column" else model.dim)))
            if role == "gather_parts" and latent:
                found.append(("all_gather", unit * latent.rope_head_dim))
            if role in ("row", "parts"):
                found.append(("reduce_scatter", unit * model.dim))
        return found

    def _expert_parallel(self, layer: int) -> list[tuple[str, float]]:
        """The exchanges of a layer's forward pass over `ep`."""
        model = self.config.model
        if self.sizes.ep == 1 or not is_described(model) or not is_mixture(model, layer):
            return []
        return [("all_to_all", self.tokens * model.experts_per_token * model.dim * self.memory.compute_bytes)] * 2

    def _context_parallel(self) -> list[tuple[str, float]]:
        """What a layer's attention exchanges over `cp` in its forward pass."""
        cp = self.sizes.cp
        model = self.config.model
        if cp == 1:
            return []
        width = head_dim(model) * self.memory.compute_bytes / self.sizes.tp
        if self.config.context.method == "all_to_all":
            return [("all_to_all", 2 * self.tokens * (model.n_heads + n_kv_heads(model)) * width)]
        return [("all_gather", 2 * self.tokens * cp * n_kv_heads(model) * width)]  # a ring passes on as much

    def _between(self, layer: int, kind: str) -> list[tuple[str, str, float]]:
        """The collectives that a layer waits for in a pass ("forward", "backward", "repeated"): axis, op, bytes."""
        by_axis = {
            "tp": self._tensor_parallel(layer),
            "ep": self._expert_parallel(layer),
            "cp": self._context_parallel(),
        }
        found = [(axis, op, n_bytes) for axis, each in by_axis.items() for op, n_bytes in each]
        if kind == "forward":
            return found
        if kind == "backward":
            other = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}
            return [(axis, other.get(op, op), n_bytes) for axis, op, n_bytes in found]
        if not self._repeats(layer):
            return []
        kept = self._kept
        again = [each for each in found if each[1] != "reduce_scatter" or "reduce_scatter" not in kept]
        last = [each for each in again if each[1] == "reduce_scatter"][-1:]  # a recomputation ends before it
        if last:
            again.remove(last[0])
        return [each for each in again if each[0] != "cp" or "attention" not in kept]

    def _exposed(self, layer: int, kind: str, beside: Seconds) -> Seconds:
        """Seconds of the collectives in a pass of a layer that nothing hides."""
        found: Seconds = defaultdict(float)
        for axis, op, n_bytes in self._between(layer, kind):
            ranks, stride = self._axis(axis)
            found[axis] += self.network.seconds(op, n_bytes, ranks, stride)
            if axis == "tp":
                found["elementwise"] += 2 * n_bytes / self.device.memory  # it is cut and joined along the sequence
            if axis == "ep" and kind != "backward":
                found[axis] += _ROUTE / 2
        if self.config.comm.async_tp and found["tp"]:
            found["tp"] = max(found["tp"] / self.sizes.tp, found["tp"] - beside["products"])
        if self.config.context.method == "ring" and found["cp"]:
            found["cp"] = max(0.0, found["cp"] - beside["attention"])
        return found

    def _axis(self, axis: str) -> tuple[int, int]:
        """Ranks along an axis, and how far apart they are: tp is innermost, then cp, dp_shard, dp_replicate, pp."""
        sizes = self.sizes
        return {
            "tp": (sizes.tp, 1),
            "cp": (sizes.cp, sizes.tp),
            "ep": (sizes.ep, sizes.tp),
            "shard": (sizes.fsdp_shard, sizes.tp),
            "expert_shard": (sizes.expert_shard, sizes.tp * sizes.ep),
            "replicas": (sizes.replicas, sizes.tp * sizes.fsdp_shard),
            "pp": (sizes.pp, sizes.stage_ranks),
        }[axis]

    # ------------------------------------------------------------------------- recomputation

    @cached_property
    def _kept(self) -> set[str]:
        """What selective checkpointing keeps, by name: "products", "grouped", "attention", "reduce_scatter"."""
        table = self.config.activation_checkpoint
        if table.mode != "selective":
            return set()
        ops = resolve_ops(tuple(table.save_ops or self.memory.model.plan.save_ops))
        named = {
            "products": "aten::mm",
            "grouped": "keel::grouped_mm",
            "attention": "aten::_scaled_dot_product_flash_attention",
            "reduce_scatter": "_c10d_functional::reduce_scatter_tensor",
        }
        return {word for word, op in named.items() if op in ops}

    def _repeats(self, layer: int) -> bool:
        table = self.config.activation_checkpoint
        if table.mode in ("none", "budget"):
            return False
        return layer in selected_layers(table, self.config.model.n_layers)

    def _repeated(self, layer: int) -> Seconds:
        """What the backward pass of a layer computes again."""
        table = self.config.activation_checkpoint
        if table.mode == "budget":
            share = 1 - table.memory_budget
            return {part: share * each for part, each in self._forward(layer).items()}
        if not self._repeats(layer):
            return {}
        matrices = list(self.matrices(layer))
        nth = table.save_every_nth_matmul
        plain = [each.name for each in matrices if not each.is_grouped]
        kept = plain[nth - 1 :: nth] if "products" in self._kept else []
        kept += [each.name for each in matrices if each.is_grouped and "grouped" in self._kept]
        again = [each.name for each in matrices[:-1] if each.name not in kept]  # the last is never repeated
        repeated = {"products": self._forward_products(layer, again)}
        repeated["attention"] = 0.0 if "attention" in self._kept else self.attention(layer)[0]
        repeated["elementwise"] = self.elementwise(layer)[0]
        return _sum(repeated, self._exposed(layer, "repeated", repeated))

    # ------------------------------------------------------------------------- a micro-batch

    def _forward(self, layer: int) -> Seconds:
        found = {"products": self._forward_products(layer), "attention": self.attention(layer)[0]}
        found["elementwise"] = self.elementwise(layer)[0] + self._casts(layer)[0]
        return _sum(found, self._exposed(layer, "forward", found))

    def _backward(self, layer: int) -> Seconds:
        found = {"products": self._backward_products(layer), "attention": self.attention(layer)[1]}
        found["elementwise"] = self.elementwise(layer)[1] + self._casts(layer)[1]
        return _sum(found, self._exposed(layer, "backward", found))

    def _head(self) -> Seconds:
        """The head, and a loss that computes the logits' gradients along with them."""
        model = self.config.model
        logits = self.tokens * model.vocab_size / self.sizes.tp
        products = 3 * 2 * logits * model.dim / self.device.products
        stream = self.tokens * model.dim * self.memory.compute_bytes
        return {
            "head and loss": products + _LOGIT_BYTES * logits / self.device.memory,
            "tp": 2 * self.network.seconds("all_gather", stream, *self._axis("tp")),
        }

    @cached_property
    def passes(self) -> list[tuple[Seconds, Seconds]]:
        """Forward and backward of each of FSDP's groups, in forward order; the backward pass with its recomputation."""
        known: dict[tuple, tuple[Seconds, Seconds]] = {}
        found: list[tuple[Seconds, Seconds]] = []
        for group in self.memory.groups:
            layer = group.layer
            if layer is None:
                found.append(({}, {}))
                continue
            kind = (
                self.memory.model.kind_of_block(layer, self.memory.frozen),
                tokens_seen(self.config.model, layer, self.config.training.seq_len),
                self._repeats(layer),
            )
            if kind not in known:
                again = sum(self._repeated(layer).values())
                known[kind] = self._forward(layer), _sum(self._backward(layer), {"recomputation": again})
            found.append(known[kind])
        if self.memory.has_head:
            found[-1] = _sum(found[-1][0], self._head()), found[-1][1]
        return found

    # ------------------------------------------------------------------------- FSDP, beside the layers

    @cached_property
    def _traffic(self) -> list[dict[str, tuple[str, float, float]]]:
        """Of each group: what is gathered and what is reduced, as lists of (axis, bytes), per pass.

        "gather": axis, bytes and seconds; "gather_experts", "reduce", "reduce_experts", "sum" (over replicas) likewise.
        """
        memory = self.memory
        shapes = memory.shapes
        found = []
        for group in memory.groups:
            names = [name for name in shapes if memory.model.fsdp_group_of(name) == group.name]
            apart = [name for name in names if memory.model.is_of_experts(name) and self.sizes.ep > 1]
            experts = sum(math.prod(shapes[name]) for name in apart)
            all_elements = sum(math.prod(shapes[name]) for name in names)
            gathered = group.gathered_bytes - experts * memory.compute_bytes
            trained = group.trained * (1 - experts / max(all_elements, 1))
            sums = group.trained_shard * memory.reduce_bytes
            each = {
                "gather": self._of("all_gather", "shard", gathered),
                "gather_experts": self._of("all_gather", "expert_shard", experts * memory.compute_bytes),
                "reduce": self._of("reduce_scatter", "shard", trained * memory.reduce_bytes),
                "reduce_experts": self._of(
                    "reduce_scatter", "expert_shard", (group.trained - trained) * memory.reduce_bytes
                ),
                "sum": self._of("all_reduce", "replicas", sums),
            }
            found.append(each)
        return found

    def _of(self, op: str, axis: str, n_bytes: float) -> tuple[str, float, float]:
        ranks, stride = self._axis(axis)
        if ranks == 1 or n_bytes == 0:
            return axis, 0.0, 0.0
        return axis, n_bytes, self.network.seconds(op, n_bytes, ranks, stride)

    def _seconds_of(self, group: int, what: str) -> float:
        """Seconds of a group's "gather" or "reduce", its experts' and its replicas' included."""
        parts = {"gather": ("gather", "gather_experts"), "reduce": ("reduce", "reduce_experts", "sum")}[what]
        return sum(self._traffic[group][part][2] for part in parts)

    def _gathers_again(self, group: int) -> bool:
        """Whether the backward pass gathers a group that the forward pass has freed."""
        memory = self.memory
        reshard = reshard_after_forward(self.config.fsdp)
        if memory.groups[group].name == "root" or reshard == "never":
            return False
        return reshard == "always" or (self.sizes.pp == 1 and group < len(memory.groups) - 1)

    def _fsdp(self, gathers: bool, reduces: bool) -> tuple[float, float]:
        """Exposed and hidden seconds of FSDP's collectives in one micro-batch."""
        n = len(self.passes)
        gather = [self._seconds_of(g, "gather") * gathers for g in range(n)]
        again = [self._seconds_of(g, "gather") * self._gathers_again(g) for g in range(n)]
        reduce = [self._seconds_of(g, "reduce") * reduces for g in range(n)]
        exposed = gather[0] + reduce[0]
        for g, (forward, backward) in enumerate(self.passes):
            beside_forward = gather[g + 1] if g + 1 < n else 0.0
            beside_backward = (again[g - 1] if g else 0.0) + (reduce[g + 1] if g + 1 < n else 0.0)
            exposed += max(0.0, beside_forward - sum(forward.values()))
            exposed += max(0.0, beside_backward - sum(backward.values()))
        return exposed, sum(gather) + sum(again) + sum(reduce) - exposed

    def _copies(self, gathers: bool, reduces: bool) -> float:
        """Seconds in which FSDP copies gathered parameters and gradients into and out of its buffers."""
        memory = self.memory
        if not memory.uses_fsdp:
            return 0.0
        n_bytes = 0.0
        for place, group in enumerate(memory.groups):
            times = gathers + self._gathers_again(place)
            n_bytes += 2 * group.gathered_bytes * times
            n_bytes += reduces * group.trained * (memory.compute_bytes + memory.reduce_bytes)
        return n_bytes / self.device.memory

    def _schedule(self) -> list[tuple[bool, bool]]:
        """Of each micro-batch: whether its forward pass gathers parameters, and whether its backward pass reduces."""
        once = reduces_once(self.config)
        held = self.config.fsdp.zero_stage == 1 or self.sizes.pp > 1
        last = self.micro_batches - 1
        return [(not held or each == 0, not once or each == last) for each in range(self.micro_batches)]

    # ------------------------------------------------------------------------- the step

    def step(self) -> dict[str, float]:
        """Seconds by part; their sum is the step."""
        return dict(self._step)

    @cached_property
    def _step(self) -> dict[str, float]:
        total: Seconds = defaultdict(float)
        for forward, backward in self.passes:
            for part, seconds in _sum(forward, backward).items():
                total[part] += self.micro_batches * seconds
        for schedule, times in Counter(self._schedule()).items():
            exposed, hidden = self._fsdp(*schedule)
            total["fsdp"] += times * exposed
            total["slower products beside fsdp"] += times * hidden * self.device.collective_share
            total["elementwise"] += times * self._copies(*schedule)
        total["pipeline bubble"] = self._bubble(sum(total.values()))
        total["optimizer"] = self._optimizer()
        device = sum(total.values())
        launches = len(self.memory.layers) * _LAUNCHES[self.config.compile.enable]
        launches += sum(self._inner(layer)[0] > 0 for layer in self.memory.layers) * _LAUNCHES_OF_EXPERTS
        host = self.micro_batches * launches * _LAUNCH
        total["waiting for the host"] = max(0.0, host - device)
        return {part: seconds for part, seconds in total.items() if seconds > 0}

    def _bubble(self, busy: float) -> float:
        """Seconds in which a rank waits while the pipeline fills and drains (Narayanan et al. 2021, section 2.2).

        A zero-bubble schedule fills them with the weights' gradients (Qi et al. 2024), if passes take equally long.
        """
        if self.sizes.pp == 1 or self.config.pipeline.schedule == "zero_bubble_v":
            return 0.0
        sends = 2 * (self.sizes.pp - 1) * self.network.seconds("send", self._sent, *self._axis("pp"))
        return (self.sizes.pp - 1) / stages_per_rank(self.config) * busy / self.micro_batches + sends

    @property
    def _sent(self) -> float:
        """Bytes that a micro-batch sends to the next stage."""
        return self.tokens * self.config.model.dim * self.memory.compute_bytes / self.sizes.tp

    def _optimizer(self) -> float:
        """Seconds of the update: states and parameters are read and written, gradients read, measured and scaled."""
        memory = self.memory
        shards = {name: memory._sharded(name) for name in memory.shapes}
        parameters = sum(shards.values()) * memory.state_bytes
        states = max(optimizer_bytes(self.config, self.sizes, shards))
        moved = 2 * (parameters + states) + 4 * parameters
        sent = 0.0
        if self.sizes.by_owner:
            dtype = self.config.fsdp.owner_broadcast_dtype or self.config.training.dtype
            whole = sum(shards.values()) * BYTES[dtype]
            sent = self.network.seconds("all_gather", whole, self.sizes.replicas, self.sizes.tp)
        return moved / self.device.memory + sent

    def collectives(self) -> list[Collective]:
        """The collectives of a step by kind, largest first; the few of scalars are left out."""
        calls: Counter[tuple[str, str]] = Counter()
        n_bytes: Counter[tuple[str, str]] = Counter()
        seconds: dict[tuple[str, str], float] = defaultdict(float)

        def add(op: str, axis: str, size: float, times: int = 1) -> None:
            if size and self._axis(axis)[0] > 1:
                calls[op, axis] += times
                n_bytes[op, axis] += round(size) * times
                seconds[op, axis] += times * self.network.seconds(op, size, *self._axis(axis))

        for (gathers, reduces), times in Counter(self._schedule()).items():
            for place, each in enumerate(self._traffic):
                gathered = gathers + self._gathers_again(place)
                for part, (axis, size, _) in each.items():
                    if part.startswith("gather"):
                        add("all_gather", axis, size, times * gathered)
                    elif reduces:
                        add("all_reduce" if part == "sum" else "reduce_scatter", axis, size, times)
        for layer in self.memory.layers:
            for kind in ("forward", "backward", "repeated"):
                for axis, op, size in self._between(layer, kind):
                    add(op, axis, size, self.micro_batches)
        stream = self.tokens * self.config.model.dim * self.memory.compute_bytes
        ends = (0 in self.memory.stages) + self.memory.has_head
        add("all_gather", "tp", stream, ends * self.micro_batches)
        add("reduce_scatter", "tp", stream, ends * self.micro_batches)
        last = self.sizes.pp * stages_per_rank(self.config) - 1
        for op in ("send", "receive"):
            boundaries = sum((stage < last) + (stage > 0) for stage in self.memory.stages)
            add(op, "pp", self._sent, self.micro_batches * boundaries)
        exposed = self._exposed_by_axis()
        of_axis: dict[str, float] = defaultdict(float)
        for (_, axis), each_seconds in seconds.items():
            of_axis[axis] += each_seconds
        return [
            Collective(
                op,
                axis,
                calls[op, axis],
                size,
                seconds[op, axis],
                min(1.0, exposed.get(axis, 0.0) / of_axis[axis]) * seconds[op, axis] if of_axis[axis] else 0.0,
            )
            for (op, axis), size in n_bytes.most_common()
        ]

    def _exposed_by_axis(self) -> dict[str, float]:
        """Exposed seconds of a step, by axis."""
        parts = self._step
        by_axis = {axis: parts.get(axis, 0.0) for axis in ("tp", "cp", "ep")}
        return by_axis | dict.fromkeys(("shard", "expert_shard", "replicas"), parts.get("fsdp", 0.0))
