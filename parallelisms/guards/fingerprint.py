"""The fingerprint of a step's gradients: a few numbers per parameter, which a replay of the step is compared with.

Each parameter has a *digest*, the sum of the bits of all its gradient's elements as integers: it is exact, any flipped
bit changes it, and no order of adding up or cutting into shards does. Where another mesh rounds otherwise, all digests
differ, and two other numbers are compared within a bound: the gradient's norm, and one element, whose place is drawn
from (seed, step, name) and so is the same on any mesh. Each rank also has a digest of all that it holds: a flipped bit
changes the digest of one parameter and of one rank, which names both. The batch has a digest, too, which tells other
data from other values.

All numbers are sums over ranks, so that one small reduction per step collects them, and nothing waits for the device.
Their elements are integers below 2^53 or come from one value, so that float64 adds them exactly, in any order; only
norms are rounded.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn

from configs.schema import Config
from parallelisms.grad_norm import norms_of
from parallelisms.init import local_indices
from parallelisms.mesh import Mesh
from parallelisms.ranks import local_part

MAX_RANK_DIGESTS = 128
"""Limit on the ranks' digests; in a larger job, neighboring ranks share one."""
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int32}
_MODULUS = 1 << 32
_FOLD = 0x9E3779B1


@dataclass(frozen=True)
class Gradients:
    """The fingerprint of a step's gradients, the same on all ranks; arrays have an element per parameter."""

    digests: np.ndarray
    """uint32; equal for equal bits, on any mesh."""
    norms: np.ndarray
    """float32; rounded differently on another mesh."""
    samples: np.ndarray
    """The sampled elements, float32, or float64 if the gradients are."""
    ranks: np.ndarray
    """uint32; the digests of the ranks, or of ranges of them, in order."""
    data: int
    """Digest of the global batch; equal for equal samples, on any mesh."""


class GradientFingerprint:
    """Takes the fingerprint of the gradients of parameters, of which this rank holds some or parts."""

    def __init__(self, parameters: Mapping[str, Tensor], names: Sequence[str], mesh: Mesh, seed: int) -> None:
        """Find out who holds what; all ranks must call it.

        Args:
            parameters: this rank's by name, each its shard or whole.
            names: of all parameters of the model, in its order.
            mesh: all its ranks take part.
            seed: the run's.
        """
        self.names = list(names)
        self._parameters = dict(parameters)
        self._mesh = mesh
        self._seed = seed
        n_ranks = dist.get_world_size()
        self._n = len(names)
        self._n_slots = min(n_ranks, MAX_RANK_DIGESTS)
        numbers = {name: number for number, name in enumerate(names)}
        own = [numbers[name] for name in parameters]
        slot = 3 * self._n + dist.get_rank() * self._n_slots // n_ranks
        places = [kind * self._n + number for kind in range(3) for number in own]
        self._places = torch.tensor([*places, slot, 3 * self._n + self._n_slots], device=mesh.device)
        inner = (mesh.cp, mesh.tp, mesh.pp)
        self._counts_data = not any(axis.get_local_rank() for axis in inner)
        """Whether this rank is the only one of those with the same samples that adds their digest."""
        self._boxes = {name: _box(parameter) for name, parameter in parameters.items()}
        held = torch.zeros(self._n, dtype=torch.float64)
        for name, parameter in parameters.items():
            held[numbers[name]] = local_part(parameter).numel() / parameter.numel()
        self.copies = mesh.sum_over_all(held.to(mesh.device)).round().long().cpu().numpy()
        """How many replicas of each parameter the ranks hold."""

    @torch.no_grad()
    def sums(self, step: int, data: int) -> Tensor:
        """The numbers of all ranks' gradients, float64 on the device, for `read`; all ranks must call it.

        A frozen parameter counts as one with a gradient of 0.

        Args:
            step: its number.
            data: the sum of the digests of this rank's micro-batches.
        """
        device = self._mesh.device
        # Where the gradients are, which may be in CPU memory.
        zero = local_part(next(iter(self._parameters.values())).detach()).new_zeros(1)
        local = {name: _local_gradient(parameter, zero) for name, parameter in self._parameters.items()}
        gradients = [gradient for gradient, _ in local.values()]
        digests = torch.stack([_bits(gradient).sum(dtype=torch.int32) for gradient in gradients]).double()
        squares = norms_of(gradients).double().square()
        samples = [self._sample(step, name, *found) for name, found in local.items()]
        values = torch.cat((digests, squares, torch.stack(samples).double(), digests.sum()[None])).to(device)
        own_data = torch.full((1,), data if self._counts_data else 0, dtype=torch.float64, device=device)
        values = torch.cat((values, own_data))
        sums = torch.zeros(3 * self._n + self._n_slots + 1, dtype=torch.float64, device=device)
        return self._mesh.sum_over_all(sums.index_copy_(0, self._places, values))

    def _sample(self, step: int, name: str, gradient: Tensor, is_filled: bool) -> Tensor:
        """The sampled element of a parameter's gradient, a scalar; 0 if another rank has it."""
        shape = self._parameters[name].shape
        place = np.unravel_index(
            xxhash.xxh3_64_intdigest(f"{self._seed}/{step}/{name}".encode()) % shape.numel(), shape
        )
        index = 0
        for position, (start, length) in zip(place, self._boxes[name], strict=True):
            if not (is_filled and start <= position < start + length):
                return gradient.new_zeros(())
            index = index * length + int(position) - start
        return gradient.view(-1)[index]

    def read(self, sums: Tensor) -> Gradients:
        """Interpret `sums` in the host's memory."""
        numbers = sums.numpy()
        digests, squares, samples = numbers[: 3 * self._n].reshape(3, self._n)
        whole, rest = np.divmod(digests.astype(np.int64), self.copies)  # a rest: the replicas differ
        is_double = next(iter(self._parameters.values())).dtype == torch.float64
        return Gradients(
            digests=((whole + rest * _FOLD) % _MODULUS).astype(np.uint32),
            norms=np.sqrt(squares / self.copies).astype(np.float32),
            samples=(samples / self.copies).astype(np.float64 if is_double else np.float32),
            ranks=(numbers[3 * self._n : -1].astype(np.int64) % _MODULUS).astype(np.uint32),
            data=int(numbers[-1]) % _MODULUS,
        )


def fingerprint_of(
    stages: Iterable[nn.Module], names: Sequence[str], mesh: Mesh, config: Config
) -> GradientFingerprint | None:
    """The object that takes the fingerprints of `metrics.fingerprint`, as `GradientFingerprint`; None if it is off."""
    if not config.metrics.fingerprint:
        return None
    parameters = {name: parameter for stage in stages for name, parameter in stage.named_parameters()}
    return GradientFingerprint(parameters, names, mesh, config.training.seed)


def _box(parameter: Tensor) -> list[tuple[int, int]]:
    """The start and the length of this rank's part of a parameter in each dimension."""
    if local_part(parameter).numel() == 0:
        return [(0, 0)] * parameter.ndim
    return [(int(indices[0]), len(indices)) for indices in local_indices(parameter)]


def _local_gradient(parameter: Tensor, zero: Tensor) -> tuple[Tensor, bool]:
    """This rank's part of a gradient, and whether there is any; otherwise `zero`."""
    if parameter.grad is None or local_part(parameter.grad).numel() == 0:
        return zero, False
    return local_part(parameter.grad).contiguous(), True


def _bits(gradient: Tensor) -> Tensor:
    return gradient.view(_BITS[gradient.element_size()])
