"""What learns: the model with its optimizer and loss, and one optimizer step of them.

The loss is the mean over all valid target tokens of the global batch. Their number is known before the first
backward pass, so each micro-batch adds its tokens' share and nothing depends on how the batch was cut. A step whose
loss or gradient norm is not finite changes nothing, on all ranks alike, since both numbers are the same everywhere.
"""

import math
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from configs.schema import Config
from models import build_model
from parallelisms.grad_norm import clip_grad_norm
from parallelisms.init import materialize
from parallelisms.mesh import Mesh
from parallelisms.parallelize import parallelize
from parallelisms.passes import Call, OneByOne, Passes
from parallelisms.pipeline import Pipeline
from trainer.data.loader import IGNORED, MicroBatch
from trainer.loss import CrossEntropy
from trainer.optimizer import build_optimizer, optimizer_state, set_lr


@dataclass(frozen=True)
class StepResult:
    """What a step did; the same on all ranks."""

    loss: float
    """Mean over the global batch's valid target tokens, in nats."""
    grad_norm: float
    """Global norm before clipping."""
    skipped: bool
    """The loss or the norm was not finite, and so no parameter changed."""


@dataclass(frozen=True)
class Learner:
    """Model, optimizer and loss on this rank's place in the mesh."""

    config: Config
    mesh: Mesh
    parameters: dict[str, nn.Parameter]
    """This rank's, or its shards of them: those of the whole model, or of its pipeline stages."""
    passes: Passes
    optimizer: Optimizer
    loss: CrossEntropy

    def step(self, micro_batches: list[MicroBatch], lr: float) -> StepResult:
        """Update the model by this rank's share of a global batch; all ranks must call it."""
        valid_tokens = self._valid_tokens(micro_batches)
        scale = self.mesh.sizes.dp / valid_tokens  # FSDP averages gradients over the ranks; their sum is wanted
        total = self.passes.train([self._call(batch, self.loss) for batch in micro_batches], scale)
        grad_norm = self._clip()
        result = _result(self.mesh.sum_over_dp(total) / valid_tokens, grad_norm)
        if not result.skipped:
            set_lr(self.optimizer, lr)
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return result

    def evaluate(self, micro_batches: list[MicroBatch]) -> Tensor:
        """(sum of the cross-entropy, valid tokens) over this rank's micro-batches, float64, (2,)."""
        cross_entropy = replace(self.loss, z_loss_weight=0.0)
        loss_sum = self.passes.evaluate([self._call(batch, cross_entropy) for batch in micro_batches])
        return torch.stack((loss_sum, loss_sum.new_tensor(_count_valid(micro_batches))))

    def state(self) -> dict[str, Tensor]:
        """Everything a checkpoint holds in tensors, by name; loading into them in place restores it.

        To be asked for anew each time: FSDP pads its shards at the first forward pass, which gives them new memory.
        """
        model = {f"model.{name}": parameter.detach() for name, parameter in self.parameters.items()}
        return model | optimizer_state(self.optimizer, self.parameters)

    def _call(self, batch: MicroBatch, loss: CrossEntropy) -> Call:
        batch = batch.to(self.mesh.device)
        positions = batch.positions
        if positions is None:  # a later pipeline stage sees no tokens to count
            positions = torch.arange(batch.tokens.shape[1], device=self.mesh.device)[None]
        of_targets = partial(loss, targets=batch.targets)
        return Call(batch.tokens, {"positions": positions, "document_ids": batch.document_ids, "loss": of_targets})

    def _clip(self) -> Tensor:
        """Clip the gradients; returns their norm before."""
        training, pipeline = self.config.training, self.mesh.pp.get_group()
        return clip_grad_norm(self.parameters.values(), training.max_norm, training.norm_type, pipeline)

    def _valid_tokens(self, micro_batches: list[MicroBatch]) -> Tensor:
        """Target tokens of the global batch that count; a float64 scalar: exact, and every backend can add it up."""
        count = torch.tensor(_count_valid(micro_batches), dtype=torch.float64, device=self.mesh.device)
        return self.mesh.sum_over_dp(count)


def build_learner(config: Config, mesh: Mesh) -> Learner:
    """Build the model without memory, cut it over the mesh, then give each rank its shard's initial weights."""
    with torch.device("meta"):
        model = build_model(config.model).to(getattr(torch, config.training.dtype))
    names = [name for name, _ in model.named_parameters()]
    stages = parallelize(model, mesh, config)
    for stage in stages.values():
        materialize(stage, mesh.device, config.training.seed, offload=config.fsdp.cpu_offload)
    parameters = {name: parameter for stage in stages.values() for name, parameter in stage.named_parameters()}
    return Learner(
        config=config,
        mesh=mesh,
        parameters=parameters,
        passes=Pipeline(stages, config, mesh) if mesh.sizes.pp > 1 else OneByOne(stages[0], config.fsdp),
        optimizer=build_optimizer(config.optimizer, list(parameters.items()), names),
        loss=CrossEntropy(
            z_loss_weight=config.training.z_loss_weight,
            compile=config.compile.enable,
            repeatable=config.pipeline.schedule == "zero_bubble_v" and mesh.sizes.pp > 1,
        ),
    )


def _count_valid(micro_batches: list[MicroBatch]) -> int:
    """Target tokens that count."""
    return sum(int((batch.targets != IGNORED).sum()) for batch in micro_batches)


def _result(loss: Tensor, grad_norm: Tensor) -> StepResult:
    # The one point at which the CPU waits for the device: whether to update must be known before the update.
    loss_value, norm_value = torch.stack((loss, grad_norm.to(loss))).tolist()
    return StepResult(loss_value, norm_value, skipped=not (math.isfinite(loss_value) and math.isfinite(norm_value)))
