"""Fast paths of communication: where each is on, and the reason where it is off."""

from types import SimpleNamespace

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from configs.errors import ConfigError
from configs.load import load
from parallelisms import symmetric_memory
from parallelisms.symmetric_memory import async_tp_is_off, fast_paths, fsdp_buffers_are_off, set_fsdp_buffers
from tests.end_to_end.launch import curve, launch_here

ASYNC_TP = ("--comm.async_tp", "true")
HAS_SYMMETRIC = hasattr(FSDPModule, "set_symm_mem_for_comm")


def config(*words):
    return load("llama_1b.toml", words, 1).config


def mesh(tp=2, fsdp_shard=2, device="cuda"):
    sizes = SimpleNamespace(tp=tp, fsdp_shard=fsdp_shard)
    return SimpleNamespace(sizes=sizes, device=torch.device(device), tp=SimpleNamespace(get_group=lambda: None))


@pytest.fixture
def two_gpus(monkeypatch):
    """Two ranks of a tensor-parallel group: `two_gpus(hosts, peers)` sets what they are; this one is the first."""

    def arrange(hosts, peers):
        places = list(zip(hosts, (0, 1), strict=True))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: peers)
        answers = iter((places, None))  # both ranks have the same reasons

        def gather(value, _):
            known = next(answers)
            return known if known else [value, value]

        monkeypatch.setattr(symmetric_memory, "gather", gather)

    return arrange


def test_asynchronous_tensor_parallelism_is_on_where_gpus_reach_each_other(two_gpus):
    two_gpus(("a", "a"), peers=True)
    assert async_tp_is_off(config(*ASYNC_TP), mesh()) is None


def test_and_off_with_the_reason_elsewhere(two_gpus):
    job = config(*ASYNC_TP)
    assert async_tp_is_off(job, mesh(tp=1)) == "mesh.tp is 1"
    assert async_tp_is_off(job, mesh(device="cpu")) == "this run is on CPUs"
    two_gpus(("a", "b"), peers=True)
    assert async_tp_is_off(job, mesh()) == "a tensor-parallel group is on 2 hosts (a, b)"
    two_gpus(("a", "a"), peers=False)
    assert async_tp_is_off(job, mesh()) == "GPU 0 of a cannot reach the memory of GPU 1"


@pytest.mark.parametrize("buffers", ["registered", "symmetric", "copy_engine"])
def test_fsdps_buffers(buffers, monkeypatch):
    monkeypatch.setenv("NCCL_CTA_POLICY", "")
    monkeypatch.delenv("NCCL_CTA_POLICY")
    job = config("--comm.fsdp_buffers", buffers)
    assert fsdp_buffers_are_off(job, mesh(device="cpu")) == "this run is on CPUs"
    assert fsdp_buffers_are_off(job, mesh(fsdp_shard=1)) == "FSDP shards over one rank"
    reason = fsdp_buffers_are_off(job, mesh())
    if buffers != "registered" and not HAS_SYMMETRIC:
        assert reason.startswith("torch 2.11")
        return
    assert reason is None
    called = []
    module = SimpleNamespace(
        set_allocate_memory_from_process_group_for_comm=lambda on: called.append(on),
        set_symm_mem_for_comm=lambda: called.append("symmetric"),
    )
    monkeypatch.setattr(symmetric_memory, "fsdp_modules", lambda _: [module])
    set_fsdp_buffers([torch.nn.Linear(1, 1)], job, mesh())
    assert called == [True if buffers == "registered" else "symmetric"]
    import os

    assert os.environ.get("NCCL_CTA_POLICY") == ("2" if buffers == "copy_engine" else None)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--comm.fsdp_buffers", "symmetric", *ASYNC_TP), 'set fsdp_buffers = "registered", or async_tp = false'),
        (("--comm.fsdp_buffers", "registered", "--training.reduction", "exact"), 'training.reduction "exact" replaces'),
    ],
)
def test_what_contradicts_the_job_is_refused(words, reason):
    with pytest.raises(ConfigError) as error:
        config(*words)
    assert reason in " ".join(str(error.value).split())


def test_the_same_file_runs_on_a_laptop_and_says_what_is_off(tmp_path, capsys):
    assert launch_here(tmp_path / "plain", "--training.steps", "3") == 0
    capsys.readouterr()
    assert launch_here(tmp_path / "asks", "--training.steps", "3", "--comm.fsdp_buffers", "copy_engine") == 0
    assert "copy_engine buffers of FSDP: off, this run is on CPUs" in " ".join(capsys.readouterr().out.split())
    assert curve(tmp_path / "asks" / "run") == curve(tmp_path / "plain" / "run")


def test_nothing_is_said_of_what_nobody_asked_for():
    assert fast_paths(config(), mesh(device="cpu")) == ""
    said = fast_paths(config(*ASYNC_TP, "--comm.fsdp_buffers", "registered"), mesh(device="cpu"))
    assert said.splitlines() == [
        "asynchronous tensor parallelism: off, this run is on CPUs",
        "registered buffers of FSDP: off, this run is on CPUs",
    ]
