"""Hosts on which Triton can't build a kernel, although Triton and a compiler are there, or whose driver is too old."""

import os
import subprocess
import sys
import warnings

import pytest
import torch

from configs.errors import ConfigError
from configs.load import load
from tests.null_gpu.test_axes import step
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


KERNELS = [
    ((), "configs/llama_8b.toml"),
    (("--compile.enable", "false", "--optimizer.kernel", "auto"), "--optimizer.kernel"),
]


@pytest.mark.parametrize(("words", "place"), KERNELS)
def test_a_host_that_builds_no_kernel_ends_the_run_before_weights_are_drawn(fresh_null_rank, tmp_path, words, place):
    (said,) = fresh_null_rank(1, said_of_a_host, "/bin/false", str(tmp_path), words)
    assert said.startswith(place)
    assert ": Triton can't build or launch a kernel on this host (CalledProcessError: Command '['/bin/false'" in said
    assert said.endswith('set compile.enable = false and optimizer.kernel = "torch"')
    own = ("--compile.enable", "false", "--optimizer.kernel", "torch")
    assert fresh_null_rank(1, said_of_a_host, "/bin/false", str(tmp_path), own) == [""]


@pytest.mark.parametrize("words", [words for words, _ in KERNELS])
def test_a_host_that_builds_them_says_nothing(fresh_null_rank, tmp_path, words):
    assert fresh_null_rank(1, said_of_a_host, "gcc", str(tmp_path), words) == [""]


def said_in_a_step(words: str) -> list[str]:
    """On a rank: what Triton warns of while Keel's kernels are compiled and launched."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step(words)
    return [str(warning.message) for warning in caught if "triton" in str(warning.message).lower()]


def test_triton_has_nothing_to_say_of_the_kernels(fresh_null_rank, monkeypatch, tmp_path):
    """Since 3.9 it warns of a kernel that leaves to it whether products and sums are fused."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert fresh_null_rank(1, said_in_a_step, "--compile.enable false --optimizer.qk_clip 100") == [[]]


ASK = """
import sys
from pathlib import Path
from configs.load import load
from trainer.guards import environment
environment._DEVICES = Path(sys.argv[1])
print(environment.device_type(load("debug.toml")))
"""


@pytest.mark.parametrize(
    ("version", "devices", "says"),
    [
        ("13000", "1", "cuda\n"),
        ("13000", "0", "cpu\n"),  # the job has none of the host's
        ("12020", "1", "can't use them: The NVIDIA driver on your system is too old (found version 12020)."),
    ],
)
def test_a_driver_that_is_too_old_for_torch(null_gpus, tmp_path, version, devices, says):
    """A process of its own asks, since torch asks the driver once."""
    (tmp_path / "nvidia0").touch()
    told = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ASK, tmp_path],
        env=os.environ | null_gpus | {"KEEL_NULL_GPU_DRIVER": version, "KEEL_NULL_GPUS": devices},
        capture_output=True,
        text=True,
    )
    assert says in told.stdout + told.stderr
