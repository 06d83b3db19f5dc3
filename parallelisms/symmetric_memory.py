"""Communication through memory that the GPUs of a group can read directly, where torch and the machine have it.

Asynchronous tensor parallelism (Wang et al. 2023, Overlap Communication with Dependent Computation): the compiler cuts
a matmul that follows an all-gather, or precedes a reduce-scatter, into parts, and moves the next part while one is
computed. Each part is copied from a neighbor's memory, so all ranks of the group must be on one host, with GPUs that
reach each other (NVLink).

FSDP's buffers: `registered` ones are allocated by NCCL, which then sends from and receives into them without copies of
its own (over NVLink and SHARP). In symmetric memory NCCL has faster kernels, and within a host it can gather by the
GPUs' copy engines, which leaves all cores to the computation (`NCCL_CTA_POLICY`).

All of it is fast paths: values are the same, up to the order in which parts of a reduction are added. What cannot run
on this machine is off, and the start-up summary says why.
"""

import os
import socket
import warnings
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed._symmetric_memory import enable_symm_mem_for_group
from torch.distributed.fsdp import FSDPModule

from configs.schema import Comm, Config
from parallelisms.mesh import Mesh
from parallelisms.ranks import gather
from parallelisms.torch_internals import fsdp_modules

MICRO_PIPELINE: dict[str, Any] = {"_micro_pipeline_tp": True}
"""The compiler's option for asynchronous tensor parallelism."""
_ZERO_CORES = "2"
"""NCCL's policy by which collectives use no cores of a GPU where they can do without."""


def async_tp_is_off(config: Config, mesh: Mesh) -> str | None:
    """Why products do not overlap with tensor parallelism's communication; None if they do. All ranks must call it."""
    if not config.comm.async_tp:
        return "comm.async_tp is false"
    if mesh.sizes.tp == 1:
        return "mesh.tp is 1"
    if mesh.device.type != "cuda":
        return "this run is on CPUs"
    group = mesh.tp.get_group()
    places = gather((socket.gethostname(), torch.cuda.current_device()), group)
    reasons = gather(_apart(places), group)  # one rank's reason is the group's: all must run the same program
    return next(filter(None, reasons), None)


def _apart(places: Sequence[tuple[str, int]]) -> str | None:
    """Why this rank cannot read the memory of a group's GPUs, given by host and number."""
    hosts = sorted({host for host, _ in places})
    here = torch.cuda.current_device()
    if len(hosts) > 1:
        return f"a tensor-parallel group is on {len(hosts)} hosts ({', '.join(hosts[:3])})"
    apart = [gpu for _, gpu in places if gpu != here and not torch.cuda.can_device_access_peer(here, gpu)]
    return f"GPU {here} of {hosts[0]} cannot reach the memory of GPU {apart[0]}" if apart else None


def fsdp_buffers_are_off(config: Config, mesh: Mesh) -> str | None:
    """Why FSDP's collectives use torch's own memory; None if they do not."""
    buffers = config.comm.fsdp_buffers
    if buffers == "default":
        return 'comm.fsdp_buffers is "default"'
    if mesh.device.type != "cuda":
        return "this run is on CPUs"
    if mesh.sizes.fsdp_shard == 1:
        return "FSDP shards over one rank"
    if buffers != "registered" and not hasattr(FSDPModule, "set_symm_mem_for_comm"):
        return f"torch {torch.__version__} has no FSDP in symmetric memory; 2.13 has"
    return None


def fast_paths(config: Config, mesh: Mesh) -> str:
    """The job's requests beyond torch's default communication, and whether they are on; empty if there are none.

    All ranks must call it.
    """
    states = {
        "asynchronous tensor parallelism": async_tp_is_off(config, mesh) if config.comm.async_tp else "",
        f"{config.comm.fsdp_buffers} buffers of FSDP": (
            fsdp_buffers_are_off(config, mesh) if config.comm.fsdp_buffers != "default" else ""
        ),
    }
    return "\n".join(f"{name}: {f'off, {why}' if why else 'on'}" for name, why in states.items() if why != "")


def enable_async_tp(config: Config, mesh: Mesh) -> dict[str, Any]:
    """Give the tensor-parallel group symmetric memory where the job asks for it; returns options for the compiler."""
    if async_tp_is_off(config, mesh):
        return {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # deprecated, but the compiler's pass still asks for it (2.13)
        enable_symm_mem_for_group(mesh.tp.get_group().group_name)
    return MICRO_PIPELINE


def set_fsdp_buffers(stages: Iterable[nn.Module], config: Config, mesh: Mesh) -> None:
    """Let the collectives of the stages' FSDP groups use the memory that the job names; all ranks must call it."""
    if fsdp_buffers_are_off(config, mesh):
        return
    for module in chain.from_iterable(map(fsdp_modules, stages)):
        _set(module, config.comm)


def _set(module: Any, comm: Comm) -> None:
    if comm.fsdp_buffers == "registered":
        module.set_allocate_memory_from_process_group_for_comm(True)
        return
    if comm.fsdp_buffers == "copy_engine":
        os.environ.setdefault("NCCL_CTA_POLICY", _ZERO_CORES)  # read with the first communicator, as in `streams.py`
    module.set_symm_mem_for_comm()
