"""The job that is rehearsed in place of a job: the same layers, ranks and micro-batches, in rows of a few numbers."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from configs.architectures import family_of
from configs.architectures.parts import small_size
from configs.layout import MeshSizes, accumulation_steps, mesh_sizes
from configs.reading.toml_text import table_text
from configs.schema import Config, Model
from configs.stages import layers_of_stages
from scripts.proving.small import short_lr_schedule, small_optimizer

STEPS = 6
STOP_AFTER = 2
"""The step after which each rank is told to stop. It is also that of a validation and a save."""
_LAYERS = 2
"""Layers of a pipeline stage, and twice as many without a pipeline; further ones do as these do."""
_MICRO_BATCHES = 2
"""Micro-batches of a step for each rank of the pipeline: it fills, goes on as it is, and empties."""


class RehearsalJob(NamedTuple):
    """The job that is rehearsed."""

    text: str
    """Text of the job file."""
    size: str
    """How small it is, for people."""
    left_out: list[str]
    """What of the job it leaves out, for people."""


def rehearsal_job(config: Config, ranks: int, folder: Path, later: Sequence[Config] = ()) -> RehearsalJob:
    """Make the job to rehearse for a job.

    Args:
        config: the job, or the first stage of it.
        ranks: the number of its ranks.
        folder: the run folder.
        later: the later stages, one of whose borders the rehearsed job has.
    """
    given = config.model_dump(exclude_unset=True)
    sizes = mesh_sizes(config, ranks)
    cut = 1 << (max(sizes.tp, sizes.cp, sizes.ep, sizes.pp) - 1).bit_length()
    model = given["model"] | family_of(config.model).small(config.model, cut)
    if isinstance(config.model, Model):
        model["n_layers"] = config.model.n_layers if config.pipeline.split else _layers(config)
    training = _training(config, given["training"], sizes, cut)
    border = _border(config, later, sizes, training)
    has_documents = any(stage.data.document_mask for stage in (config, *later))
    left_out: list[str] = []
    tables: dict[str, Any] = {
        "job": {"name": "rehearsal", "output_dir": str(folder), "device": "cpu", "grace_seconds": 3600},
        "model": model,
        "data": _data(config, has_documents),
        "training": training,
        "optimizer": small_optimizer(given["optimizer"], model),
        "lr_schedule": short_lr_schedule(given["lr_schedule"], STEPS),
        "mesh": sizes.axes,
        "fsdp": _without(given.get("fsdp", {}), "cpu_offload"),
        "comm": _without(given.get("comm", {}), "async_tp") | {"order_guard_interval": 0},
        "context": given.get("context", {}),
        "pipeline": given.get("pipeline", {}),
        "checkpoint": _checkpoint(given.get("checkpoint", {})),
        "validation": _validation(config, sizes, has_documents),
        "metrics": {"interval": 1, "tensorboard": False, "details_interval": 2 * bool(config.metrics.details_interval)},
        "fault": given.get("fault", {}) | {"compare_interval": 2 * bool(config.fault.compare_interval)},
        "average": given.get("average", {}) | ({"interval": 1, "start_step": 0} if config.average.interval else {}),
        "stages": [{"at_step": 1} | border] if border else [],
    }
    if config.activation_checkpoint.mode in ("full", "selective"):
        tables["activation_checkpoint"] = given["activation_checkpoint"]
    if config.float8.recipe != "none":
        if find_spec("torchao"):
            tables["float8"] = given["float8"] | {"emulate": True}
        else:
            left_out.append("[float8] (the package torchao is not installed)")
    micro_batches = training["global_batch_size"] // sizes.dp
    layers = f"{model['n_layers']} layers, " if "n_layers" in model else ""
    size = f"{layers}{micro_batches} micro-batches of 1 x {training['seq_len']} tokens, short rows"
    size += ", later stages as one" if border else ""
    return RehearsalJob(table_text({name: table for name, table in tables.items() if table}), size, left_out)


def _layers(config: Config) -> int:
    return min(config.model.n_layers, _LAYERS * max(2, len(layers_of_stages(config))))


def _without(table: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in table.items() if key not in keys}


def _sources(names: list[tuple[str, float]], has_documents: bool) -> list[dict[str, Any]]:
    """Synthetic tokens under the names and weights of the job's sources."""
    documents = {"document_length": 8} if has_documents else {}
    return [{"name": name, "kind": "synthetic", "weight": weight, **documents} for name, weight in names]


def _data(config: Config, has_documents: bool) -> dict[str, Any]:
    sources = _sources([(source.name, source.weight) for source in config.data.sources], has_documents)
    return {"sources": sources, "document_mask": config.data.document_mask}


def _validation(config: Config, sizes: MeshSizes, has_documents: bool) -> dict[str, Any]:
    if not config.validation.interval:
        return {}
    sources = _sources([(source.name, source.weight) for source in config.validation.sources], has_documents)
    return {"interval": 2, "sequences": min(config.validation.sequences, 2 * sizes.dp), "sources": sources}


def _training(config: Config, given: Mapping[str, Any], sizes: MeshSizes, cut: int) -> dict[str, Any]:
    micro_batches = min(accumulation_steps(config, sizes), _MICRO_BATCHES * sizes.pp)
    return _without(given, "tf32", "deterministic") | {
        "steps": STEPS,
        "seq_len": small_size(config.training.seq_len, 32, 2 * cut),
        "micro_batch_size": 1,
        "global_batch_size": sizes.dp * micro_batches,
    }


def _border(config: Config, later: Sequence[Config], sizes: MeshSizes, training: Mapping[str, Any]) -> dict[str, Any]:
    """What a later stage sets in small: all that one of them changes of what a step issues; empty without any."""
    if not later:
        return {}
    changed: dict[str, Any] = {}
    if any(stage.training.seq_len != config.training.seq_len for stage in later):
        changed["seq_len"] = 2 * training["seq_len"]
    if any(accumulation_steps(stage, sizes) != accumulation_steps(config, sizes) for stage in later):
        changed["global_batch_size"] = 2 * training["global_batch_size"]
    masks = any(stage.data.document_mask != config.data.document_mask for stage in later)
    data = {"data": {"document_mask": not config.data.document_mask}} if masks else {}
    training_table = {"training": changed} if changed else {}
    # At any border the ranks exchange their places in the data, so the rate changes even if nothing else does.
    return {"optimizer": {"lr": 2 * config.optimizer.lr}} | data | training_table


def _checkpoint(given: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in given.items() if key.startswith("keep_")}
    return kept | {"interval": 2, "mode": "sync"}
