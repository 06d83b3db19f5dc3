"""A launch's messages besides its progress: the job before it is built, and how the run went."""

import os
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from checkpoint.manifest import is_fork
from checkpoint.storage import FolderStorage
from configs.checks.idle import without_effect
from configs.elastic import Choice, describe
from configs.files import is_folder
from configs.machine import free_memory
from configs.schema import Config
from configs.secret import SECRET
from parallelisms.mesh import Mesh
from parallelisms.nccl import nccl_variables
from parallelisms.sums import sums_of
from trainer.data.bucket_place import requests_made
from trainer.guards.environment import device_name, threads
from trainer.lifecycle import State, write_status
from trainer.opening import Opened
from trainer.planning.states import checkpoint_bytes
from trainer.planning.takes_less import CONTEXT_BYTES, does_not_fit, host_does_not_fit
from trainer.report.console import Console
from trainer.report.summary import closing_rows, closing_title, next_rows, slow_attention, startup_rows
from trainer.trainer import Trainer


def silent_end(before: dict[str, Any], folder: Path) -> str:
    """Describe a launch whose ranks all died before one could report why."""
    heard = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(before.get("time", 0)))
    last_sign = before.get("time", 0) - 1
    crashes = [str(file) for file in sorted((folder / "crashes").glob("*")) if file.stat().st_mtime >= last_sign]
    stacks = f"; stacks of its crash are in {', '.join(crashes)}" if crashes else ""
    reason = f" (its last status: {before['reason']})" if before.get("reason") else ""
    return (
        f"the last launch (process {before.get('pid')} on host {before.get('host')}) ended unexpectedly at step "
        f"{before.get('step')}{reason}, last seen at {heard}: it was killed, or its host went down{stacks}"
    )


def say_hello(job: Opened, console: Console) -> None:
    """Print what will be trained, and warn of what will not fit; nothing is built yet."""
    config = job.config
    mesh = job.mesh
    data = [f"{source.name}: {source.kind} {source.path or ''}".rstrip() for source in config.data.sources]
    name = device_name(mesh.device)
    step = job.progress.first_step
    rows = startup_rows(config, mesh.sizes, name, job.peak, data, config.job.folder, step, mesh, job.largest)
    rows.insert(2, ("attention", job.attention))
    nccl = nccl_variables(config, os.environ) if mesh.device.type == "cuda" and dist.get_world_size() > 1 else ""
    kernels = (("Gated DeltaNet", job.delta), ("8 bits", job.float8))
    further = (*kernels, ("communication", job.communication), ("NCCL", nccl))
    rows[3:3] = [row for row in further if row[1]]
    console.table(f"Keel trains {config.job.name}", rows)
    if made := requests_made():
        console.line(f"{made} requests were made by this rank for the data's list, headers and tables")
    for line in job.plan:
        console.line(line)
    if job.choice:
        console.line(_where(config, job.choice))
    if not sums_of(config.training).mesh_changes_bits:
        console.line(_what_decides_bits(config, mesh))
    if job.by_memory:
        console.line(str(job.by_memory))
    if unauthenticated := note_on_secret(os.environ):
        console.line(unauthenticated)
    for complaint in (*job.warnings, *without_effect(config), *slow_attention(config, mesh.device.type)):
        console.warning_of_all(complaint)
    if config.compile.enable:
        console.line("torch.compile compiles in the first steps, which may take minutes")
    warn_if_too_large(job.largest, mesh.device, console, mesh, job.storage)


def note_on_secret(environment: Mapping[str, str]) -> str:
    """The remark on a run without a secret on several hosts, by torchrun's variables; "" if there is none."""
    if int(environment.get("GROUP_WORLD_SIZE", "1")) == 1 or environment.get(SECRET):
        return ""
    return f"{SECRET} is not set: hosts believe anyone who writes to their store (docs/stopping.md)"


def _where(config: Config, choice: Choice) -> str:
    """One line: "elastic: 2 hosts of 2 ranks; 4 ranks form the mesh dp_shard 4"."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return f"elastic: {choice.world_size // here} hosts of {here} ranks; {describe(config, choice)}"


def _what_decides_bits(config: Config, mesh: Mesh) -> str:
    """The settings of an exact run that decide its bits, besides its run keys."""
    fixed = [f"mesh.{axis} {size}" for axis in ("tp", "cp", "ep") if (size := mesh.sizes.axes[axis]) > 1]
    if config.compile.enable:
        fixed.append(f"torch.compile, activation checkpointing {config.activation_checkpoint.mode}")
    fixed.append(f"{threads()} threads (OMP_NUM_THREADS)" if mesh.device.type == "cpu" else "this kind of GPU")
    return f"exact: another dp_replicate, dp_shard, pp, zero_stage changes no bit; these would: {', '.join(fixed)}"


def warn_if_too_large(
    config: Config, device: torch.device, console: Console, mesh: Mesh | None, storage: FolderStorage | None
) -> None:
    """Warn that a GPU, this host or the disk has too little room; not an error, as it may get more."""
    if dist.get_rank() > 0:
        return
    checkpoints = config.job.folder / "checkpoints"
    where = checkpoints if is_folder(checkpoints) else config.job.folder  # it may be a link to another disk
    needed = checkpoint_bytes(config)
    free = (storage or FolderStorage()).room(where)
    if free is not None and needed > free:
        console.warning(
            f"a checkpoint takes {needed:,} bytes, and {where} has {free:,} free: saves will fail. Make room, or set "
            "job.output_dir to another disk"
        )
    ranks = dist.get_world_size()
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    problems = [host_does_not_fit(config, ranks, ranks_here, device.type, free_memory(), mesh)]
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)  # without CUDA's own memory, which this process holds by now
        problems.append(does_not_fit(config, ranks, free + CONTEXT_BYTES, mesh))
    for problem in filter(None, problems):
        console.warning(problem)


def say_goodbye(trainer: Trainer, state: State) -> None:
    """Print how the run went and where its files are; all ranks must call it."""
    config = trainer.config
    console = trainer.console
    step = trainer.run.step
    memory = trainer.memory()
    if dist.get_rank() > 0:
        return
    folder = config.job.folder
    newest = trainer.checkpoints.newest
    plan = trainer.records.beside_plan.text()
    reason = trainer.runtime.stop.reason or "a signal to another rank"
    console.table(
        closing_title(config, state, step, reason),
        closing_rows(config, folder, trainer.runtime.ledger.seconds(), trainer.progress.ends, memory, newest, plan),
    )
    console.commands("What to try next", next_rows(config, state, is_fork(folder / "checkpoints"), step))
    said = "" if state == "done" else reason
    write = partial(write_status, folder, state, step, said, checkpoint=str(newest))
    console.outages.insist(folder / "status.json", write)
