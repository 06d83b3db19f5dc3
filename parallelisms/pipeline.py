"""Pipeline parallelism: each rank holds some of the layers, and micro-batches flow through the ranks.

`gpipe` (Huang et al. 2019) runs all forward passes, then all backward passes. `1f1b` (Narayanan et al. 2019) alternates
them and so keeps the activations of at most as many micro-batches as there are ranks. `interleaved_1f1b` (Narayanan et
al. 2021, section 2.2) gives each rank several stages. `zero_bubble_v` (Qi et al. 2023, section 6) gives each rank two
stages, placed in a V (down the ranks and back up), and computes weight gradients where ranks would otherwise wait. The
schedules are those of `torch.distributed.pipelining`.

A stage is a model of the same class with parts missing, whose parameters keep their names: initial weights, optimizer
groups and checkpoints fit any number of stages. A matrix that embedding and head share is on both ends (`ties.py`).
Gradients are reduced over the data-parallel ranks once per step: the stages keep their parameters gathered and their
gradients unsharded until the last micro-batch is through.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from configs.errors import UserError
from configs.layout import accumulation_steps, micro_batch_size
from configs.plan import plan_of
from configs.schema import Config
from configs.stages import layers_of_stages, n_stages, rank_of_stage, stages_of_rank
from parallelisms.fsdp import reshard
from parallelisms.mesh import Mesh
from parallelisms.passes import Call, Prepare, as_it_is
from parallelisms.sums.fast import Reduction
from parallelisms.torch_internals import has_zero_bubble

_SCHEDULES: dict[str, Callable[..., Any]] = {
    "gpipe": lambda stages, **settings: ScheduleGPipe(stages[0], **settings),
    "1f1b": lambda stages, **settings: Schedule1F1B(stages[0], **settings),
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "zero_bubble_v": ScheduleZBVZeroBubble,
}


def own_stages(model: nn.Module, config: Config, rank: int) -> dict[int, nn.Module]:
    """A pipeline rank's stages of a model on the meta device, by number; the model itself if there is one stage."""
    layers = layers_of_stages(config)
    if len(layers) == 1:
        return {0: model}
    return {stage: _cut(deepcopy(model), layers[stage]) for stage in stages_of_rank(config, rank)}


def _cut(model: nn.Module, layers: range) -> nn.Module:
    """Remove from a whole model everything that the stage with these layers does not hold."""
    plan = plan_of(model)
    gone = [name for number, name in enumerate(plan.blocks) if number not in layers]
    is_last = layers.stop == plan.n_blocks
    if layers.start > 0:
        gone += [name for name in plan.before_blocks if not (is_last and name in plan.tied)]
    gone += () if is_last else plan.after_blocks
    leave_out = getattr(model, "leave_out", None)
    if leave_out is not None:
        leave_out(gone)
        return model
    for name in gone:
        parent, _, child = name.rpartition(".")
        owner = model.get_submodule(parent)
        if isinstance(owner, nn.ModuleDict):
            del owner[child]
        else:
            setattr(owner, child, None)
    return model


class Relay:
    """Forward passes alone: each micro-batch goes through all stages before the next one."""

    def __init__(self, stages: Mapping[int, nn.Module], config: Config, mesh: Mesh) -> None:
        """stages: those of this rank, by number; without a pipeline, the model is stage 0."""
        self._modules = stages
        self._mesh = mesh
        self._n_stages = n_stages(config)
        self._owners = [rank_of_stage(config, stage) for stage in range(self._n_stages)]
        self._dim = config.model.dim
        self._dtype = getattr(torch, config.training.compute_dtype)
        self._parts = _sequence_parts(stages.values(), mesh)

    def __call__(self, call: Call) -> Iterable[Tensor]:
        """Run a micro-batch through this rank's stages; yields the loss if the last stage is among them."""
        x = call.tokens
        for number, module in self._modules.items():
            if number > 0 and self._owners[number - 1] != self._mesh.pp.get_local_rank():
                n, seq_len = call.tokens.shape
                shape = (n, seq_len // self._parts, self._dim)
                x = torch.empty(shape, dtype=self._dtype, device=self._mesh.device)
                dist.recv(x, group=self._mesh.pp.get_group(), group_src=self._owners[number - 1])
            x = module(x, **call.arguments)
            if number == self._n_stages - 1:
                yield x
            elif self._owners[number + 1] != self._mesh.pp.get_local_rank():
                dist.send(x, group=self._mesh.pp.get_group(), group_dst=self._owners[number + 1])


def _sequence_parts(stages: Iterable[nn.Module], mesh: Mesh) -> int:
    """Parts into which tensor parallelism splits the sequence between the stages."""
    return 1 if any(plan_of(module).keeps_sequences_whole for module in stages) else mesh.sizes.tp


class Pipeline:
    """Runs micro-batches through the pipeline's stages; implements `Passes`."""

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        config: Config,
        mesh: Mesh,
        reductions: Mapping[int, Reduction],
        before: Sequence[Callable[[], None]] = (),
        prepare: Prepare = as_it_is,
    ) -> None:
        """Build the schedule of this rank's `stages`, with parameters in memory and every other technique applied.

        Args:
            stages, config, mesh: the stages by number, the job and its mesh.
            reductions: sum the gradients of each stage.
            before: what forward hooks of a stage do before its parameters are gathered. A schedule of several stages
                per rank gathers them before any hook runs, so it begins by calling these.
            prepare: called with each micro-batch before the first one's forward pass.

        Raises:
            UserError: the installed torch does not support the schedule.
        """
        if config.pipeline.schedule == "zero_bubble_v" and not has_zero_bubble():
            raise UserError(
                f'pipeline.schedule = "zero_bubble_v" needs torch 2.13 or later, and this is {torch.__version__}; '
                'install that, or set pipeline.schedule = "interleaved_1f1b"'
            )
        # Since torch 2.15 a stage advises the backend "nccl-lazy", whatever "nccl" is; KNOWN_BACKEND is as lazy.
        logging.getLogger("torch.distributed.pipelining._p2p").setLevel(logging.ERROR)
        self._modules = stages
        self._mesh = mesh
        self._before = before if len(stages) > 1 else ()
        self._prepare = prepare
        self._forward = Relay(stages, config, mesh)
        self._n_stages = n_stages(config)
        training = config.training
        self._hidden = torch.empty(
            (
                micro_batch_size(training),
                training.seq_len // mesh.sizes.cp // _sequence_parts(stages.values(), mesh),
                config.model.dim,
            ),
            dtype=getattr(torch, training.compute_dtype),
            device="meta",
            requires_grad=True,
        )
        self._stages = [self._stage(number, module, reductions[number]) for number, module in stages.items()]
        self._schedule = _SCHEDULES[config.pipeline.schedule](
            self._stages,
            n_microbatches=accumulation_steps(config, mesh.sizes),
            loss_fn=torch.mul,  # the schedule calls it with a micro-batch's loss and its "target", here the scale
            scale_grads=False,
        )

    def _stage(self, number: int, module: nn.Module, reduction: Reduction) -> PipelineStage:
        # With the shapes given, torch does not have to run the model once to find them.
        tokens = torch.empty(self._hidden.shape[:2], dtype=torch.int64, device="meta")
        loss_dtype = torch.promote_types(self._hidden.dtype, torch.float32)  # torch 2.11 checks it
        loss = torch.empty((), dtype=loss_dtype, device="meta", requires_grad=True)
        return reduction.pipeline_stage(
            module,
            number,
            self._n_stages,
            self._mesh.device,
            input_args=tokens if number == 0 else self._hidden,
            output_args=loss if number == self._n_stages - 1 else self._hidden,
            group=self._mesh.pp.get_group(),
        )

    def train(self, calls: Sequence[Call], scale: Tensor) -> Tensor:
        """Implement `Passes.train`."""
        calls = [self._prepare(call) for call in calls]
        for act in self._before:
            act()
        for stage in self._stages:
            stage.has_backward = True
            stage.clear_runtime_states()
        scaled_losses: list[Tensor] = []
        # The schedule's `step` without its splitting of a batch into micro-batches: they are split already.
        self._schedule._step_microbatches(
            arg_mbs=[(call.tokens,) for call in calls],
            kwarg_mbs=[call.arguments for call in calls],
            target_mbs=[scale] * len(calls),
            losses=scaled_losses,
            return_outputs=False,
        )
        losses = [loss.detach() / scale for loss in scaled_losses] or [torch.zeros_like(scale)] * len(calls)
        return self._mesh.sum_over_pp(torch.stack(losses))

    @torch.no_grad()
    def evaluate(self, calls: Sequence[Call]) -> Tensor:
        """Implement `Passes.evaluate`."""
        losses = [output for call in calls for output in self._forward(call)]
        for module in self._modules.values():
            reshard(module)
        return self._sum(losses)

    def _sum(self, losses: Iterable[Tensor]) -> Tensor:
        """The sum of the last stage's losses, on all ranks of the pipeline."""
        total = torch.zeros((), dtype=torch.float64, device=self._mesh.device)
        for loss in losses:
            total += loss
        return self._mesh.sum_over_pp(total)
