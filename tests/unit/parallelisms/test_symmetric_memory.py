"""Fast paths of communication: where each is on, and the reason where it is off."""

from types import SimpleNamespace

import pytest
import torch

from configs.load import load
from parallelisms import symmetric_memory
from parallelisms.symmetric_memory import async_tp_is_off, fast_paths

ASYNC_TP = ("--comm.async_tp", "true")


def config(*words):
    return load("llama_1b.toml", words, 1).config


def mesh(tp=2, device="cuda"):
    sizes = SimpleNamespace(tp=tp)
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


def test_nothing_is_said_of_what_nobody_asked_for():
    assert fast_paths(config(), mesh(device="cpu")) == ""
    said = fast_paths(config(*ASYNC_TP), mesh(device="cpu"))
    assert said == "asynchronous tensor parallelism: off, this run is on CPUs"
