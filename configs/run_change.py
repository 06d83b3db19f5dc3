"""Compares the run keys of two configs, which a resume refuses to change unless allowed."""

from collections.abc import Collection
from typing import Any

from pydantic import ValidationError

from configs.architectures.llama import expert_dim, head_dim, n_kv_heads
from configs.reading.keys import KeyPath, dotted, find, general, leaves
from configs.reading.removed import REMOVED
from configs.reading.toml_text import text_or_not_set
from configs.schema import Model, further_run_keys, is_run_key


def run_key_diff(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Compare the run keys of two complete configs, given as nested tables.

    A key that is missing on one side (saved before the key existed) counts as set to its default.

    Returns:
        One line per changed key, `"training.seed: 0 -> 1"`; empty if none changed.
    """
    further = set(further_run_keys(old)) & set(further_run_keys(new))
    before = _run_values(old, further)
    after = _run_values(new, further)
    lines = []
    for path in sorted(before.keys() | after.keys(), key=lambda path: list(map(str, path))):
        was, now = (values.get(path, default_of(path)) for values in (before, after))
        if was != now:
            lines.append(f"{dotted(path)}: {text_or_not_set(was)} -> {text_or_not_set(now)}")
    return lines


_NOT_COMPUTED = {"init_std", "router.auxiliary_loss_weight", "router.bias_update_rate"}
"""Keys of [model] that matter while it is trained, not for what it computes from given weights."""


def function_diff(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Compare what the models of two complete configs compute from the same weights; as in `run_key_diff`.

    A config that is not Keel's, as in a stranger's checkpoint, is not compared.
    """
    try:
        before, after = (_computed(Model.model_validate(config.get("model"))) for config in (old, new))
    except ValidationError:
        return []
    changed = [key for key in after if before.get(key) != after[key] and key not in _NOT_COMPUTED]
    return [f"model.{key}: {text_or_not_set(before.get(key))} -> {text_or_not_set(after[key])}" for key in changed]


def _computed(model: Model) -> dict[str, Any]:
    """The keys of [model] with the values that apply."""
    values = model.model_dump()
    experts = values.pop("router") if model.n_experts else {}
    values |= {"head_dim": head_dim(model), "n_kv_heads": n_kv_heads(model), "expert_dim": expert_dim(model)}
    return values | {f"router.{key}": value for key, value in experts.items()}


def _run_values(config: dict[str, Any], further: Collection[str]) -> dict[KeyPath, Any]:
    # virtual_shards was a key of sources; the loader compares the number of shards itself, with the order of samples.
    return {
        path: value
        for path, value in leaves(config)
        if path[-1] != "virtual_shards" and is_run_key(dotted(path), further)
    }


def default_of(path: KeyPath) -> Any:
    """The default of a key, also of a removed one; None if it has none."""
    key = find(path)
    return key.default if key else REMOVED.get(general(path), (None,))[0]
