"""A parameter as the optimizer of its owner sees it: a plain tensor, with all that lies between the two.

It is the parameter's own memory, or a master copy in full precision where the parameters are sent rounded. Of one that
another axis of the mesh cuts it is this rank's part, or, if the update needs whole matrices, all parts put together.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from parallelisms.cut_parameters import cut_of, local, own_part, placed, whole


class OwnedParameter:
    """One that this rank owns."""

    def __init__(self, parameter: Parameter, rounds_to: torch.dtype | None, updated_whole: bool) -> None:
        """
        Args:
            parameter: all ranks over which it is cut must make this of it, if it is `updated_whole`.
            rounds_to: the type in which it is sent, which leaves a master here; None: as it is.
            updated_whole: whether its update needs all parts.
        """
        self._parameter, self._rounds_to = parameter, rounds_to
        self._is_put_together = updated_whole and cut_of(parameter) is not None
        self.plain = Parameter(self._seen(parameter).clone() if rounds_to else self._seen(parameter))
        """What the optimizer updates."""
        self._known_version = -1

    def _seen(self, tensor: Tensor) -> Tensor:
        """A parameter or gradient as the optimizer sees it."""
        return whole(tensor) if self._is_put_together else local(tensor)

    # ------------------------------------------------------------------ an update

    def lend(self) -> None:
        """Show the optimizer this step's gradient, and the parameter's memory, which FSDP may have moved."""
        if self._parameter.grad is None:  # frozen: it is not updated
            return
        if self._rounds_to is None:
            self.plain.data = self._seen(self._parameter)
        else:
            self.follow()
        self.plain.grad = self._seen(self._parameter.grad)

    def take_back(self) -> None:
        """Let go of the gradient, and of what was put together, after keeping this rank's part of it."""
        if self._is_put_together and self._rounds_to is None:
            if self.plain.grad is not None:
                local(self._parameter).copy_(own_part(self.plain.data, self._parameter))
            self.plain.data = self.plain.data.new_empty(0)
        self.plain.grad = None

    def to_send(self) -> Tensor:
        """This rank's part of what the update has made, in full precision."""
        return own_part(self.plain.detach(), self._parameter) if self._rounds_to else local(self._parameter)

    def arrived(self) -> None:
        """Note that the parameter is what was sent: what is written to it from now on was not written here."""
        self._known_version = local(self._parameter)._version

    def follow(self) -> None:
        """Let the master follow its parameter if someone else has written that, as a model's `load_state_dict` does.

        Where the parameter still is what the master rounds to, the master stays. (One that was put together is taken
        up only by `load_master`: to compare it, all its ranks would have to gather it at every step.)
        """
        held, master = local(self._parameter), self.plain.data
        if self._is_put_together or held._version == self._known_version:
            return
        master.copy_(torch.where(held == master.to(self._rounds_to).to(held.dtype), master, held))
        self.arrived()

    # ------------------------------------------------------------------ saving and loading

    def saved(self) -> Tensor:
        """What is saved of it, in full precision; a DTensor where it is cut."""
        return placed((self.plain if self._rounds_to else local(self._parameter)).detach(), self._parameter)

    def placed(self, value: Any) -> Any:
        """A value of the optimizer's state with its place in the whole."""
        return placed(value, self._parameter)

    def taken_from(self, value: Any) -> Any:
        """The reverse, of one that is of the whole parameter."""
        return value if self._is_put_together else own_part(value, self._parameter)

    @torch.no_grad()
    def load_master(self, master: Tensor | None) -> None:
        """Take over the whole parameter in full precision; None: as it is now.

        Whether it rounds to what the parameter holds is looked at when it is needed.
        """
        self.plain.data.copy_(self._seen(self._parameter) if master is None else self.taken_from(master))
        self._known_version = -1
