"""The search finds what estimating every candidate finds, and proposes only jobs that a launch accepts."""

import json
from pathlib import Path

import pytest

from configs.checks import check
from configs.checks.idle import idle_keys
from configs.errors import ConfigError, UserError
from configs.layout import mesh_sizes
from configs.load import load
from configs.run_change import run_key_diff
from configs.schema import Config
from scripts import plan
from scripts.tuning import Tuning, rank_counts, write_job
from trainer.planning.devices import device_named
from trainer.planning.memory import estimate_memory
from trainer.planning.search import Search
from trainer.planning.step_time import estimate_step
from trainer.report.units import count

GPU = device_named("h100")
BF16 = ["--training.compute_dtype", "bfloat16", "--job.device", "auto"]
COMPILED = ["--compile.enable", "true", "--model.n_layers", "2"]
SMALL = ["--training.global_batch_size", "2", "--training.micro_batch_size", "1"]


def job(name: str, *words: str) -> Config:
    return load(name, [*BF16, *words]).config


def search(config: Config, ranks: int, gib: float, prunes: bool = True) -> Search:
    return Search(config, ranks, GPU, 8, gib * 2**30, prunes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "ranks", "gib"),
    [
        (job("debug.toml", *SMALL), 2, 1.25),
        pytest.param(job("debug.toml", "--training.global_batch_size", "4"), 4, 1.25, marks=pytest.mark.slow),
        (job("debug.toml", "--training.global_batch_size", "8"), 1, 80),
        pytest.param(job("moe_debug.toml", *SMALL), 2, 1.3, marks=pytest.mark.slow),
        pytest.param(job("debug.toml", *SMALL, *COMPILED), 2, 1.25, marks=pytest.mark.slow),
        (
            job("debug.toml", "--training.global_batch_size", "4", "--fsdp.partition", "owner", "--mesh.dp_shard", "1"),
            2,
            2,
        ),
    ],
)
def test_it_finds_what_estimating_all_candidates_finds(config: Config, ranks: int, gib: float):
    quick = search(config, ranks, gib).run()
    whole = search(config, ranks, gib, prunes=False).run()
    assert [found.order for found in quick.best] == [found.order for found in whole.best]
    assert quick.considered == whole.considered
    assert whole.pruned == 0
    assert quick.estimated <= whole.estimated


@pytest.mark.slow
def test_a_part_of_a_block_is_not_below_its_share():
    """The bound of memory, for every candidate."""
    config = job("debug.toml", *SMALL)
    searching = search(config, 2, 80)
    for branch in searching._branches():
        sizes = mesh_sizes(branch.job, 2)
        needed = [estimate_memory(each, mesh_sizes(each, 2), "cuda").device for each in searching._members(branch.job)]
        assert searching._least_memory(branch.job) <= min(needed), sizes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks", "words"),
    [
        pytest.param("debug.toml", 4, (), marks=pytest.mark.slow),
        ("moe_debug.toml", 2, ()),
        ("debug.toml", 2, ("--compile.enable", "false", "--training.reduction", "exact")),
        ("debug.toml", 8, ("--float8.recipe", "rowwise", "--fsdp.zero_stage", "1")),
    ],
)
def test_all_that_it_proposes_is_valid_and_the_same_run(tmp_path: Path, name: str, ranks: int, words: tuple[str, ...]):
    config = job(name, *words)
    for found in search(config, ranks, 80).run().best:
        assert not check(found.config, ranks)
        assert not run_key_diff(config.model_dump(), found.config.model_dump())
        write_job(tmp_path / "best.toml", name, found.config)
        loaded = load(str(tmp_path / "best.toml"), world_size=ranks)
        assert loaded.config == found.config
        assert not loaded.warnings
        step = estimate_step(loaded.config, ranks, GPU)
        assert step.seconds == pytest.approx(found.seconds, rel=1e-12)
        assert estimate_memory(loaded.config, mesh_sizes(loaded.config, ranks), "cuda").device == found.memory


def test_it_proposes_no_key_that_does_nothing():
    """A load would set it back, and the job that is written would not be the one that was estimated."""
    config = job("debug.toml")
    for fsdp in search(config, 8, 80)._shardings(config):
        assert dict(idle_keys(config.model_copy(update={"fsdp": fsdp}), {})) == dict(idle_keys(config, {}))


def test_it_varies_what_context_and_tensor_parallelism_exchange_and_how_many_layers_recompute():
    config = job("debug.toml", *SMALL, *COMPILED)
    branches = [branch.job for branch in search(config, 4, 80)._branches()]
    assert {each.context.method for each in branches if each.mesh.cp > 1} == {"gather", "ring", "all_to_all"}
    assert {each.context.method for each in branches if each.mesh.cp == 1} == {"gather"}
    assert {each.comm.async_tp for each in branches if each.mesh.tp > 1} == {False, True}
    assert {each.comm.async_tp for each in branches if each.mesh.tp == 1} == {False}
    assert {each.activation_checkpoint.every_nth_layer for each in branches} == {1, 2}
    hosts_of_1 = Search(config, 4, GPU, 1, 80 * 2**30)._branches()
    assert {each.job.comm.async_tp for each in hosts_of_1 if each.job.mesh.tp > 1} == {False}


def test_async_tp_between_hosts_hides_nothing():
    """A launch turns it off where GPUs do not reach each other's memory."""
    words = ["--mesh.tp", "4", "--compile.enable", "true", "--comm.async_tp"]
    config, plain = (load("llama_8b.toml", [*BF16, *words, value], 8).config for value in ("true", "false"))
    assert estimate_step(config, 8, GPU, gpus_per_host=2).parts == estimate_step(plain, 8, GPU, gpus_per_host=2).parts
    assert estimate_step(config, 8, GPU).parts["tp"] < estimate_step(plain, 8, GPU).parts["tp"]


@pytest.mark.slow
def test_a_curve_says_what_each_number_of_ranks_attains():
    tuning = Tuning(load("debug.toml", BF16), GPU, 8, 80 * 2**30)
    points = tuning.curve([1, 2, 3, 4], price=2.0)
    assert [each["ranks"] for each in points] == [1, 2, 3, 4]
    assert points[0]["efficiency"] == 1
    assert points[3]["tokens_per_second"] == pytest.approx(4 * points[3]["tokens_per_second_per_gpu"])
    assert points[1]["price"] == pytest.approx(2 * points[1]["gpu_hours"])


def test_ranks_are_a_number_a_list_or_a_range():
    assert rank_counts("8") == [8]
    assert rank_counts("8,12") == [8, 12]
    assert rank_counts("8..100") == [8, 16, 32, 64]


@pytest.mark.parametrize("text", ["", "0", "-1", "8..", "..8", "8..4", "8,8", "4,2", "1.5", "1e3", "8..16..32"])
def test_other_ranks_are_refused(text: str):
    with pytest.raises(ConfigError, match="--ranks"):
        rank_counts(text)


def test_what_cannot_be_tuned_is_said():
    with pytest.raises(UserError, match=r"none of [\d,]+ ways .* fits"):
        search(job("debug.toml"), 2, 1.01).run()
    with pytest.raises(UserError, match="no mesh of 1,009 ranks"):
        search(job("debug.toml"), 1009, 80).run()
    with pytest.raises(UserError, match="elastic"):
        search(job("debug.toml", "--elastic.enable", "true"), 2, 80).run()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tune"], "--device"),
        (["--tune", "--device", "h100", "--trace"], "--trace"),
        (["--tune", "--device", "h100", "--prove"], "--prove"),
        (["--write", "best.toml"], "--tune"),
        (["--tune", "--device", "h100", "--write", "nowhere/best.toml"], "folder that exists"),
        (["--tune", "--device", "abacus"], "unknown"),
    ],
)
def test_bad_options_are_one_message(words: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert plan.main(["debug.toml", "--ranks", "2", *BF16, *words]) != 0
    told = capsys.readouterr()
    assert message in told.out + told.err
    assert "Traceback" not in told.err


def test_the_best_of_one_number_of_ranks_have_their_price(capsys: pytest.CaptureFixture[str]):
    words = ["debug.toml", "--ranks", "1", "--tune", "--device", "h100", "--price", "2.5", *BF16, *SMALL]
    assert plan.main(words) == 0
    printed = capsys.readouterr().out
    assert plan.main([*words, "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["best"]
    assert printed.count("at 2.5 a GPU-hour") == len(best)
    assert f"{count(best[0]['gpu_hours'])} GPU-hours; {count(best[0]['price'])} at 2.5 a GPU-hour" in printed


def test_the_command_writes_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "best.toml"
    words = ["--device", "h100", "--json", *BF16]
    assert plan.main(["debug.toml", "--ranks", "4", "--tune", "--write", str(file), *words]) == 0
    best = json.loads(capsys.readouterr().out)["best"][0]
    assert plan.main([str(file), "--ranks", "4", *words[:3]]) == 0
    assert json.loads(capsys.readouterr().out)["time"]["step_seconds"] == pytest.approx(best["step_seconds"])
    assert plan.main(["debug.toml", "--ranks", "4", "--tune", "--write", str(file), *words]) != 0  # it exists
