"""A parameter as its owner's optimizer sees it: a plain tensor, and the conversion between the two.

The tensor is the parameter's own memory, or a master copy in full precision if parameters are sent rounded. If other
axes of the mesh shard the parameter, the tensor is this rank's part or, if the update needs whole matrices, this rank's
matrices, each gathered: experts that are on other ranks stay there.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from parallelisms.cut_parameters import cut_of, local, own_part, placed, whole


class OwnedParameter:
    """A parameter that this rank owns."""

    def __init__(self, parameter: Parameter, rounds_to: torch.dtype | None, updated_whole: bool) -> None:
        """
        Args:
            parameter: if `updated_whole`, all ranks over which it is sharded must construct this object for it.
            rounds_to: the dtype in which it is sent, with a master copy kept here; None: it is sent as it is.
            updated_whole: whether its update needs whole matrices.
        """
        self._parameter = parameter
        self._rounds_to = rounds_to
        dimensions = range(parameter.ndim)
        within_matrices = dimensions[-2:] if updated_whole else ()
        self._cut = cut_of(parameter, dimensions)
        self._gathered = cut_of(parameter, within_matrices)
        self._cut_when_seen = cut_of(parameter, [dim for dim in dimensions if dim not in within_matrices])
        self.plain = Parameter(self._seen(parameter).clone() if rounds_to else self._seen(parameter))
        """The tensor that the optimizer updates."""
        self._shape_when_seen = self.plain.shape  # what was gathered is released after each update
        self._has_rows = updated_whole
        self._known_version = -1

    def _seen(self, tensor: Tensor) -> Tensor:
        """A parameter or gradient in the form that the optimizer sees."""
        return whole(local(tensor), self._gathered)

    # ------------------------------------------------------------------ an update

    def lend(self) -> None:
        """Give the optimizer this step's gradient, and the parameter's memory, which FSDP may have moved."""
        if self._parameter.grad is None:  # frozen, so it is not updated
            return
        if self._rounds_to is None:
            self.plain.data = self._seen(self._parameter)
        else:
            self.follow()
        self.plain.grad = self._seen(self._parameter.grad)

    def take_back(self) -> None:
        """Release the gradient and what was gathered, after keeping this rank's part of the result."""
        if self._gathered and self._rounds_to is None:
            if self.plain.grad is not None:
                local(self._parameter).copy_(own_part(self.plain.data, self._gathered))
            self.plain.data = self.plain.data.new_empty(0)
        self.plain.grad = None

    def to_send(self) -> Tensor:
        """This rank's part of the updated parameter, in full precision."""
        return own_part(self.plain.detach(), self._gathered) if self._rounds_to else local(self._parameter)

    def arrived(self) -> None:
        """Record that the parameter now holds what was sent, so that later writes are recognized as foreign."""
        self._known_version = local(self._parameter)._version

    def follow(self) -> None:
        """Update the master if its parameter was written from elsewhere, for example by a model's `load_state_dict`.

        Where the parameter still equals the rounded master, the master stays. (A gathered parameter is taken over only
        by `load_master`: to compare it, all its ranks would have to gather it at every step.)
        """
        held = local(self._parameter)
        master = self.plain.data
        if self._gathered or held._version == self._known_version:
            return
        master.copy_(torch.where(held == master.to(self._rounds_to).to(held.dtype), master, held))
        self.arrived()

    # ------------------------------------------------------------------ saving and loading

    def saved(self) -> Tensor:
        """The tensor to save, in full precision; a DTensor if it is sharded."""
        return self.placed(self.plain.detach()) if self._rounds_to else placed(local(self._parameter), self._cut)

    def placed(self, value: Any) -> Any:
        """Turn a value of the optimizer's state into a DTensor, with its place in the whole; a count stays as it is.

        It has a number for each element of the parameter as the optimizer sees it, or for each row of whole matrices.
        """
        return placed(value, self._cut_when_seen) if self._is_of(self._shape_when_seen, value) else value

    def taken_from(self, value: Any) -> Any:
        """This rank's part of a tensor for the whole parameter; the inverse of `placed`."""
        return own_part(value, self._cut_when_seen) if self._is_of(self._parameter.shape, value) else value

    def _is_of(self, shape: torch.Size, value: Any) -> bool:
        """Whether a value has a number for each element of a shape or, of whole matrices, for each row."""
        # Of whole matrices alone: without its last dimension, a vector has the shape of a count.
        shapes = (shape, shape[:-1]) if self._has_rows else (shape,)
        return isinstance(value, Tensor) and value.shape in shapes

    @torch.no_grad()
    def load_master(self, master: Tensor | None) -> None:
        """Load the whole parameter in full precision; None: take the parameter's current value.

        Whether it rounds to the parameter's value is checked when that matters.
        """
        self.plain.data.copy_(self._seen(self._parameter) if master is None else self.taken_from(master))
        self._known_version = -1
