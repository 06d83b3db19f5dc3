"""Computing in another type than the parameters have, on a single rank, without FSDP.

FSDP implements compute_dtype and reduce_dtype where there is something to shard. A single rank has nothing to gather or
reduce, and FSDP would still cast and copy every parameter in each forward and each backward pass, and every gradient
three times. Here the modules hold a copy of each parameter in compute_dtype, which is made once per step, and a
micro-batch's gradient is added to the parameter's own as soon as it is computed. The values are the same bits, since
the same casts and sums are made.

The copies take memory between steps, where FSDP frees a group's parameters after its computation; that is what
`fsdp.reshard_after_forward = "always"` asks for. The parameters themselves, the *masters*, stay what the optimizer,
checkpoints, clipping and fingerprints see, under the same names.
"""

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from configs.layout import reshard_after_forward
from configs.schema import Config

CAST_BYTES, CASTS_BESIDE, COPY_BYTES = 46, 20, 10
"""Bytes that are moved per parameter and micro-batch, of float32 parameters that compute in bfloat16: by FSDP, a cast
and a copy for each pass, and three copies and a sum of the gradient; of these, on streams beside the computation's; and
with copies, the sum (6 in a step's first micro-batch), besides 6 once per step."""


def keeps_copies(world_size: int, config: Config) -> bool:
    """Whether a rank computes with copies; exact sums, rounded masters, gathers in 8 bits and states in CPU memory are
    FSDP's.

    Gradients are accumulated in the masters' type, which must be `reduce_dtype` and hold all values of `compute_dtype`.
    """
    fsdp, training = config.fsdp, config.training
    dtype, compute_dtype = (getattr(torch, name) for name in (training.dtype, training.compute_dtype))
    is_wider = torch.finfo(dtype).bits > torch.finfo(compute_dtype).bits
    is_for_fsdp = training.reduction == "exact" or fsdp.cpu_offload or fsdp.owner_broadcast_dtype is not None
    may_keep = reshard_after_forward(fsdp) != "always" and not is_for_fsdp and not config.float8.fsdp_all_gather
    return world_size == 1 and is_wider and training.reduce_dtype == training.dtype and may_keep


class ComputeCopies:
    """The copies with which the modules of some models compute, each of a parameter that they held before."""

    def __init__(self, models: Iterable[nn.Module], dtype: torch.dtype) -> None:
        """Replace the modules' parameters by copies; tied ones stay tied.

        Args:
            models: parameters must be in memory, with their values unless `refresh` is called before they compute.
            dtype: of the copies.
        """
        self.copies: dict[Parameter, Parameter] = {}
        """The copy of each master."""
        for model in models:
            for master in model.parameters():
                self.copies[master] = _copy_of(master, dtype)
            for module in model.modules():
                for name, master in list(module.named_parameters(recurse=False)):
                    setattr(module, name, self.copies[master])

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the masters' values; call it when they have changed."""
        torch._foreach_copy_(list(self.copies.values()), list(self.copies))


def _copy_of(master: Parameter, dtype: torch.dtype) -> Parameter:
    """A copy whose gradients are added to the master's."""
    copy = Parameter(master.detach().to(dtype))
    copy.register_post_accumulate_grad_hook(partial(_hand_over, master))
    copy.requires_grad_(master.requires_grad)
    return copy


@torch.no_grad()
def _hand_over(master: Parameter, copy: Tensor) -> None:
    """Add the gradient of a copy to its master's, and free it."""
    gradient, copy.grad = copy.grad, None
    assert gradient is not None
    if master.grad is None:
        master.grad = gradient.to(master.dtype)
    else:
        master.grad.add_(gradient)
