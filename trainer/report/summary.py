"""What is shown before the first step and after the last: a job as rows of text, for `Console.table`."""

import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path

import torch

from checkpoint.export.hf_config import to_keel
from checkpoint.find import HF_CONFIG_NAME
from configs.architectures import family_of
from configs.architectures.parts import head_dim
from configs.errors import UserError
from configs.layout import (
    MeshSizes,
    accumulation_steps,
    active_parameter_count,
    micro_batch_size,
    named_axes,
    schedule_lengths,
    scheduled_steps,
    tokens_per_step,
    zero_stage,
)
from configs.schema import Config, HfModel, Training, is_described
from configs.stages import layers_of_stages
from models.documents import has_kernel
from parallelisms.mesh import Mesh
from parallelisms.sums import sums_of
from trainer.lifecycle import LAUNCHER, State
from trainer.optimizers.adamw import kernel_of_adamw
from trainer.optimizers.build import rule_name
from trainer.optimizers.rule import rule_of
from trainer.planning.flops import flops_per_token
from trainer.planning.memory import estimate_memory
from trainer.planning.skeleton import skeleton
from trainer.planning.states import always_frozen
from trainer.report.console import Row
from trainer.report.metrics import Kind, Memory
from trainer.report.units import count, duration, size
from trainer.teacher import teacher_job

# --------------------------------------------------------------------------- before


def startup_rows(
    config: Config,
    sizes: MeshSizes,
    device_name: str,
    peak: float | None,
    data: Sequence[str],
    run_folder: Path,
    resumed_step: int = 0,
    mesh: Mesh | None = None,
    largest: Config | None = None,
) -> list[Row]:
    """What will be trained, how it is computed and where it is written.

    Args:
        config, sizes: the job and its mesh.
        device_name: from `torch.cuda.get_device_name()`, or "cpu".
        peak: `flops.peak_flops` of that device.
        data: one line per source, such as "python_stdlib: 3.5 M tokens".
        run_folder: where everything is written.
        resumed_step: steps already completed; 0: a new run.
        mesh: as for `measure_blocks`.
        largest: the stage of the run that takes the most memory; None: `config`.
    """
    device_type = "cpu" if device_name == "cpu" else "cuda"
    rows = [
        ("model", _model(config)),
        ("teacher", _teacher(config)),
        ("precision", _precision(config, device_type)),
        ("ranks", _ranks(sizes, device_name)),
        ("technique", _techniques(config, device_type)),
        ("batch", _batch(config, sizes)),
        ("steps", _steps(config, resumed_step)),
        ("FLOPs", _flops(config, peak)),
        ("memory", _memory(largest or config, sizes, device_type, mesh)),
        ("a resume", promise(config.training, device_type)),
        ("data", "\n".join(data)),
        ("validation", _validation(config)),
        ("written to", f"{run_folder}/: {_files(config)}"),
    ]
    return [row for row in rows if row[1]]


def _model(config: Config) -> str:
    model = config.model
    active = ""
    if is_described(model) and model.n_experts is not None:
        active = f", {count(active_parameter_count(model))} active"
    shapes = skeleton(model).shapes
    frozen = always_frozen(config, skeleton(model))
    trained = f", {count(sum(prod(shapes[name]) for name in shapes.keys() - frozen))} trained" if frozen else ""
    n_parameters = sum(map(prod, shapes.values()))
    return (
        f"{model.architecture}, {count(n_parameters)} parameters ({n_parameters:,}){active}{trained}\n"
        f"{family_of(model).shape(model)}{native_modules(config)}"
    )


def _teacher(config: Config) -> str:
    table = config.distillation
    if table.teacher is None:
        return ""
    model = teacher_job(config).model
    n_parameters = sum(map(prod, skeleton(model).shapes.values()))
    return (
        f"{table.teacher}: {model.architecture}, {count(n_parameters)} parameters\n"
        f"weight {table.weight:g}, temperature {table.temperature:g}; the loss shown stays the cross-entropy"
    )


def native_modules(config: Config) -> str:
    """A line if Keel has modules of its own for this model of Hugging Face; "" otherwise."""
    if not isinstance(config.model, HfModel):
        return ""
    try:
        own = to_keel(config.model.fields, Path(HF_CONFIG_NAME))
    except UserError:
        return ""
    return f"\nKeel's own {own.architecture} computes the same, and offers sequence parallelism and float8 besides"


def _precision(config: Config, device_type: str) -> str:
    products = float32_products(config.training, device_type)
    return _types(config) + (f"; {products}" if products else "")


def promise(training: Training, device_type: str) -> str:
    """How closely a resumed run follows an undisturbed one on this kind of device."""
    if device_type == "cpu":
        return "bit for bit that of a run without a stop"
    if training.deterministic:
        return "bit for bit that of a run without a stop (training.deterministic)"
    return "that of a run without a stop up to rounding; bit for bit with training.deterministic = true, slower"


def float32_products(training: Training, device_type: str) -> str:
    """How a GPU computes float32 products; empty if there are none, or no choice."""
    if device_type == "cpu" or training.compute_dtype != "float32":
        return ""
    return "products in TF32 (10 bits of each factor)" if training.tf32 else "products without TF32: exact, and slow"


def _types(config: Config) -> str:
    kept, compute, reduce = (getattr(config.training, key) for key in ("dtype", "compute_dtype", "reduce_dtype"))
    moments = config.optimizer.moments_dtype if config.optimizer.moments_dtype == "bfloat16" else kept
    if config.optimizer.rounding == "stochastic":
        kept = moments = f"stochastically rounded {kept}"
    if kept == compute == reduce == moments:
        return kept
    states = f"{kept} parameters and optimizer" if kept == moments else f"{kept} parameters, {moments} moments"
    return f"{states}, {compute} forward and backward, {reduce} reduction"


def _ranks(sizes: MeshSizes, device_name: str) -> str:
    experts = f"\nexperts: {sizes.of_experts}" if sizes.of_experts else ""
    mesh = f": {named_axes(sizes.axes)}" if sizes.world_size > 1 else ""
    return f"{sizes.world_size} on {device_name}{mesh}{experts}"


def _techniques(config: Config, device_type: str) -> str:
    """The differences from plain eager training."""
    used = [
        f"ZeRO stage {config.fsdp.zero_stage}" if zero_stage(config.fsdp) < 3 else "",
        _pipeline(config),
        f"context parallelism by {config.context.method}" if config.mesh.cp > 1 else "",
        "torch.compile" if config.compile.enable else "",
        f"activation checkpointing {config.activation_checkpoint.mode}"
        if config.activation_checkpoint.mode != "none"
        else "",
        "states offloaded to the CPU" if config.fsdp.cpu_offload else "",
        _owners(config),
        _optimizer(config, device_type),
    ]
    return ", ".join(filter(None, used))


def _optimizer(config: Config, device_type: str) -> str:
    """The optimizer; on a CPU, AdamW is not mentioned, since there is no choice of its kernel."""
    name = config.optimizer.name
    title = name.partition(":")[2] or name.capitalize()
    if rule_of(name).hidden_matrices_only:
        used = f"{title} for the blocks' matrices"
    else:
        used = "" if name == "adamw" else title
    has_adamw = rule_name(config.optimizer, is_hidden_matrix=False) == "adamw"
    if not has_adamw or device_type == "cpu" or config.fsdp.cpu_offload:
        return used
    dtype = getattr(torch, config.training.dtype)
    said = {"keel": "Keel's kernel of AdamW", "torch": "torch's kernel of AdamW", "separate": "AdamW without a kernel"}
    kernel = said[kernel_of_adamw(config.optimizer, device_type, dtype, sums_of(config.training))]
    return f"{used}, {kernel}" if used else kernel


def _owners(config: Config) -> str:
    if config.fsdp.partition == "rows":
        return ""
    rounded = config.fsdp.owner_broadcast_dtype
    return "optimizer by owner" + (f", who sends parameters in {rounded}" if rounded else "")


def _pipeline(config: Config) -> str:
    """The schedule, and the number of layers in each stage; empty without a pipeline."""
    if config.mesh.pp == 1:
        return ""
    layers = " + ".join(str(len(layers)) for layers in layers_of_stages(config))
    return f"pipeline {config.pipeline.schedule} of {layers} layers"


def _batch(config: Config, sizes: MeshSizes) -> str:
    training = config.training
    micro_batches = accumulation_steps(config, sizes)
    cut = f"{training.micro_batch_size} at once" + (f", {micro_batches} times" if micro_batches > 1 else "")
    ranks = f" on each of {sizes.dp} data-parallel ranks" if sizes.dp > 1 else ""
    return (
        f"{training.global_batch_size:,} sequences of {training.seq_len:,} = {tokens_per_step(config):,} tokens "
        f"per step ({cut}{ranks})"
    )


def _steps(config: Config, resumed_step: int) -> str:
    steps = config.training.steps
    total = f"{steps:,} = {count(steps * tokens_per_step(config))} tokens"
    if config.stages:
        total = f"{steps:,}, in the stages below"
        return f"{total}; resuming from step {resumed_step:,}" if resumed_step else total
    scheduled = scheduled_steps(config)
    if steps > scheduled and schedule_lengths(config.lr_schedule).decay is not None:
        total += f"; after step {scheduled:,} ({_length_key(config)}) the learning rate stays at its minimum"
    return f"{total}; resuming from step {resumed_step:,}" if resumed_step else total


def _validation(config: Config) -> str:
    interval = config.validation.interval
    steps = config.training.steps
    if not interval:
        return ""
    if interval > steps:
        return f"none: the first would be at step {interval:,} (validation.interval), after the last step, {steps:,}"
    return f"{config.validation.sequences:,} sequences every {interval:,} steps"


def _flops(config: Config, peak: float | None) -> str:
    frozen = always_frozen(config, skeleton(config.model))
    flops = flops_per_token(config.model, config.training.seq_len, frozen)
    of_peak = f"MFU of {peak / 1e12:g} TFLOP/s" if peak else "MFU not shown: the peak FLOP/s of this device is unknown"
    without_mask = f"{count(flops.full)} if attention is counted without the causal mask"
    without_mask += "; the teacher's are not counted" if config.distillation.teacher else ""
    return f"{count(flops.causal)} per token, {without_mask}\n{of_peak}"


def _memory(config: Config, sizes: MeshSizes, device_type: str, mesh: Mesh | None) -> str:
    estimate = estimate_memory(config, sizes, device_type, mesh)
    peak = estimate.peak
    transient = {
        "gradients": 0 if estimate.offloaded else peak.gradients,
        "gathered": peak.gathered,
        "activations": peak.activations,
        "loss": peak.loss,
    }
    where = f", and {size(estimate.states)} of the host's memory" if estimate.offloaded else ""
    beside = "; CUDA and the allocator's reserve are extra" if device_type == "cuda" else "; Python and torch are extra"
    lines = [f"about {size(estimate.device)} per rank{where} (estimate of what is allocated{beside})"]
    states = ("parameters", "gradients", "optimizer", *(("teacher",) if estimate.teacher else ()))
    lines += [", ".join(f"{name} {size(getattr(estimate, name))}" for name in states)]
    if estimate.communicators:
        lines[0] += f"\nabout {size(estimate.communicators)} for NCCL's communicators, beside that"
    lines += [f"at the peak, in {peak.name}: " + ", ".join(f"{name} {size(n)}" for name, n in transient.items() if n)]
    return "\n".join(lines)


def slow_attention(config: Config, device_type: str) -> Iterator[str]:
    """Warn if attention has no fused kernel for the documents of this job."""
    dtype = config.training.compute_dtype
    width = head_dim(config.model)
    if not config.data.document_mask or has_kernel(device_type, getattr(torch, dtype), width):
        return
    in_tiles = config.mesh.cp > 1 and config.context.method != "all_to_all"
    pairs = (
        "tile by tile" if in_tiles else f"under a mask of all pairs, {size(config.training.seq_len**2)} per sequence"
    )
    yield (
        f"no kernel keeps documents apart on CUDA in {dtype} with heads of {width}: scores are materialized {pairs}, "
        'which is slow; there is one for training.compute_dtype = "bfloat16" and heads of a multiple of 8, up to 256'
    )


def _files(config: Config) -> str:
    return "run.log, metrics.jsonl, checkpoints/" + (", tensorboard/" if config.metrics.tensorboard else "")


# --------------------------------------------------------------------------- after


def closing_title(config: Config, state: State, step: int, reason: str) -> str:
    """The heading of a run's last table."""
    if state == "done" and step > config.training.steps:
        return f"Nothing to do: the run is at step {step:,}, and training.steps = {config.training.steps}."
    if state == "done":
        return f"Done: step {step:,} reached."
    if state == "preempted":
        return f"Stopped by {reason} after step {step:,}, with everything saved."
    return f"Failed after step {step:,}: {reason}"


def closing_rows(
    config: Config,
    run_folder: Path,
    seconds: Mapping[Kind, float],
    losses: tuple[float, float] | None,
    memory: Memory,
    checkpoint: Path | None,
    plan: str = "",
) -> list[Row]:
    """How the run went, and where everything is.

    Args:
        config: the job.
        run_folder: the run's folder.
        seconds: from `TimeLedger.seconds()`.
        losses: this launch's first and last loss; None if it made no step.
        memory: the most memory that any rank has held.
        checkpoint: the newest; None if there is none.
        plan: what was measured beside what was planned; "" if nothing can be compared.
    """
    spent = sorted(((value, kind) for kind, value in seconds.items() if value >= 0.05), reverse=True)
    events = shlex.quote(str(run_folder / "tensorboard"))
    by_kind = ", ".join(f"{kind} {duration(value)}" for value, kind in spent)
    rows = [
        ("loss", f"{losses[0]:.4f} at first, {losses[1]:.4f} at last" if losses else ""),
        ("time", f"{duration(sum(seconds.values()))}\n{by_kind}"),
        ("memory", _memory_held(memory)),
        ("plan", plan),
        ("checkpoint", str(checkpoint) if checkpoint else "none"),
        ("metrics", str(run_folder / "metrics.jsonl")),
        ("curves", f"tensorboard --logdir {events}" if config.metrics.tensorboard else ""),
        ("log", str(run_folder / "run.log")),
    ]
    return [row for row in rows if row[1]]


def _memory_held(memory: Memory) -> str:
    held = f"{size(memory.memory_peak_bytes)} at the peak"
    if memory.memory_reserved_peak_bytes is None:
        return f"{held}, of the whole process with Python and torch"
    held += f", {size(memory.memory_reserved_peak_bytes)} reserved ({memory.memory_percent:.1f}% of the device's)"
    if not memory.allocator_retries and not memory.allocator_ooms:
        return held
    return (
        f"{held}\nallocator retries {memory.allocator_retries} (it freed memory and tried again, which is slow), "
        f"times it ran out {memory.allocator_ooms}"
    )


def _length_key(config: Config) -> str:
    return "lr_schedule.total_tokens" if config.lr_schedule.total_steps is None else "lr_schedule.total_steps"


def next_rows(config: Config, state: State, is_fork: bool = False, step: int = 0) -> list[Row]:
    """The next things to try: variations of the command that started this process, each also correct when repeated.

    In another folder, the command of a fork draws weights of its own: that is not the fork's curve.
    """
    go_on = {"checkpoint.load": "latest"} if config.checkpoint.load == "none" else {}
    if state != "done":
        return [("resume from the newest checkpoint", _with(_this_command(), go_on))]
    steps = max(config.training.steps, step)
    scheduled = steps if config.stages else scheduled_steps(config)
    farther = min(2 * steps, scheduled) if steps < scheduled else 2 * steps
    how = "continue to twice the steps" if farther == 2 * steps else "continue to the end of the schedule"
    if not config.stages and farther > scheduled and schedule_lengths(config.lr_schedule).decay is not None:
        how += f", past {_length_key(config)} (minimum rate)"
    seed = (config.training.seed + 1) % 2**63
    rows = [
        (how, _with(_this_command(), go_on | {"training.steps": str(farther)})),
        (
            "another seed, as a separate run",
            _with(_this_command(), _new_run(config, f"seed-{seed}") | {"training.seed": str(seed)}),
        ),
    ]
    if not is_fork and _would_run_on_two_ranks(config):
        rows.append(("the same curve from two ranks", _with(_this_command(ranks=2), _new_run(config, "2-ranks"))))
    launcher = shlex.split(os.environ.get(LAUNCHER, "python train.py"))
    return [*rows, ("every key and its meaning", shlex.join([*launcher, "--help"]))]


def _this_command(ranks: int | None = None) -> list[str]:
    """The command line that started this process, as a person would type it, or the same for `ranks` ranks."""
    launched = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if LAUNCHER in os.environ:
        several = ["--ranks", str(ranks or launched)] if (ranks or launched) > 1 else []
        return [*shlex.split(os.environ[LAUNCHER]), *(word for word in sys.argv[1:] if word != "--config"), *several]
    if ranks is None and "TORCHELASTIC_RUN_ID" not in os.environ:
        return ["python", *sys.argv]
    wanted = ranks or launched
    return ["torchrun", *(["--nproc-per-node", str(wanted)] if wanted > 1 else []), *sys.argv]


def _would_run_on_two_ranks(config: Config) -> bool:
    """Whether this run had one rank, and two could share its batch with no other change."""
    alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
    divides = config.training.global_batch_size % (2 * micro_batch_size(config.training)) == 0
    return alone and divides and config.mesh.dp_shard == -1


def _new_run(config: Config, suffix: str) -> dict[str, str]:
    """The keys that give a run its own folder and make it start from the beginning."""
    load = config.checkpoint.load
    go_back = config.checkpoint.go_back
    from_start = {} if load == "latest" else {"checkpoint.load": "latest"}
    from_start |= {"checkpoint.go_back": "0"} if go_back else {}
    if config.job.output_dir:
        return {"job.output_dir": f"{config.job.output_dir.rstrip('/')}-{suffix}", **from_start}
    return {"job.name": f"{config.job.name}-{suffix}", **from_start}


def _with(command: Sequence[str], changes: Mapping[str, str]) -> str:
    """The command with some keys set, each once."""
    words = list(command)
    for key, value in changes.items():
        flag = f"--{key}"
        if flag in words:
            del words[words.index(flag) : words.index(flag) + 2]
        words = [word for word in words if not word.startswith(f"{flag}=")] + [flag, value]
    return shlex.join(words)
