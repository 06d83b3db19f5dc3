"""The tables of a plan: what a kind of rank holds, what a step takes, what ranks wait for; also as plain values."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from configs.layout import tokens_per_step
from trainer.report.console import Row
from trainer.report.units import brief, count, duration, percent, size

if TYPE_CHECKING:
    from scripts.rehearsal.run import Proof
    from trainer.planning.by_stage import RunTime, StagePlan
    from trainer.planning.memory import MemoryEstimate
    from trainer.planning.step_time import Collective, RankTime, StepTime


# --------------------------------------------------------------------------- memory


def memory_rows(by_kind: Mapping[int, "MemoryEstimate"], device_bytes: int | None, on_gpus: bool = True) -> list[Row]:
    """Return the rows of what each kind of rank holds at its peak: a column for each, in GiB."""
    most = sorted(by_kind, key=lambda rank: -by_kind[rank].device)[:_COLUMNS]
    columns = []
    for rank in sorted(most):
        estimate = by_kind[rank]
        column = {_RANK: f"{rank}"} if len(by_kind) > 1 else {}
        column |= {part: _gib(n_bytes) for part, n_bytes in estimate.parts.items()}
        column["in all"] = _gib(estimate.device)
        if on_gpus:
            column[BESIDE] = _gib(beside(estimate))
        if on_gpus and device_bytes:
            column["left of a GPU's"] = _gib(device_bytes - estimate.device - beside(estimate))
        columns.append(column)
    names = dict.fromkeys(name for column in columns for name in column)
    order = sorted(names, key=lambda name: _AFTER_THE_PARTS.index(name) if name in _AFTER_THE_PARTS else -1)
    return _side_by_side(columns, order)


def _side_by_side(columns: Sequence[Mapping[str, str]], names: Iterable[str], width: int = 9) -> list[Row]:
    """Rows of several columns; a column may lack some."""
    return [(name, "".join(f"{column.get(name, '-'):>{width}}" for column in columns)) for name in names]


_RANK = "rank of the pipeline"


def beside(estimate: "MemoryEstimate") -> int:
    """Bytes of a GPU that torch does not allocate."""
    from trainer.planning.takes_less import CONTEXT_BYTES

    return estimate.communicators + CONTEXT_BYTES


BESIDE = "beside: NCCL, CUDA"
"""What `beside` is called."""
_AFTER_THE_PARTS = ("buffers", "in all", BESIDE, "left of a GPU's")
"""Rows of `memory_rows` that come last; a kind of rank may lack any other."""


_COLUMNS = 5
"""Kinds of ranks that fit beside each other on the console."""


def _gib(n_bytes: float) -> str:
    return f"{n_bytes / 2**30:.2f}"


def memory_as_json(by_kind: Mapping[int, "MemoryEstimate"]) -> list[dict[str, Any]]:
    """The bytes of each kind of rank at its peak as plain values."""
    return [
        {
            "pipeline_rank": rank,
            "peak_bytes": estimate.device,
            "moment": estimate.peak.name,
            "parts_bytes": estimate.parts,
            "communicators_bytes": estimate.communicators,
        }
        for rank, estimate in by_kind.items()
    ]


# --------------------------------------------------------------------------- stages


def stage_rows(stages: Sequence["StagePlan"], on_gpus: bool = True) -> list[Row]:
    """Return the rows of the stages of a run: what a step of each has, holds and takes."""
    return [(f"{stage.number}, from step {stage.first_step:,}", _words(stage, on_gpus)) for stage in stages]


def _words(stage: "StagePlan", on_gpus: bool) -> str:
    training = stage.config.training
    shape = f"{training.global_batch_size:,} x {training.seq_len:,}"
    words = f"{stage.steps:,} steps of {shape} tokens, {size(stage.memory.device)} at the peak"
    if stage.step:
        took = duration(stage.steps * stage.step.seconds_with_waits)
        words += f"; {brief(stage.step.seconds)} a step, {_speed(stage.step, on_gpus)}: {took}"
    return words


def stages_as_json(stages: Sequence["StagePlan"]) -> list[dict[str, Any]]:
    """The stages as plain values; times are None without a device."""
    return [
        {
            "stage": stage.number,
            "first_step": stage.first_step,
            "steps": stage.steps,
            "tokens": stage.steps * tokens_per_step(stage.config),
            "peak_bytes": stage.memory.device,
            "step_seconds": stage.step.seconds if stage.step else None,
            "tokens_per_second_per_gpu": stage.step.tokens_per_second if stage.step else None,
            "mfu": stage.step.mfu if stage.step else None,
        }
        for stage in stages
    ]


# --------------------------------------------------------------------------- waiting


def proof_rows(proof: "Proof", ranks: int) -> list[Row]:
    """Return the rows of a rehearsal."""
    return [
        ("ranks", f"{len(proof.ranks)} of {ranks:,} rehearsed: {_listed(proof.ranks)}"),
        ("each", "starts, computes 2 steps, validates, compares replicas, saves, is told to stop, and saves"),
        ("in small", "; ".join([proof.size, *(f"without {part}" for part in proof.left_out)])),
        ("issued", f"{proof.events:,} collectives and messages, in {proof.groups:,} groups and pairs"),
        ("waiting", "fails" if proof.problem else "no rank waits forever"),
        ("values", "not compared: that is keel prove, on ranks of this machine"),
        ("rehearsed in", duration(proof.seconds)),
    ]


def _listed(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:12]))
    return shown + (", ..." if len(ranks) > 12 else "")


# --------------------------------------------------------------------------- time

PART_WORDS = {
    "tp": "tensor parallelism, exposed",
    "cp": "context parallelism, exposed",
    "ep": "expert parallelism, exposed",
    "fsdp": "FSDP, exposed",
    "slower products beside fsdp": "slower beside FSDP",
}
"""Parts of a step whose names need words."""


def time_rows(step: "StepTime", run: "RunTime", price: float | None, on_gpus: bool = True) -> list[Row]:
    """Return the rows of what a step and the run take; `price` is of one GPU, or one rank of a CPU, for one hour."""
    hour = "GPU-hour" if on_gpus else "rank-hour"
    cost = f"; {count(run.gpu_hours * price)} at {price:g} a {hour}" if price else ""
    return [
        ("a step", f"{brief(step.seconds)}: {_speed(step, on_gpus)}"),
        *_part_rows(step),
        *_axis_rows(step.slowest),
        _data_row(step),
        *_save_rows(step),
        (
            "the run",
            f"{count(run.tokens)} tokens in {run.steps:,} steps: {duration(run.seconds)}, "
            f"{count(run.gpu_hours)} {hour}s{cost}",
        ),
        ("a checkpoint", f"{size(step.checkpoint)}, written in {brief(step.save.write)}"),
        ("counted", "FLOPs, tokens, bytes of collectives, data, states, checkpoints and saves"),
        ("modelled", "rates, bytes of elementwise kernels, what overlaps, the pipeline's bubble, waits"),
        *([("left out", "; ".join(step.left_out))] if step.left_out else []),
    ]


def _speed(step: "StepTime", on_gpus: bool) -> str:
    return f"{count(step.tokens_per_second)} tokens/s a {'GPU' if on_gpus else 'rank'}, MFU {percent(step.mfu)}"


def _part_rows(step: "StepTime") -> list[Row]:
    """Seconds by part, the longest first: a column for each kind of rank, of one kind with their shares."""
    most = sorted(step.by_kind, key=lambda rank: -step.by_kind[rank].seconds)[:_COLUMNS]
    whole: Counter[str] = Counter()
    columns = []
    for rank in sorted(most):
        of_kind = step.by_kind[rank]
        whole.update(of_kind.parts)
        columns.append({f"  {PART_WORDS.get(part, part)}": brief(each) for part, each in of_kind.parts.items()})
        columns[-1] |= {f"  {_RANK}": f"{rank}", "  in all": brief(of_kind.seconds)}
    names = [f"  {PART_WORDS.get(part, part)}" for part, _ in whole.most_common()]
    if len(step.by_kind) > 1:
        return _side_by_side(columns, [f"  {_RANK}", *names, "  in all"], width=11)
    shares = {f"  {PART_WORDS.get(part, part)}": percent(each / step.seconds) for part, each in step.parts.items()}
    return _side_by_side([columns[0], shares], names, width=11)


def _axis_rows(rank: "RankTime") -> list[Row]:
    """The collectives of a rank by axis, the largest first."""
    by_axis: dict[str, list[Collective]] = {}
    for each in rank.collectives:
        by_axis.setdefault(each.axis, []).append(each)
    return [(f"  over {axis}", _axis_words(of_axis)) for axis, of_axis in by_axis.items()]


def _axis_words(collectives: Sequence["Collective"]) -> str:
    """What the collectives of an axis send and take: "2 GiB in 4 calls: 8 ms (inside hosts 8 ms), exposed 3 ms"."""

    def total(name: str) -> float:
        return sum(getattr(each, name) for each in collectives)

    links = {"inside hosts": total("inside"), "between hosts": total("between")}
    words = ", ".join(f"{link} {brief(seconds)}" for link, seconds in links.items() if seconds)
    sent = f"{size(total('n_bytes'))} in {total('calls'):,} calls"
    return f"{sent}: {brief(total('seconds'))} ({words}), exposed {brief(total('exposed'))}"


def _data_row(step: "StepTime") -> Row:
    """What a step waits for its data."""
    data = step.data
    words = f"{brief(data.waiting)} a step: a rank prepares the next one's, {size(data.n_bytes)} of files, in "
    return "waiting for data", words + brief(data.seconds)


def _save_rows(step: "StepTime") -> list[Row]:
    """A row of what saves add to a step; none if the run saves at its end only."""
    save = step.save
    if not save.interval:
        return []
    share = percent(save.of_a_step / step.seconds)
    words = f"{brief(save.wait)} every {save.interval:,} steps, for {size(save.n_bytes)} of a rank to its host"
    return [("waiting for saves", f"{brief(save.of_a_step)} a step, {share} more: {words}")]


def time_as_json(step: "StepTime", run: "RunTime", price: float | None) -> dict[str, Any]:
    """The estimate as plain values; `plan_figures` says which are counted, and which modelled."""
    return {
        "step_seconds": step.seconds,
        "tokens_per_second_per_gpu": step.tokens_per_second,
        "mfu": step.mfu,
        "by_kind": [
            {
                "pipeline_rank": rank,
                "seconds": of_kind.seconds,
                "parts_seconds": dict(of_kind.parts),
                "collectives": [vars(each) for each in of_kind.collectives],
            }
            for rank, of_kind in step.by_kind.items()
        ],
        "parts_seconds": dict(step.parts),
        "run": {
            "tokens": run.tokens,
            "steps": run.steps,
            "seconds": run.seconds,
            "gpu_hours": run.gpu_hours,
            "price": run.gpu_hours * price if price else None,
        },
        "model_flops_per_step": step.flops,
        "checkpoint_bytes": step.checkpoint,
        "data": vars(step.data),
        "saves": vars(step.save) | {"seconds_of_a_step": step.save.of_a_step},
        "left_out": list(step.left_out),
    }
