"""What the keys of numerics set, what is promised of a resume, and what is said of GPUs that do not do."""

import os
import subprocess
import sys

import pytest
import torch

from configs.errors import ConfigError, UserError
from configs.load import load
from trainer.guards import environment
from trainer.guards.environment import device_type
from trainer.numerics import set_numerics
from trainer.report.summary import float32_products, promise


def job(*words):
    return load("debug.toml", words)


def test_what_is_promised_depends_on_the_device():
    plain, exact = (job("--training.deterministic", each).config.training for each in ("false", "true"))
    assert promise(plain, "cpu").startswith("bit for bit")
    assert promise(exact, "cuda").startswith("bit for bit")
    assert "up to rounding; bit for bit with training.deterministic" in promise(plain, "cuda")


def test_how_float32_is_multiplied_is_said_where_it_is_a_choice():
    exact, fast = (job("--training.tf32", each).config.training for each in ("false", "true"))
    assert "without TF32" in float32_products(exact, "cuda")
    assert "in TF32" in float32_products(fast, "cuda")
    assert float32_products(exact, "cpu") == ""
    assert float32_products(job("--training.compute_dtype", "bfloat16").config.training, "cuda") == ""


def test_what_does_nothing_is_a_warning_and_off():
    idle = job("--training.tf32", "true", "--training.compute_dtype", "bfloat16")
    assert 'tf32 does nothing with compute_dtype = "bfloat16"' in idle.warnings[0]
    assert not idle.config.training.tf32
    for name in ("tf32", "deterministic"):
        idle = job(f"--training.{name}", "true", "--job.device", "cpu")
        assert f'{name} does nothing with job.device = "cpu"' in idle.warnings[0]
        assert not getattr(idle.config.training, name)


def test_exact_reductions_on_a_gpu_need_deterministic_kernels():
    with pytest.raises(UserError, match=r"also set training\.deterministic = true"):
        set_numerics(job("--training.reduction", "exact").config.training, "cuda")
    set_numerics(job("--training.reduction", "exact").config.training, "cpu")


def test_a_cpu_is_left_as_it_is():
    before = torch.get_float32_matmul_precision()
    set_numerics(job("--training.tf32", "true", "--training.deterministic", "true").config.training, "cpu")
    assert torch.get_float32_matmul_precision() == before
    assert not torch.are_deterministic_algorithms_enabled()


SETS = """
import os, torch, torch._inductor.config as inductor
from configs.load import load
from trainer.numerics import set_numerics
set_numerics(load("debug.toml", {words}).config.training, "cuda")
print(torch.are_deterministic_algorithms_enabled(), torch.backends.cuda.cudnn_sdp_enabled(), inductor.deterministic,
      os.environ.get("CUBLAS_WORKSPACE_CONFIG"), torch.get_float32_matmul_precision())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--training.deterministic", "true"), "True False True :4096:8 highest"),
        (("--training.tf32", "true"), "False True False None high"),
    ],
)
def test_what_the_keys_set(words, expected):
    program = SETS.format(words=words)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.stdout.split("\n")[0] == expected, done.stderr


def test_a_workspace_that_is_not_deterministic_is_named(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    for name in ("use_deterministic_algorithms", "set_float32_matmul_precision"):
        monkeypatch.setattr(torch, name, lambda _: None)
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", lambda _: None)
    monkeypatch.setattr("torch._inductor.config.deterministic", False)
    monkeypatch.setattr("torch.utils.deterministic.fill_uninitialized_memory", True)
    with pytest.raises(UserError, match=r'CUBLAS_WORKSPACE_CONFIG to be :4096:8 or :16:8 .* it is ":0:0"; unset it'):
        set_numerics(job("--training.deterministic", "true").config.training, "cuda")


@pytest.fixture
def gpus(monkeypatch):
    """Two GPUs, as torch would show them."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla V100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 0))
    monkeypatch.setattr(environment.socket, "gethostname", lambda: "node-b")
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("gpus")
def test_more_ranks_than_gpus(monkeypatch):
    monkeypatch.setitem(os.environ, "LOCAL_WORLD_SIZE", "2")
    monkeypatch.setitem(os.environ, "LOCAL_RANK", "1")
    assert device_type(job()) == "cuda"
    for local_rank in ("0", "3"):  # all ranks of the host say the same, so that the first one's word is the cause
        monkeypatch.setitem(os.environ, "LOCAL_WORLD_SIZE", "4")
        monkeypatch.setitem(os.environ, "LOCAL_RANK", local_rank)
        with pytest.raises(ConfigError) as caught:
            device_type(job())
        message = str(caught.value)
        assert f"torch sees 2 on host node-b for 4 ranks (this one has LOCAL_RANK {local_rank})" in message
        assert "--nproc-per-node 2" in message
        assert "CUDA_VISIBLE_DEVICES is not set" in message
        assert device_type(job("--job.device", "cpu")) == "cpu"


@pytest.mark.usefixtures("gpus")
def test_a_gpu_without_bfloat16(monkeypatch):
    assert device_type(job("--training.compute_dtype", "float32")) == "cuda"
    with pytest.raises(ConfigError) as caught:
        device_type(job("--training.compute_dtype", "bfloat16"))
    message = str(caught.value)
    assert "GPU 0 of host node-b, Tesla V100, has compute capability 7.0" in message
    assert 'set compute_dtype = "float32"' in message
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    assert device_type(job("--training.compute_dtype", "bfloat16")) == "cuda"


@pytest.fixture
def unusable_gpus(monkeypatch, tmp_path):
    """A host with two GPUs, whose driver torch's CUDA build refuses."""

    def refuse():
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12020). Please update\nit.")

    (tmp_path / "nvidia0").touch()
    (tmp_path / "nvidiactl").touch()
    monkeypatch.setattr(environment, "_DEVICES", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", refuse)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


@pytest.mark.parametrize("device", ["auto", "cuda"])
@pytest.mark.usefixtures("unusable_gpus")
def test_gpus_that_torch_cannot_use_are_not_passed_over(device):
    """`auto` trained on the CPU, with nothing but torch's warning."""
    with pytest.raises(ConfigError) as caught:
        device_type(job("--job.device", device))
    message = str(caught.value)
    assert "has GPUs, but torch" in message
    assert (
        "can't use them: The NVIDIA driver on your system is too old (found version 12020). Please update; " in message
    )
    assert message.endswith('set job.device = "cpu" to train without them')
    assert device_type(job("--job.device", "cpu")) == "cpu"


@pytest.mark.usefixtures("unusable_gpus")
def test_gpus_of_another_job_are_not_missed(monkeypatch):
    """Slurm's device files of a host that gives this job none of its GPUs."""

    def refuse():
        raise RuntimeError("No CUDA GPUs are available")

    monkeypatch.setattr(torch.cuda, "init", refuse)
    assert device_type(job()) == "cpu"
    with pytest.raises(ConfigError, match="torch sees no CUDA device here"):
        device_type(job("--job.device", "cuda"))


def test_gpus_that_are_hidden_or_not_there_are_not_missed(monkeypatch, unusable_gpus):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert device_type(job()) == "cpu"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    (unusable_gpus / "nvidia0").unlink()
    assert device_type(job()) == "cpu"
    (unusable_gpus / "nvidia0").touch()
    monkeypatch.setattr(torch.version, "cuda", None)  # torch's build for CPUs
    assert device_type(job()) == "cpu"
