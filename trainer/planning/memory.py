"""Estimate of the memory that a rank will need, made before anything is built: does the job fit?

A step's memory is what persists from step to step, plus what is also alive at the step's worst moment. The moments
that can be the worst are computed one by one: the loss, where all activations wait, and the backward pass of each FSDP
group, where activations are freed, gradients appear, and checkpointed blocks are recomputed. The tensors counted are
those that torch's CUDA build really holds (tests/null_gpu/test_memory.py compares). FSDP shards each parameter by rows,
so the largest shard is ceil(rows / (dp_shard x cp)) rows, after tensor parallelism has taken its part. Experts are
first split by expert over `ep`, and are assumed to have equal load. Owners (fsdp.partition) hold the optimizer state of
whole parameters, or of their ranks' experts.

The estimate is of allocated memory, `torch.cuda.max_memory_allocated()`, and is within a few percent of it. A GPU must
hold more: the CUDA context (about half a GiB), NCCL's communicators, which are counted apart, and what torch's
allocator has reserved in pieces that nothing fits into (2 to 10 GiB in the jobs of this repository).
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import ceil, prod

from configs.architectures.llama_keys import window_of
from configs.architectures.parts import head_dim, n_kv_heads
from configs.float8 import choose
from configs.layout import (
    MeshSizes,
    accumulation_steps,
    adds_up_wider,
    micro_batch_size,
    reduces_once,
    reshard_after_forward,
    zero_stage,
)
from configs.schema import Config
from configs.stages import layers_of_rank, layers_of_stages, n_stages, stages_of_rank, stages_per_rank
from parallelisms.activation_checkpoint import selected_layers
from parallelisms.attention.halo import largest_halo
from parallelisms.compute_copies import computes_with_copies, keeps_copies
from parallelisms.fsdp import is_needed
from parallelisms.mesh import Mesh
from parallelisms.sums import sums_of
from trainer.loss import chunk_rows
from trainer.planning.activations import measure_blocks
from trainer.planning.block_memory import BlockMemory
from trainer.planning.flops import tokens_seen
from trainer.planning.held import Group, Held, held
from trainer.planning.skeleton import Shape, Skeleton, skeleton
from trainer.planning.states import BYTES, always_frozen, optimizer_bytes
from trainer.teacher import teacher_job

_WORKSPACE_BYTES = 2 * 32 * 2**20
"""cuBLAS's workspace on Hopper and later, as torch sets it, for each of two threads: forward's and backward's."""

_COMMUNICATOR_BYTES = 2**29
"""A communicator's channels, measured by others: 544 MB on 2 A100 with NVLink, 688 on 4 (NVIDIA/nccl issue 964)."""
_OF_ALL_PAIRS_BYTES = 33 * 10**8
"""The same where every rank sends to every other, as experts' tokens: 3.3 GB on 8 H100 (NVIDIA/nccl issue 1685)."""


@dataclass(frozen=True)
class Moment:
    """Bytes alive at one moment of a step, besides parameters and optimizer state."""

    name: str
    """When it is: "the loss", or "the backward pass of layers.3"."""
    gradients: int
    """Gradients accumulated, and those just computed."""
    gathered: int
    """Parameters that FSDP has gathered, and gradients that it sends and reduces."""
    activations: int
    """Activations kept by the forward pass, and what a block's backward pass computes from them."""
    loss: int
    """A chunk of logits, and the gradients that the loss computes ahead."""

    @property
    def total(self) -> int:
        return self.gradients + self.gathered + self.activations + self.loss


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on the rank that holds the most."""

    parameters: int
    copies: int
    """Parameters in compute_dtype that a single rank keeps from step to step."""
    gradients: int
    """All gradients that a step accumulates, at its end."""
    optimizer: int
    teacher: int
    """The parameters of a teacher, with those of its head gathered."""
    buffers: int
    """Memory that libraries keep: cuBLAS's workspace, a pipeline's receive buffers."""
    peak: Moment
    """The worst moment of a step."""
    communicators: int
    """Memory of NCCL's communicators, which torch does not allocate: it is beside all others, and not in `device`."""
    offloaded: bool
    """Whether parameters, gradients and optimizer state are in CPU memory (fsdp.cpu_offload)."""

    @property
    def states(self) -> int:
        """Memory that persists from step to step, gradients included."""
        return self.parameters + self.copies + self.gradients + self.optimizer

    @property
    def device(self) -> int:
        """Everything that the device must hold at the worst moment."""
        transient = self.buffers + self.peak.total
        transient += self.teacher
        return transient if self.offloaded else transient + self.parameters + self.copies + self.optimizer

    @property
    def parts(self) -> dict[str, int]:
        """The parts of `device`, by name; those of no bytes are left out."""
        states = {"parameters": self.parameters, "compute copies": self.copies, "optimizer": self.optimizer}
        moment = {name: n_bytes for name, n_bytes in vars(self.peak).items() if name != "name"}
        parts = ({} if self.offloaded else states) | moment | {"teacher": self.teacher, "buffers": self.buffers}
        return {name: n_bytes for name, n_bytes in parts.items() if n_bytes}


def estimates_by_kind(config: Config, sizes: MeshSizes, device_type: str) -> dict[int, MemoryEstimate]:
    """Estimate memory for each distinct kind of rank, by the first rank of the pipeline that is of the kind."""
    return {rank: RankMemory(config, sizes, device_type, rank).estimate() for rank in distinct_ranks(config)}


def estimate_memory(config: Config, sizes: MeshSizes, device_type: str, mesh: Mesh | None = None) -> MemoryEstimate:
    """Estimate the memory of one rank of a mesh of `sizes`, on "cpu" or "cuda"; `mesh` is as for `measure_blocks`."""
    return largest(RankMemory(config, sizes, device_type, rank, mesh) for rank in distinct_ranks(config))


def count_communicators(sizes: MeshSizes, by_whole_matrices: bool = False) -> int:
    """The NCCL communicators of a rank: one for each set of ranks with which it communicates (`build_mesh`).

    Args:
        sizes: the mesh.
        by_whole_matrices: whether the optimizer needs whole matrices, which the ranks of a stage exchange.
    """

    def over(*axes: str) -> tuple[str, ...]:
        return tuple(axis for axis in axes if sizes.axes[axis] > 1)

    of_tokens = ("dp_replicate", "dp_shard", "cp")
    sets = {over("pp", *of_tokens, "tp"), over(*of_tokens), over("tp"), over("pp")}
    if not sizes.by_owner:
        sets |= {over("dp_replicate"), over("dp_shard", "cp")}
    if by_whole_matrices:
        sets.add(over(*of_tokens, "tp"))
    has_experts = sizes.ep > 1
    # Context and expert parallelism have their own; if both are over the same ranks, these share it.
    inside_layers = (sizes.cp > 1) + (has_experts and sizes.ep != sizes.cp)
    of_experts = sizes.expert_replicas if sizes.by_owner else sizes.expert_shard
    return len(sets - {()}) + inside_layers + (has_experts and of_experts > 1)


def distinct_ranks(config: Config) -> list[int]:
    """One rank of each kind in the pipeline, the first: of ranks with the same layers it keeps the most."""
    if config.mesh.pp == 1:
        return [0]
    model = skeleton(config.model)
    frozen = always_frozen(config, model)
    table = config.activation_checkpoint
    checkpointed = set(selected_layers(table, config.model.n_layers)) if table.mode in ("full", "selective") else set()
    stages = layers_of_stages(config)
    numbers: dict[tuple, int] = {}
    kinds = []
    for layer in range(config.model.n_layers):
        seen = tokens_seen(config.model, layer, config.training.seq_len)
        kind = (model.kind_of_block(layer, frozen), seen, layer in checkpointed)
        kinds.append(numbers.setdefault(kind, len(numbers)))
    first: dict[tuple, int] = {}
    for rank in range(config.mesh.pp):
        own = stages_of_rank(config, rank)
        layers = tuple(tuple(kinds[layer] for layer in stages[stage]) for stage in own)
        first.setdefault((0 in own, len(stages) - 1 in own, layers), rank)
    return list(first.values())


def largest(ranks: Iterable["RankMemory"]) -> MemoryEstimate:
    """The estimate of the rank that holds the most."""
    return max((rank.estimate() for rank in ranks), key=lambda estimate: estimate.device)


@dataclass(frozen=True)
class RankMemory:
    """The memory of one rank of the pipeline, or of any rank without a pipeline."""

    config: Config
    sizes: MeshSizes
    device_type: str
    pipeline_rank: int
    mesh: Mesh | None = None

    def estimate(self) -> MemoryEstimate:
        """The state that persists from step to step, and the worst moment."""
        config = self.config
        shards = self.shards
        return MemoryEstimate(
            parameters=self.held.elements * self.state_bytes,
            copies=self.held.elements * self.compute_bytes * self.keeps_copies,
            gradients=self._gradients(sum(shards[name] for name in shards.keys() - self.frozen)),
            optimizer=self.optimizer,
            teacher=self.teacher.kept_for_forward if self.teacher else 0,
            buffers=self._buffers(),
            peak=max(self.moments(), key=lambda moment: moment.total),
            communicators=self._communicators() if self.device_type == "cuda" else 0,
            offloaded=config.fsdp.cpu_offload,
        )

    # ------------------------------------------------------------------------- what the rank holds

    @cached_property
    def stages(self) -> list[int]:
        """Numbers of its pipeline stages; [0] without a pipeline."""
        return stages_of_rank(self.config, self.pipeline_rank)

    @cached_property
    def layers(self) -> list[int]:
        """Numbers of its blocks."""
        return layers_of_rank(self.config, self.pipeline_rank)

    @cached_property
    def has_head(self) -> bool:
        return n_stages(self.config) - 1 in self.stages

    @cached_property
    def model(self) -> Skeleton:
        return skeleton(self.config.model)

    @cached_property
    def held(self) -> Held:
        """Its parameters."""
        return held(
            self.model,
            self.sizes,
            tuple(self.layers),
            0 in self.stages,
            self.has_head,
            self.frozen,
            self.in_float8 if self.config.float8.fsdp_all_gather else frozenset(),
            self.compute_bytes,
        )

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """Shapes of its parameters as FSDP gathers them."""
        return self.held.shapes

    @property
    def shards(self) -> Mapping[str, int]:
        """Elements of each parameter's largest FSDP shard."""
        return self.held.shards

    @property
    def groups(self) -> list[Group]:
        """FSDP's groups in forward order."""
        return self.held.groups

    @cached_property
    def optimizer(self) -> int:
        """Bytes of optimizer state."""
        config = self.config
        known = self.held.optimizer_bytes
        key = repr((config.optimizer, config.training.dtype, config.average, config.fsdp.owner_broadcast_dtype))
        if key not in known:
            known[key] = max(optimizer_bytes(config, self.sizes, self.shards))
        return known[key]

    @cached_property
    def in_float8(self) -> frozenset[str]:
        """The whole model's matrices that multiply in float8."""
        if self.config.float8.recipe == "none":
            return frozenset()
        converted = choose(self.model.shapes, self.model.plan, self.config).converted
        return frozenset(name if name in self.model.shapes else f"{name}.weight" for name in converted)

    @cached_property
    def teacher(self) -> "RankMemory | None":
        """The same rank of a job of the teacher's; None without one."""
        if self.config.distillation.teacher is None:
            return None
        return RankMemory(teacher_job(self.config), self.sizes, self.device_type, self.pipeline_rank, self.mesh)

    @property
    def kept_for_forward(self) -> int:
        """Bytes of the parameters of a model that only runs forward: this rank's, and those of the head, gathered."""
        kept = (self._root or self.groups[-1:]) if self.has_head and self.is_sharded else []
        return self.held.elements * self.state_bytes + sum(group.gathered_bytes for group in kept)

    @property
    def saved(self) -> int:
        """Bytes of its part of a checkpoint, of the owner that has the most."""
        return max(optimizer_bytes(self.config, self.sizes, self.shards, with_parameters=True))

    @cached_property
    def frozen(self) -> frozenset[str]:
        """The whole model's parameters that never train."""
        return always_frozen(self.config, self.model)

    @cached_property
    def idle_layers(self) -> set[int]:
        """The layers that no gradient reaches, since nothing up to them trains; autograd keeps nothing for them."""
        trained = [self.model.block_of(name) for name in self.model.shapes if name not in self.frozen]
        if any(self.model.is_before_blocks(name) for name in self.model.shapes.keys() - self.frozen):
            return set()
        first = min((layer for layer in trained if layer is not None), default=self.config.model.n_layers)
        of_first_stage = layers_of_stages(self.config)[0]  # what other stages receive always takes a gradient
        return {layer for layer in self.layers if layer < first and layer in of_first_stage}

    @cached_property
    def micro_batches(self) -> int:
        """Micro-batches per step."""
        return accumulation_steps(self.config, self.sizes)

    @property
    def state_bytes(self) -> int:
        return BYTES[self.config.training.dtype]

    @property
    def compute_bytes(self) -> int:
        return BYTES[self.config.training.compute_dtype]

    @property
    def reduce_bytes(self) -> int:
        return BYTES[self.config.training.reduce_dtype]

    def _gradients(self, sharded: int) -> int:
        return sum(map(self._held, self.groups)) if self.reduces_once else sharded * self.state_bytes

    def _communicators(self) -> int:
        count = count_communicators(self.sizes, self.config.optimizer.name == "muon")
        of_pairs = int(self.sizes.ep > 1)
        return (count - of_pairs) * _COMMUNICATOR_BYTES + of_pairs * _OF_ALL_PAIRS_BYTES

    def _buffers(self) -> int:
        """Library buffers; a pipeline stage receives each micro-batch, and each gradient, into a separate tensor."""
        last = n_stages(self.config) - 1
        received = sum((stage > 0) + (stage < last) for stage in self.stages) * self.micro_batches
        stream = self.tokens * self.config.model.dim // self.sizes.tp * self.compute_bytes
        return received * stream + (_WORKSPACE_BYTES if self.device_type == "cuda" else 0)

    # ------------------------------------------------------------------------- moments

    def moments(self) -> Iterator[Moment]:
        """The moments at which memory can peak, in the first, a middle and the last micro-batch of a step.

        The first has no gradients yet; the last of several reduces them, if that is done once per step.
        """
        many = [(True, False)] if self.micro_batches > 2 else []
        several = [(False, False), *many, (True, True)]
        for accumulated, is_last in several if self.micro_batches > 1 else [(False, True)]:
            if self.has_head:
                yield self._in_loss(accumulated)
            for place in range(len(self.groups)):
                yield from self._in_backward(place, accumulated, is_last)

    def _in_loss(self, accumulated: bool) -> Moment:
        """All activations wait; the head is gathered, and its gradient exists before it is reduced."""
        gradients = self._held_up_to[-1] if accumulated else 0
        gathered = self._gathered(len(self.groups) - 1, ahead=0)
        if self.is_sharded and zero_stage(self.config.fsdp) > 1:
            gathered += self.groups[-1].gathered_bytes  # FSDP keeps the buffer of its last gather
        if accumulated and not self.reduces_once:
            gathered += self._reduced(0)
        return Moment("the loss", gradients, gathered, self._waiting(len(self.layers)), self._loss(peak=True))

    def _in_backward(self, place: int, accumulated: bool, is_last: bool) -> Iterator[Moment]:
        """Two moments: while the group computes, and while its gradients are reduced."""
        group = self.groups[place]
        name = f"the backward pass of {group.name}"
        held = self._held_up_to
        shards = self._reduced_shards_up_to
        gradients = held[place + 1] if accumulated else 0
        if not is_last or (accumulated and not (self.reduces_once or self.is_exact)):
            gradients += held[-1] - held[place + 1]
        else:
            gradients += shards[-1] - shards[place + 1]
        kept = self._waiting(0 if group.layer is None else bisect_left(self.layers, group.layer))
        waiting_losses = self._loss(peak=False) + self._waiting_for_embedding(place)
        gathered = self._gathered(place, self.config.comm.prefetch)
        if group.layer is not None:
            computing = self.blocks[group.layer].backward(self._samples) + self._fetched(group.layer)
            sent = self._reduced(place + 1) if place + 1 < len(self.groups) and not self.reduces_once else 0
            yield Moment(name, gradients, gathered + sent, kept + computing, waiting_losses)
        made = group.trained * self.compute_bytes
        if (self.keeps_copies or self.frees_copies) and not accumulated:  # the last is added up, all others are whole
            freed = group.trained * self.compute_bytes * self.frees_copies
            made = group.trained * self.state_bytes + group.largest * self.compute_bytes - freed
        yield Moment(name, gradients + made, gathered + self._reduced(place), kept, waiting_losses)

    # ------------------------------------------------------------------------- gathered groups, and gradients

    @cached_property
    def uses_fsdp(self) -> bool:
        return is_needed(self.sizes.world_size, self.config)

    @cached_property
    def keeps_copies(self) -> bool:
        return keeps_copies(self.sizes.world_size, self.config)

    @cached_property
    def frees_copies(self) -> bool:
        return computes_with_copies(self.sizes.world_size, self.config) and not self.keeps_copies

    @property
    def is_sharded(self) -> bool:
        return self.sizes.fsdp_shard > 1

    @cached_property
    def reduces_once(self) -> bool:
        """Whether gradients stay unsharded until the step's end."""
        return reduces_once(self.config) and self.micro_batches > 1

    @cached_property
    def adds_up_wider(self) -> bool:
        """Whether gradients take `reduce_dtype` until the step's end."""
        return adds_up_wider(self.config) and self.micro_batches > 1

    @cached_property
    def is_exact(self) -> bool:
        return not sums_of(self.config.training).mesh_changes_bits

    def _held(self, group: Group) -> int:
        """Bytes of the group's gradients between two micro-batches; if exact, of a partial sum for each bit of their
        number, which replicas divide among themselves."""
        if self.is_exact:
            return (self.micro_batches.bit_length() - 1) * ceil(group.part) * self.reduce_bytes
        return group.trained * self.reduce_bytes if self.reduces_once else self._reduced_shard(group)

    def _reduced_shard(self, group: Group) -> int:
        """Bytes of the group's gradients after their reduction, on the device."""
        kept_bytes = self.reduce_bytes if self.adds_up_wider else self.state_bytes
        return 0 if self.config.fsdp.cpu_offload else group.trained_shard * kept_bytes

    @cached_property
    def _held_up_to(self) -> list[int]:
        """`_held` of the first n groups together, for each n."""
        return [0, *accumulate(map(self._held, self.groups))]

    @cached_property
    def _reduced_shards_up_to(self) -> list[int]:
        """`_reduced_shard` of the first n groups together, for each n."""
        return [0, *accumulate(map(self._reduced_shard, self.groups))]

    @cached_property
    def _root(self) -> list[Group]:
        """The groups that stay gathered throughout."""
        return [group for group in self.groups if group.name == "root"]

    @cached_property
    def _gathered_up_to(self) -> list[int]:
        """Bytes of the first n groups' parameters, for each n; groups of one name are gathered as one, the last."""
        known: dict[str, int] = {}
        totals = [0]
        for group in self.groups:
            totals.append(totals[-1] + group.gathered_bytes - known.get(group.name, 0))
            known[group.name] = group.gathered_bytes
        return totals

    def _reduced(self, place: int) -> int:
        """Bytes of a group's unsharded gradients as they are sent; FSDP keeps them until it sends the next group's.

        An exact reduction also receives as many, and replicas send and receive shards.
        """
        group = self.groups[place]
        exchanged = group.trained * self.is_sharded + 2 * group.replicated
        return (group.trained + exchanged * self.is_exact) * self.reduce_bytes if self.uses_fsdp else 0

    def _gathered(self, place: int, ahead: int) -> int:
        """Bytes of parameters gathered while the group at `place` computes, with `ahead` prefetched in backward."""
        if not (self.uses_fsdp or self.frees_copies):
            return 0
        reshard = reshard_after_forward(self.config.fsdp)
        group = self.groups[place]
        if zero_stage(self.config.fsdp) == 1:
            return self._gathered_up_to[-1]
        if reshard == "never" or (self.config.mesh.pp > 1 and reshard == "default"):
            return self._gathered_up_to[place + 1]
        coming = self.groups[max(0, place - ahead) : place] if self.is_sharded else []
        alive = [*self._root, group, *coming]
        return sum({g.name: g.gathered_bytes for g in alive}.values())

    # ------------------------------------------------------------------------- activations and loss

    @property
    def _samples(self) -> int:
        """Samples of a micro-batch."""
        return micro_batch_size(self.config.training)

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one rank: with context parallelism, a part of every sequence."""
        return self._samples * self.config.training.seq_len // self.sizes.cp

    @cached_property
    def blocks(self) -> dict[int, BlockMemory]:
        return measure_blocks(self.config, self.layers, self.sizes, self.device_type == "cuda", self.mesh)

    def _waiting(self, n_layers: int) -> int:
        """Bytes of activations waiting for backward, counting only `n_layers` layers of the current micro-batch."""
        kept = self._kept_up_to
        stream = self.tokens * self.config.model.dim * self.compute_bytes // self.sizes.tp
        whole = kept[-1] + stream
        n_bytes = kept[n_layers] + stream + (self._in_flight - 1) * whole  # with the first block's input
        if self.has_head and n_layers == len(self.layers):
            normed = stream * (1 + self.sizes.tp * (self.sizes.tp > 1))  # the final norm's output, gathered
            # A module that predicts a further token keeps about what the last layer does, and what it joins.
            of_module = kept[-1] - kept[-2] + 4 * stream + normed
            n_bytes += normed + self._n_further * of_module
        return ceil(n_bytes)

    @cached_property
    def _kept_up_to(self) -> list[int]:
        """Bytes that the first n of its layers keep for backward in a micro-batch, for each n."""
        kept = (0 if layer in self.idle_layers else block.kept * self._samples for layer, block in self.blocks.items())
        return [0, *accumulate(kept)]

    @cached_property
    def _in_flight(self) -> float:
        """Micro-batches whose activations it keeps at the worst moment."""
        if self.config.mesh.pp == 1:
            return 1
        return stages_in_flight(self.config, self.pipeline_rank, self.micro_batches) / len(self.stages)

    def _fetched(self, layer: int) -> int:
        """Bytes of the other ranks' keys and values that attention holds in backward, and of their gradients.

        gather: all of them, with their gradients once as computed and once as sent; ring: the current and the next
        ones, with the current, the arriving and the leaving gradients; a window: the sum of this rank's gradients, with
        those that leave and arrive.
        """
        config = self.config
        sizes = self.sizes
        if sizes.cp == 1 or config.context.method == "all_to_all":
            return 0
        elements = 2 * n_kv_heads(config.model) * head_dim(config.model) * self.tokens // sizes.tp
        if window := window_of(config.model, layer):
            n_tokens = config.training.seq_len // sizes.cp
            halo = elements * largest_halo(sizes.cp, n_tokens, window - 1) // n_tokens
            return elements * max(self.compute_bytes, 4) + 2 * halo * self.compute_bytes
        shares, of_gradients = (sizes.cp, 2 * sizes.cp) if config.context.method == "gather" else (2, 3)
        return elements * (shares * self.compute_bytes + of_gradients * max(self.compute_bytes, 4))

    @property
    def _head(self) -> str:
        """Name of the parameter that produces the logits: the head's, or the embedding's tied to it."""
        plan = self.model.plan
        return f"{(plan.before_blocks if self.model.is_tied else plan.after_blocks[-1:])[0]}.weight"

    @property
    def _n_further(self) -> int:
        """Modules that predict further tokens, each with a loss."""
        return len(self.model.plan.further_blocks)

    def _waiting_for_embedding(self, place: int) -> int:
        """Bytes of a tied matrix's gradient as the head, which waits in backward for its gradient as the embedding."""
        waits = self.model.is_tied and self._head not in self.frozen and place > 0
        return prod(self.shapes[self._head]) * self.compute_bytes if waits else 0

    def _loss(self, peak: bool) -> int:
        """Bytes of the gradients that the losses of waiting micro-batches have computed ahead; with `peak`, also of one
        loss's chunks of logits."""
        if not self.has_head:
            return 0
        model = self.config.model
        tokens = self.tokens
        compute = self.compute_bytes
        vocabulary = ceil(model.vocab_size / self.sizes.tp)
        softmax = max(compute, 4)
        by_weight = 0 if self._head in self.frozen else vocabulary * model.dim * softmax
        ahead = (by_weight + tokens * model.dim * compute) * (1 + self._n_further)
        waiting = self.micro_batches if self.config.pipeline.schedule == "gpipe" and self.config.mesh.pp > 1 else 1
        if not peak:
            return (waiting - 1) * ahead
        if self.teacher:
            return waiting * ahead + self._divergence(vocabulary, softmax)
        rows = chunk_rows(tokens, vocabulary * softmax, self.device_type)
        chunk = rows * vocabulary
        product = vocabulary * model.dim * compute if self.device_type == "cpu" else 0  # a GPU adds it up in its kernel
        logits = chunk * compute
        in_place = softmax == compute
        # The previous chunk's last operand is still alive.
        before = logits if rows < tokens and not in_place else 0
        if self.config.compile.enable:
            working = 0 if in_place else logits + max(before, product)
        else:
            working = before + chunk * softmax * (1 if in_place else 2)
        rounded = 0 if in_place or not by_weight else vocabulary * model.dim * compute  # in the loss's backward
        return waiting * ahead + max(logits + working, rounded)

    def _divergence(self, vocabulary: int, softmax: int) -> int:
        """Bytes of a loss that follows a teacher: the teacher's states, and chunks of both models' logits."""
        assert self.teacher is not None
        of_step = self.micro_batches if self.config.mesh.pp > 1 else 1
        states = of_step * self.tokens * self.teacher.config.model.dim * self.compute_bytes
        rows = chunk_rows(self.tokens, 2 * vocabulary * softmax, self.device_type)
        # Compiled, a kernel reads both and writes the gradient; otherwise each operation writes what it computes, and
        # the place of the target is a matrix of truth values.
        working = self.compute_bytes if self.config.compile.enable else 4 * softmax + 1
        before = self.compute_bytes if rows < self.tokens else 0  # the previous chunk's gradient is still alive
        return states + rows * vocabulary * (2 * self.compute_bytes + working + before)


def stages_in_flight(config: Config, rank: int, micro_batches: int) -> int:
    """How many stage passes' activations a pipeline rank keeps at the worst moment."""
    ranks = config.mesh.pp
    stages = stages_per_rank(config)
    most = {
        "gpipe": micro_batches,
        "1f1b": ranks - rank,
        "interleaved_1f1b": (stages - 1) * ranks + 2 * (ranks - 1 - rank) + 1,
        "zero_bubble_v": 2 * ranks,
    }
    return min(most[config.pipeline.schedule], stages * micro_batches)
