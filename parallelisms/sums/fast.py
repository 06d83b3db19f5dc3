"""The sums of a step, and the quickest way to add them up: FSDP's reductions, and all-reduces in any order."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from configs.layout import adds_up_wider
from configs.schema import Config
from parallelisms.grad_norm import grad_norm
from parallelisms.mesh import Mesh
from parallelisms.ranges import NamedStage
from parallelisms.torch_internals import keep_gradients_in, modules_with_groups


class Reduction:
    """The reduction of the gradients of a model, or of a pipeline's stage: here, FSDP's own."""

    def of_micro_batch(self, is_last: bool) -> AbstractContextManager[None]:
        """Run a micro-batch's backward pass in this context. The parameters have gradients after the step's last."""
        return nullcontext()

    def pipeline_stage(self, *arguments: Any, **settings: Any) -> PipelineStage:
        """The stage that reduces its gradients in this way; arguments are those of `PipelineStage`."""
        return NamedStage(*arguments, **settings)


class WideReduction(Reduction):
    """FSDP's own reduction, with the gradients of a step's micro-batches added in `reduce_dtype`.

    FSDP converts each micro-batch's gradient to the parameter's type and adds in that. Between micro-batches they are
    kept in the wider type here, and converted once, as FSDP does it if it reduces only with the last one.
    """

    def __init__(self, model: nn.Module, reduce_dtype: torch.dtype) -> None:
        """
        Args:
            model: whose parameters are in FSDP groups, all of one type.
            reduce_dtype: a wider type.
        """
        self._parameters = list(model.parameters())
        self._groups = modules_with_groups(model)
        self._dtypes = (self._parameters[0].dtype, reduce_dtype)
        self._is_wide = False

    @contextmanager
    def of_micro_batch(self, is_last: bool) -> Iterator[None]:
        """Implement `Reduction.of_micro_batch`; a step's only micro-batch has nothing to be added to."""
        if not is_last:
            self._keep(wide=True)
        yield
        if is_last and self._is_wide:
            self._keep(wide=False)
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.to(parameter.dtype)

    def _keep(self, wide: bool) -> None:
        if wide is not self._is_wide:
            self._is_wide = wide
            for module in self._groups:
                keep_gradients_in(module, self._dtypes[wide])


class Sums:
    """The sums of a step: of gradients, of their powers for the norm, and of losses."""

    mesh_changes_bits = True
    """Whether the sizes of the data-parallel mesh and the pipeline change the last bits."""
    allows_copies = True
    """Whether a single rank may add up the gradients of copies of its parameters (`compute_copies.py`)."""
    updates_whole_vectors = False
    """Whether the optimizer must update every element by the same instructions, wherever a shard begins."""

    def reduction(self, model: nn.Module, config: Config) -> Reduction:
        """Sum a model's gradients from now on; its parameters are sharded, as they are between two steps, or whole."""
        if adds_up_wider(config):
            return WideReduction(model, getattr(torch, config.training.reduce_dtype))
        return Reduction()

    def grad_norm(
        self, parameters: Iterable[Tensor], norm_type: float = 2.0, pipeline: dist.ProcessGroup | None = None
    ) -> Tensor:
        """The global norm of the gradients, as by `parallelisms.grad_norm`; all ranks must call it."""
        return grad_norm(parameters, norm_type, pipeline)

    def loss_sum(self, losses: Tensor, compute_dtype: str, mesh: Mesh) -> Tensor:
        """The sum of the losses of all ranks' micro-batches, a scalar; all ranks must call it.

        Args:
            losses: (micro-batches,) float64, of this rank's micro-batches.
            compute_dtype: the type that they were computed in.
            mesh: the mesh.
        """
        total = torch.zeros_like(losses[0])
        for loss in losses:
            total += loss
        # The sum over the ranks that have computed other tokens.
        return mesh.sum_over_tokens(total)
