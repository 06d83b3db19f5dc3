"""Whether a run that goes on from a checkpoint has the bits that it would have had undisturbed.

It has, with the same job file on the same mesh and in the same surroundings: the sums of a step are then added up in
the same order. What changes that order changes the last bits of every loss from there on, and nothing else.
"""

from collections.abc import Mapping
from typing import Any

import torch

from checkpoint.manifest import Manifest

CODE = "Keel's code"
"""Its place in an environment: the one part of it whose change need not change a bit."""
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
)
"""The machine keys that change the order of sums, what the compiler fuses, or which kernels are taken."""
_ALIKE = {"fsdp.zero_stage": {2, 3}}
"""Values of them between which no bit changes."""


def changed_surroundings(manifest: Manifest, environment: Mapping[str, str]) -> dict[str, str]:
    """The parts of the surroundings that are not as they were when the checkpoint was written, by name.

    A checkpoint that has none recorded is compared by its torch version alone.
    """
    before = {"torch": manifest.torch_version, **manifest.environment}
    now = {"torch": torch.__version__, **(environment if manifest.environment else {})}
    return _changes(before, now)


def changed_settings(manifest: Manifest, config: Mapping[str, Any], mesh: Mapping[str, int]) -> dict[str, str]:
    """The sizes of the mesh, and those of SETTINGS, that are not as they were, by name."""
    before = {f"mesh.{axis}": size for axis, size in manifest.mesh.items()} | _settings(manifest.config)
    now = {f"mesh.{axis}": size for axis, size in mesh.items()} | _settings(config)
    alike = {name for name, values in _ALIKE.items() if {before.get(name), now.get(name)} <= values}
    return {name: change for name, change in _changes(before, now).items() if name not in alike}


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Those of SETTINGS that a config knows."""
    tables = ((key, *key.split(".")) for key in SETTINGS)
    return {key: config[table][name] for key, table, name in tables if name in config.get(table, {})}


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """ "old -> new" for each value that differs."""
    pairs = {name: (before.get(name, "not set"), now.get(name, "not set")) for name in {**before, **now}}
    return {name: f"{old} -> {new}" for name, (old, new) in pairs.items() if old != new}
