"""Communication through memory that the GPUs of a group can read directly, where torch and the machine have it.

Asynchronous tensor parallelism (Wang et al. 2023, Overlap Communication with Dependent Computation): the compiler cuts
a matmul that follows an all-gather, or precedes a reduce-scatter, into parts, and moves the next part while one is
computed. Each part is copied from a neighbor's memory, so all ranks of the group must be on one host, with GPUs that
reach each other (NVLink).

It is a fast path: values are the same, up to the order in which parts of a reduction are added. Where it cannot run it
is off, and the start-up summary says why.
"""

import socket
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed._symmetric_memory import enable_symm_mem_for_group

from configs.schema import Config
from parallelisms.mesh import Mesh
from parallelisms.ranks import gather

MICRO_PIPELINE: dict[str, Any] = {"_micro_pipeline_tp": True}
"""The compiler's option for asynchronous tensor parallelism."""


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


def fast_paths(config: Config, mesh: Mesh) -> str:
    """Whether asynchronous tensor parallelism is on; empty if the job does not ask for it. All ranks must call it."""
    if not config.comm.async_tp:
        return ""
    why = async_tp_is_off(config, mesh)
    return f"asynchronous tensor parallelism: {f'off, {why}' if why else 'on'}"


def enable_async_tp(config: Config, mesh: Mesh) -> dict[str, Any]:
    """Give the tensor-parallel group symmetric memory where the job asks for it; returns options for the compiler."""
    if async_tp_is_off(config, mesh):
        return {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # deprecated, but the compiler's pass still asks for it (2.13)
        enable_symm_mem_for_group(mesh.tp.get_group().group_name)
    return MICRO_PIPELINE
