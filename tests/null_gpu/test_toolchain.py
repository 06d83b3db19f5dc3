"""A host on which Triton can't build a kernel, although Triton and a compiler are there."""

import os

import pytest
import torch

from configs.errors import ConfigError
from configs.load import load
from trainer.optimizers.adamw import require_kernel


def said_of_a_host(compiler: str, cache: str, words: tuple[str, ...]) -> str:
    """On a rank: what a job's start says of Triton on a host with this C compiler and nothing compiled yet."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    os.environ.update(CC=compiler, TRITON_CACHE_DIR=cache)
    try:
        require_kernel(load("llama_1b.toml", words), torch.device("cuda"))
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("words", "place"),
    [
        ((), "configs/llama_8b.toml"),
        (("--compile.enable", "false", "--optimizer.kernel", "auto"), "--optimizer.kernel"),
    ],
)
def test_a_host_that_builds_no_kernel_ends_the_run_before_weights_are_drawn(fresh_null_rank, tmp_path, words, place):
    (said,) = fresh_null_rank(1, said_of_a_host, "/bin/false", str(tmp_path), words)
    assert said.startswith(place)
    assert ": Triton can't build or launch a kernel on this host (CalledProcessError: Command '['/bin/false'" in said
    assert said.endswith('set compile.enable = false and optimizer.kernel = "torch"')
    own = ("--compile.enable", "false", "--optimizer.kernel", "torch")
    assert fresh_null_rank(1, said_of_a_host, "/bin/false", str(tmp_path), own) == [""]
    assert fresh_null_rank(1, said_of_a_host, "gcc", str(tmp_path / "new"), words) == [""]
