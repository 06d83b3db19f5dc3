"""A run beside its plan: which figures are compared, over which steps, and in which order."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from configs.layout import mesh_sizes
from configs.load import load
from trainer.planning.data_time import DataTime
from trainer.planning.devices import device_called, device_named
from trainer.planning.memory import estimate_memory
from trainer.planning.step_time import estimate_step
from trainer.report import beside_plan
from trainer.report.beside_plan import BesidePlan
from trainer.report.metrics import Memory, Throughput

H100 = "NVIDIA H100 80GB HBM3"


def job(words=""):
    source = '[{name = "random", kind = "synthetic"}]'
    return load("llama_1b.toml", [*words.split(), "--data.sources", source], 1).config


def on(monkeypatch, name, config):
    """A comparison for a GPU of that torch name, with one rank."""
    monkeypatch.setattr(beside_plan, "device_name", lambda device: name)
    kind = "cpu" if name == "cpu" else "cuda"
    return BesidePlan(SimpleNamespace(device=torch.device(kind), sizes=mesh_sizes(config, 1)))


def compare(plan, config, steps, memory_bytes):
    for seconds, data in steps:
        plan.count(config, Throughput(None if seconds is None else 1 / seconds, seconds, data))
    complaints = []
    plan.compare(Memory(memory_bytes), complaints.append)
    return complaints


def test_planned_and_measured_stand_side_by_side_the_largest_difference_first(monkeypatch):
    config = job()
    step = estimate_step(config, 1, device_named("h100"))
    memory = estimate_memory(config, mesh_sizes(config, 1), "cuda").device
    plan = on(monkeypatch, H100, config)
    steps = [(50.0, 9.0), (None, None), (1.1 * step.seconds, 0.01), (1.3 * step.seconds, 0.02), (90.0, 0.5)]
    assert compare(plan, config, steps, int(0.5 * memory)) == []
    assert [*plan.quantities] == ["memory_peak_bytes", "step_seconds", "data_seconds"]
    assert plan.quantities["step_seconds"] == {"planned": step.seconds, "measured": 1.3 * step.seconds}
    assert plan.quantities["data_seconds"] == {"planned": 0.0, "measured": 0.02}
    assert plan.quantities["memory_peak_bytes"] == {"planned": memory, "measured": int(0.5 * memory)}
    assert plan.parts == step.parts
    first, second, *_, last = plan.text().split("\n")
    assert first.startswith("peak memory ")
    assert first.endswith("(-50.0%), the largest difference")
    assert second.startswith("a step ")
    assert second.endswith("(+30.0%)")
    assert last.startswith("planned parts: products ")


def test_a_step_is_planned_with_its_wait_for_data(monkeypatch):
    config = job()
    step = replace(estimate_step(config, 1, device_named("h100")), data=DataTime(0, 30.0, 3.0))
    monkeypatch.setattr(beside_plan, "estimate_step", lambda *arguments: step)
    plan = on(monkeypatch, H100, config)
    compare(plan, config, [(20.0, 3.5)], 2**30)
    assert plan.quantities["step_seconds"]["planned"] == step.seconds + 3.0
    assert plan.quantities["data_seconds"] == {"planned": 3.0, "measured": 3.5}


def test_a_stage_of_the_run_is_compared_by_its_own_steps(monkeypatch):
    config = job()
    plan = on(monkeypatch, H100, config)
    compare(plan, job("--training.seq_len 512"), [(20.0, 0.0), (20.0, 0.0)], 2**30)
    compare(plan, config, [(7.0, 0.0)], 2**30)
    assert plan.quantities["step_seconds"]["measured"] == 7.0


def test_memory_alone_is_compared_where_time_is_unknown(monkeypatch):
    for name, config in [("some new GPU", job()), (H100, job("--training.compute_dtype float32"))]:
        plan = on(monkeypatch, name, config)
        assert compare(plan, config, [(7.0, 0.0)], 2**30) == []
        assert [*plan.quantities] == ["memory_peak_bytes"]
        assert "\n" not in plan.text()


def test_a_cpu_has_nothing_to_compare(monkeypatch):
    config = job()
    plan = on(monkeypatch, "cpu", config)
    assert compare(plan, config, [(7.0, 0.0)], 2**30) == []
    assert not plan.quantities
    assert plan.text() == ""


def test_a_plan_that_fails_does_not_end_the_run(monkeypatch):
    config = job()
    plan = on(monkeypatch, H100, config)

    def fails(*arguments):
        raise KeyError("a block of its own")

    monkeypatch.setattr(beside_plan, "estimate_step", fails)
    (complaint,) = compare(plan, config, [(7.0, 0.0)], 2**30)
    assert "KeyError: 'a block of its own'" in complaint
    assert not plan.quantities


@pytest.mark.parametrize(
    ("name", "known"), [(H100, "h100"), ("NVIDIA H200", "h200"), ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None)]
)
def test_a_gpu_is_known_by_the_whole_name_that_torch_gives_it(name, known):
    found = device_called(name)
    assert (found and found.name) == known
