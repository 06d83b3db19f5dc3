"""The profiler traces the steps it was asked for, no others, and refuses what it cannot do."""

import gzip
import json

import pytest
import torch

from configs.errors import ConfigError
from configs.schema import Config
from parallelisms.ranges import named_range
from trainer.report.profile import StepProfiler


def config(**profile):
    return Config(
        job={"name": "toy"},
        model={"dim": 8, "n_layers": 1, "n_heads": 1, "ffn_dim": 8, "vocab_size": 8},
        data={"sources": [{"name": "s", "kind": "synthetic"}]},
        training={"steps": 20, "seq_len": 8, "global_batch_size": 1},
        optimizer={"lr": 1e-3},
        lr_schedule={"total_steps": 20},
        profile=profile,
    )


def run(profiler, steps):
    """Steps that are told apart by their names in the trace; returns what `before_step` gave."""
    traces = []
    for step in steps:
        traces.append(profiler.before_step(step))
        with named_range(f"this is step {step}"):
            torch.ones(4, 4) @ torch.ones(4, 4)
    return traces


def names(trace):
    with gzip.open(trace) as file:
        return {event["name"] for event in json.load(file)["traceEvents"]}


def test_the_trace_holds_exactly_its_steps(tmp_path):
    profiler = StepProfiler(config(start_step=3), tmp_path, rank=1, device_type="cpu")
    traces = run(profiler, range(1, 8))
    expected = tmp_path / "profile" / "step-00000003-rank-1.json.gz"
    assert traces == [None, None, None, None, None, expected, None]
    found = names(expected)
    assert {name for name in found if name.startswith("this is")} == {f"this is step {step}" for step in (3, 4, 5)}
    assert "aten::mm" in found
    assert profiler.finish() is None


def test_a_run_that_ends_earlier_writes_what_there_is(tmp_path):
    profiler = StepProfiler(config(start_step=2), tmp_path, rank=0, device_type="cpu")
    assert run(profiler, [1, 2]) == [None, None]
    assert "this is step 2" in names(profiler.finish())


def test_without_a_start_nothing_is_written(tmp_path):
    profiler = StepProfiler(config(), tmp_path, rank=0, device_type="cpu")
    assert run(profiler, range(1, 4)) == [None, None, None]
    assert profiler.finish() is None
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_done_is_a_config_error(tmp_path):
    """All that needs no device to be known is tests/unit/configs/test_config_checks.py's."""
    with pytest.raises(ConfigError, match="needs a CUDA device"):
        StepProfiler(config(start_step=1, memory_snapshot=True), tmp_path, rank=0, device_type="cpu")


def test_a_resume_behind_the_profiled_steps_says_so(tmp_path, caplog):
    StepProfiler(config(start_step=3), tmp_path, rank=0, device_type="cpu", resumed_step=2)
    assert caplog.text == ""
    StepProfiler(config(start_step=3), tmp_path, rank=0, device_type="cpu", resumed_step=3)
    assert "no trace is made" in caplog.text


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_a_memory_snapshot_lies_beside_the_trace(tmp_path, monkeypatch):
    """The calls that need a CUDA device, replaced by a record of them."""
    calls = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **settings: calls.append(settings))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: calls.append(path))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    profiler = StepProfiler(config(start_step=2, memory_snapshot=True), tmp_path, 0, device_type="cuda")
    run(profiler, range(1, 6))
    snapshot = str(tmp_path / "profile" / "step-00000002-rank-0.memory.pickle")
    assert calls == [{"max_entries": 200_000}, snapshot, {"enabled": None}]
