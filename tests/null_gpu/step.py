"""What one training step asks of a GPU, counted without one: python -m tests.null_gpu.step --config llama_1b.toml

    [--ranks 8] [--json FILE] [--table.key VALUE ...]

The step runs with torch's CUDA build on a device that computes nothing (device.c): launches, copies, synchronizations,
collectives, host time and memory are those of a real GPU, values are not. With --ranks the process is rank 0 of so
many, of which the others exist only by name; under torchrun each process is a real rank.
"""

import argparse
import gc
import json
import os
import statistics
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from tests.null_gpu.device import Counters, Unavailable, environment

ROOT = Path(__file__).parents[2]
WARM_UP_STEPS = 3  # compiling takes two, and the allocator another
TIMED_STEPS = 3
SYNTHETIC = '[{name = "random", kind = "synthetic"}]'
SYNCS = ("sync_stream", "sync_device", "sync_event", "sync_copy")
COPIES = ("copy_to_device", "copy_to_host", "copy_on_device", "fill")
LAUNCHES = ("launch_aten", "launch_triton", "gemm")


def measure(
    config: str,
    overrides: Sequence[str],
    warm_up: int = WARM_UP_STEPS,
    timed: int = TIMED_STEPS,
    count_work: bool = False,
) -> dict[str, Any]:
    """Counts of a warmed-up step of a job, on this rank of the process group that exists already.

    Args:
        config, overrides: as of the command line; the data are synthetic.
        warm_up: steps before those that count.
        timed: steps of whose times the medians are taken.
        count_work: also count operations and bytes, as `work`.

    Returns:
        `launches`, `memcpys`, `syncs`, `nccl_calls`, `host_ms`, `peak_allocated_bytes`, `peak_reserved_bytes`,
        `steady_peak_bytes`, and details of each: by kind, by group, and for synchronizations by the line of the code.
        The first two peaks are of the process, including the steps that compile; the third is that of the steps after
        these, beyond what earlier measurements in the same process have left.
    """
    import torch
    import torch.distributed as dist

    from parallelisms.mesh import groups_of_axes
    from tests.null_gpu.even_routing import route_evenly
    from tests.null_gpu.work import counting
    from trainer.data.loader import MicroBatch
    from trainer.guards.verdict import QueuedStep

    job = load_job(config, overrides, dist.get_world_size())
    route_evenly()
    left = _clean()
    learner, loader = build(job)
    counters, last = Counters(), None
    seconds, idle = [], []

    def peaks() -> tuple[int, int]:
        return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()

    def one_step(micro_batches: list[MicroBatch], last: QueuedStep | None) -> QueuedStep:
        """A step as the trainer's on a GPU: the last step's result is read once this step's work is queued."""
        gradients = learner.gradients(micro_batches, in_buffers=True)
        if last is not None:
            last.read()
        step = learner.judge(micro_batches, gradients)
        learner.update(step, 1e-4)
        return step

    for step in range(warm_up + timed):
        if step == warm_up:
            before = peaks()
            torch.cuda.reset_peak_memory_stats()
        micro_batches = next(loader)
        counters.reset()
        started = time.process_time()
        last = one_step(micro_batches, last)
        if step >= warm_up:
            seconds.append(time.process_time() - started)
            idle.append(counters.idle_seconds())
    counts = counters.read()
    steady = peaks()
    with _synchronizations() as places, _collectives(groups_of_axes(learner.mesh)) as calls:
        last = one_step(next(loader), last)
    work: dict[str, int] = {}
    if count_work:
        with counting(learner.optimizer, learner.parameters.values()) as work:
            one_step(next(loader), last)
    loader.close()
    learner.state()  # ends what is still being sent, whose memory would otherwise outlive this
    return {
        "launches": sum(counts[name] for name in LAUNCHES),
        "memcpys": sum(counts[name] for name in COPIES),
        "syncs": sum(counts[name] for name in SYNCS),
        "nccl_calls": counts["collective"],
        "host_ms": 1e3 * statistics.median(seconds),
        "idle_after_syncs_ms": 1e3 * statistics.median(idle),
        "peak_allocated_bytes": max(before[0], steady[0]),
        "peak_reserved_bytes": max(before[1], steady[1]),
        "steady_peak_bytes": steady[0] - left,
        "counts": counts,
        "sync_places": dict(places),
        "collectives_by_axis": dict(calls),
        "work": dict(work),
        "torch": torch.__version__,
        "ranks": dist.get_world_size(),
    }


def measure_bare(config: str, overrides: Sequence[str]) -> dict[str, Any]:
    """Counts of a step of the bare loop of `scripts/benchmark.py`, to compare: launches, syncs and memory."""
    import torch

    from scripts.benchmarks.bare import bare_step

    job = load_job(config, overrides, ranks=1)
    with weights_without_values():
        step = bare_step(job, torch.device("cuda", 0), compiled=job.compile.enable)
    for _ in range(WARM_UP_STEPS):
        step()
    counters = Counters()
    counters.reset()
    step()
    counts = counters.read()
    return {
        "launches": sum(counts[name] for name in LAUNCHES),
        "syncs": sum(counts[name] for name in SYNCS),
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
    }


def load_job(config: str, overrides: Sequence[str], ranks: int) -> Any:
    """A job's config, with synthetic data."""
    from configs.load import load

    return load(config, [*overrides, "--data.sources", SYNTHETIC], ranks).config


def build(job: Any, draw: bool = False) -> tuple[Any, Any]:
    """Learner and loader of a job on this rank of the process group that exists already; the memory is all theirs.

    Weights have values only if `draw`, which takes a device that computes.
    """
    import torch
    import torch.distributed as dist

    from configs.layout import mesh_sizes
    from parallelisms.mesh import build_mesh
    from tests.null_gpu.known_shapes import know_shapes
    from trainer.data.loader import build_loader
    from trainer.step import build_learner

    if not draw:
        know_shapes()
    torch._dynamo.reset()  # of what was measured before, in the same process: other shapes would be made dynamic
    _clean()
    device = torch.device("cuda", torch.cuda.current_device())
    mesh = build_mesh(mesh_sizes(job, dist.get_world_size()), device)
    with nullcontext() if draw else weights_without_values():
        learner = build_learner(job, mesh)
    return learner, build_loader(job, mesh.dp_rank, mesh.sizes.dp, start_sample=0)


def _clean() -> int:
    """Free what this process no longer uses, and begin new peaks; returns the bytes that are held nevertheless."""
    import torch

    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


@contextmanager
def weights_without_values() -> Iterator[None]:
    """Drawing weights takes the CPU's time, and nothing on this device keeps a value that could be checked."""
    from parallelisms import init

    draw, check = init._initialize, init.check_initialized
    init._initialize, init.check_initialized = lambda *_: None, lambda *_: None
    try:
        yield
    finally:
        init._initialize, init.check_initialized = draw, check


@contextmanager
def _synchronizations() -> Iterator[Counter[str]]:
    """Where torch makes the host wait for the device: how often, by the innermost line of Keel's that led there."""
    import torch

    places: Counter[str] = Counter()

    def note(message: Any, *_: Any, **__: Any) -> None:
        if "called a synchronizing" in str(message):
            places[_line_of_keel()] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            torch.cuda.set_sync_debug_mode("default")


def _line_of_keel() -> str:
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if path.is_relative_to(ROOT) and not path.is_relative_to(Path(__file__).parent):
            return f"{path.relative_to(ROOT)}:{frame.lineno}"
    return "outside of Keel"


@contextmanager
def _collectives(axes: dict[str, Any]) -> Iterator[Counter[str]]:
    """Collectives and messages by the axis of the mesh (of several that are one group, the first), and operator."""
    import torch.distributed as dist

    from parallelisms.torch_internals import listening

    names = {str(group.group_name): axis for axis, group in reversed(axes.items())}
    calls: Counter[str] = Counter()

    def note(operator: str, group: dist.ProcessGroup, _: tuple[Any, ...]) -> None:
        axis = names.get(str(group.group_name), "all")
        calls[f"{axis} ({group.size()} ranks): {operator.strip('_')}"] += 1

    with listening(note):
        yield calls


def join(ranks: int) -> None:
    """Join the process group: torchrun's, or one in which this process is rank 0 and the others are only said to be."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  # it registers the backend "fake"

    from parallelisms.mesh import start_process_group
    from parallelisms.nccl import KNOWN_BACKEND, configure_nccl

    if "RANK" in os.environ:
        start_process_group("cuda", timeout_seconds=120)
        return
    configure_nccl(KNOWN_BACKEND, os.environ)
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:fake,cuda:nccl", store=dist.HashStore(), rank=0, world_size=ranks)


def table(result: dict[str, Any]) -> str:
    """The result for people."""
    gib = 2**30
    counts = result["counts"]
    lines = [
        f"launches          {result['launches']:>8,}   " + _kinds(counts, LAUNCHES),
        f"copies and fills  {result['memcpys']:>8,}   " + _kinds(counts, COPIES),
        f"synchronizations  {result['syncs']:>8,}",
        *(f"                  {count:>8,}   {place}" for place, count in result["sync_places"].items()),
        f"NCCL calls        {result['nccl_calls']:>8,}",
        *(f"                  {count:>8,}   {call}" for call, count in result["collectives_by_axis"].items()),
        f"host CPU time     {result['host_ms']:>8.1f} ms",
        f"idle after syncs  {result['idle_after_syncs_ms']:>8.1f} ms from any synchronization to the next launch",
        f"memory at peak    {result['peak_allocated_bytes'] / gib:>8.2f} GiB allocated, "
        f"{result['peak_reserved_bytes'] / gib:.2f} GiB reserved",
    ]
    return "\n".join(lines)


def _kinds(counts: dict[str, int], names: Sequence[str]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {counts[name]:,}" for name in names)


def main() -> int:
    """The command line; starts itself once more, on the device."""
    parser = argparse.ArgumentParser(description="Count what a training step asks of a GPU, without one.")
    parser.add_argument("--config", required=True, help="job file")
    parser.add_argument("--ranks", type=int, default=1, help="be rank 0 of so many (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the counts to this file, too")
    parser.add_argument("--bare", action="store_true", help="count the bare loop's step instead, as JSON")
    parser.add_argument("--timed", type=int, default=TIMED_STEPS, help="steps of which the median is taken")
    options, overrides = parser.parse_known_args()
    if "KEEL_NULL_GPUS" not in os.environ:
        try:
            settings = environment(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        except Unavailable as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        command = [sys.executable, "-m", "tests.null_gpu.step", *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | {"OMP_NUM_THREADS": "1"} | settings)
    from configs.errors import KeelError

    join(options.ranks)
    if options.bare:
        print(json.dumps(measure_bare(options.config, overrides), indent=2))
        return 0
    try:
        result = measure(options.config, overrides, timed=options.timed, count_work=True)
    except KeelError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if int(os.environ.get("RANK", "0")) == 0:
        print(table(result))
        if options.json:
            options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # NCCL's threads wait for a device that never answers
