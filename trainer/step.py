"""The learner: the model with its optimizer and loss, and one optimizer step.

The loss is the mean over all valid target tokens of the global batch. Their number is known before the first backward
pass, so each micro-batch adds its tokens' share, and the result does not depend on how the batch was split. If a step's
loss or gradient norm is not finite on any rank, or its loss is above a limit, no rank updates (`guards/verdict.py`).
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from checkpoint.reader import AVERAGE, OPTIMIZER
from configs.architectures import own_weights
from configs.architectures.llama_keys import n_further
from configs.architectures.mup import eps_scale, lr_scale
from configs.architectures.parts import head_dim
from configs.layout import buffer_factor
from configs.own_code import is_import_path
from configs.plan import plan_of
from configs.schema import Config, Optimizer, is_described
from configs.stages import n_stages
from models.documents import Documents
from models.llama import Llama
from parallelisms.attention.context import shard_batch
from parallelisms.compile import allow_graphs, compiler_options
from parallelisms.compute_copies import ComputeCopies, computes_with_copies, keeps_copies
from parallelisms.expert import Buffers
from parallelisms.float8 import gather_in_8_bits
from parallelisms.fsdp import freeze
from parallelisms.guards.fingerprint import GradientFingerprint, fingerprint_of
from parallelisms.guards.order_guard import OrderGuard
from parallelisms.guards.replicas import Replica, replicas_on
from parallelisms.init import materialize
from parallelisms.load_balance import LoadBalance, apply_load_balance
from parallelisms.mesh import Mesh, groups_of_axes
from parallelisms.owner_partition import by_holders
from parallelisms.passes import Call, OneByOne, Passes, as_it_is
from parallelisms.pipeline import Pipeline
from parallelisms.ranges import named_range
from parallelisms.streams import queue_gathers
from parallelisms.sums import Sums, sums_of
from parallelisms.ties import TiedEnds
from trainer.average import WeightAverage, average_of
from trainer.data.loader import IGNORED, MicroBatch
from trainer.guards.verdict import QueuedStep, judge
from trainer.loss import CrossEntropy
from trainer.multi_token import FurtherLosses
from trainer.optimizers.build import (
    WidthScale,
    build_optimizer,
    frozen_until,
    optimizer_state,
    rule_name,
    saved_weights,
    set_groups,
    skips_on_device,
)
from trainer.optimizers.qk_clip import QkClip
from trainer.optimizers.training import OwnerOptimizer, TrainingOptimizer, joined
from trainer.planning.by_memory import choice_by_memory, chosen
from trainer.stages import build_stages, saved_buffers
from trainer.teacher import Teacher


@dataclass
class Learner:
    """Model, optimizer and loss on this rank's place in the mesh."""

    config: Config
    """The keys of the present stage of the run."""
    mesh: Mesh
    stages: dict[int, nn.Module]
    """This rank's pipeline stages by number; without a pipeline, stage 0 is the whole model."""
    parameters: dict[str, nn.Parameter]
    """Parameters of these stages by name, each the rank's shard or whole; what the optimizer updates."""
    passes: Passes
    sums: Sums
    optimizer: TrainingOptimizer
    average: WeightAverage | None
    """Kept as [average] says; None: no average."""
    loss: CrossEntropy
    load_balance: LoadBalance
    qk_clip: QkClip | None
    """Scales the weights of queries and keys whose logits were too large; None: they are left alone."""
    further_losses: FurtherLosses
    teacher: Teacher | None
    """The model that this one learns from; None: it learns from the text alone."""
    guard: OrderGuard
    frozen_until: dict[str, float]
    """Returned by `optimizer.frozen_until`."""
    ties: TiedEnds | None
    """The matrices on both ends of a pipeline; None without."""
    fingerprint: GradientFingerprint | None
    """Takes the fingerprints that `metrics.fingerprint` records; None: no fingerprints."""
    model_names: Sequence[str]
    """Names of the whole model's parameters."""
    buffers: Buffers | None
    """The buffers in which rows reach the experts; None: their splits are uneven."""
    make_passes: Callable[[Config], Passes]
    """Makes `passes`, whose buffers and schedule depend on the length and number of sequences."""

    def begin_stage(self, config: Config) -> None:
        """Go on with the keys of another stage of the run, between two steps; the rest of `config` is as before."""
        self.config = config
        self.passes = self.make_passes(config)
        self.loss = replace(self.loss, z_loss_weight=config.training.z_loss_weight)
        self.optimizer.max_norm = config.training.max_norm
        scales = width_scales(config, _hidden_matrices(self.stages.values(), config))
        set_groups(self.optimizer, config.optimizer, list(self.parameters.items()), self.model_names, scales)
        self.frozen_until = frozen_until(config.optimizer, self.model_names)
        for stage in self.stages.values():
            apply_load_balance(stage, self.mesh, config)
            if isinstance(stage, Llama) and is_described(config.model):
                stage.set_rope(config.model)

    def freeze(self, step: int) -> None:
        """Freeze the parameters that the next step, after `step` steps, does not train; unfreeze the others."""
        frozen = self.frozen(step)
        if any(parameter.requires_grad == (name in frozen) for name, parameter in self.parameters.items()):
            freeze(self.stages.values(), self.parameters, frozen)

    def frozen(self, step: int) -> frozenset[str]:
        """Names of the whole model's parameters that are frozen in the next step after `step` steps."""
        return frozenset(name for name, until in self.frozen_until.items() if step < until)

    def step(self, micro_batches: list[MicroBatch], lr: float) -> QueuedStep:
        """Queue a whole step: gradients, verdict and update, between which a trainer does other work."""
        step = self.judge(micro_batches, self.gradients(micro_batches))
        self.update(step, lr)
        return step

    def gradients(self, micro_batches: list[MicroBatch], in_buffers: bool = False) -> tuple[Tensor, Tensor]:
        """Add a global batch's gradients to the parameters; all ranks must call it.

        On a GPU this queues the work, and does not wait for it; the same is true of `judge` and `update`.

        Args:
            micro_batches: this rank's share.
            in_buffers: whether rows reach the experts in the job's buffers, if it has any, which may be too small:
                then the step must be computed again without.

        Returns:
            The batch's loss (float64) and the norm of its gradients, scalars.
        """
        buffers = self.buffers.used(in_buffers) if self.buffers else nullcontext()
        with self.guard.watch(), buffers:
            parts = self.own_part(micro_batches)
            # The number of valid targets in the global batch, by which every micro-batch's loss is divided.
            valid_tokens = self._valid_tokens(parts)
            calls = [self.call(part, self.loss, is_training=True) for part in parts]
            losses = self.passes.train(calls, 1.0 / valid_tokens)
            if self.ties:
                # Between the first and the last stage.
                self.ties.add_gradients()
            # The sum over all shards of the gradients.
            norm = self.grad_norm()
            # The sum over all ranks and micro-batches.
            loss = self.sums.loss_sum(losses, self.config.training.compute_dtype, self.mesh)
            return loss / valid_tokens, norm

    def judge(
        self,
        micro_batches: list[MicroBatch],
        gradients: tuple[Tensor, Tensor],
        loss_limit: float = math.inf,
        is_stopping: bool = False,
        number: int = 0,
        details: Tensor | None = None,
    ) -> QueuedStep:
        """Let all ranks agree whether a step's gradients may update the model; all ranks must call it.

        Args:
            micro_batches: this rank's share of the step.
            gradients: returned by `gradients`.
            loss_limit: a loss above it is a spike, which updates nothing.
            is_stopping: whether this rank was told to stop.
            number: the step's, which chooses the gradients that its fingerprint samples.
            details: measurements that come with the result.

        Raises:
            UserError: the ranks issued different collectives, or in a different order.
        """
        with self.guard.watch():
            sums = None
            if self.fingerprint:
                sums = self.fingerprint.sums(number, sum(batch.digest() for batch in micro_batches))
            missing = self.buffers.missing() if self.buffers else None
            step = judge(self.mesh, micro_batches, gradients, loss_limit, is_stopping, missing, sums, details)
            self.guard.compare()
            return step

    def update(self, step: QueuedStep, lr: float) -> None:
        """Update the model by a step's gradients, unless the verdict is to skip it; all ranks must call it.

        Until then, `state` is the last step's.
        """
        with self.guard.watch(), named_range("update"):
            if self.qk_clip:
                # The maximum over the ranks of a pipeline stage.
                self.qk_clip.begin_update(step.skip)
            self.optimizer.update(step, lr)
        self.guard.finish_step()
        self.finish(step.skip)

    def update_average(self, number: int, skip: Tensor) -> None:
        """Move the average of the weights, if there is one, after the update of step `number`."""
        if self.average:
            self.average.update(number, skip)

    def take_back(self, step: QueuedStep, number: int) -> None:
        """Forget step `number`, which changed no parameter; it will be computed again."""
        self.forget_gradients()
        self.freeze(number - 1)
        if self.average:
            self.average.take_back(number)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Have the weights' average in place of the weights inside; all ranks must call it, and none may save there."""
        self._exchange_average()
        try:
            yield
        finally:
            self._exchange_average()

    def _exchange_average(self) -> None:
        assert self.average is not None
        self.finish_update()
        self.average.exchange()
        self._weights_changed()

    def finish(self, skip: Tensor) -> None:
        """Free the gradients and the other leftovers of a step, which changed nothing if `skip` is 1."""
        self.load_balance.finish_step(skip)
        self.further_losses.finish_step()
        if self.teacher:
            self.teacher.finish_step()
        self.forget_gradients()

    def forget_gradients(self) -> None:
        """Free the gradients, and all that their passes have noted; to `measure`, the last step remains the last."""
        self.optimizer.zero_grad(set_to_none=True)
        self.load_balance.forget()
        self.further_losses.forget()
        if self.teacher:
            self.teacher.forget()
        if self.qk_clip:
            self.qk_clip.forget()

    def measure(self) -> dict[str, Any]:
        """What the last step says of the model's own mechanisms, by key of `StepMetrics`; all ranks must call it."""
        balance = self.load_balance.measure()
        return {
            **(vars(balance) if balance else {}),
            "multi_token_losses": self.further_losses.measure(),
            "distillation_loss": self.teacher.measure() if self.teacher else None,
            "max_attention_logit": self.qk_clip.measure() if self.qk_clip else None,
        }

    def evaluate(self, micro_batches: list[MicroBatch], token_bytes: Tensor | None) -> Tensor:
        """Evaluate this rank's share: (sum of cross-entropy, valid tokens, their bytes of text), float64, (3,).

        Args:
            micro_batches: as for `step`.
            token_bytes: (vocab,) bytes of text of each token; None: not counted.
        """
        micro_batches = self.own_part(micro_batches)
        loss_sum = self.passes.evaluate([self.call(batch, self.loss) for batch in micro_batches])
        n_bytes = 0 if token_bytes is None else sum(int(token_bytes[_valid(batch)].sum()) for batch in micro_batches)
        return torch.stack((loss_sum, *loss_sum.new_tensor([_count_valid(micro_batches), n_bytes])))

    def state(self) -> dict[str, Tensor]:
        """All tensors of a checkpoint, by name; to restore, load into them in place and call `was_loaded`.

        Call it each time: FSDP pads its shards in the first forward pass, which moves them to new memory.
        """
        weights = saved_weights(self.optimizer, self.parameters)
        model = {f"model.{name}": weight for name, weight in weights.items()}
        buffers = {f"model.{name}": kept for stage in self.stages.values() for name, kept in saved_buffers(stage)}
        average = self.average.state() if self.average else {}
        return model | buffers | optimizer_state(self.optimizer, self.parameters) | average | self.load_balance.state()

    def replicas(self) -> list[Replica]:
        """This rank's replicas of tensors that other ranks hold as well; call it each time, like `state`."""
        self.finish_update()
        state = self.state()
        if self.config.fsdp.partition == "rows":
            return replicas_on(state, self.mesh)
        # If parameters are broadcast rounded, `state` has the owner's master copy under their names.
        parameters = {f"model.{name}": parameter.detach() for name, parameter in self.parameters.items()}
        masters = {f"master.{name}": state[name] for name in parameters.keys() & state.keys()}
        owned = {*masters, *(name for name in state if name.startswith((OPTIMIZER, AVERAGE)))}
        return replicas_on(state | parameters | masters, self.mesh, owned)

    def was_loaded(self) -> None:
        """Send what was loaded into `state` to all ranks that need it; all ranks must call it."""
        if self.average:
            self.average.was_loaded()
        self._weights_changed()

    def _weights_changed(self) -> None:
        self.optimizer.owned_were_loaded()
        self.optimizer.refresh_copies()

    def finish_update(self) -> None:
        """Wait for updated parameters still being sent; otherwise the next forward pass waits."""
        self.optimizer.wait()

    def own_part(self, micro_batches: list[MicroBatch]) -> list[MicroBatch]:
        """The part of its samples that this rank computes: with context parallelism, a part of every sequence."""
        return [shard_batch(batch, self.mesh.cp, self.config.context.method) for batch in micro_batches]

    def call(self, batch: MicroBatch, loss: Callable[..., Tensor], is_training: bool = False) -> Call:
        """The model's inputs for a micro-batch; only in training does it predict further tokens."""
        document_ids = batch.document_ids
        batch = batch.to(self.mesh.device)
        positions = batch.positions
        # A later pipeline stage gets no tokens to count positions from.
        if positions is None and self.mesh.sizes.pp > 1:
            positions = torch.arange(batch.tokens.shape[1], device=self.mesh.device)[None]
        arguments: dict[str, Any] = {"positions": positions, "loss": partial(loss, targets=batch.targets)}
        if is_training and batch.further is not None:
            arguments["further"] = batch.further
        if document_ids is not None:  # torch 2.11's zero-bubble schedules do not accept None
            arguments["documents"] = Documents.find(document_ids).to(self.mesh.device)
        return Call(batch.tokens, arguments)

    def grad_norm(self) -> Tensor:
        """The global norm of the gradients, a scalar; all ranks must call it."""
        own = self.counted.values()
        return self.sums.grad_norm(own, self.config.training.norm_type, self.mesh.pp.get_group())

    @cached_property
    def counted(self) -> dict[str, nn.Parameter]:
        """The parameters without those that another rank of the pipeline holds as well, and counts."""
        copies = self.ties.copies if self.ties else ()
        return {name: parameter for name, parameter in self.parameters.items() if name not in copies}

    def _valid_tokens(self, micro_batches: list[MicroBatch]) -> Tensor:
        """Number of valid target tokens in the global batch; a float64 scalar: exact, and every backend can sum it.

        At least 1: a batch without targets has loss 0.
        """
        # A fill: a copy of the number from the host's pageable memory would wait for the device.
        count = torch.full((), _count_valid(micro_batches), dtype=torch.float64, device=self.mesh.device)
        return self.mesh.sum_over_tokens(count).clamp(min=1.0)


def build_learner(config: Config, mesh: Mesh, later: Sequence[Config] = ()) -> Learner:
    """Build the model on the meta device, parallelize it, then materialize this rank's initial weights.

    Args:
        config: of the run's first stage.
        mesh: where this rank is.
        later: the configs of the other stages, which `Learner.begin_stage` takes.
    """
    choice = choice_by_memory(config, mesh)
    config, *later = (chosen(each, choice) for each in (config, *later))
    stages, model_names = build_stages(config, mesh)
    for stage in stages.values():
        materialize(stage, mesh.device, config.training.seed, offload=config.fsdp.cpu_offload)
    teacher = Teacher(config, mesh) if config.distillation.teacher else None
    return assemble_learner(config, mesh, stages, model_names, later, teacher)


def assemble_learner(
    config: Config,
    mesh: Mesh,
    stages: dict[int, nn.Module],
    model_names: Sequence[str],
    later: Sequence[Config] = (),
    teacher: Teacher | None = None,
) -> Learner:
    """Make the learner from stages of `build_stages` whose parameters are in memory."""
    sums = sums_of(config.training)
    reductions = {number: sums.reduction(stage, config) for number, stage in stages.items()}
    allow_graphs(n_stages=1 + len(later))
    set_scales = gather_in_8_bits(stages.values(), config, mesh)
    queue_gathers(stages.values(), config.comm, mesh.device)
    limit = config.optimizer.qk_clip
    qk_clip = QkClip(limit, stages, config.model.n_heads, mesh) if limit else None
    optimizer = _optimizer(
        config, mesh, list(stages.values()), model_names, [each.optimizer for each in later], qk_clip
    )
    optimizer.max_norm = config.training.max_norm
    optimizer.skips_on_device = skips_on_device(config, mesh.device)

    prepare = teacher.prepare if teacher else as_it_is

    def make_passes(config: Config) -> Passes:
        if mesh.sizes.pp > 1:
            return Pipeline(stages, config, mesh, reductions, [optimizer.wait, *set_scales], prepare)
        return OneByOne(stages[0], config, reductions[0], prepare)

    parameters = {name: p for stage in stages.values() for name, p in stage.named_parameters()}
    until = frozen_until(config.optimizer, model_names)
    trained = {name: p for name, p in parameters.items() if until.get(name) != math.inf}
    learner = Learner(
        config=config,
        mesh=mesh,
        stages=stages,
        parameters=parameters,
        passes=make_passes(config),
        sums=sums,
        optimizer=optimizer,
        average=_average(config, optimizer, trained),
        loss=CrossEntropy(
            z_loss_weight=config.training.z_loss_weight,
            own=config.training.loss if is_import_path(config.training.loss) else "",
            compile=config.compile.enable,
            compiler_options=tuple(compiler_options(config.compile).items()) if config.compile.enable else (),
            repeatable=config.pipeline.schedule == "zero_bubble_v" and mesh.sizes.pp > 1,
        ),
        load_balance=LoadBalance(stages, config, mesh),
        qk_clip=qk_clip,
        further_losses=FurtherLosses(stages.values(), config, mesh),
        teacher=teacher,
        buffers=_buffers(stages.values(), config, mesh),
        guard=OrderGuard(config.comm.order_guard_interval, groups_of_axes(mesh).values()),
        frozen_until=until,
        ties=_tied_ends(config, mesh, stages),
        fingerprint=fingerprint_of(stages.values(), model_names, mesh, config),
        model_names=model_names,
        make_passes=make_passes,
    )
    # Last, because copies take the parameters' places in the modules.
    optimizer.copies = _compute_copies(config, mesh, stages.values())
    learner.freeze(step=0)
    return learner


def _buffers(stages: Iterable[nn.Module], config: Config, mesh: Mesh) -> Buffers | None:
    factor = buffer_factor(config.expert)
    return Buffers(stages, mesh.sizes.ep, factor, mesh.device) if factor else None


def _average(config: Config, optimizer: TrainingOptimizer, trained: dict[str, nn.Parameter]) -> WeightAverage | None:
    """The average of what this rank saves of the parameters that are not always frozen; None if none is kept."""
    if not config.average.interval:
        return None
    return average_of(config.average, partial(saved_weights, optimizer, trained), config.training.seed)


def _tied_ends(config: Config, mesh: Mesh, stages: dict[int, nn.Module]) -> TiedEnds | None:
    """The matrices that both ends of the pipeline use; None if there is no pipeline, or no such matrix."""
    model = config.model
    is_tied = is_described(model) and (model.tie_embeddings or n_further(model))
    if mesh.sizes.pp == 1 or not is_tied:
        return None
    return TiedEnds(stages, n_stages(config), mesh.pp.get_group())


def _compute_copies(config: Config, mesh: Mesh, stages: Iterable[nn.Module]) -> ComputeCopies | None:
    """The copies that the modules compute with from now on; None if FSDP converts, or nothing does."""
    world_size = mesh.sizes.world_size
    if not computes_with_copies(world_size, config):
        return None
    return ComputeCopies(stages, getattr(torch, config.training.compute_dtype), keeps_copies(world_size, config))


def _optimizer(
    config: Config,
    mesh: Mesh,
    stages: Sequence[nn.Module],
    model_names: Sequence[str],
    later: Sequence[Optimizer],
    qk_clip: QkClip | None,
) -> TrainingOptimizer:
    """Build the optimizer for the parameters in `stages`; `model_names` lists all of the model's."""
    sums = sums_of(config.training)
    seed = config.training.seed
    named_parameters = [named for stage in stages for named in stage.named_parameters()]
    hidden = _hidden_matrices(stages, config)
    scales = width_scales(config, hidden)
    build = partial(
        build_optimizer,
        config.optimizer,
        named_parameters,
        hidden,
        later=later,
        width_scales=scales,
        after_step=qk_clip.scale if qk_clip else None,
    )
    if config.fsdp.partition == "rows":
        return build(None, model_names, sums, seed, mesh)
    dtype = config.fsdp.owner_broadcast_dtype

    def assign_owners(groups: list[dict[str, Any]]) -> TrainingOptimizer:
        partitions: list[OwnerOptimizer] = []
        loads = [0]
        # Experts get owners first, since fewer ranks hold them; the others' owners are those that have less of these.
        for ranks, members in sorted(
            by_holders(groups, mesh.tokens.get_group()).items(), key=lambda holders: holders[0].size()
        ):
            spread = [loads[rank * len(loads) // ranks.size()] for rank in range(ranks.size())]
            partition = OwnerOptimizer(members, ranks, getattr(torch, dtype) if dtype else None, loads=spread)
            for stage in stages:
                partition.overlap_forward(stage)
            partitions.insert(0, partition)
            loads = partition.loads
        return joined(partitions)

    return build(assign_owners, model_names, sums, seed)


def _hidden_matrices(stages: Iterable[nn.Module], config: Config) -> dict[str, int]:
    return {name: n for stage in stages for name, n in hidden_matrices(stage, config).items()}


def hidden_matrices(model: nn.Module, config: Config) -> dict[str, int]:
    """The matrices inside the model's blocks, which Muon updates: how many of them each parameter has, by name.

    Rows of a recurrent module's own parameters are filters, whose channels are not mixed, and no matrices.
    """
    split = is_described(config.model) and config.optimizer.split_heads
    plan = plan_of(model)
    in_blocks = tuple(f"{block}." for block in (*plan.blocks, *plan.further_blocks))
    matrices = {}
    for name, parameter in model.named_parameters():
        owner = name.rpartition(".")[0]
        is_stacked = owner in plan.experts
        if name.startswith(in_blocks) and parameter.ndim == 2 + is_stacked and owner not in plan.recurrent:
            matrices[name] = parameter.shape[0] if is_stacked else 1
            if split and _is_of_heads(name):
                matrices[name] = parameter.shape[0] // head_dim(config.model)
    return matrices


def _is_of_heads(name: str) -> bool:
    """Whether each head has some rows of a matrix."""
    return name.split(".")[-2] in ("q_proj", "k_proj", "v_proj")


def width_scales(config: Config, hidden: Collection[str]) -> dict[str, WidthScale]:
    """muP's factors for the model's weights, by name; none without muP.

    Args:
        config: the job.
        hidden: names of the matrices inside the blocks.
    """
    model = config.model
    if not is_described(model) or model.mup_base_dim is None:
        return {}
    scales = {}
    for weight in own_weights(model):
        rule = rule_name(config.optimizer, weight.name in hidden)
        eps = None if rule == "muon" else eps_scale(model, weight)
        by_head = config.optimizer.split_heads and _is_of_heads(weight.name)
        scales[weight.name] = WidthScale(lr_scale(model, weight, rule, by_head), eps)
    return scales


def _valid(batch: MicroBatch) -> Tensor:
    """The valid targets."""
    return batch.targets[batch.targets != IGNORED]


def _count_valid(micro_batches: list[MicroBatch]) -> int:
    return sum(len(_valid(batch)) for batch in micro_batches)
