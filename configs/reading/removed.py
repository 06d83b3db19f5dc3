"""Keys that earlier versions of Keel had: the default of each, and what to do now.

A run keeps its whole config, so the config of an old run has all of them. One with its default value asks for what is
done now, and is left out; with another value it is a mistake that comes with its remedy.
"""

from typing import Any

_AFTER_SAVE = "it is a command now: [[checkpoint.after_save]] with name, every (in steps) and command = "
_EVALUATION: dict[str, Any] = {
    "tasks": [],
    "interval": 0,
    "task_folder": None,
    "examples": None,
    "num_fewshot": None,
    "batch_size": 16,
    "device": "cpu",
}
_SAMPLE = f'{_AFTER_SAVE}"keel sample {{checkpoint}} PROMPT --max-tokens 64"'
_SHARDS = (64, "text that is tokenized while training has 64 shards; leave it out")

REMOVED: dict[str, tuple[Any, str]] = {
    "checkpoint.export_every": (0, f'{_AFTER_SAVE}"keel export {{checkpoint}} {{output}}/model"'),
    "checkpoint.max_save_failures": (3, "the third failed save in a row ends the run; leave it out"),
    "checkpoint.interval_minutes": (0.0, "set checkpoint.interval to as many steps"),
    "checkpoint.on_damage": ("fall_back", "leave it out, or set checkpoint.load to a step, which has no fallback"),
    "checkpoint.optimizer_dtype": ("same", 'leave it out; optimizer.moments_dtype = "bfloat16" keeps smaller moments'),
    "checkpoint.verify": ("hash", "the content of every file is checked before loading; leave it out"),
    "comm.fsdp_buffers": ("default", "FSDP's collectives use torch's own memory; leave it out"),
    "comm.prefetch_backward": (1, "set comm.prefetch, for both directions"),
    "comm.prefetch_forward": (1, "set comm.prefetch, for both directions"),
    "compile.options": ({}, "set compile.mode, or the compiler's environment variables (TORCHINDUCTOR_...)"),
    "data.sources.N.virtual_shards": _SHARDS,
    "fault.lag_ratio": (0.2, "a rank that lags by a fifth of a step is named; leave it out"),
    "fault.spikes.max_rewinds": (3, "a checkpoint is returned to 3 times at most; leave it out"),
    "fault.trace_nonfinite": (True, "the first non-finite step is always traced; leave it out"),
    "optimizer.muon_lr_adjustment": ("match_rms_adamw", "Muon's updates are as large as AdamW's; leave it out"),
    "optimizer.newton_schulz_steps": (5, "Muon takes 5 Newton-Schulz iterations; leave it out"),
    "profile.steps": (3, "a trace has 3 steps; leave it out"),
    "validation.sample_temperature": (0.8, _SAMPLE),
    "validation.sample_tokens": (64, _SAMPLE),
    "validation.samples": ([], _SAMPLE),
    "validation.sources.N.virtual_shards": _SHARDS,
} | {
    f"evaluation.{key}": (default, f'{_AFTER_SAVE}"keel evaluate {{checkpoint}} --tasks NAME,NAME"')
    for key, default in _EVALUATION.items()
}
"""Default and remedy by dotted name; `N` stands for an index into a list of tables."""


def without_removed(value: Any, prefix: str = "") -> Any:
    """Return nested tables without the removed keys that have their defaults, and without tables that had no others."""
    if isinstance(value, list):
        return [without_removed(item, f"{prefix}N.") for item in value]
    if not isinstance(value, dict):
        return value
    kept: dict[str, Any] = {}
    for key, item in value.items():
        name = f"{prefix}{key}"
        if name in REMOVED and item == REMOVED[name][0]:
            continue
        inner = without_removed(item, f"{name}.")
        if inner != {} or item == {}:
            kept[key] = inner
    return kept
