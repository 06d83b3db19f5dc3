"""The mesh: how the ranks are arranged, and the few collectives that the trainer needs on it.

Axes, outermost first: `pp` (pipeline stages), `dp_replicate` (copies of the sharded model), `dp_shard` (FSDP), `cp`
(context parallel), `tp` (tensor parallel). The innermost axis talks most, so its ranks are neighbours, on one machine
where there are several. Every axis exists at every size, 1 included: one path through the code serves a laptop and a
cluster. Context-parallel ranks hold different tokens as data-parallel ones do, so FSDP shards over both at once.
For the experts those same ranks are cut anew, into `expert_shard` x `ep` (expert parallel).
"""

import gc
import os
import resource
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from configs.layout import MeshSizes
from parallelisms.torch_internals import forget_process_groups, process_groups, set_timeout, timeouts_of

_GLOO_CONNECTS_LAZILY = "TORCH_GLOO_LAZY_INIT"
_RANKS_CONNECTED_AT_ONCE = 64
"""Three groups of so many make 189 connections a rank, and need no store later: it dies with torchrun."""


@dataclass(frozen=True)
class Mesh:
    """The ranks' arrangement, seen from one of them."""

    sizes: MeshSizes
    device: torch.device
    fsdp: DeviceMesh
    """(shard,), or (replicas, shard) where there are some: what `fully_shard` takes. By rows, shard is dp_shard x cp
    and replicas is dp_replicate; by owner, shard is 1, and replicas are all that hold different tokens."""
    cp: DeviceMesh
    tp: DeviceMesh
    pp: DeviceMesh
    dp: DeviceMesh
    """All data-parallel ranks in one dimension: those that see different samples."""
    tokens: DeviceMesh
    """Those and the context-parallel ones: all that see different tokens."""
    ep: DeviceMesh
    """(ep,), or (ep, tp) where there is tensor parallelism: over what experts are cut before FSDP shards them."""
    expert_fsdp: DeviceMesh
    """(expert_shard,), or (replicas, expert_shard): what `fully_shard` takes for them."""

    @property
    def dp_rank(self) -> int:
        """Which share of every global batch this rank computes."""
        return self.dp.get_local_rank()

    def sum_over_tokens(self, tensor: Tensor) -> Tensor:
        """Add `tensor` up over the ranks that hold different tokens (data- and context-parallel), in place."""
        dist.all_reduce(tensor, group=self.tokens.get_group())
        return tensor

    def sum_over_pp(self, tensor: Tensor) -> Tensor:
        """Add `tensor` up over the ranks of the pipeline, in place."""
        dist.all_reduce(tensor, group=self.pp.get_group())
        return tensor

    def max_over_all(self, tensor: Tensor) -> Tensor:
        """Element-wise maximum over all ranks, in place."""
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor


def groups_of_axes(mesh: Mesh) -> dict[str, dist.ProcessGroup]:
    """The process groups of this rank by the axis along which their ranks are arranged."""
    meshes = {"dp": mesh.dp, "tokens": mesh.tokens, "cp": mesh.cp, "tp": mesh.tp, "pp": mesh.pp}
    shard = {
        str(name): axes[name].get_group()
        for axes in (mesh.ep, mesh.expert_fsdp, mesh.fsdp)
        for name in axes.mesh_dim_names or ()
    }
    return {name: axis.get_group() for name, axis in meshes.items()} | shard


def start_process_group(device_type: str, timeout_seconds: int) -> torch.device:
    """Join torchrun's process group, or form one of a single process; returns this rank's device.

    CPU tensors go over gloo also on GPU machines: checkpoints and agreement on a stop must not wait in GPU queues.
    gloo connects all ranks of a group with each other at once; in a large job only two that speak to each other, when
    they first do: in most collectives a rank speaks to its two neighbors, in some to as many as 2 log2(ranks).
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > _RANKS_CONNECTED_AT_ONCE:
        os.environ.setdefault(_GLOO_CONNECTS_LAZILY, "1")
    allow_open_files()
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_seconds)
    device = torch.device(device_type)
    if device_type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    store: dist.Store = dist.HashStore()
    rank, world_size = 0, 1
    if "RANK" in os.environ:
        store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
        store.set_timeout(timeout)
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            store = dist.PrefixStore(_attempt(store, rank, world_size, timeout_seconds), store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    return device


def allow_open_files() -> None:
    """Raise this process's limit on open files, connections included, as far as the system lets it (often 1,024)."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # a system may name a limit that it does not grant
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _attempt(store: dist.Store, rank: int, world_size: int, timeout_seconds: int) -> str:
    """A name for this attempt of torchrun's to run the job; the same on all ranks, and no other attempt's.

    torchrun keeps its store when it restarts the ranks (torch 2.11 to 2.13), and in it the addresses of the dead ones,
    with which the new ones would try to connect. Its count of restarts is no name: each node has a count of its own,
    and a restart that another node has caused is not in it. So the first rank makes a name up, and tells it to those
    who ask. Each asks under a new key, since the questions of dead ranks are still in the store, too.

    Raises:
        DistStoreError, DistNetworkError: a rank did not ask, or the first did not answer, for `timeout_seconds`.
    """
    if rank > 0:
        question = uuid4().hex
        store.set(f"attempt/asked by {rank}", question)
        name = store.get(f"attempt/answer to {question}").decode()
        store.set(f"{name}/{rank} knows", "")
        return name
    name, unaware = f"attempt {store.add('attempts', 1)}", set(range(1, world_size))
    deadline = time.monotonic() + timeout_seconds
    while unaware:
        for each in sorted(unaware):
            if store.check([f"attempt/asked by {each}"]):
                store.set(f"attempt/answer to {store.get(f'attempt/asked by {each}').decode()}", name)
            if store.check([f"{name}/{each} knows"]):
                unaware.discard(each)
        if time.monotonic() > deadline:
            raise dist.DistStoreError(f"ranks {sorted(unaware)} did not join within {timeout_seconds} s")
        time.sleep(0.01)
    return name


def end_process_group() -> None:
    """Leave the process group, and let go of it: another may be formed in this process."""
    dist.destroy_process_group()
    forget_process_groups()
    gc.collect()  # meshes and the modules wrapped for them are in reference cycles


def build_mesh(sizes: MeshSizes, device: torch.device) -> Mesh:
    """Arrange the ranks of the process group as `sizes` says. No group waits longer than that of all ranks does."""
    mesh = init_device_mesh(
        device.type,
        (sizes.pp, sizes.token_ranks, sizes.tp),
        mesh_dim_names=("pp", "tokens", "tp"),
        backend_override=_backends(device, {"pp": sizes.pp, "tokens": sizes.token_ranks, "tp": sizes.tp}),
    )

    def cut(mesh: DeviceMesh, dimension: int, into: dict[str, int]) -> DeviceMesh:
        # By number: `_unflatten` of torch 2.11 takes no name, since its check of one is inverted.
        return mesh._unflatten(dimension, tuple(into.values()), tuple(into), _backends(device, into))

    axes = cut(mesh, 1, {"dp_replicate": sizes.dp_replicate, "dp_shard": sizes.dp_shard, "cp": sizes.cp})
    fsdp = cut(mesh, 1, {"replicas": sizes.replicas, "shard": sizes.fsdp_shard})
    experts = cut(fsdp, 2, {"expert_shard": sizes.expert_shard, "ep": sizes.ep})
    replicas = ("replicas",) if sizes.replicas > 1 else ()
    arranged = Mesh(
        sizes=sizes,
        device=device,
        fsdp=fsdp[*replicas, "shard"],
        cp=axes["cp"],
        tp=mesh["tp"],
        pp=mesh["pp"],
        dp=axes["dp_replicate", "dp_shard"]._flatten("dp", **_backends(device, {"backend_override": sizes.dp})),
        tokens=mesh["tokens"],
        # Without expert parallelism the slice has no use, and torch 2.11 refuses it where a shard is one rank.
        ep=experts["ep", "tp"] if sizes.tp > 1 and sizes.ep > 1 else experts["ep"],
        expert_fsdp=experts[*replicas, "expert_shard"],
    )
    _hold_to_timeout()
    return arranged


def _backends(device: torch.device, sizes: Mapping[str, int]) -> Any:
    """The backend of each dimension, by name; those that are left out have that of all ranks, gloo included.

    Steps on GPUs exchange nothing but GPU tensors along the axes, so NCCL is enough: a gloo group each would hold
    connections and threads. A dimension of all ranks is the group of all ranks, and needs no other.
    """
    if device.type != "cuda":
        return {}
    return {name: "nccl" for name, size in sizes.items() if size < dist.get_world_size()}


def _hold_to_timeout() -> None:
    """Give all groups the time-out of that of all ranks: torch makes a mesh's with its own, of 10 or 30 minutes."""
    assert dist.group.WORLD is not None
    for timeout in set(timeouts_of(dist.group.WORLD).values()):
        for group in process_groups():
            set_timeout(group, timeout)
