"""Which changed settings are said to change the bits of a resumed run."""

import copy

import pytest

from checkpoint.reproducibility import changed_settings
from configs.load import load

NOW = load("debug.toml", (), 1).config.model_dump(mode="json")


def test_a_key_that_an_earlier_version_did_not_have_counts_as_its_default():
    before = copy.deepcopy(NOW)
    del before["float8"], before["comm"]["async_tp"], before["optimizer"]["kernel"], before["attention"]
    assert changed_settings(before, {}, NOW, {}) == {}
    now = copy.deepcopy(NOW)
    now["comm"]["async_tp"] = True
    assert changed_settings(before, {}, now, {}) == {"comm.async_tp": "False -> True"}


@pytest.mark.parametrize(
    ("table", "name", "value"), [("optimizer", "kernel", "torch"), ("attention", "backend", "flex")]
)
def test_another_kernel_is_said(table, name, value):
    now = copy.deepcopy(NOW)
    now[table][name] = value
    assert changed_settings(NOW, {}, now, {}) == {f"{table}.{name}": f"auto -> {value}"}
