"""The mesh: how the ranks are arranged, and the few collectives that the trainer runs on it.

Axes, outermost first: `pp` (pipeline stages), `dp_replicate` (replicas of the sharded model), `dp_shard` (FSDP), `cp`
(context parallel), `tp` (tensor parallel). The innermost axis communicates most, so its ranks are neighbors, on one
machine where there are several. Every axis exists at every size, 1 included: one code path serves a laptop and a
cluster. Context-parallel ranks hold different tokens, as data-parallel ones do, so FSDP shards over both at once.
For experts, those same ranks are split a second way, into `expert_shard` x `ep` (expert parallel); by owner, all ranks
that hold different tokens are, into `expert_replicas` x `ep`.
"""

import gc
import os
import resource
import time
import warnings
from collections.abc import Callable, Mapping
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
from configs.secret import signed, verified
from parallelisms.nccl import KNOWN_BACKEND, configure_nccl
from parallelisms.torch_internals import (
    forget_process_groups,
    process_groups,
    set_timeout,
    settle_segments,
    sharing_groups,
    store_of_all_ranks,
    timeouts_of,
)

_GLOO_CONNECTS_LAZILY = "TORCH_GLOO_LAZY_INIT"
_RANKS_CONNECTED_AT_ONCE = 64
"""Three groups of this size make 189 connections per rank, and do not need the store later: it dies with torchrun."""
_INSIDE_LAYERS = ("cp", "ep")
"""Axes along which the layers communicate while FSDP gathers the next ones' parameters. See `build_mesh`."""


@dataclass(frozen=True)
class Mesh:
    """The arrangement of the ranks, as seen from one of them."""

    sizes: MeshSizes
    device: torch.device
    fsdp: DeviceMesh
    """(shard,), or (replicas, shard) with more than one replica; the mesh for `fully_shard`. If partitioned by rows,
    shard is dp_shard x cp and replicas is dp_replicate; if by owner, shard is 1 and replicas is all of `tokens`."""
    cp: DeviceMesh
    tp: DeviceMesh
    pp: DeviceMesh
    dp: DeviceMesh
    """All data-parallel ranks in one dimension; they see different samples."""
    tokens: DeviceMesh
    """All data- and context-parallel ranks in one dimension; they see different tokens."""
    stage: DeviceMesh
    """All ranks that hold parts of the same pipeline stage, in one dimension; `place` says which parts."""
    ep: DeviceMesh
    """(ep,), or (ep, tp) with tensor parallelism: the axes that split experts before FSDP shards them."""
    expert_fsdp: DeviceMesh
    """(expert_shard,), or (expert_replicas, expert_shard); the mesh for `fully_shard` of experts. As in `fsdp`, shards
    are 1 if partitioned by owner, so that the first dimension has all ranks that hold the same parameters."""

    @property
    def dp_rank(self) -> int:
        """The share of every global batch that this rank computes."""
        return self.dp.get_local_rank()

    def place(self, rank: int) -> dict[str, int]:
        """The coordinates of a rank of `stage`, by the name of the axis, in both ways to split the token ranks."""
        sizes = self.sizes
        token_rank, tp = divmod(rank, sizes.tp)
        replica, shard = divmod(token_rank, sizes.fsdp_shard)
        place_of_experts, ep = divmod(token_rank, sizes.ep)
        expert_replica, expert_shard = divmod(place_of_experts, sizes.expert_shard)
        of_experts = {"expert_replicas": expert_replica, "expert_shard": expert_shard, "ep": ep}
        return {"replicas": replica, "shard": shard, **of_experts, "tp": tp}

    def sum_over_tokens(self, tensor: Tensor) -> Tensor:
        """Sum `tensor` over the ranks that hold different tokens (data- and context-parallel), in place."""
        return _reduced(tensor, self.tokens.get_group())

    def sum_over_pp(self, tensor: Tensor) -> Tensor:
        """Sum `tensor` over the pipeline's ranks, in place."""
        return _reduced(tensor, self.pp.get_group())

    def sum_over_all(self, tensor: Tensor) -> Tensor:
        """Element-wise sum over all ranks, in place."""
        return _reduced(tensor, None)

    def max_over_stage(self, tensor: Tensor) -> Tensor:
        """Element-wise maximum over the ranks of this pipeline stage, in place."""
        return _reduced(tensor, self.stage.get_group(), dist.ReduceOp.MAX)

    def max_over_all(self, tensor: Tensor) -> Tensor:
        """Element-wise maximum over all ranks, in place."""
        return _reduced(tensor, None, dist.ReduceOp.MAX)


def _reduced(tensor: Tensor, group: dist.ProcessGroup | None, op: Any = dist.ReduceOp.SUM) -> Tensor:
    if dist.get_world_size(group) > 1:  # on one GPU, NCCL would need a communicator, and launch a kernel
        dist.all_reduce(tensor, op=op, group=group)
    return tensor


def groups_of_axes(mesh: Mesh) -> dict[str, dist.ProcessGroup]:
    """This rank's process groups, by the mesh axis along which their ranks are arranged."""
    meshes = {"dp": mesh.dp, "tokens": mesh.tokens, "cp": mesh.cp, "tp": mesh.tp, "pp": mesh.pp}
    of_experts = (mesh.ep, mesh.expert_fsdp) if mesh.sizes.ep > 1 else ()
    shard = {
        str(name): axes[name].get_group() for axes in (*of_experts, mesh.fsdp) for name in axes.mesh_dim_names or ()
    }
    groups = {name: axis.get_group() for name, axis in meshes.items()} | shard
    stage = mesh.stage.get_group()
    # Without tensor parallelism, or without other axes, these are the ranks of another axis, whose name says more.
    is_further = all(group.group_name != stage.group_name for group in groups.values())
    return groups | ({"stage": stage} if is_further else {})


def start_process_group(
    device_type: str, timeout_seconds: int, warn: Callable[[str], None] = warnings.warn
) -> torch.device:
    """Join torchrun's process group, or form a group of one process; returns this rank's device.

    CPU tensors use gloo on GPU machines as well: checkpoints and agreement on a stop must not wait in GPU queues.
    By default gloo connects all pairs of ranks in a group at once. In a large job it connects a pair when the two
    first communicate: in most collectives a rank talks to its two neighbors, in some to as many as 2 log2(ranks).
    `warn` is told what the GPU's driver refuses.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > _RANKS_CONNECTED_AT_ONCE:
        os.environ.setdefault(_GLOO_CONNECTS_LAZILY, "1")
    allow_open_files()
    timeout = timedelta(seconds=timeout_seconds)
    device = torch.device(device_type)
    if device_type == "cuda":
        configure_nccl(KNOWN_BACKEND, os.environ)
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        settle_segments(warn)
    store: dist.Store = dist.HashStore()
    rank = 0
    world_size = 1
    if "RANK" in os.environ:
        store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
        store.set_timeout(timeout)
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            store = dist.PrefixStore(_attempt(store, rank, world_size, timeout_seconds), store)
    dist.init_process_group(_backend(device_type), store=store, rank=rank, world_size=world_size, timeout=timeout)
    return device


def form_of_first(ranks: int, device: torch.device, timeout_seconds: int) -> dist.Store:
    """Form the process group again, of the first ranks of the present one only; the others leave it.

    Returns:
        A store that all of them still share; it ends when the first rank drops it.
    """
    rank = dist.get_rank()
    timeout = timedelta(seconds=timeout_seconds)
    store = store_of_all_ranks()
    end_process_group()
    if rank < ranks:
        within = dist.PrefixStore("first ranks", store)
        dist.init_process_group(_backend(device.type), store=within, rank=rank, world_size=ranks, timeout=timeout)
    return dist.PrefixStore("all ranks", store)


def _backend(device_type: str) -> str:
    return "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"


def allow_open_files() -> None:
    """Raise this process's limit on open files, which include connections, to the hard limit (often 1,024 at first)."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # a system may report a limit that it does not grant
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _attempt(store: dist.Store, rank: int, world_size: int, timeout_seconds: int) -> str:
    """A name for torchrun's current attempt to run the job; the same on all ranks, and unique to this attempt.

    torchrun keeps its store when it restarts the ranks (torch 2.11 to 2.13). The store still has the dead ranks'
    addresses, to which the new ranks would try to connect. torchrun's restart count cannot serve as the name: each node
    counts separately and misses restarts that another node caused. So the first rank makes up a name and sends it to
    the ranks that ask. Each rank asks under a new key, since the dead ranks' questions are still in the store, too.

    Raises:
        DistStoreError, DistNetworkError: a rank did not ask, or the first did not answer, for `timeout_seconds`.
        Forged: the answer is not from a rank with the same secret.
    """
    if rank > 0:
        question = uuid4().hex
        store.set(f"attempt/asked by {rank}", question)
        key = f"attempt/answer to {question}"
        name = verified(key, store.get(key))
        store.set(f"{name}/{rank} knows", "")
        return name
    name = f"attempt {store.add('attempts', 1)}"
    unaware = set(range(1, world_size))
    deadline = time.monotonic() + timeout_seconds
    while unaware:
        for each in sorted(unaware):
            if store.check([f"attempt/asked by {each}"]):
                key = f"attempt/answer to {store.get(f'attempt/asked by {each}').decode()}"
                store.set(key, signed(key, name))
            if store.check([f"{name}/{each} knows"]):
                unaware.discard(each)
        if time.monotonic() > deadline:
            raise dist.DistStoreError(f"ranks {sorted(unaware)} did not join within {timeout_seconds} s")
        time.sleep(0.01)
    return name


def end_process_group() -> None:
    """Leave the process group and release it, so that this process can form another."""
    dist.destroy_process_group()
    forget_process_groups()
    gc.collect()  # meshes and the modules wrapped for them are in reference cycles


def build_mesh(sizes: MeshSizes, device: torch.device) -> Mesh:
    """Arrange the ranks of the process group as `sizes` says. Every new group gets the default group's time-out.

    Axes with the same ranks share a process group: on GPUs each that communicates has an NCCL communicator, of half a
    GiB. A communicator runs its collectives one after another, in the order in which they were issued, whatever their
    streams. So axes may share one only if none waits in vain for another. Those of `_INSIDE_LAYERS` would: FSDP issues
    the gathers of the next layers ahead of a layer's own collectives, which would then queue behind them. They have
    communicators of their own, even where their ranks are all ranks. The others' (sums of tokens, losses and norms, the
    update) are issued between passes, when FSDP's are over or must wait for them anyway. Since one thread issues the
    same collectives in the same order on every rank (the order guard verifies it), sharing cannot deadlock.
    """
    with sharing_groups(_INSIDE_LAYERS):
        arranged = _arranged(sizes, device)
    _hold_to_timeout()
    return arranged


def _arranged(sizes: MeshSizes, device: torch.device) -> Mesh:
    mesh = init_device_mesh(
        device.type,
        (sizes.pp, sizes.token_ranks, sizes.tp),
        mesh_dim_names=("pp", "tokens", "tp"),
        backend_override=_backends(device, {"pp": sizes.pp, "tokens": sizes.token_ranks, "tp": sizes.tp}),
    )

    def cut(mesh: DeviceMesh, dimension: int, into: dict[str, int]) -> DeviceMesh:
        # By index: torch 2.11's `_unflatten` refuses every name, because its check of names is inverted.
        return mesh._unflatten(dimension, tuple(into.values()), tuple(into), _backends(device, into))

    axes = cut(mesh, 1, {"dp": sizes.dp, "cp": sizes.cp})
    fsdp = cut(mesh, 1, {"replicas": sizes.replicas, "shard": sizes.fsdp_shard})
    of_experts = {"expert_replicas": sizes.expert_replicas, "expert_shard": sizes.expert_shard, "ep": sizes.ep}
    experts = cut(mesh, 1, of_experts)
    replicas = ("replicas",) if sizes.replicas > 1 else ()
    expert_replicas = ("expert_replicas",) if sizes.expert_replicas > 1 else ()
    return Mesh(
        sizes=sizes,
        device=device,
        fsdp=fsdp[*replicas, "shard"],
        cp=axes["cp"],
        tp=mesh["tp"],
        pp=mesh["pp"],
        dp=axes["dp"],
        tokens=mesh["tokens"],
        stage=_stage(mesh, sizes, device),
        # Without expert parallelism the slice is not needed, and torch 2.11 refuses it where a shard is one rank.
        ep=experts["ep", "tp"] if sizes.tp > 1 and sizes.ep > 1 else experts["ep"],
        expert_fsdp=experts[*expert_replicas, "expert_shard"],
    )


def _stage(mesh: DeviceMesh, sizes: MeshSizes, device: torch.device) -> DeviceMesh:
    if sizes.tp == 1:
        return mesh["tokens"]
    return mesh["tokens", "tp"]._flatten("stage", **_backends(device, {"backend_override": sizes.stage_ranks}))


def _backends(device: torch.device, sizes: Mapping[str, int]) -> Any:
    """The backend of each dimension, by name; dimensions left out use the default group's, gloo included.

    On GPUs, a step exchanges only GPU tensors along the axes, so NCCL is enough: a gloo group per axis would hold
    connections and threads. A dimension of all ranks reuses the default group.
    """
    if device.type != "cuda":
        return {}
    world_size = dist.get_world_size()
    apart = {name for name, size in sizes.items() if name in _INSIDE_LAYERS and size > 1}
    return {name: "nccl" for name, size in sizes.items() if size < world_size or name in apart}


def _hold_to_timeout() -> None:
    """Give every group the default group's time-out: torch makes a mesh's groups with its own, 10 or 30 minutes."""
    assert dist.group.WORLD is not None
    for timeout in set(timeouts_of(dist.group.WORLD).values()):
        for group in process_groups():
            set_timeout(group, timeout)
