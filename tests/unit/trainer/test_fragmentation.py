"""The allocator's setting: Keel's, unless the user has one."""

import os

import pytest

from scripts.command import end
from trainer.guards.fragmentation import _NAMES, let_segments_grow


def test_segments_grow_unless_the_user_says_otherwise():
    environment = {"HOME": "/root"}
    let_segments_grow(environment)
    assert environment == {"HOME": "/root", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_what_the_user_has_set_stays(name):
    environment = {name: "max_split_size_mb:128"}
    let_segments_grow(environment)
    assert environment == {name: "max_split_size_mb:128"}


def test_every_command_has_the_allocator_of_training(monkeypatch):
    for name in _NAMES:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit):
        end(lambda: 0)
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
