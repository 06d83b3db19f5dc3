"""Check whether a job fits, and how long it takes, before requesting machines: build it for any number of ranks.

    python scripts/plan.py llama_7b.toml --ranks 8 [--memory-gib 80] [--device h100] [--trace] [--prove | --prove-all]

The model is built on the meta device and parallelized over a fake process group, with the same code and checks as on a
cluster, but without memory for the weights. The plan shows what rank 0 would hold, counted from its shards, and an
estimate of the rest; with --memory-gib also whether that fits, or what would make it fit. With --device, a step's time
is estimated from counted work and the rates in configs/rates/devices.toml, or those that --calibrate measures on this
machine. With --trace, one step of each kind of rank
is run with fake tensors, to show what it communicates. With --prove, the run is rehearsed in small as each kind of
rank, and what they issue is matched: no rank waits forever, or who does, for what, and where. With --tune, the fastest
ways to run the same job that fit the device are searched; --ranks may then be several numbers, 8,16,64 or 8..512, for
the best of each.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

if not __package__:  # run as a file
    import keel  # noqa: F401 - Keel's packages come first

from configs.errors import ConfigError, UserError
from configs.files import write_atomically
from configs.layout import mesh_sizes
from configs.load import LoadedConfig, load
from configs.run_stages import largest_first
from configs.schema import Config
from configs.stages import layers_of_stages, stages_of_rank
from scripts.command import add_job_argument, end, job_of, number_of, parsed, positive, require_places, run_command
from scripts.plan_figures import origins
from scripts.plan_tables import (
    BESIDE,
    beside,
    memory_as_json,
    memory_rows,
    proof_rows,
    stage_rows,
    stages_as_json,
    time_as_json,
    time_rows,
)
from trainer.report.console import Console, Row
from trainer.report.metrics import memory_peak_bytes
from trainer.report.units import count, duration, size

if TYPE_CHECKING:
    from scripts.rehearsal.run import Proof
    from trainer.planning.by_stage import RunTime, StagePlan
    from trainer.planning.devices import Device
    from trainer.planning.timeline import RankLine


def shard_bytes(config: Config, ranks: int) -> int:
    """Bytes of the parameters that rank 0 of `ranks` holds, after all parallelisms are applied."""
    import torch

    from parallelisms.fake_ranks import fake_ranks
    from parallelisms.mesh import build_mesh
    from parallelisms.ranks import local_part
    from trainer.stages import build_stages

    with fake_ranks(ranks):
        stages, _ = build_stages(config, build_mesh(mesh_sizes(config, ranks), torch.device("cpu")))
        locals_ = [local_part(p) for s in stages.values() for p in s.parameters()]
        assert all(p.is_meta for p in locals_)
        return sum(p.numel() * p.element_size() for p in locals_)


def rows(stage: "StagePlan", ranks: int, device_bytes: int | None, name: str, ranks_of_cpu: int = 0) -> list[Row]:
    """Return the rows of the plan.

    Args:
        stage: the stage of the run that takes the most memory.
        ranks: how many the job shall run on.
        device_bytes: the memory of a GPU, None if unknown.
        name: its name, as `_name` has it.
        ranks_of_cpu: ranks that share a CPU and its memory, `device_bytes`; 0 on GPUs.
    """
    from trainer.planning.skeleton import skeleton
    from trainer.planning.takes_less import does_not_fit, host_does_not_fit
    from trainer.report.summary import native_modules

    config = stage.config
    held = shard_bytes(config, ranks)
    where = f"{stage.memory.peak.name}{_of(name)}"
    sizes = mesh_sizes(config, ranks)
    estimate = stage.memory
    too_much = ""
    if device_bytes and ranks_of_cpu:
        too_much = host_does_not_fit(config, ranks, ranks_of_cpu, "cpu", device_bytes)
    elif device_bytes:
        too_much = does_not_fit(config, ranks, device_bytes, what=name or "the job")
    place = "by a rank" if ranks_of_cpu else "of a GPU's memory"
    return [
        (
            "model",
            f"{count(sum(map(prod, skeleton(config.model).shapes.values())))} parameters{native_modules(config)}",
        ),
        ("ranks", f"{ranks}: {sizes}"),
        ("held by rank 0", f"{size(held)} of parameters; with gradients and optimizer {size(estimate.states)}"),
        (
            "at the peak",
            f"about {size(estimate.device)} allocated {place} (estimate), in {where}",
        ),
        *([("fits", too_much or "yes")] if device_bytes else []),
    ]


def kinds_of_ranks(config: Config, ranks: int) -> dict[int, str]:
    """Return one rank of each kind, with its description.

    In a pipeline, ranks differ by their layers and by whether they hold the first or last stage. Otherwise these are
    the first and the last rank, whose shards are smaller where the ranks do not divide the rows.
    """
    a_stage = ranks // config.mesh.pp
    if config.mesh.pp == 1:
        return {0: "the first rank", ranks - 1: "the last rank"}
    layers = layers_of_stages(config)
    kinds: dict[tuple, int] = {}
    for rank in range(config.mesh.pp):
        own = stages_of_rank(config, rank)
        kinds.setdefault((0 in own, len(layers) - 1 in own, tuple(len(layers[stage]) for stage in own)), rank)
    return {rank * a_stage: f"rank {rank} of the pipeline" for rank in kinds.values()}


def traffic_rows(config: Config, ranks: int, rank: int) -> list[Row]:
    """Return the rows of what a rank communicates in a step."""
    from trainer.planning.traffic import trace_step

    started = time.perf_counter()
    traffic = trace_step(config, ranks, rank)
    rows = [
        (f"{kind.op} over {kind.axis}", f"{calls:,} calls, {size(n_bytes)} in all")
        for kind, (calls, n_bytes) in traffic.items()
    ]
    return [*rows, ("traced in", duration(time.perf_counter() - started))]


def _traced(config: Config, ranks: int) -> dict[str, list[Row]]:
    """The communication of a step on each kind of rank; kinds that communicate the same are one."""
    found: dict[tuple[Row, ...], tuple[list[str], Row]] = {}
    for rank, kind in kinds_of_ranks(config, ranks).items():
        *traffic, took = traffic_rows(config, ranks, rank)
        found.setdefault(tuple(traffic), ([], took))[0].append(kind)
    return {" and of ".join(kinds): [*traffic, took] for traffic, (kinds, took) in found.items()}


def _rank_counts(text: str) -> list[int]:
    """The type of --ranks: one number, or several; `rank_counts` reads these."""
    if text.isdecimal() or not text.replace(".", "").replace(",", "").isdecimal():
        return [positive(text)]
    from scripts.tuning import rank_counts

    try:
        return rank_counts(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _require_tune(options: argparse.Namespace, counts: Sequence[int]) -> None:
    """Refuse combinations of options that mean nothing."""
    if options.calibrate and (options.device or options.tune or len(counts) > 1):
        raise UserError(
            "--calibrate measures this machine and plans with it; give it one number of ranks, and "
            "--device with --tune the file that it writes afterwards"
        )
    if options.tune and not options.device:
        raise UserError("--tune compares times; say with --device for which kind of GPU, such as h100")
    if options.tune and (options.trace or options.prove or options.html):
        raise UserError(
            "--tune compares jobs; leave --trace, --prove and --html out, and plan the job that --write writes"
        )
    if not options.tune and (options.write or len(counts) > 1):
        raise UserError("--write and several numbers of ranks are for --tune, which searches the best job; add it")
    if options.write:
        from scripts.tuning import require_new

        require_new(options.write)
        if len(counts) > 1:
            raise UserError("--write writes one job; give --ranks one number")


def _tune(
    options: argparse.Namespace,
    job: LoadedConfig,
    counts: Sequence[int],
    device: "Device",
    memory: float,
    console: Console,
) -> None:
    """Print the best ways to run the job, or the best for each number of ranks."""
    from scripts.tuning import Tuning, write_job

    if device.type == "cpu":
        raise UserError("--tune searches for GPUs; say for which kind with --device, such as h100")
    tuning = Tuning(job, device, options.gpus_per_host, memory)
    if len(counts) > 1:
        points = tuning.curve(counts, options.price)
        if options.json:
            print(json.dumps({"job": job.config.job.name, "device": options.device, "curve": points}, indent=2))
        else:
            tuning.show_curve(points, console)
        return
    outcome = tuning.search(counts[0]).run()
    if options.json:
        found = tuning.as_json(outcome, counts[0], options.price)
        head = {"job": job.config.job.name, "ranks": counts[0], "device": options.device}
        print(json.dumps(head | found, indent=2))
    else:
        tuning.show(outcome, counts[0], options.price, console)
    if options.write:
        write_job(options.write, job_of(options), outcome.best[0].config)
        console.line(f"wrote {options.write}")


def _calibrate(options: argparse.Namespace, config: Config, console: Console) -> None:
    """Measure this machine's GPU or CPU, write its row, and have the job planned for it."""
    from scripts.tuning import require_new

    require_new(options.calibrate, "--calibrate")
    from scripts.calibration import calibrate, calibration_rows, row_text

    console.line("measuring this machine's GPU, or its CPU if it has none, which takes about half a minute")
    device, not_measured = calibrate(config, options.ranks[0])
    console.table(f"rates of {device.title}", calibration_rows(device, not_measured))
    write_atomically(options.calibrate, [row_text(device, not_measured)])
    console.line(f"wrote {options.calibrate}, for --device")
    options.device = str(options.calibrate)


_positive_number = number_of(lambda n: 0 < n < 1e15, "a number above 0 and below 1e15")


@dataclass(frozen=True)
class Plan:
    """What is shown of a job; the parts that were not asked for are empty or None."""

    name: str
    ranks: int
    memory: list[Row]
    stages: "list[StagePlan]"
    largest: "StagePlan"
    """The stage that takes the most memory."""
    longest: "StagePlan"
    """The stage that takes the most time."""
    device_bytes: int | None
    traced: dict[str, list[Row]]
    proof: "Proof | None"
    on_gpus: bool
    lines: "Sequence[RankLine]"
    """When each rank of the pipeline passes micro-batches; empty without a page."""
    chosen: dict[str, Any]
    """The keys that memory has chosen, with their values."""

    def as_json(self, options: argparse.Namespace) -> dict[str, Any]:
        """The plan as plain values, and how each figure came about."""
        plan: dict[str, Any] = {"job": self.name, "ranks": self.ranks, "memory": dict(self.memory)}
        if self.chosen:
            plan["chosen"] = self.chosen
        plan["memory_by_kind"] = memory_as_json(self.largest.by_kind)
        if len(self.stages) > 1:
            plan["stages"] = stages_as_json(self.stages)
        if self.traced:
            plan["traced"] = {kinds: dict(traffic) for kinds, traffic in self.traced.items()}
        if self.longest.step:
            plan |= {"device": options.device, "time": time_as_json(self.longest.step, self._run, options.price)}
        if self.proof:
            plan["proof"] = vars(self.proof)
        return plan | origins(plan)

    def page(self, options: argparse.Namespace, device: "Device | None") -> str:
        """The plan as a page of HTML."""
        from scripts.page.planned import planned_page

        title = self._title + (f" of {device.title}" if device else "")
        tables = {"The job": self.memory}
        if len(self.stages) > 1:
            tables["Its stages (estimate)"] = stage_rows(self.stages, self.on_gpus)
        if self.longest.step:
            heading = f"A step{_of(_name(self.longest, self.stages))} (estimate)"
            tables[heading] = time_rows(self.longest.step, self._run, options.price, self.on_gpus)
        held = {
            rank: estimate.parts | ({BESIDE: beside(estimate)} if self.on_gpus else {})
            for rank, estimate in self.largest.by_kind.items()
        }
        stages = _of(_name(self.largest, self.stages)), _of(_name(self.longest, self.stages))
        step = self.longest.step
        steps = {rank: of_kind.parts for rank, of_kind in step.by_kind.items()} if step else {}
        device_bytes = self.device_bytes if self.on_gpus else None  # ranks share a CPU's
        return planned_page(title, tables, held, device_bytes, steps, stages, self.lines)

    def show(self, options: argparse.Namespace, device: "Device | None", console: Console) -> None:
        """Print the plan as tables."""
        memory = self.memory
        if device and dict(memory)["fits"] != "yes":
            console.line(f"does not fit: {dict(memory)['fits']}\n")
            memory = [row for row in memory if row[0] != "fits"]
        console.table(self._title, memory)
        if len(self.stages) > 1:
            console.table("its stages (estimate)", stage_rows(self.stages, self.on_gpus))
        largest = _name(self.largest, self.stages)
        longest = _name(self.longest, self.stages)
        peak = memory_rows(self.largest.by_kind, self.device_bytes, self.on_gpus)
        when = f"the peak of {largest}" if largest else "its peak"
        console.table(f"memory of a rank at {when}, GiB (estimate)", peak)
        if self.longest.step and device:
            steps = time_rows(self.longest.step, self._run, options.price, self.on_gpus)
            console.table(f"a step{_of(longest)} on {device.title} (estimate)", steps)
        for kinds, traffic in self.traced.items():
            console.table(f"one step{_of(largest)} of {kinds}", traffic)
        if self.proof:
            console.table("what ranks wait for", proof_rows(self.proof, self.ranks))

    @property
    def _title(self) -> str:
        return f"{self.name} on {self.ranks} rank{'s' * (self.ranks > 1)}"

    @property
    def _run(self) -> "RunTime":
        from trainer.planning.by_stage import run_time

        return run_time((stage.steps, stage.step) for stage in self.stages if stage.step)


def _name(stage: "StagePlan", stages: "Sequence[StagePlan]") -> str:
    """The name of one stage of several; empty for the only one of a run."""
    return f"stage {stage.number}" if len(stages) > 1 else ""


def _of(name: str) -> str:
    return f" of {name}" if name else ""


def planned(
    job: LoadedConfig, options: argparse.Namespace, device: "Device | None", memory: float | None, console: Console
) -> Plan:
    """Make the plan of a job; `memory`: GiB of a GPU, None if unknown."""
    from trainer.planning.by_memory import planned_choice
    from trainer.planning.by_stage import plan_stages, run_lengths

    ranks = options.ranks[0]
    if options.prove:
        from trainer.planning.unknown_names import require_known_names

        require_known_names(job)  # in words of this job, not of the small one
    device_bytes = int(memory * 2**30) if memory else None
    config, *others = [stage.config for stage in largest_first(job.stages, sum(run_lengths(job)))]
    choice = planned_choice(config, ranks, device_bytes, others)
    if choice:
        console.line(str(choice))
    started = time.perf_counter()
    stages = plan_stages(job, choice, ranks, device, options.gpus_per_host)
    most = max(stages, key=lambda stage: stage.memory.device)
    longest = max(stages, key=lambda stage: stage.steps * stage.step.seconds_with_waits if stage.step else 0.0)
    ranks_of_cpu = min(ranks, options.gpus_per_host) if device and device.type == "cpu" else 0
    held = rows(most, ranks, device_bytes, _name(most, stages), ranks_of_cpu)
    held.append(("built in", duration(time.perf_counter() - started)))
    held.append(("this process", f"{size(memory_peak_bytes('cpu'))} at its peak"))
    traced = _traced(most.config, ranks) if options.trace else {}
    lines: Sequence[RankLine] = ()
    if device and options.html:
        from trainer.planning.timeline import timeline

        lines = timeline(longest.config, ranks, device, options.gpus_per_host)
    proof = None
    if options.prove:
        from scripts.rehearsal.run import rehearse

        proof = rehearse(stages[0].config, ranks, [stage.config for stage in stages[1:]], options.prove_all)
    name = job.config.job.name
    on_gpus = not ranks_of_cpu
    keys = choice.keys if choice else {}
    return Plan(name, ranks, held, stages, most, longest, device_bytes, traced, proof, on_gpus, lines, keys)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the plan; returns the exit code."""
    options, overrides = parsed(_parser(), arguments)
    options.prove |= options.prove_all

    def work(console: Console) -> None:
        if options.price and not (options.device or options.calibrate):
            raise UserError("--price needs a time to multiply with; say with --device for which kind of GPU")
        require_places({"--html": options.html})
        counts = options.ranks
        _require_tune(options, counts)
        memory = options.memory_gib
        device = None
        if options.calibrate:
            _calibrate(options, load(job_of(options), overrides, counts[0]).config, console)
        if options.device:
            from trainer.planning.devices import device_named

            device = device_named(options.device)
            memory = memory or device.memory_gib
        if options.tune and device:
            _tune(options, load(job_of(options), overrides), counts, device, memory * 2**30, console)
            return
        plan = planned(load(job_of(options), overrides, counts[0]), options, device, memory, console)
        if options.json:
            print(json.dumps(plan.as_json(options), indent=2))
        else:
            plan.show(options, device, console)
        if options.html:
            write_atomically(options.html, [plan.page(options, device)])
            console.line(f"wrote {options.html}")
        if plan.proof and plan.proof.problem:
            raise UserError(plan.proof.problem)

    return run_command(work, "stopped", out=sys.stderr if options.json else None)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], epilog="Further words override the config.")
    add_job_argument(parser)
    add = parser.add_argument
    add("--ranks", type=_rank_counts, required=True, help="number of ranks; with --tune also 8,16,64 or 8..512")
    add("--memory-gib", type=_positive_number, help="memory of a GPU (default: that of --device)")
    add(
        "--device",
        metavar="NAME",
        help="kind of GPU, such as h100, cpu, or a file of --calibrate: estimate a step's time",
    )
    add("--calibrate", type=Path, metavar="FILE", help="measure this machine's GPU or CPU, and write FILE for --device")
    add("--gpus-per-host", type=positive, default=8, help="GPUs of a host (default: %(default)s)")
    add("--price", type=_positive_number, metavar="P", help="price of an hour of a GPU, or of a rank on a CPU")
    add("--trace", action="store_true", help="run one step of each kind of rank with fake tensors")
    add("--prove", action="store_true", help="rehearse the run, and show that no rank waits forever")
    add("--prove-all", action="store_true", help="the same as every rank; beyond 16, --prove takes those at the edges")
    add("--tune", action="store_true", help="search the fastest ways to run the same job")
    add("--write", type=Path, metavar="FILE", help="write the best that --tune finds as a job file")
    add("--html", type=Path, metavar="FILE", help="write the plan as a page, with bars of memory and of a step")
    add("--json", action="store_true", help="print the plan as JSON")
    return parser


if __name__ == "__main__":
    end(main)
