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
from parallelisms.context import shard_batch
from parallelisms.fsdp import prepare_backward, reshard
from parallelisms.grad_norm import clip_grad_norm
from parallelisms.init import materialize
from parallelisms.mesh import Mesh
from parallelisms.parallelize import parallelize
from parallelisms.plan import plan_of
from parallelisms.zero import OwnerPartition
from trainer.data.loader import IGNORED, MicroBatch
from trainer.loss import CrossEntropy
from trainer.optimizer import build_optimizer, optimizer_state, saved_weights, set_lr


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
    model: nn.Module
    optimizer: Optimizer
    loss: CrossEntropy

    def step(self, micro_batches: list[MicroBatch], lr: float) -> StepResult:
        """Update the model by this rank's share of a global batch; all ranks must call it."""
        micro_batches = self._own_part(micro_batches)
        valid_tokens = self._valid_tokens(micro_batches)
        scale = (
            self.mesh.sizes.token_ranks / valid_tokens
        )  # FSDP averages gradients over the ranks; their sum is wanted
        total = torch.zeros_like(valid_tokens)
        for batch in micro_batches:
            prepare_backward(self.model, self.config.fsdp, is_last_micro_batch=batch is micro_batches[-1])
            loss_sum = self._loss_sum(batch, self.loss)
            (loss_sum * scale).backward()
            total += loss_sum.detach()
        training = self.config.training
        grad_norm = clip_grad_norm(self.model.parameters(), training.max_norm, training.norm_type)
        result = _result(self.mesh.sum_over_dp(total) / valid_tokens, grad_norm)
        if not result.skipped:
            set_lr(self.optimizer, lr)
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return result

    @torch.no_grad()
    def evaluate(self, micro_batches: list[MicroBatch], token_bytes: Tensor | None) -> Tensor:
        """(sum of the cross-entropy, valid tokens, their bytes of text) over this rank's share, float64, (3,).

        Args:
            micro_batches: as for `step`.
            token_bytes: (vocab,) bytes of text that each token stands for; None: they are not counted.
        """
        total = torch.zeros(3, dtype=torch.float64, device=self.mesh.device)
        cross_entropy = replace(self.loss, z_loss_weight=0.0)
        for batch in self._own_part(micro_batches):
            valid = batch.targets[batch.targets != IGNORED]
            total[0] += self._loss_sum(batch, cross_entropy)
            total[1] += len(valid)
            total[2] += 0 if token_bytes is None else int(token_bytes[valid].sum())
        reshard(self.model)
        return total

    def state(self) -> dict[str, Tensor]:
        """Everything a checkpoint holds in tensors, by name; loading into them in place, and `was_loaded`, restores it.

        To be asked for anew each time: FSDP pads its shards at the first forward pass, which gives them new memory.
        """
        parameters = dict(self.model.named_parameters())
        model = {f"model.{name}": weight for name, weight in saved_weights(self.optimizer, parameters).items()}
        return model | optimizer_state(self.optimizer, parameters)

    def was_loaded(self) -> None:
        """Bring what was read into `state` to all ranks that need it; all ranks must call it."""
        if isinstance(self.optimizer, OwnerPartition):
            self.optimizer.owned_were_loaded()

    def finish_update(self) -> None:
        """Wait for updated parameters that are still on their way; the next forward pass would do so as well."""
        if isinstance(self.optimizer, OwnerPartition):
            self.optimizer.wait()

    def _own_part(self, micro_batches: list[MicroBatch]) -> list[MicroBatch]:
        """What this rank computes of its samples: with context parallelism a part of every sequence."""
        return [shard_batch(batch, self.mesh.cp, self.config.context.method) for batch in micro_batches]

    def _loss_sum(self, batch: MicroBatch, loss: CrossEntropy) -> Tensor:
        batch = batch.to(self.mesh.device)
        of_targets = partial(loss, targets=batch.targets)
        return self.model(batch.tokens, batch.positions, batch.document_ids, loss=of_targets)

    def _valid_tokens(self, micro_batches: list[MicroBatch]) -> Tensor:
        """Target tokens of the global batch that count; a float64 scalar: exact, and every backend can add it up."""
        count = sum(int((batch.targets != IGNORED).sum()) for batch in micro_batches)
        return self.mesh.sum_over_dp(torch.tensor(count, dtype=torch.float64, device=self.mesh.device))


def build_learner(config: Config, mesh: Mesh) -> Learner:
    """Build the model without memory, cut it over the mesh, then give each rank its shard's initial weights."""
    with torch.device("meta"):
        model = build_model(config.model).to(getattr(torch, config.training.dtype))
    parallelize(model, mesh, config)
    materialize(model, mesh.device, config.training.seed, offload=config.fsdp.cpu_offload)
    return Learner(
        config=config,
        mesh=mesh,
        model=model,
        optimizer=_optimizer(config, mesh, model),
        loss=CrossEntropy(z_loss_weight=config.training.z_loss_weight, compile=config.compile.enable),
    )


def _optimizer(config: Config, mesh: Mesh, model: nn.Module) -> Optimizer:
    named_parameters = list(model.named_parameters())
    if config.fsdp.partition == "rows":
        return build_optimizer(config.optimizer, named_parameters)
    in_blocks = tuple(f"{block}." for block in plan_of(model).blocks)
    hidden_matrices = [name for name, p in named_parameters if p.ndim == 2 and name.startswith(in_blocks)]
    dtype = config.fsdp.owner_broadcast_dtype
    partition = partial(
        OwnerPartition,
        process_group=mesh.dp.get_group(),
        broadcast_dtype=getattr(torch, dtype) if dtype else None,
    )
    optimizer = build_optimizer(config.optimizer, named_parameters, hidden_matrices, partition)
    assert isinstance(optimizer, OwnerPartition)
    optimizer.overlap_forward(model)
    return optimizer


def _result(loss: Tensor, grad_norm: Tensor) -> StepResult:
    # The one point at which the CPU waits for the device: whether to update must be known before the update.
    loss_value, norm_value = torch.stack((loss, grad_norm.to(loss))).tolist()
    return StepResult(loss_value, norm_value, skipped=not (math.isfinite(loss_value) and math.isfinite(norm_value)))
