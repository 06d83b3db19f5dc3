"""The small job that `keel prove` runs in place of a job: the same run tables, small, in float64, on synthetic tokens.

Machine tables are left out: the techniques take their place. What a proof in float64 cannot keep is told in a note.
"""

import fnmatch
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from configs.architectures import family_of
from configs.architectures.parts import small_size
from configs.reading.toml_text import table_text
from configs.schema import Average, Config, table_of_model

STEPS = 4
_MAX_NORM = 0.1
"""Below the norms of the first steps, so that clipping is part of the proof."""
_LEAST_EPS = 1e-6
"""Least epsilon: at 1e-8 Adam amplifies the round-off of gradients near zero."""
_LEFT_OUT = ("tf32", "deterministic", "micro_batch_size", "max_skipped_steps")


class SmallJob(NamedTuple):
    """A job file's text."""

    text: str
    notes: tuple[str, ...]
    """What differs from the job besides its size, for people."""


def small_job(config: Config, ranks: int) -> SmallJob:
    """Make the small job of a job, for meshes of up to `ranks` ranks, a power of two."""
    notes = list(_notes(config))
    values = config.model_dump(exclude_unset=True)
    model = values["model"] | family_of(config.model).small(config.model, ranks)
    optimizer = small_optimizer(values["optimizer"], model)
    dropped = len(config.optimizer.groups) - len(optimizer.get("groups", []))
    if dropped:
        notes.append(f"{dropped} of optimizer.groups name only parameters that the small model does not have")
    tables: dict[str, Any] = {
        "job": {"name": "prove", "device": "cpu"},
        "model": model,
        "data": {
            "sources": [{"name": "synthetic", "kind": "synthetic"}],
            "document_mask": config.data.document_mask,
        },
        "training": _training(config, values["training"], ranks),
        "optimizer": optimizer,
        "lr_schedule": short_lr_schedule(values["lr_schedule"], STEPS),
        "average": _average(config.average),
        "checkpoint": {"interval": 0},
        "comm": {"order_guard_interval": 1},
    }
    if config.data.document_mask:
        tables["data"]["sources"][0]["document_length"] = 8
    return SmallJob(table_text(tables), tuple(notes))


def _notes(config: Config) -> Iterator[str]:
    """What a proof in float64 does not keep."""
    dtypes = {config.training.dtype, config.training.compute_dtype, config.training.reduce_dtype} - {"float64"}
    if dtypes:
        yield f"computed in float64, not in {' and '.join(sorted(dtypes))}: there, round-off hides faults"
    if config.float8.recipe != "none":
        yield 'float8 matmuls are left out; their proof is keel parity --rows "float8*"'
    if config.distillation.teacher:
        yield "distillation.teacher is left out; tests/distributed/test_teacher.py compares it with plain PyTorch"
    if config.fsdp.owner_broadcast_dtype:
        yield "fsdp.owner_broadcast_dtype is left out: it rounds"
    if config.average.dtype == "bfloat16":
        yield "average.dtype is left out: bfloat16 rounds"


def _training(config: Config, given: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    training = config.training
    kept = {key: value for key, value in given.items() if key not in _LEFT_OUT}
    return kept | {
        "steps": STEPS,
        "seq_len": small_size(training.seq_len, 32, 2 * ranks),  # context parallelism cuts two chunks for each rank
        "global_batch_size": small_size(training.global_batch_size, 2 * ranks, ranks),
        "dtype": "float64",
        "compute_dtype": "float64",
        "reduce_dtype": "float64",
        "max_norm": min(training.max_norm, _MAX_NORM) if training.max_norm != float("inf") else training.max_norm,
    }


def _average(average: Average) -> dict[str, Any]:
    """An average of the same kind, of which several updates are among the steps."""
    if not average.interval:
        return {}
    kind = {"last": min(average.last, 2)} if average.last else {"decay": average.decay}
    return {"interval": 1, "start_step": min(average.start_step, 1), **kind}


def small_optimizer(given: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    """The optimizer's table, without groups of parameters that the small model does not have."""
    kept = {key: value for key, value in given.items() if key != "kernel"}
    kept["eps"] = max(kept.get("eps", 0.0), _LEAST_EPS)
    if "groups" in kept:
        from trainer.planning.skeleton import skeleton  # which imports torch

        names = skeleton(table_of_model(model).model_validate(model)).shapes
        kept["groups"] = [group for group in kept["groups"] if fnmatch.filter(names, group["pattern"])]
    return kept


def short_lr_schedule(given: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """The schedule, so short that its warm-up and its decay are among the steps."""
    warms_up, decays = (given.get(f"{part}_steps") or given.get(f"{part}_tokens") for part in ("warmup", "decay"))
    kept = {key: value for key, value in given.items() if not key.endswith(("_steps", "_tokens"))}
    kept |= {"warmup_steps": min(warms_up or 0, 1), "total_steps": 2 * steps}
    return kept | ({"decay_steps": steps} if decays else {})
