"""How long a step takes on a kind of GPU, before there is one: counted work, divided by the rates of `devices`.

A micro-batch is followed through the layers of one pipeline rank. Each layer's forward pass, recomputation and backward
pass take the time of their matrix products, of attention, and of the bytes that elementwise kernels move. Collectives
of tensor, context and expert parallelism stand between these, so that all of their time shows. FSDP's run beside the
layers: what takes longer than the layer that hides it shows, and products are slower by the multiprocessors that the
hidden part takes. A pipeline waits for its slowest rank, and while it fills and drains.

What is counted is exact: FLOPs (`flops`), parameters and optimizer state (`memory`, `states`), bytes of collectives (as
`traffic` traces them; a test compares). What is modelled: the bytes of elementwise kernels per token, which were
counted once on jobs of this repository (docs/measurements.md, "Estimates for one H200"), all rates, and what
overlaps.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from configs.architectures.llama_keys import is_delta, n_further
from configs.delta import passes_states
from configs.errors import UserError
from configs.layout import MeshSizes, mesh_sizes, reduces_once, reshard_after_forward, tokens_per_step, zero_stage
from configs.own_code import is_import_path
from configs.schema import Config, is_described
from configs.stages import n_stages, stages_per_rank
from configs.table import with_keys
from models.delta import CHUNK
from trainer.planning.data_time import DataTime, data_time
from trainer.planning.devices import Device
from trainer.planning.flops import flops_per_token, tokens_seen
from trainer.planning.layer_time import LayerTime, Seconds, added
from trainer.planning.memory import Group, distinct_ranks
from trainer.planning.pipeline_order import zero_bubble_wait
from trainer.planning.save_time import SaveTime, save_time
from trainer.planning.states import checkpoint_bytes, sent_by_owners

_LAUNCHES = {True: 54, False: 80}
"""Kernels of a layer, forward and backward, compiled and not, with FSDP's."""
_LAUNCHES_OF_EXPERTS = 47
"""Further kernels of a layer with experts."""
_SHARE_DIGITS = 2
"""Digits of the shares of passes by which a schedule's wait is known."""
_LAUNCHES_OF_DELTA = 171, 5
"""Those of a layer of kind delta by torch's operations, eager: in all, and for each chunk of a sequence."""


@dataclass(frozen=True)
class Collective:
    """The collectives of one kind that a rank issues in a step."""

    op: str
    axis: str
    calls: int
    n_bytes: int
    """Sum of the whole tensors, as `traffic.Traffic` counts them."""
    seconds: float
    inside: float
    """Seconds on the links inside of a host, at the same time as on those between hosts."""
    between: float
    exposed: float
    """Seconds in which nothing else runs."""


@dataclass(frozen=True)
class RankTime:
    """A step of one rank of the pipeline."""

    parts: Mapping[str, float]
    """Seconds by part; their sum is the rank's step."""
    collectives: Sequence[Collective]

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class StepTime:
    """The estimate of a step, which lasts as long as on the pipeline rank that takes the longest."""

    by_kind: Mapping[int, RankTime]
    """One pipeline rank of each kind, and its step."""
    tokens: int
    """Tokens of a step, of all ranks."""
    ranks: int
    flops: int
    """Model FLOPs of a step, of all ranks, with the causal half of attention, without recomputation."""
    peak: float
    """FLOP/s by which MFU is measured."""
    checkpoint: int
    """Bytes of a checkpoint."""
    data: DataTime
    """Its wait is not among the parts."""
    save: SaveTime
    left_out: Sequence[str]
    """What the job does that the estimate does not contain."""

    @cached_property
    def slowest(self) -> RankTime:
        """The rank that takes the longest."""
        return max(self.by_kind.values(), key=lambda rank: rank.seconds)

    @property
    def parts(self) -> Mapping[str, float]:
        """Seconds of the slowest rank by part; their sum is the step."""
        return self.slowest.parts

    @property
    def seconds(self) -> float:
        return self.slowest.seconds

    @property
    def seconds_with_waits(self) -> float:
        """The mean of the run's steps, which wait for data, and between which it saves."""
        return self.seconds + self.data.waiting + self.save.of_a_step

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of one GPU."""
        return self.tokens / self.seconds / self.ranks

    @property
    def mfu(self) -> float:
        return self.flops / self.seconds / self.ranks / self.peak


def estimate_step(config: Config, ranks: int, device: Device, gpus_per_host: int = 8) -> StepTime:
    """Estimate a step of the job on so many GPUs of a kind.

    Raises:
        ConfigError: the ranks cannot form the mesh.
        UserError: the device lacks what the job asks for, or the job's techniques are not modelled for its model.
    """
    require_modelled(config, device)
    kinds = _by_kind(config, ranks, device, gpus_per_host)
    slowest = _slowest(kinds)
    tokens = tokens_per_step(config)
    seconds = sum(slowest.step().values())
    saved = max(rank.memory.saved for rank in kinds)
    return StepTime(
        by_kind={rank.place: RankTime(rank.step(), rank.collectives()) for rank in kinds},
        tokens=tokens,
        ranks=ranks,
        flops=tokens * flops_per_token(config.model, config.training.seq_len, slowest.memory.frozen).causal,
        peak=device.peak[device.compute_dtype],
        checkpoint=checkpoint_bytes(config),
        data=data_time(config, slowest.sizes, gpus_per_host, seconds),
        save=save_time(config, saved, min(ranks, gpus_per_host), device, seconds),
        left_out=_left_out(config, slowest.has_delta_kernels),
    )


def slowest_rank(
    config: Config, ranks: int, device: Device, gpus_per_host: int, known: "Passes | None" = None
) -> "Rank":
    """The pipeline rank that takes the longest, without what only a report needs; `known` is as `Rank` has it."""
    return _slowest(_by_kind(config, ranks, device, gpus_per_host, known))


def _slowest(kinds: Sequence["Rank"]) -> "Rank":
    return max(kinds, key=lambda rank: sum(rank.step().values()))


def _by_kind(
    config: Config, ranks: int, device: Device, gpus_per_host: int, known: "Passes | None" = None
) -> list["Rank"]:
    sizes = mesh_sizes(config, ranks)
    shared = {} if known is None else known
    return [Rank(config, sizes, device, gpus_per_host, place, shared) for place in distinct_ranks(config)]


def rank_of(config: Config, ranks: int, device: Device, gpus_per_host: int, place: int = 0) -> "Rank":
    """One rank of the pipeline."""
    return Rank(config, mesh_sizes(config, ranks), device, gpus_per_host, place)


def seconds_of_layers(config: Config, sizes: MeshSizes, device: Device, gpus_per_host: int) -> float:
    """Seconds of a micro-batch's forward and backward pass through all layers and the head; `sizes` has no pipeline."""
    rank = Rank(with_keys(config, mesh={"pp": 1}), sizes, device, gpus_per_host, 0)
    passes = [seconds for layer in rank.memory.layers for seconds in rank.pass_of(layer)]
    return sum(sum(seconds.values()) for seconds in (*passes, rank.head()))


def require_modelled(config: Config, device: Device) -> None:
    """Refuse what has no rates.

    Raises:
        UserError: the device lacks what the job asks for, or the job's techniques are not modelled for its model.
    """
    if config.float8.recipe != "none" and not device.products_float8:
        raise UserError(f'{device.title} has no float8 products; set float8.recipe = "none"')
    if config.training.compute_dtype != device.compute_dtype:
        raise UserError(
            f'time on {device.title} is estimated for training.compute_dtype = "{device.compute_dtype}" only, not '
            f'"{config.training.compute_dtype}"; add --training.compute_dtype {device.compute_dtype} for what that '
            "would take"
        )
    split = [f"mesh.{axis} = {size}" for axis in ("tp", "cp", "ep") if (size := getattr(config.mesh, axis)) > 1]
    if split and not is_described(config.model):
        raise UserError(f"time is not estimated for {config.model.architecture} with {', '.join(split)}")


def _left_out(config: Config, has_delta_kernels: bool) -> list[str]:
    """What the job does that takes time and is not in the estimate."""
    has_delta = is_described(config.model) and "delta" in config.model.layers
    saves = config.checkpoint.interval > 0
    asked = {
        "validation": config.validation.interval > 0,
        "copies of states in the host's memory for a save": saves and config.fsdp.cpu_offload,
        "transfers of fsdp.cpu_offload": config.fsdp.cpu_offload,
        "Muon's products": config.optimizer.name == "muon",
        "scores that data.document_mask hides are counted as if they were computed": config.data.document_mask,
        "recomputation of mode budget is taken as a share of the forward pass": (
            config.activation_checkpoint.mode == "budget"
        ),
        "experts of unequal load": bool(config.model.n_experts),
        'kernels that attention.delta_backend = "auto" may find': (
            has_delta and config.attention.delta_backend == "auto" and not has_delta_kernels
        ),
        "a teacher's forward passes": config.distillation.teacher is not None,
        "what joins states and embeddings in model.multi_token": (n_further(config.model) > 0),
        "reading sources of a kind of one's own": any(is_import_path(each.kind) for each in config.data.sources),
    }
    return [words for words, applies in asked.items() if applies]


# --------------------------------------------------------------------------- a rank


@dataclass(frozen=True)
class BesidePass:
    """What FSDP does beside a pass of a micro-batch, in seconds."""

    gathers: float
    reduces: float
    exposed: float
    """The part of both that lasts longer than what it runs beside."""
    copies: float
    """Copies into and out of buffers, which the pass waits for."""

    @property
    def hidden(self) -> float:
        return self.gathers + self.reduces - self.exposed


def weights_seconds(backward: Seconds) -> float:
    """The part of a backward pass that a zero-bubble schedule splits off: half of its products are for weights."""
    return backward.get("products", 0.0) / 2


Passes = dict[tuple, tuple[Seconds, Seconds]]
"""Seconds of the forward and the backward pass of a layer, by its kind."""


@dataclass(frozen=True)
class Rank(LayerTime):
    """The step of one rank of the pipeline, or of any rank without a pipeline: its layers, and what is around them."""

    known: Passes = field(default_factory=dict)
    """Passes that were computed; jobs may share them whose layers take equally long."""

    @cached_property
    def passes(self) -> list[tuple[Seconds, Seconds]]:
        """Forward and backward of each of FSDP's groups, in forward order; the backward pass with its recomputation."""
        found = [self._pass_of_group(group) for group in self.memory.groups]
        if self.memory.has_head:
            found[-1] = added(found[-1][0], self.head()), found[-1][1]
        return found

    def _pass_of_group(self, group: Group) -> tuple[Seconds, Seconds]:
        if group.name in self.memory.model.plan.further_blocks:  # like the last layer, and the head again
            forward, backward = self.pass_of(self.config.model.n_layers - 1)
            waits = sum(self.network.seconds(op, size, *self.axis(axis)) for axis, op, size in self._joined(group))
            return added(forward, self.head()), added(backward, {"tp": waits} if waits else {})
        return ({}, {}) if group.layer is None else self.pass_of(group.layer)

    def _joined(self, group: Group) -> list[tuple[str, str, float]]:
        """What a module that predicts a further token waits for in its backward pass, beside its block's."""
        block = f"{group.name}.block."
        return self.sums_of_whole([name for name in group.names if not name.startswith(block)])

    def pass_of(self, layer: int) -> tuple[Seconds, Seconds]:
        """Forward and backward of a layer, computed once for each kind; no backward of one that no gradient reaches."""
        is_idle = layer in self.memory.idle_layers
        if (found := self.known.get((layer, is_idle))) is not None:
            return found
        kind = (
            self.memory.model.kind_of_block(layer, self.memory.frozen),
            tokens_seen(self.config.model, layer, self.config.training.seq_len),
            self.repeats(layer),
            is_idle,
        )
        if kind not in self.known:
            again = sum(self.repeated(layer).values())
            backward = {} if is_idle else added(self.backward(layer), {"recomputation": again})
            self.known[kind] = self.forward(layer), backward
        self.known[layer, is_idle] = self.known[kind]
        return self.known[kind]

    @cached_property
    def _seconds_of_passes(self) -> list[tuple[float, float]]:
        seconds = {id(each): (sum(each[0].values()), sum(each[1].values())) for each in self.passes}
        return [seconds[id(each)] for each in self.passes]

    # ------------------------------------------------------------------------- FSDP, beside the layers

    @cached_property
    def _traffic(self) -> list[dict[str, tuple[str, float, float]]]:
        """What FSDP gathers and reduces for each group: the axis, the bytes of the whole, and seconds.

        The parts are "gather", "reduce" and "sum" (over replicas), of experts apart from the rest under expert
        parallelism.
        """
        known: dict[tuple, dict[str, tuple[str, float, float]]] = {}
        found = []
        for group in self.memory.groups:
            of_experts = group.apart, group.apart_shard
            kind = group.gathered_bytes, group.elements, group.trained, group.trained_shard, of_experts
            if kind not in known:
                known[kind] = self._traffic_of(group)
            found.append(known[kind])
        return found

    def _traffic_of(self, group: Group) -> dict[str, tuple[str, float, float]]:
        memory = self.memory
        gathered = group.gathered_bytes - group.apart * memory.compute_bytes
        trained = group.trained * (1 - group.apart / max(group.elements, 1))
        of_experts = group.trained - trained
        summed = group.trained_shard - group.apart_shard
        same_experts = "expert_replicas" if self.sizes.by_owner else "replicas"
        return {
            "gather": self._of("all_gather", "shard", gathered),
            "gather_experts": self._of("all_gather", "expert_shard", group.apart * memory.compute_bytes),
            "reduce": self._of("reduce_scatter", "shard", trained * memory.reduce_bytes),
            "reduce_experts": self._of("reduce_scatter", "expert_shard", of_experts * memory.reduce_bytes),
            "sum": self._of("all_reduce", "replicas", summed * memory.reduce_bytes),
            "sum_experts": self._of("all_reduce", same_experts, group.apart_shard * memory.reduce_bytes),
        }

    def _of(self, op: str, axis: str, n_bytes: float) -> tuple[str, float, float]:
        ranks, stride = self.axis(axis)
        if ranks == 1 or n_bytes == 0:
            return axis, 0.0, 0.0
        return axis, n_bytes, self.network.seconds(op, n_bytes, ranks, stride)

    def _seconds_of(self, *parts: str) -> list[float]:
        """Seconds of these parts of each group's traffic, its experts' included; groups of a kind share it."""
        totals = {
            id(each): sum(seconds for part, (_, _, seconds) in each.items() if part.startswith(parts))
            for each in {id(each): each for each in self._traffic}.values()
        }
        return [totals[id(each)] for each in self._traffic]

    @cached_property
    def _gathers(self) -> list[float]:
        return self._seconds_of("gather")

    @cached_property
    def _reduces(self) -> list[float]:
        return self._seconds_of("reduce", "sum")

    @cached_property
    def _gathers_again(self) -> list[bool]:
        """Whether the backward pass gathers each group, which the forward pass has freed."""
        groups = self.memory.groups
        reshard = reshard_after_forward(self.config.fsdp)
        again = [reshard == "always" or (reshard != "never" and self.sizes.pp == 1)] * len(groups)
        if reshard != "always":
            again[-1] = False
        idle = self.memory.idle_layers
        return [
            each and group.name != "root" and group.layer not in idle for each, group in zip(again, groups, strict=True)
        ]

    def fsdp(self, gathers: bool, reduces: bool) -> tuple[BesidePass, BesidePass]:
        """FSDP beside the forward and the backward pass of a micro-batch through all layers of the rank.

        Args:
            gathers: whether the forward pass gathers parameters.
            reduces: whether the backward pass reduces gradients.
        """
        n = len(self.passes)
        gather = [seconds * gathers for seconds in self._gathers]
        again = [seconds * is_gathered for seconds, is_gathered in zip(self._gathers, self._gathers_again, strict=True)]
        reduce = [seconds * reduces for seconds in self._reduces]
        in_forward = gather[0]
        in_backward = reduce[0]
        for g, (forward, backward) in enumerate(self._seconds_of_passes):
            beside_forward = gather[g + 1] if g + 1 < n else 0.0
            beside_backward = (again[g - 1] if g else 0.0) + (reduce[g + 1] if g + 1 < n else 0.0)
            in_forward += max(0.0, beside_forward - forward)
            in_backward += max(0.0, beside_backward - backward)
        to_gather, to_reduce = self._copies(gathers, reduces)
        return (
            BesidePass(sum(gather), 0.0, in_forward, to_gather),
            BesidePass(sum(again), sum(reduce), in_backward, to_reduce),
        )

    def _copies(self, gathers: bool, reduces: bool) -> tuple[float, float]:
        """Seconds in which FSDP copies to and from its buffers, and gradients are added up, forward and backward."""
        gathered, again, trained = self._copied
        forward = 2 * gathered * gathers
        backward = 2 * again + reduces * trained * (self.memory.compute_bytes + self.memory.reduce_bytes)
        backward += self._added_up / self.memory.micro_batches
        return forward / self.device.memory, backward / self.device.memory

    @cached_property
    def _copied(self) -> tuple[float, float, float]:
        """Bytes that FSDP gathers in a forward and in a backward pass, and elements whose gradients it reduces."""
        groups = self.memory.groups if self.memory.uses_fsdp else ()
        again = zip(groups, self._gathers_again, strict=False)
        return (
            sum(group.gathered_bytes for group in groups),
            sum(group.gathered_bytes for group, is_gathered in again if is_gathered),
            sum(group.trained for group in groups),
        )

    @cached_property
    def _added_up(self) -> float:
        """Bytes that are moved to add up the gradients of a step's micro-batches.

        Those that are reduced once are kept whole, in the type of the reduction, to which the first is converted.
        """
        memory = self.memory
        further = memory.micro_batches - 1
        if not further:
            return 0.0
        if not memory.reduces_once:
            return further * 3 * memory.reduce_bytes * sum(group.trained_shard for group in memory.groups)
        trained = sum(group.trained for group in memory.groups)
        converted = memory.compute_bytes + memory.reduce_bytes
        return trained * (converted + further * (converted + memory.reduce_bytes))

    def schedule(self) -> list[tuple[bool, bool]]:
        """Whether the forward pass of each micro-batch gathers parameters, and its backward pass reduces gradients."""
        once = reduces_once(self.config)
        held = zero_stage(self.config.fsdp) == 1 or self.sizes.pp > 1
        last = self.memory.micro_batches - 1
        return [(not held or each == 0, not once or each == last) for each in range(self.memory.micro_batches)]

    # ------------------------------------------------------------------------- the step

    def step(self) -> dict[str, float]:
        """Seconds by part; their sum is the step."""
        return dict(self._step)

    @cached_property
    def _step(self) -> dict[str, float]:
        total: Seconds = defaultdict(float)
        for each in {id(each): each for each in self.passes}.values():
            times = self.memory.micro_batches * sum(other is each for other in self.passes)
            for part, seconds in added(*each).items():
                total[part] += times * seconds
        for schedule, times in Counter(self.schedule()).items():
            for beside in self.fsdp(*schedule):
                total["fsdp"] += times * beside.exposed
                total["slower products beside fsdp"] += times * beside.hidden * self.device.collective_share
                total["elementwise"] += times * beside.copies
        total["pipeline bubble"] = self._bubble(sum(total.values()))
        total["optimizer"] = self.optimizer_seconds
        device = sum(total.values())
        launches = sum(map(self._launches, self._blocks))
        host = self.memory.micro_batches * launches * self.device.launch
        total["waiting for the host"] = host if self.device.type == "cpu" else max(0.0, host - device)
        return {part: seconds for part, seconds in total.items() if seconds > 0}

    @property
    def _n_further(self) -> int:
        """Modules of the rank that predict further tokens."""
        return n_further(self.config.model) if self.memory.has_head else 0

    @property
    def _blocks(self) -> Sequence[int]:
        """Its layers, and the last once more for each module that predicts a further token, whose block is like it."""
        return (*self.memory.layers, *[self.config.model.n_layers - 1] * self._n_further)

    def _launches(self, layer: int) -> int:
        """Kernels of a layer for a micro-batch."""
        launches = _LAUNCHES[self.config.compile.enable]
        if self.inner(layer)[0]:
            launches += _LAUNCHES_OF_EXPERTS
        if is_delta(self.config.model, layer) and not self.has_delta_kernels:
            in_all, of_chunk = _LAUNCHES_OF_DELTA
            side_by_side = 2 * self.sizes.cp if passes_states(self.config) else 1
            launches += in_all + of_chunk * math.ceil(self.config.training.seq_len / side_by_side / CHUNK)
        return launches

    def _bubble(self, busy: float) -> float:
        """Seconds in which a rank waits while the pipeline fills and drains (Narayanan et al. 2021, section 2.2).

        A zero-bubble schedule fills a part of them with the weights' gradients (Qi et al. 2024).
        """
        if self.sizes.pp == 1:
            return 0.0
        sends = 2 * (self.sizes.pp - 1) * self.send_seconds
        if self.config.pipeline.schedule == "zero_bubble_v":
            micro_batches = self.memory.micro_batches
            shares = (round(share, _SHARE_DIGITS) for share in self._shares_of_passes())
            return zero_bubble_wait(self.sizes.pp, micro_batches, *shares) * busy / micro_batches + sends
        return (self.sizes.pp - 1) / stages_per_rank(self.config) * busy / self.memory.micro_batches + sends

    def _shares_of_passes(self) -> tuple[float, float]:
        """Shares of forward passes, and of those for the weights' gradients, in a micro-batch's time."""
        forward = sum(sum(ahead.values()) for ahead, _ in self.passes)
        backward = sum(sum(back.values()) for _, back in self.passes)
        weights = sum(weights_seconds(back) for _, back in self.passes)
        return forward / (forward + backward), weights / (forward + backward)

    @property
    def send_seconds(self) -> float:
        """Seconds of a message to the next stage."""
        return self.network.seconds("send", self._sent, *self.axis("pp"))

    @property
    def _sent(self) -> float:
        """Bytes that a micro-batch sends to the next stage."""
        return self.tokens * self.config.model.dim * self.memory.compute_bytes / self.sizes.tp

    @property
    def optimizer_seconds(self) -> float:
        """Seconds of the update: states and parameters are read and written, gradients read, measured and scaled."""
        memory = self.memory
        elements = memory.held.elements
        parameters = elements * memory.state_bytes
        moved = 2 * (parameters + memory.optimizer) + 4 * parameters
        sent = self._sent_by_owners.items()
        waits = sum(self.network.seconds("broadcast", n_bytes, *self.axis(axis)) for axis, (_, n_bytes) in sent)
        return moved / self.device.memory + waits

    @cached_property
    def _sent_by_owners(self) -> dict[str, tuple[int, int]]:
        return sent_by_owners(self.config, self.sizes, self.memory.shards)

    def collectives(self) -> list[Collective]:
        """The collectives of a step by kind, largest first; the few of scalars are left out."""
        calls: Counter[tuple[str, str]] = Counter()
        n_bytes: Counter[tuple[str, str]] = Counter()
        seconds: dict[tuple[str, str], float] = defaultdict(float)
        inside: dict[tuple[str, str], float] = defaultdict(float)
        between: dict[tuple[str, str], float] = defaultdict(float)
        of_axis: dict[str, float] = defaultdict(float)
        for op, axis, size, times in self._issued():
            ranks, stride = self.axis(axis)
            if size and ranks > 1:
                calls[op, axis] += times
                n_bytes[op, axis] += round(size) * times
                transfer = self.network.transfer(op, size, ranks, stride)
                seconds[op, axis] += times * transfer.seconds
                inside[op, axis] += times * transfer.inside
                between[op, axis] += times * transfer.between
        for (_, axis), each_seconds in seconds.items():
            of_axis[axis] += each_seconds
        exposed = self._exposed_by_axis()
        shares = {axis: min(1.0, exposed.get(axis, 0.0) / total) if total else 0.0 for axis, total in of_axis.items()}
        return [
            Collective(
                *kind,
                calls=calls[kind],
                n_bytes=size,
                seconds=seconds[kind],
                inside=inside[kind],
                between=between[kind],
                exposed=shares[kind[1]] * seconds[kind],
            )
            for kind, size in n_bytes.most_common()
        ]

    def _issued(self) -> Iterator[tuple[str, str, float, int]]:
        """The collectives of a step: op, axis, bytes, and how often; they may be of one rank, or of no bytes."""
        micro_batches = self.memory.micro_batches
        for (gathers, reduces), times in Counter(self.schedule()).items():
            for place, each in enumerate(self._traffic):
                gathered = gathers + self._gathers_again[place]
                for part, (axis, size, _) in each.items():
                    if part.startswith("gather"):
                        yield "all_gather", axis, size, times * gathered
                    elif reduces:
                        yield "all_reduce" if part.startswith("sum") else "reduce_scatter", axis, size, times
        idle = self.memory.idle_layers
        for layer in self._blocks:
            for kind in ("forward",) if layer in idle else ("forward", "backward", "repeated"):
                for axis, op, size in self.between(layer, kind):
                    yield op, axis, size, micro_batches
        for group in self.memory.groups:
            for axis, op, size in self._joined(group) if group.name in self.memory.model.plan.further_blocks else ():
                yield op, axis, size, micro_batches
        stream = self.tokens * self.config.model.dim * self.memory.compute_bytes
        ends = (0 in self.memory.stages) + self.memory.has_head + 2 * self._n_further  # embeds, and has a head
        of_others = set(range(n_stages(self.config))) - set(self.memory.stages)
        boundaries = sum((stage + 1 in of_others) + (stage - 1 in of_others) for stage in self.memory.stages)
        yield "reduce_scatter", "tp", stream, ends * micro_batches
        yield "all_gather", "tp", stream, (ends - bool(idle)) * micro_batches  # a frozen embedding takes no gradient
        for axis, (calls, n_bytes) in self._sent_by_owners.items():
            yield "broadcast", axis, n_bytes / calls, calls
        for op in ("send", "receive"):
            yield op, "pp", self._sent, boundaries * micro_batches

    def _exposed_by_axis(self) -> dict[str, float]:
        """Exposed seconds of a step, by axis."""
        parts = self._step
        by_axis = {axis: parts.get(axis, 0.0) for axis in ("tp", "cp", "ep")}
        return by_axis | dict.fromkeys(("shard", "expert_shard", "replicas", "expert_replicas"), parts.get("fsdp", 0.0))
