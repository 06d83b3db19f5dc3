"""Computing in another type than the parameters have, on a single rank, without FSDP.

FSDP implements compute_dtype and reduce_dtype where there is something to shard. A single rank has nothing to gather or
reduce, and FSDP would still cast and copy every parameter in each forward and each backward pass, and every gradient
three times. Here the modules hold a copy of each parameter in compute_dtype, and a micro-batch's gradient is added to
the parameter's own as soon as it is computed. The values are the same bits, since the same casts and sums are made. The
parameters themselves, the *masters*, stay what the optimizer, checkpoints, clipping and fingerprints see, under the
same names.

Copies that are *kept* are made once per step, and take memory between steps. *Transient* ones, which
`fsdp.reshard_after_forward = "always"` asks for, have memory only while the plan's FSDP group that they belong to
computes: a group's copies are made before its forward pass and freed after it, made again before its backward pass, and
each is freed when its gradient is there. The tensors stay the same, and only their storage comes and goes, as with
FSDP; so the compiler's graphs and what autograd has saved stay valid.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from configs.layout import reshard_after_forward
from configs.plan import plan_of
from configs.schema import Config
from parallelisms.sums import sums_of
from parallelisms.torch_internals import FSDP_ADDS_UP


def computes_with_copies(world_size: int, config: Config) -> bool:
    """Whether a rank computes with copies; exact sums, rounded masters, float8 all-gathers and states in CPU memory are
    FSDP's.

    Gradients are accumulated in the masters' type, which must be `reduce_dtype` and hold all values of `compute_dtype`.
    """
    fsdp = config.fsdp
    training = config.training
    dtype, compute_dtype = (getattr(torch, name) for name in (training.dtype, training.compute_dtype))
    is_wider = torch.finfo(dtype).bits > torch.finfo(compute_dtype).bits
    is_for_fsdp = fsdp.cpu_offload or fsdp.owner_broadcast_dtype is not None or config.float8.fsdp_all_gather
    may_copy = not is_for_fsdp and sums_of(training).allows_copies
    return world_size == 1 and is_wider and training.reduce_dtype == training.dtype and may_copy


def keeps_copies(world_size: int, config: Config) -> bool:
    """Whether a rank computes with copies that it keeps from step to step."""
    return computes_with_copies(world_size, config) and reshard_after_forward(config.fsdp) != "always"


class ComputeCopies:
    """The copies that the modules of some models compute with, each of a parameter that they held before."""

    def __init__(self, models: Iterable[nn.Module], dtype: torch.dtype, are_kept: bool = True) -> None:
        """Replace the modules' parameters by copies; tied ones stay tied.

        Args:
            models: parameters must be in memory, with their values unless `refresh` is called before they compute.
            dtype: of the copies.
            are_kept: whether copies keep their memory; if not, the models must have plans.
        """
        self.copies: dict[Parameter, Parameter] = {}
        """The copy of each master."""
        self.kept = self.copies if are_kept else {}
        """Those that must be written when their master has changed."""
        for model in models:
            for master in model.parameters():
                self.copies[master] = _copy_of(master, dtype, are_kept)
            if not are_kept:
                self._make_transient(model)
            for module in model.modules():
                for name, master in list(module.named_parameters(recurse=False)):
                    setattr(module, name, self.copies[master])

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the masters' values to kept copies; call it when they have changed."""
        if self.kept:
            torch._foreach_copy_(list(self.kept.values()), list(self.kept))

    def _make_transient(self, model: nn.Module) -> None:
        """Give the copies memory by the groups of the model's plan, and all other parameters' copies by the root."""
        rest = {master: self.copies[master] for master in model.parameters()}
        after = None
        for names in reversed(plan_of(model).fsdp_groups):
            modules = [model.get_submodule(name) for name in names]
            own = dict.fromkeys(master for module in modules for master in module.parameters())
            after = _Group(modules, {master: rest.pop(master) for master in own}, waits=after is None, after=after)
        if rest:
            _Group([model], rest, waits=True)


class _Group:
    """Transient copies that have memory while some modules compute."""

    def __init__(
        self, modules: list[nn.Module], copies: dict[Parameter, Parameter], waits: bool, after: "_Group | None" = None
    ) -> None:
        """Watch the modules, which compute in this order.

        Args:
            modules: hooks are put on the first and the last.
            copies: what they compute with, by master.
            waits: whether the copies keep their memory from the forward to the backward pass. The last group's backward
                pass directly follows its forward pass, and the root is used throughout.
            after: the group that computes next.
        """
        self._waits = waits
        self._after = after
        # As `data` they have versions of their own: what autograd has saved of a copy does not count as changed.
        self._values = [(copy.data, master) for master, copy in copies.items()]
        modules[0].register_forward_pre_hook(self._before_forward)
        modules[-1].register_forward_hook(self._after_forward)

    def _before_forward(self, _module: nn.Module, _inputs: Any) -> None:
        _make(self._values)  # also those that have memory, since their masters may have changed

    def _after_forward(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        if not (self._waits and torch.is_grad_enabled()):
            self._free()
        for tensor in output if isinstance(output, tuple) else (output,):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(self._before_backward)

    def _before_backward(self, _gradient: Tensor) -> None:
        if self._after:
            self._after._free()  # copies without a gradient
        _make([(value, master) for value, master in self._values if not value.untyped_storage().size()])

    def _free(self) -> None:
        for value, _ in self._values:
            value.untyped_storage().resize_(0)


@torch.no_grad()
def _make(copies: list[tuple[Tensor, Parameter]]) -> None:
    """Give copies memory, and their masters' values."""
    for copy, _ in copies:
        copy.untyped_storage().resize_(copy.nbytes)
    if copies:
        torch._foreach_copy_([copy for copy, _ in copies], [master for _, master in copies])


def _copy_of(master: Parameter, dtype: torch.dtype, is_kept: bool) -> Parameter:
    """A copy whose gradients are added to the master's."""
    copy = Parameter(master.detach().to(dtype))
    if not is_kept:
        copy.untyped_storage().resize_(0)
    if not FSDP_ADDS_UP:
        copy.grad_dtype = None  # a gradient that is computed in a wider type keeps it, as with FSDP
    copy.register_post_accumulate_grad_hook(partial(_hand_over, master, is_kept))
    copy.requires_grad_(master.requires_grad)
    return copy


@torch.no_grad()
def _hand_over(master: Parameter, is_kept: bool, copy: Tensor) -> None:
    """Add the gradient of a copy to its master's, and free it; all that reads the copy in backward has run."""
    gradient = copy.grad
    copy.grad = None
    assert gradient is not None
    if not is_kept:
        copy.untyped_storage().resize_(0)
    if master.grad is None:
        master.grad = gradient.to(master.dtype)
    else:
        master.grad.add_(gradient)
