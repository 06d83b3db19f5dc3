"""Where the null GPU cannot be had, one sentence says what is lacking."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.null_gpu import device
from tests.null_gpu.device import Counters, Unavailable, library

ROOT = Path(__file__).parents[2]
KEYS = {"launches", "memcpys", "syncs", "nccl_calls", "host_ms", "peak_allocated_bytes", "peak_reserved_bytes"}
TINY = (
    "--model.dim 256 --model.n_layers 2 --model.n_heads 4 --model.n_kv_heads 2 --model.ffn_dim 512 "
    "--model.vocab_size 4096 --training.seq_len 256 --training.micro_batch_size 2 --training.global_batch_size 16 "
    "--compile.enable false"
)


@pytest.fixture
def never_built(monkeypatch, tmp_path):
    """A machine with all that it takes, on which nothing was built yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(device.importlib.util, "find_spec", lambda _: object())
    monkeypatch.setattr(device, "HEADERS", ())
    monkeypatch.setattr(shutil, "which", lambda name: name)
    return monkeypatch


def test_no_cuda_build(never_built):
    never_built.setattr(device.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(Unavailable, match=r"is no CUDA build; .* pip install torch"):
        library()


def test_no_headers(never_built):
    never_built.setattr(device, "HEADERS", ("nvidia/cu0/include",))
    with pytest.raises(Unavailable, match=r"CUDA headers are not where .*nvidia/cu0/include"):
        library()


def test_no_compiler(never_built):
    never_built.setattr(shutil, "which", lambda _: None)
    with pytest.raises(Unavailable, match="gcc is needed"):
        library()


def test_a_compiler_that_fails(never_built, tmp_path):
    broken = tmp_path / "device.c"
    broken.write_text("int;;; this is no C")
    never_built.setattr(device, "SOURCE", broken)
    with pytest.raises(Unavailable, match=r"(?s)gcc could not build .*device.c:\n.*error: "):
        library()


def test_a_process_without_the_device(monkeypatch):
    monkeypatch.delenv("KEEL_NULL_GPUS", raising=False)
    with pytest.raises(Unavailable, match="started without the device"):
        Counters()


@pytest.mark.long
def test_the_tool_counts_a_step_of_rank_0_of_8(null_gpus, tmp_path):
    """It sets its surroundings by itself: this process has none of them."""
    command = [sys.executable, "-m", "tests.null_gpu.step", "--config", "llama_1b.toml", "--ranks", "8"]
    words = ["--json", str(tmp_path / "step.json"), *TINY.split()]
    done = subprocess.run([*command, *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "step.json").read_text())
    assert result.keys() >= KEYS
    assert (result["syncs"], result["sync_places"]) == (0, {})
    assert result["nccl_calls"] > 0
    assert 0 == result["idle_after_syncs_ms"] < result["host_ms"]
    assert 0 < result["peak_allocated_bytes"] <= result["peak_reserved_bytes"]
