"""Whether a run that resumes from a checkpoint has the same bits as an undisturbed one.

It does if the same job file runs on the same mesh in the same environment: a step's sums are then added up in the same
order. A change of that order changes the last bits of every loss from there on, and nothing else. With
training.reduction = "exact", the order does not depend on the data-parallel mesh nor on the pipeline.
"""

from collections.abc import Mapping
from typing import Any

import torch

from checkpoint.manifest import Manifest
from configs.reading.keys import key_path
from configs.run_change import default_of
from configs.schema import is_exact

CODE = "Keel's code"
"""The key for code in an environment: the only part whose change need not change any bits."""
SETTINGS = (
    "training.micro_batch_size",
    "training.deterministic",
    "fsdp.zero_stage",
    "fsdp.accumulate",
    "fsdp.partition",
    "context.method",
    "pipeline.schedule",
    "pipeline.stages_per_rank",
    "pipeline.split",
    "compile.enable",
    "compile.mode",
    "attention.backend",
    "optimizer.kernel",
    "comm.async_tp",
    "float8.emulate",
)
"""The machine keys that change the order of sums, what the compiler fuses, or which kernels are used."""
_FREE_IF_EXACT = {"mesh.pp", "mesh.dp_replicate", "mesh.dp_shard", "fsdp.zero_stage", "fsdp.accumulate"} | {
    key for key in SETTINGS if key.startswith(("pipeline.", "fsdp.partition"))
}
"""The mesh sizes and SETTINGS that change nothing with exact reductions."""
_ALIKE = {"fsdp.zero_stage": {2, 3}}
"""Values of these keys between which no bit changes."""


def changed_surroundings(manifest: Manifest, environment: Mapping[str, str]) -> dict[str, str]:
    """The parts of the environment that have changed since the checkpoint was written, by name.

    A checkpoint that records no environment is compared by its torch version alone.
    """
    before = {"torch": manifest.torch_version, **manifest.environment}
    now = {"torch": torch.__version__, **(environment if manifest.environment else {})}
    return changes(before, now)


def changed_settings(
    old_config: Mapping[str, Any], old_mesh: Mapping[str, int], config: Mapping[str, Any], mesh: Mapping[str, int]
) -> dict[str, str]:
    """The mesh sizes and the SETTINGS that have changed, by name."""
    before = {f"mesh.{axis}": size for axis, size in old_mesh.items()} | _settings(old_config)
    now = {f"mesh.{axis}": size for axis, size in mesh.items()} | _settings(config)
    alike = {name for name, values in _ALIKE.items() if {before.get(name), now.get(name)} <= values}
    if is_exact(old_config) and is_exact(config):
        alike |= _FREE_IF_EXACT
    return {name: change for name, change in changes(before, now).items() if name not in alike}


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The SETTINGS of a config; one that an earlier version of Keel did not have counts as its default."""
    tables = ((key, *key.split(".")) for key in SETTINGS)
    return {key: config.get(table, {}).get(name, default_of(key_path(key))) for key, table, name in tables}


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """ "old -> new" for each value that differs."""
    pairs = {name: (before.get(name, "not set"), now.get(name, "not set")) for name in {**before, **now}}
    return {name: f"{old} -> {new}" for name, (old, new) in pairs.items() if old != new}
