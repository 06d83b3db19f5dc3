"""An error that says that memory is out becomes one message that names the keys to change; no other error does."""

import pytest
import torch

from configs.load import load
from trainer.guards.out_of_memory import out_of_memory
from trainer.planning.takes_less import takes_less

CUDA = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 3 has a total capacity of 79.10 GiB of which 1.25 GiB is "
    "free. Including non-PyTorch memory, this process has 77.84 GiB memory in use. Of the allocated memory 70.01 GiB "
    "is allocated by PyTorch, and 5.10 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory "
    "is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True"
)


@pytest.fixture(scope="module")
def config():
    return load("debug.toml", ["--training.micro_batch_size", "4"], 1).config


def test_the_hosts_memory(config):
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 52)
    said = str(out_of_memory(caught.value, config, step=12))
    assert "is out of memory after step 12: it could not allocate" in said
    assert "training.micro_batch_size = 1 (now 4)" in said


def test_a_gpu(config):
    said = str(out_of_memory(torch.OutOfMemoryError(CUDA), config, step=None))
    assert "is out of memory during start-up: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 3 has" in said
    assert "fsdp.cpu_offload = true" in said
    assert "expandable_segments" not in said


def test_python(config):
    assert "Python could not allocate" in str(out_of_memory(MemoryError(), config, step=1))


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), OSError(12, "Cannot allocate memory"), KeyError("x")])
def test_other_errors(config, error):
    assert out_of_memory(error, config, step=1) is None


def test_only_what_is_left_to_change():
    words = ["--training.micro_batch_size", "1", "--activation_checkpoint.mode", "full", "--fsdp.cpu_offload", "true"]
    assert takes_less(load("debug.toml", words, 1).config, on_gpu=True) == [
        "more ranks, or mesh.tp, mesh.cp and mesh.pp: each rank holds a smaller part"
    ]


@pytest.mark.parametrize(
    ("named", "key", "value"),
    [
        ("training.micro_batch_size = 1 (now 4)", "training.micro_batch_size", "1"),
        ('activation_checkpoint.mode = "selective"', "activation_checkpoint.mode", "selective"),
        ('activation_checkpoint.mode = "full"', "activation_checkpoint.mode", "full"),
        ("fsdp.zero_stage = 3", "fsdp.zero_stage", "3"),
        ("mesh.dp_replicate = 1 (now 2)", "mesh.dp_replicate", "1"),
        ("fsdp.cpu_offload = true", "fsdp.cpu_offload", "true"),
    ],
)
def test_a_change_that_is_made_is_not_named_again(named, key, value):
    words = ["--training.micro_batch_size", "4", "--mesh.dp_replicate", "2", "--fsdp.zero_stage", "2"]
    before, after = (
        takes_less(load("debug.toml", [*words, *change], 4).config, on_gpu=True) for change in ([], [f"--{key}", value])
    )
    assert any(line.startswith(named) for line in before)
    assert not any(line.startswith(named) for line in after)
