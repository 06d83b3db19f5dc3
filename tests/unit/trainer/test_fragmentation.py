"""The allocator's setting: Keel's, unless the user has one."""

import pytest

from trainer.guards.fragmentation import let_segments_grow


def test_segments_grow_unless_the_user_says_otherwise():
    environment = {"HOME": "/root"}
    let_segments_grow(environment)
    assert environment == {"HOME": "/root", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_what_the_user_has_set_stays(name):
    environment = {name: "max_split_size_mb:128"}
    let_segments_grow(environment)
    assert environment == {name: "max_split_size_mb:128"}
