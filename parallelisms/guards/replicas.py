"""Replicas of one tensor on several ranks: detecting that they differ, and repairing them.

Data-parallel replicas (`dp_replicate`, owner partition) hold the same parameters, tensor-parallel ranks the same norms,
and all ranks of a stage the same load-balance biases and step counts. Equal inputs and equal operations keep a tensor's
replicas bitwise equal, and training itself never compares them. So a bit that flips in one rank's memory persists: that
rank computes with a different model from then on, its gradients spread to all ranks, and a checkpoint takes each tensor
from any one replica.

Which ranks hold replicas of a tensor follows from its placements. Each rank hashes its tensors where they are, on a GPU
without a copy to the host, and along every axis that replicates something the ranks compare one number. Only if the
numbers differ are the tensors' hashes exchanged, to name tensors, ranks and hosts.
"""

import socket
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from configs.errors import listed
from parallelisms.mesh import Mesh
from parallelisms.ranks import Json, gather

CPU_PIECE = 1 << 17
GPU_PIECE = 1 << 22
"""Words of 8 bytes hashed at once. On a CPU, a piece, its factors and its products fit in the cache (4 GB/s per core);
on a GPU, a few large pieces need fewer launches, at the cost of 64 MiB."""
_FOLD = 0x9E3779B1
_HORNER = 0x9E3779B97F4A7C15 - (1 << 64)  # odd numbers with their bits well mixed
_SHOWN = 8


@dataclass(frozen=True)
class Replica:
    """This rank's replica of a tensor that other ranks hold as well."""

    name: str
    part: str
    """The part of the whole tensor, by this rank's position on the axes that shard it: "shard 1"; "" for the whole."""
    local: Tensor
    axes: Mapping[str, dist.ProcessGroup]
    """The mesh axes along which there are replicas."""
    device: torch.device
    """The device on which ranks along these axes exchange tensors."""


@dataclass(frozen=True)
class Difference:
    """Replicas that are not equal; the same object on all ranks."""

    name: str
    part: str
    holders: tuple[tuple[int, ...], ...]
    """Ranks with equal content, the largest set first."""

    @property
    def majority(self) -> tuple[int, ...]:
        """The ranks whose content more than half of all ranks hold; empty if there is no majority."""
        most = self.holders[0]
        return most if 2 * len(most) > sum(map(len, self.holders)) else ()

    def text(self, hosts: Sequence[str]) -> str:
        """One line that names the odd ranks and their hosts, or all ranks if there is no majority."""
        where = f"{self.name} ({self.part})" if self.part else self.name
        if self.majority:
            odd = _named([rank for ranks in self.holders[1:] for rank in ranks], hosts)
            return f"{where}: {odd} differs from {_named(self.majority, hosts)}"
        sides = " from ".join(_named(ranks, hosts) for ranks in self.holders)
        return f"{where}: {sides}; without a majority, neither is known to be right"


def replicas_on(tensors: Mapping[str, Tensor], mesh: Mesh, owned: Collection[str] = ()) -> list[Replica]:
    """This rank's replicas of tensors that other ranks also hold, sorted by name.

    Args:
        tensors: plain tensors are whole, and the same on all ranks of a pipeline stage.
        mesh: this rank's mesh.
        owned: names of tensors that, among the ranks with different tokens, only one rank holds; these have replicas
            over `tp` alone.
    """
    replicas = [_replica(name, tensor.detach(), mesh, name in owned) for name, tensor in sorted(tensors.items())]
    return [replica for replica in replicas if replica.axes]


def _replica(name: str, tensor: Tensor, mesh: Mesh, is_owned: bool) -> Replica:
    axes = {"tp": mesh.tp.get_group()}
    if not isinstance(tensor, DTensor):
        axes |= {} if is_owned else {"tokens": mesh.tokens.get_group()}
        return Replica(name, "", tensor, _of_several(axes), mesh.device)
    names = tensor.device_mesh.mesh_dim_names or ()
    parts = []
    for i, (axis, placement) in enumerate(zip(names, tensor.placements, strict=True)):
        if placement.is_replicate():
            axes[axis] = tensor.device_mesh.get_group(i)
        else:
            axes.pop(axis, None)
            parts += [f"{axis} {tensor.device_mesh.get_local_rank(i)}"] if tensor.device_mesh.size(i) > 1 else []
    return Replica(name, ", ".join(parts), tensor.to_local(), _of_several(axes), mesh.device)


def _of_several(axes: Mapping[str, dist.ProcessGroup]) -> dict[str, dist.ProcessGroup]:
    return {name: group for name, group in sorted(axes.items()) if group.size() > 1}


@torch.no_grad()
def differences(replicas: Sequence[Replica]) -> tuple[list[Difference], list[str]]:
    """Compare this rank's replicas with the other ranks'; all ranks must call it.

    Returns:
        The differences, by name, and the host of each rank; both empty if all replicas are equal. The same on all
        ranks.
    """
    if dist.get_world_size() == 1:
        return [], []
    digests = _digests(replicas)
    by_axis = [_differs(replicas, digests, axis, group) for axis, group in _axes(replicas)]
    differs = torch.tensor(int(any(by_axis)))
    dist.all_reduce(differs, op=dist.ReduceOp.MAX)
    if not differs:
        return [], []
    mine: Json = [[replica.name, replica.part, digest] for replica, digest in zip(replicas, digests, strict=True)]
    by_rank = gather((mine, socket.gethostname()))
    contents = [{(name, part): digest for name, part, digest in of_rank} for of_rank, _ in by_rank]
    return _found(contents), [host for _, host in by_rank]


@torch.no_grad()
def heal(replicas: Iterable[Replica], found: Iterable[Difference]) -> None:
    """Overwrite differing replicas with the majority's; all ranks must call it.

    Args:
        replicas: this rank's replicas, as compared.
        found: differences, each with a majority.
    """
    here = {(replica.name, replica.part): replica.local for replica in replicas}
    rank = dist.get_rank()
    for difference in found:
        source = difference.majority[0]
        for odd in (rank for ranks in difference.holders[1:] for rank in ranks):
            if rank == source:  # through the CPU: gloo sends between any two ranks without further setup
                dist.send(here[difference.name, difference.part].cpu().contiguous(), dst=odd)
            elif rank == odd:
                local = here[difference.name, difference.part]
                content = torch.empty(local.shape, dtype=local.dtype)
                dist.recv(content, src=source)
                local.copy_(content)


def described(found: Sequence[Difference], hosts: Sequence[str]) -> str:
    """A line for each of the first differences, and the number of the others."""
    return "\n  " + listed([difference.text(hosts) for difference in found], most=_SHOWN)


# --------------------------------------------------------------------------- comparing


def _axes(replicas: Iterable[Replica]) -> list[tuple[str, dist.ProcessGroup]]:
    """Every axis along which there are replicas, in the same order on all ranks."""
    return sorted({axis: group for replica in replicas for axis, group in replica.axes.items()}.items())


def _differs(replicas: Sequence[Replica], digests: Sequence[int], axis: str, group: dist.ProcessGroup) -> bool:
    """Whether the ranks along an axis hold different replicas of anything."""
    along = repr([digest for replica, digest in zip(replicas, digests, strict=True) if axis in replica.axes])
    number = int.from_bytes(blake2b(along.encode(), digest_size=8).digest(), signed=True)
    # ~number falls as number rises, so one MAX reduction finds both extremes.
    extremes = torch.tensor([number, ~number], device=replicas[0].device)
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    largest, smallest = extremes.tolist()
    return largest != ~smallest


def _found(by_rank: Sequence[Mapping[tuple[str, str], int]]) -> list[Difference]:
    contents: dict[tuple[str, str], dict[int, list[int]]] = {}
    for rank, digests in enumerate(by_rank):
        for key, digest in digests.items():
            contents.setdefault(key, {}).setdefault(digest, []).append(rank)
    return [
        Difference(name, part, tuple(sorted(map(tuple, holders.values()), key=lambda ranks: (-len(ranks), ranks))))
        for (name, part), holders in sorted(contents.items())
        if len(holders) > 1
    ]


def _named(ranks: Iterable[int], hosts: Sequence[str]) -> str:
    """ "rank 1 (node-7), rank 3 (node-8)"."""
    return ", ".join(f"rank {rank} ({hosts[rank]})" for rank in sorted(ranks))


# --------------------------------------------------------------------------- hashing


def _digests(replicas: Sequence[Replica]) -> list[int]:
    """The hash of each replica; waits for each device once."""
    on_device: dict[torch.device, list[int]] = {}
    for i, replica in enumerate(replicas):
        on_device.setdefault(replica.local.device, []).append(i)
    digests = [0] * len(replicas)
    for indices in on_device.values():
        values = torch.stack([digest(replicas[i].local) for i in indices]).tolist()
        for i, value in zip(indices, values, strict=True):
            digests[i] = value
    return digests


def digest(tensor: Tensor) -> Tensor:
    """A hash of a tensor's bytes, an int64 scalar on its device; computing it does not wait for the device.

    Each word of 8 bytes is multiplied by an odd factor that depends on its position, and the products are summed modulo
    2^64. An odd factor is invertible, so a change of bits in one half of one word always changes the hash; of other
    changes, about one in 2^32 goes unnoticed. The upper half is folded into the lower, or two flipped sign bits would
    cancel out.
    """
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    factors = _factors(tensor.device)
    for piece in _words(tensor).split(len(factors)):
        mixed = torch.add(piece, piece >> 32, alpha=_FOLD)
        total = total * _HORNER + mixed.mul_(factors[: piece.numel()]).sum()
    return total


def _words(tensor: Tensor) -> Tensor:
    """The bytes of a tensor as int64, zero-padded to a whole word; copied only if they are not aligned."""
    raw = tensor.contiguous().flatten().view(torch.uint8)
    if raw.numel() % 8 or raw.storage_offset() % 8:
        aligned = raw.new_zeros(-(-raw.numel() // 8) * 8)
        aligned[: raw.numel()] = raw
        raw = aligned
    return raw.view(torch.int64)


@cache
def _factors(device: torch.device) -> Tensor:
    """An odd int64 for each word of a piece, equal in every process."""
    n = CPU_PIECE if device.type == "cpu" else GPU_PIECE
    limits = torch.iinfo(torch.int64)
    generator = torch.Generator().manual_seed(0)
    return (torch.randint(limits.min, limits.max, (n,), generator=generator) | 1).to(device)
