"""The trace of `[profile]` names the parts of a step, one inside the other as they ran, whatever computes them."""

import gzip
import json
from itertools import pairwise
from typing import NamedTuple

import pytest

from tests.end_to_end.launch import curve, launch, launch_here

TRACED = "--profile.start_step 2 --training.steps 5 --checkpoint.interval 4"
BLOCKS = ("layers.0", "layers.1")
PARTS = {"loss", "backward", "update", "save", *(f"forward {block}" for block in BLOCKS)}


class Range(NamedTuple):
    name: str
    start: float
    end: float

    def __contains__(self, other) -> bool:
        return self.start <= other.start and other.end <= self.end


def ranges_of(folder) -> dict[str, list[Range]]:
    """What the trace of rank 0 names, by name; on a CPU all of it is of one thread."""
    with gzip.open(folder / "run/profile/step-00000002-rank-0.json.gz") as file:
        events = json.load(file)["traceEvents"]
    found: dict[str, list[Range]] = {}
    for event in events:
        if "dur" in event and event.get("cat") in ("user_annotation", "cpu_op"):
            start = event["ts"]
            found.setdefault(event["name"], []).append(Range(event["name"], start, start + event["dur"]))
    return found


def assert_parts(found, micro_batches: int, steps: int = 3) -> None:
    """Each part as often as it ran, in its order; none inside another; a save, of step 4, after all updates."""
    times = micro_batches * steps
    expected = dict.fromkeys(PARTS, times) | {"update": steps, "save": 1}
    assert {name: len(found.get(name, ())) for name in PARTS} == expected
    parts = sorted((each for name in PARTS for each in found[name]), key=lambda each: each.start)
    assert all(first.end <= second.start for first, second in pairwise(parts))
    one = ["forward layers.0", "forward layers.1", "loss", "backward"] * micro_batches + ["update"]
    assert [part.name for part in parts] == one * steps + ["save"]
    assert any(product in forward for forward in found["forward layers.1"] for product in found["aten::mm"])
    assert any(product in backward for backward in found["backward"] for product in found["aten::mm"])
    assert len(found["Optimizer.step#RowAdamW.step"]) == steps
    assert all(any(step in update for update in found["update"]) for step in found["Optimizer.step#RowAdamW.step"])


@pytest.mark.slow
def test_a_plain_run_and_one_without_a_trace(tmp_path):
    assert launch_here(tmp_path, *TRACED.split()) == 0
    assert_parts(ranges_of(tmp_path), micro_batches=4)
    (tmp_path / "plain").mkdir()
    assert launch_here(tmp_path / "plain", "--training.steps", "5", "--checkpoint.interval", "4") == 0
    assert curve(tmp_path / "run") == curve(tmp_path / "plain/run")
    assert not (tmp_path / "plain/run/profile").exists()


@pytest.mark.slow
def test_gathers_and_reductions_of_fsdp(tmp_path):
    launch(tmp_path, f"{TRACED} --activation_checkpoint.mode full", ranks=2)
    found = ranges_of(tmp_path)
    assert_parts(found, micro_batches=2)
    for block in BLOCKS:
        gathers, reductions = found[f"FSDP::all_gather ({block})"], found[f"FSDP::post_backward_reduce ({block})"]
        assert len(gathers) == 2 * len(reductions) == 2 * 6
        assert all(any(reduction in backward for backward in found["backward"]) for reduction in reductions)
        assert not any(gather in forward for forward in found[f"forward {block}"] for gather in gathers)


@pytest.mark.long
def test_a_compiled_run_is_not_compiled_again(tmp_path):
    outcome = launch(
        tmp_path, f"{TRACED} --compile.enable true", ranks=2, env={"TORCH_LOGS": "recompiles"}, preloaded=False
    )
    assert_parts(ranges_of(tmp_path), micro_batches=2)
    assert "Recompiling" not in outcome.err


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b"])
def test_a_pipeline_names_its_passes(tmp_path, schedule):
    words = f"{TRACED} --mesh.pp 2 --pipeline.schedule {schedule}"
    words += " --model.n_layers 4 --pipeline.stages_per_rank 2" if schedule == "interleaved_1f1b" else ""
    launch(tmp_path, words, ranks=2)
    found = ranges_of(tmp_path)
    assert {"forward layers.0", "backward", "update", "save"} <= found.keys()
    assert len(found["forward layers.0"]) == 3 * 4
    assert len(found["backward"]) == 3 * 4 * (2 if schedule == "interleaved_1f1b" else 1)


@pytest.mark.slow
def test_a_broadcast_of_owners_is_part_of_the_update(tmp_path):
    launch(tmp_path, f"{TRACED} --fsdp.partition owner --mesh.dp_replicate 2 --mesh.dp_shard 1", ranks=2)
    found = ranges_of(tmp_path)
    sent = [each for name, each_of in found.items() if name == "c10d::broadcast_" for each in each_of]
    assert sum(any(each in update for update in found["update"]) for each in sent) >= 2
    assert found.keys() >= PARTS
