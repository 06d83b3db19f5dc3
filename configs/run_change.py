"""Compares the run keys of two configs, which a resume refuses to change unless allowed."""

from collections.abc import Collection
from typing import Any

from pydantic import ValidationError

from configs.architectures import family_of
from configs.architectures.hf import parsed
from configs.reading.keys import KeyPath, dotted, find, general, leaves
from configs.reading.removed import REMOVED
from configs.reading.toml_text import text_or_not_set
from configs.schema import further_run_keys, is_run_key, table_of_model


def run_key_diff(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Compare the run keys of two complete configs, given as nested tables.

    A key that is missing on one side (saved before the key existed) counts as set to its default. Stages are not
    compared: `run_stages.trained_diff` compares the configs of each.

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


def function_diff(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Compare what the models of two complete configs compute from the same weights; as in `run_key_diff`.

    A config that is not Keel's, as in a stranger's checkpoint, is not compared.
    """
    try:
        before, after = (_computed(config.get("model")) for config in (old, new))
    except ValidationError:
        return []
    changed = [key for key in after if before.get(key) != after[key]]
    return [f"model.{key}: {text_or_not_set(before.get(key))} -> {text_or_not_set(after[key])}" for key in changed]


def _computed(table: Any) -> dict[str, Any]:
    model = table_of_model(table).model_validate(table)
    return family_of(model).computed(model)


def _run_values(config: dict[str, Any], further: Collection[str]) -> dict[KeyPath, Any]:
    # virtual_shards was a key of sources; the loader compares the number of shards itself, with the order of samples.
    values = {
        path: value
        for path, value in leaves(config)
        if path[0] != "stages" and path[-1] != "virtual_shards" and is_run_key(dotted(path), further)
    }
    text = values.pop(("model", "hf_config"), None)
    # The content of a config.json is compared field by field, so that the message names the one that changed.
    fields = {} if text is None else parsed(text)
    return values | {("model", "hf_config", *path): value for path, value in leaves(fields)}


def default_of(path: KeyPath) -> Any:
    """The default of a key, also of a removed one; None if it has none."""
    key = find(path)
    return key.default if key else REMOVED.get(general(path), (None,))[0]
