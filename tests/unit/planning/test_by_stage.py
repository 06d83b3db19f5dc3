"""The plan of a run with stages is that of each of them as a job of its own."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

import train
from configs.checks import check
from configs.layout import mesh_sizes
from configs.load import load
from configs.run_stages import Border, RunStage, largest_first, stage_of, steps_of_stages
from configs.schema import Config
from scripts import plan
from scripts.tuning import Tuning
from trainer.planning.devices import device_named
from trainer.planning.memory import estimate_memory
from trainer.planning.step_time import estimate_step

GPU = device_named("h100")
OLMO3 = {1: (1_413_814, 512, 8_192), 2: (47_684, 256, 8_192), 3: (11_921, 64, 65_536)}
"""Steps, sequences and tokens of the published stages."""


def planned(capsys, *words: str) -> dict:
    assert plan.main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@given(st.lists(st.integers(1, 40), max_size=6, unique=True), st.integers(1, 50))
def test_the_stages_of_a_run_have_its_steps(borders: list[int], steps: int):
    config = load("debug.toml").config
    stages = [RunStage(Border(after), config) for after in [0, *sorted(borders)]]
    counted = [0] * len(stages)
    for step in range(1, steps + 1):
        counted[stages.index(stage_of(stages, step))] += 1
    assert steps_of_stages(stages, steps) == counted


@pytest.mark.slow
def test_a_plan_has_the_memory_of_the_largest_stage_and_the_time_of_all(capsys):
    found = planned(capsys, "olmo3_7b_stages.toml", "--ranks", "64", "--device", "h100")
    stages = load("olmo3_7b_stages.toml", world_size=64).stages
    seconds = 0.0
    for each, stage in zip(found["stages"], stages, strict=True):
        steps, sequences, length = OLMO3[each["stage"]]
        whole = estimate_step(stage.config, 64, GPU)
        step = whole.seconds
        assert (each["steps"], each["tokens"]) == (steps, steps * sequences * length)
        assert each["step_seconds"] == step
        assert each["peak_bytes"] == estimate_memory(stage.config, mesh_sizes(stage.config, 64), "cuda").device
        seconds += steps * whole.seconds_with_waits
    peaks = [each["peak_bytes"] for each in found["stages"]]
    assert peaks[2] > 5 * peaks[0]
    assert found["memory_by_kind"][0]["peak_bytes"] == peaks[2]
    assert found["memory"]["fits"].startswith("stage 3 needs about")
    run = found["time"]["run"]
    assert run["tokens"] == sum(each["tokens"] for each in found["stages"])
    assert run["seconds"] == pytest.approx(seconds)
    assert run["gpu_hours"] == pytest.approx(seconds * 64 / 3600)
    assert found["time"]["step_seconds"] == found["stages"][0]["step_seconds"]


def test_stages_that_the_run_does_not_reach_take_nothing(capsys):
    found = planned(capsys, "olmo3_7b_stages.toml", "--ranks", "64", "--training.steps", "1461498")
    assert [each["stage"] for each in found["stages"]] == [1, 2]
    assert max(each["peak_bytes"] for each in found["stages"]) == found["memory_by_kind"][0]["peak_bytes"]
    job = load("olmo3_7b_stages.toml", world_size=64)
    assert largest_first(job.stages, 1_461_499)[0].config.training.seq_len == 65_536
    assert largest_first(job.stages, 1_461_498)[0].config.training.seq_len == 8_192


@pytest.mark.slow
def test_the_console_shows_each_stage(capsys):
    assert plan.main(["olmo3_7b_stages.toml", "--ranks", "64", "--device", "h100"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert out.startswith("does not fit: stage 3 needs about")
    for words in (
        "3, from step 1,461,499 11,921 steps of 64 x 65,536 tokens",
        "memory of a rank at the peak of stage 3",
        "a step of stage 1 on NVIDIA H100",
        "tokens in 1,473,419 steps",
    ):
        assert words in out


FROM_BUCKET = """
base = "debug.toml"
[job]
device = "auto"
[training]
compute_dtype = "bfloat16"
[data]
prepare = "none"
sources = [{ name = "here", kind = "synthetic" }]
[[stages]]
at_step = 100
data.sources = [{ name = "there", kind = "tokens", path = "s3://bucket/tokens" }]
"""


def test_a_stage_waits_for_its_own_data(tmp_path, capsys):
    job = tmp_path / "job.toml"
    job.write_text(FROM_BUCKET)
    found = planned(capsys, str(job), "--ranks", "1", "--device", "h100")
    first, second = (estimate_step(stage.config, 1, GPU) for stage in load(str(job), world_size=1).stages)
    assert first.data.waiting == 0 < second.data.waiting
    expected = 100 * first.seconds_with_waits + 200 * second.seconds_with_waits
    assert found["time"]["run"]["seconds"] == pytest.approx(expected)


STAGED = """
base = "debug.toml"
[training]
compute_dtype = "bfloat16"
global_batch_size = 2
micro_batch_size = 1
[job]
device = "auto"
[[stages]]
at_step = 10
training = { seq_len = 1024, global_batch_size = 1 }
"""


@pytest.mark.slow
def test_a_limit_of_memory_is_that_of_every_stage_that_is_reached(tmp_path, capsys, monkeypatch):
    (tmp_path / "staged.toml").write_text(STAGED)
    job = (str(tmp_path / "staged.toml"), "--mesh.tp", "2", "--mesh.dp_shard", "1")
    first, second = (each["peak_bytes"] for each in planned(capsys, *job, "--ranks", "2")["stages"])
    limit = (first + second) / 2
    job += ("--activation_checkpoint.memory_limit_gib", f"{limit / 2**30:.6f}")
    limited = [each["peak_bytes"] for each in planned(capsys, *job, "--ranks", "2")["stages"]]
    assert limited[0] < first
    assert limited[1] <= limit < second
    short = ("--training.steps", "10")
    (alone,) = planned(capsys, *job, *short, "--ranks", "2")["memory_by_kind"]
    assert alone["peak_bytes"] == first

    def validated(*words: str) -> str:
        monkeypatch.setattr("sys.argv", ["keel", "--config", *words, "--validate"])
        assert train.main() == 0
        return capsys.readouterr().out

    assert 'chooses mode = "selective"' in validated(*job)
    assert 'chooses mode = "none"' in validated(*job, *short)


@pytest.mark.slow
def test_a_tuned_job_is_possible_and_fits_in_every_stage(tmp_path):
    """A sequence of the second stage has four times the tokens, and a step has one of them, so no mesh has dp 2."""
    (tmp_path / "staged.toml").write_text(STAGED)
    job = load(str(tmp_path / "staged.toml"))
    stage = job.later_stages[0].config
    tuning = Tuning(job, GPU, 8, 1.3 * 2**30)
    outcome = tuning.search(2).run()
    for best in outcome.best:
        config = under(best.config, stage)
        assert not check(config, 2)
        assert best.config.mesh.dp_replicate * best.config.mesh.dp_shard == 1
        peaks = [estimate_memory(each, mesh_sizes(each, 2), "cuda").device for each in (best.config, config)]
        assert peaks[0] < peaks[1] == best.memory < 0.3 * 2**30
    n = job.config.training.steps
    for best, found in zip(outcome.best, tuning.as_json(outcome, 2, None)["best"], strict=True):
        first, second = (
            estimate_step(each, 2, GPU).seconds_with_waits for each in (best.config, under(best.config, stage))
        )
        assert found["gpu_hours"] == pytest.approx((10 * first + (n - 10) * second) * 2 / 3600)


def under(found: Config, stage: Config) -> Config:
    """A stage with the machine keys that were found."""
    values = stage.model_dump()
    changed = found.model_dump()
    values |= {name: changed[name] for name in ("mesh", "fsdp", "pipeline", "activation_checkpoint")}
    values["training"]["micro_batch_size"] = changed["training"]["micro_batch_size"]
    return Config.model_validate(values)


def test_the_page_names_the_stages_that_it_draws(tmp_path, capsys):
    page = tmp_path / "plan.html"
    assert plan.main(["olmo3_7b_stages.toml", "--ranks", "64", "--device", "h100", "--html", str(page)]) == 0
    text = page.read_text()
    for heading in ("Memory at the peak of stage 3", "One step of stage 1, by kind of work", "Its stages (estimate)"):
        assert heading in text
