"""The fastest ways to run a job on so many GPUs: `keel plan JOB --ranks N --device D --tune`.

Only machine keys vary, so all candidates learn the same: the mesh, what FSDP keeps gathered, the micro-batch, the
pipeline's schedule, what is recomputed, and how context and tensor parallelism exchange. Candidates that differ only in
how FSDP shards are one branch. A branch has a bound below the time of its candidates: the work of all layers spread
evenly over the pipeline, with its bubble. It has one below their memory, too: states spread over all ranks, and
activations that wait. Branches are opened by ascending bound, and the memory of their candidates is estimated by
ascending time, until the next one's bound or time is above that of the slowest job to report: what is left cannot be
among the best. Times and memory are those of `keel plan`.
"""

from bisect import insort
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heappop, heappush
from itertools import product
from math import inf, prod

from configs.checks import check
from configs.errors import UserError
from configs.layout import MeshSizes, accumulation_steps, mesh_sizes, micro_batch_size, reduces_once
from configs.schema import (
    ActivationCheckpoint,
    Comm,
    Config,
    Context,
    Fsdp,
    Mesh,
    Pipeline,
    further_run_keys,
    is_described,
)
from configs.stages import layers_of_rank, stages_per_rank
from configs.table import Table
from trainer.planning.activations import measure_blocks
from trainer.planning.block_memory import BlockMemory
from trainer.planning.by_memory import SHARE_OF_A_CARD, ways
from trainer.planning.devices import Device
from trainer.planning.memory import RankMemory, distinct_ranks, estimate_memory, largest, stages_in_flight
from trainer.planning.skeleton import skeleton
from trainer.planning.states import BYTES, checkpoint_bytes
from trainer.planning.step_time import Passes, require_modelled, seconds_of_layers, slowest_rank
from trainer.planning.takes_less import CONTEXT_BYTES
from trainer.report.units import size
from trainer.teacher import fits_teacher

BEST = 10
"""Jobs to report."""
_TABLES = "mesh", "fsdp", "pipeline", "activation_checkpoint", "context", "comm"
"""Machine tables that vary, besides the micro-batch."""


@dataclass(frozen=True)
class Found:
    """A job that fits, with its estimates."""

    config: Config
    parts: Mapping[str, float]
    """Seconds by part of a step."""
    memory: int
    """Bytes that are allocated on a GPU at the peak."""

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def order(self) -> tuple[float, int]:
        """Faster first, then what takes less memory."""
        return self.seconds, self.memory

    def beats(self, other: "Found") -> str:
        """Where most of the time goes that another job takes longer."""
        longer = {part: other.parts.get(part, 0.0) - self.parts.get(part, 0.0) for part in {*self.parts, *other.parts}}
        part = max(sorted(longer), key=lambda each: longer[each])
        if other.seconds - self.seconds < 1e-6 * self.seconds:
            saved = other.memory - self.memory
            return f"equally fast, with {size(abs(saved))} {'less' if saved >= 0 else 'more'} memory"
        return f"{longer[part]:.3g} s less of {part}"


@dataclass(frozen=True)
class Outcome:
    """What a search has found, and what became of its candidates."""

    best: list[Found]
    """The best, fastest first; at most `BEST`."""
    estimated: int
    """Candidates whose time was estimated, without those that do not fit."""
    pruned: int
    """Candidates that a bound shows to be slower than the best."""
    too_large: int
    """Candidates that do not fit a GPU's memory, by a bound or by the estimate."""

    @property
    def considered(self) -> int:
        """All candidates that the rules between keys allow."""
        return self.estimated + self.pruned + self.too_large


@dataclass(frozen=True)
class _Branch:
    """Candidates that differ only in how FSDP shards."""

    job: Config
    """One of them, whose parameters are sharded over as many ranks as they can be."""
    bound: float
    """Seconds of a step that none of them is below."""


@dataclass(order=True)
class _Timed:
    """A candidate whose time is known; in order of that, and of equals as branches are opened."""

    seconds: float
    branch: int
    place: int
    job: Config = field(compare=False)
    parts: Mapping[str, float] = field(compare=False)
    too_large: list[Config] = field(compare=False)
    """Those of the branch that do not fit."""


@dataclass(frozen=True)
class _WithLeastBlocks(RankMemory):
    """A bound below the memory of a rank: all but its blocks as estimated, and of those their part of the whole."""

    least: Mapping[int, BlockMemory] = field(default_factory=dict)

    @cached_property
    def blocks(self) -> dict[int, BlockMemory]:
        parts = self.sizes.tp * self.sizes.cp
        of_parameters = self.sizes.tp * self.sizes.ep
        return {
            layer: BlockMemory(
                self.least[layer].kept // parts,
                tuple((kept // parts, gradients // of_parameters) for kept, gradients in self.least[layer].moments),
            )
            for layer in self.layers
        }


@dataclass
class Search:
    """The search for one number of ranks."""

    config: Config
    ranks: int
    device: Device
    gpus_per_host: int
    device_bytes: float
    prunes: bool = True
    """False: every candidate is estimated, which a test compares with."""
    later: Sequence[Config] = ()
    """The later stages of the run, which must be possible and fit, too; `config` is the first, whose time counts."""
    _seconds: dict[tuple, float] = field(default_factory=dict)
    _passes: dict[tuple, Passes] = field(default_factory=dict)
    _whole: dict[str, dict[int, BlockMemory]] = field(default_factory=dict)
    _layers: dict[tuple, list[list[int]]] = field(default_factory=dict)

    def run(self) -> Outcome:
        """Find the best.

        Raises:
            UserError: no candidate fits, or the job is of a kind whose time is not estimated.
        """
        if self.config.elastic.enable:
            raise UserError("an elastic job chooses its mesh when it starts; add --elastic.enable false to tune it")
        require_modelled(self.config.model_copy(update={"mesh": Mesh()}), self.device)
        counts: Counter[str] = Counter()
        best: list[Found] = []
        opened: list[_Timed] = []
        for number, branch in enumerate(sorted(self._branches(), key=lambda branch: branch.bound)):
            self._settle(opened, branch.bound, best, counts)
            if branch.bound > self._slowest(best):
                counts["pruned"] += len(list(self._members(branch.job)))
            elif self.prunes and self._least_memory(branch.job) > self.limit:
                counts["too large"] += len(list(self._members(branch.job)))
            else:
                for timed in self._timed(branch, number):
                    heappush(opened, timed)
        self._settle(opened, inf, best, counts)
        if not best:
            raise UserError(
                f"none of {sum(counts.values()):,} ways to run {self.config.job.name} on {self.ranks:,} ranks fits "
                f"{size(self.limit)} of a GPU's memory; take more ranks"
                if counts
                else f"no mesh of {self.ranks:,} ranks can run {self.config.job.name} with its global batch of "
                f"{self.config.training.global_batch_size} sequences; take another number of ranks"
            )
        return Outcome(best, counts["estimated"], counts["pruned"], counts["too large"])

    @property
    def limit(self) -> float:
        """Bytes that tensors may take: what `activation_checkpoint.memory_limit_gib = "device"` fills."""
        return min(SHARE_OF_A_CARD * self.device_bytes, self.device_bytes - CONTEXT_BYTES)

    def _slowest(self, best: Sequence[Found]) -> float:
        """Seconds of the slowest job to report: nothing that is slower needs a look."""
        return best[-1].seconds if self.prunes and len(best) == BEST else inf

    def _timed(self, branch: _Branch, number: int) -> Iterator["_Timed"]:
        """The candidates of a branch, with their times."""
        too_large: list[Config] = []
        for place, job in enumerate(self._members(branch.job)):
            known = self._passes.setdefault(self._key_of_layers(job), {})
            parts = slowest_rank(job, self.ranks, self.device, self.gpus_per_host, known).step()
            yield _Timed(sum(parts.values()), number, place, job, parts, too_large)

    def _settle(self, opened: list["_Timed"], until: float, best: list[Found], counts: Counter[str]) -> None:
        """Put the candidates that are faster than `until` among the best if they are and fit, the fastest first."""
        while opened and opened[0].seconds < until:
            candidate = heappop(opened)
            if candidate.seconds > self._slowest(best):
                counts["estimated"] += 1
            elif (memory := self._fitting(candidate)) is None:
                candidate.too_large.append(candidate.job)
                counts["too large"] += 1
            else:
                counts["estimated"] += 1
                insort(best, Found(candidate.job, candidate.parts, memory), key=lambda found: found.order)
                del best[BEST:]

    def _fitting(self, candidate: "_Timed") -> int | None:
        """Bytes that a candidate takes; None if it does not fit."""
        job = candidate.job
        if self.prunes and any(_shards_less(job, other) for other in candidate.too_large):
            return None
        sizes = mesh_sizes(job, self.ranks)
        ranks = [_WithLeastBlocks(job, sizes, "cuda", rank, least=self._blocks(job)) for rank in distinct_ranks(job)]
        if self.prunes and largest(ranks).device > self.limit:  # before blocks are traced on this mesh
            return None
        memory = self._memory(job, sizes)
        return memory if memory <= self.limit else None

    def _memory(self, job: Config, sizes: MeshSizes) -> int:
        """Bytes at the peak of the stage that takes the most."""
        return max(estimate_memory(stage, sizes, "cuda").device for stage in (job, *self.later_of(job)))

    # ------------------------------------------------------------------------- candidates

    def later_of(self, job: Config) -> Iterator[Config]:
        """The later stages under a candidate's machine keys."""
        tables = {name: getattr(job, name) for name in _TABLES}
        own = self.config.training.micro_batch_size
        for stage in self.later:
            training = stage.training
            if training.micro_batch_size in (own, "auto"):  # it has none of its own
                training = training.model_copy(update={"micro_batch_size": job.training.micro_batch_size})
            yield stage.model_copy(update=tables | {"training": training})

    def _branches(self) -> Iterator[_Branch]:
        for mesh in self._meshes():
            dp = mesh.dp_replicate * mesh.dp_shard
            for micro_batch in self._micro_batches(dp):
                training = self.config.training.model_copy(update={"micro_batch_size": micro_batch})
                others = self._pipelines(mesh.pp), self._recomputations, self._contexts(mesh.cp)
                for pipeline, way, context in product(*others):
                    tables = {"pipeline": pipeline, "activation_checkpoint": way, "context": context}
                    job = self._with(mesh=mesh, training=training, **tables)
                    jobs = (job, *self.later_of(job))
                    if not any(check(stage, self.ranks) or not fits_teacher(stage) for stage in jobs):
                        for comm in self._comms(mesh.tp):  # on which no rule between keys depends
                            each = job.model_copy(update={"comm": comm})
                            yield _Branch(each, self._least_seconds(each))

    def _meshes(self) -> Iterator[Mesh]:
        """The meshes without replicas that the rules allow, with what else asks least of a mesh."""
        of_model = is_described(self.config.model)
        experts = self.config.model.n_experts or 1 if of_model else 1
        cps = [self.config.mesh.cp] if "mesh.cp" in self._fixed else _divisors(self.ranks)
        tps = _divisors(self.ranks)
        if not of_model:  # whose time is estimated without them
            cps = tps = [1]
        by_owner = self.config.fsdp.partition == "owner"
        for tp, cp, pp in product(tps, cps, _divisors(self.ranks)):
            dp, rest = divmod(self.ranks, tp * cp * pp)
            for ep in _divisors(experts) if not rest else ():
                axes = {"dp_replicate": dp, "dp_shard": 1} if by_owner else {"dp_replicate": 1, "dp_shard": dp}
                mesh = Mesh(**axes, cp=cp, tp=tp, pp=pp, ep=ep)
                least = min(self._micro_batches(dp), default=0)
                training = self.config.training.model_copy(update={"micro_batch_size": least})
                plain = {"pipeline": Pipeline(schedule="gpipe"), "activation_checkpoint": ActivationCheckpoint()}
                jobs = (self._with(mesh=mesh, training=training, context=each, **plain) for each in self._contexts(cp))
                if least and any(not check(job, self.ranks) for job in jobs):
                    yield mesh

    def _micro_batches(self, dp: int) -> list[int]:
        batch = self.config.training.global_batch_size
        if batch % dp:
            return []
        asked = [micro_batch_size(self.config.training)] if "training.micro_batch_size" in self._fixed else None
        return [size for size in asked or _divisors(batch // dp) if (batch // dp) % size == 0]

    def _pipelines(self, pp: int) -> list[Pipeline]:
        """The schedules; stages per rank are powers of two. The job's own table has its own split of the layers."""
        if pp == 1:
            return [self.config.pipeline]
        stages = [2**n for n in range(1, (self.config.model.n_layers // pp).bit_length())]
        own = [self.config.pipeline] if pp == self.config.mesh.pp else []
        plain = [Pipeline(schedule=name) for name in ("gpipe", "1f1b", "zero_bubble_v")]
        interleaved = [Pipeline(schedule="interleaved_1f1b", stages_per_rank=n) for n in stages]
        return [*own, *(each for each in plain + interleaved if each not in own)]

    @cached_property
    def _recomputations(self) -> list[ActivationCheckpoint]:
        """The job's own way to checkpoint, those among which `memory_limit_gib` chooses, and two on half the layers."""
        own = self.config.activation_checkpoint
        own_ways = [] if own.memory_limit_gib else [own]
        found = list(ways(self.config))
        whole = ActivationCheckpoint(mode="selective"), ActivationCheckpoint(mode="full")
        found += [way.model_copy(update={"every_nth_layer": 2}) for way in whole if self.config.model.n_layers > 1]
        return [*own_ways, *(way for way in found if way not in own_ways)]

    def _contexts(self, cp: int) -> list[Context]:
        """The ways to exchange tokens. Where `mesh.cp` is a run key, so is which tokens a rank has."""
        own = self.config.context
        if cp == 1 or "mesh.cp" in self._fixed:
            return [own]
        others = [own.model_copy(update={"method": method}) for method in ("gather", "ring", "all_to_all")]
        return [own, *(each for each in others if each != own)]

    def _comms(self, tp: int) -> list[Comm]:
        """The tables with and without `async_tp`, which the compiler makes between the GPUs of a host."""
        own = self.config.comm
        if tp == 1 or tp > self.gpus_per_host or not self.config.compile.enable:
            return [own]
        return [own, own.model_copy(update={"async_tp": not own.async_tp})]

    def _members(self, job: Config) -> Iterator[Config]:
        """The candidates of a branch: what FSDP keeps gathered, and over how many ranks it shards."""
        if job.fsdp.partition == "owner":
            yield job
            return
        mesh = job.mesh
        for replicas, fsdp in product(_divisors(mesh.dp_shard), self._shardings(job)):
            shard = mesh.dp_shard // replicas
            if shard * mesh.cp % mesh.ep == 0:
                axes = mesh.model_copy(update={"dp_replicate": replicas, "dp_shard": shard})
                yield job.model_copy(update={"mesh": axes, "fsdp": fsdp})

    def _shardings(self, job: Config) -> list[Fsdp]:
        """The ways to shard that differ on this mesh."""
        changes: list[dict] = [{"zero_stage": 3, "reshard_after_forward": "default"}]
        if job.mesh.pp == 1 or job.pipeline.schedule != "zero_bubble_v":
            changes.append({"zero_stage": 3, "reshard_after_forward": "always"})
        if self.ranks > 1 and job.mesh.pp == 1:  # with a pipeline, parameters stay and gradients wait anyway
            changes.append({"zero_stage": 1, "reshard_after_forward": "default"})
            changes.append({"zero_stage": 2, "reshard_after_forward": "default"})
        return [self.config.fsdp.model_copy(update={"accumulate": "reduce_every"} | change) for change in changes]

    @cached_property
    def _fixed(self) -> tuple[str, ...]:
        """Machine keys that the job's run keys make run keys."""
        return further_run_keys(self.config.model_dump())

    def _with(self, **tables: Table) -> Config:
        """The job with other tables, and parameters sharded over as many ranks as they can be."""
        fsdp = self.config.fsdp
        if fsdp.partition == "rows":
            plain = {"zero_stage": 3, "reshard_after_forward": "default", "accumulate": "reduce_every"}
            fsdp = fsdp.model_copy(update=plain)
        return self.config.model_copy(update={"fsdp": fsdp} | tables)

    # ------------------------------------------------------------------------- bounds

    def _least_seconds(self, job: Config) -> float:
        """The slowest rank has at least the mean of all layers' work, and waits while the pipeline fills and drains."""
        sizes = mesh_sizes(job, self.ranks)
        key = self._key_of_layers(job)
        if key not in self._seconds:
            self._seconds[key] = seconds_of_layers(job, replace(sizes, pp=1), self.device, self.gpus_per_host)
        micro_batches = accumulation_steps(job, sizes)
        waits = 0 if job.pipeline.schedule == "zero_bubble_v" else (sizes.pp - 1) / stages_per_rank(job)
        return self._seconds[key] * (micro_batches + waits) / sizes.pp * (1 - 1e-9)  # sums in another order

    def _key_of_layers(self, job: Config) -> tuple:
        """The same for candidates whose layers take equally long."""
        mesh = job.mesh
        way = job.activation_checkpoint.model_dump_json()
        exchange = job.context.method, job.comm.async_tp
        return mesh.tp, mesh.cp, mesh.ep, job.training.micro_batch_size, way, exchange

    def _least_memory(self, job: Config) -> float:
        """States spread over all ranks, activations that wait (tp x cp ranks hold all), and a pipeline's gradients."""
        sizes = mesh_sizes(job, self.ranks)
        blocks = self._blocks(job)
        micro_batches = accumulation_steps(job, sizes)
        waits_for_all = micro_batches > 1 and sizes.pp > 1 and reduces_once(job)
        most = 0.0
        for rank, layers in enumerate(self._layers_of_ranks(job)):
            kept = [0 if self._freezes else blocks[layer].kept for layer in layers]
            passes = stages_in_flight(job, rank, micro_batches) / stages_per_rank(job) if sizes.pp > 1 else 1
            waiting = (passes * sum(kept) - max(kept)) * micro_batch_size(job.training) / (sizes.tp * sizes.cp)
            elements = sum(self._elements[layer] for layer in layers) / (sizes.tp * sizes.ep)
            unsharded = elements * BYTES[job.training.reduce_dtype] * waits_for_all
            most = max(most, waiting + unsharded)  # the last layer's activations may be freed by then
        return most + (0 if job.fsdp.cpu_offload else self._states / self.ranks)

    def _blocks(self, job: Config) -> dict[int, BlockMemory]:
        """What blocks take on a single rank; a part of a mesh is not below that over the ranks that divide them."""
        way = job.activation_checkpoint.model_dump_json()
        if way not in self._whole:
            alone = job.model_copy(update={"mesh": Mesh()})
            self._whole[way] = measure_blocks(alone, range(job.model.n_layers), MeshSizes(1, 1, 1), True)
        return self._whole[way]

    def _layers_of_ranks(self, job: Config) -> list[list[int]]:
        key = (job.mesh.pp, job.pipeline.model_dump_json())
        if key not in self._layers:
            self._layers[key] = [layers_of_rank(job, rank) for rank in range(job.mesh.pp)]
        return self._layers[key]

    @cached_property
    def _elements(self) -> list[int]:
        """Elements of each layer; none where some are frozen."""
        model = skeleton(self.config.model)
        layers = range(self.config.model.n_layers)
        return [0 if self._freezes else sum(prod(model.shapes[name]) for name in model.of_block(n)) for n in layers]

    @cached_property
    def _states(self) -> int:
        return checkpoint_bytes(self.config)

    @cached_property
    def _freezes(self) -> bool:
        return any(group.freeze for group in self.config.optimizer.groups)


def _shards_less(job: Config, other: Config) -> bool:
    """Whether a job of the same branch shards alike, over as few ranks or fewer."""
    return job.fsdp == other.fsdp and job.mesh.dp_replicate >= other.mesh.dp_replicate


def _divisors(n: int) -> list[int]:
    return [k for k in range(1, n + 1) if n % k == 0]
