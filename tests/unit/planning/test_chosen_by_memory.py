"""fsdp.zero_stage and training.micro_batch_size "auto": what fits and is fastest is chosen, and learns the same."""

import itertools
import re
from contextlib import closing

import pytest

from configs.errors import ConfigError
from configs.layout import accumulation_steps, mesh_sizes
from configs.load import load
from configs.run_stages import largest_first
from configs.table import with_keys
from scripts import plan
from tests.end_to_end.launch import TINY, curve, launch, launch_here
from tests.hf_families import write_config
from trainer.data.loader import build_loader
from trainer.planning.by_memory import choose, chosen, planned_choice, with_choice
from trainer.planning.devices import device_named
from trainer.planning.memory import estimate_memory
from trainer.planning.step_time import estimate_step

GIB = 2**30
SOURCE = ("--data.sources", '[{name = "random", kind = "synthetic"}]')
LIMIT = "--activation_checkpoint.memory_limit_gib"
AUTO = ("--training.micro_batch_size", "auto", "--fsdp.zero_stage", "auto")


def job(name, ranks, *words):
    return load(name, [*words, *SOURCE], ranks).config


@pytest.mark.slow
@pytest.mark.parametrize("gib", [16, 18, 26, 60, 300])
def test_the_fastest_that_fits_is_taken(gib):
    config = job("llama_8b.toml", 8, "--model.n_layers", "6", LIMIT, str(gib), *AUTO)
    sizes = mesh_sizes(config, 8)
    seconds = {}
    for stage, micro_batch in itertools.product((1, 2, 3), (1, 2, 4, 8, 16)):
        by_hand = with_keys(config, fsdp={"zero_stage": stage}, training={"micro_batch_size": micro_batch})
        try:
            way = choose(by_hand, sizes, "cuda", gib * GIB).job
        except ConfigError:
            continue
        assert estimate_memory(way, sizes, "cuda").device <= gib * GIB
        seconds[stage, micro_batch] = estimate_step(way, 8, device_named("h100")).seconds
    choice = planned_choice(config, 8, None)
    assert choice.needed <= gib * GIB
    keys = choice.job.fsdp.zero_stage, choice.job.training.micro_batch_size
    assert keys == min(seconds, key=seconds.get)
    assert len(seconds) > 1


@pytest.mark.slow
def test_8b_on_eight_gpus_calls_nccl_fewer_than_200_times_a_step():
    def calls(config):
        return sum(each.calls for each in estimate_step(config, 8, device_named("h200")).slowest.collectives)

    config = job("llama_8b.toml", 8, LIMIT, "device", *AUTO)
    assert calls(job("llama_8b.toml", 8)) == 1616
    choice = planned_choice(config, 8, 140 * GIB)
    assert calls(choice.job) == 68
    said = 'memory_limit_gib = "device" chooses mode = "selective", layers = "0-5", training.micro_batch_size = 2, '
    assert f"{said}fsdp.zero_stage = 1: about " in str(choice)


@pytest.mark.parametrize(
    ("words", "key", "expected"),
    [
        (
            AUTO[:2],
            "micro_batch_size",
            "chosen within a limit of memory, and there is none; set activation_checkpoint.",
        ),
        (AUTO[2:], "zero_stage", "chosen within a limit of memory, and there is none; set activation_checkpoint."),
        (
            (*AUTO, LIMIT, "1", "--training.reduction", "exact"),
            "micro_batch_size",
            'with training.reduction = "exact", it is a run key; set a number',
        ),
        (
            (*AUTO, LIMIT, "1", "--float8.recipe", "rowwise", "--float8.emulate", "true"),
            "micro_batch_size",
            'with float8.recipe = "rowwise", it is a run key; set a number',
        ),
    ],
)
def test_what_cannot_be_chosen_is_one_error(words, key, expected):
    with pytest.raises(ConfigError) as error:
        load(str(TINY), words, 1)
    assert str(error.value).count("\n") == 0
    assert f'{key} = "auto"' in str(error.value)
    assert expected in str(error.value)


def test_the_stage_alone_may_be_chosen_for_exact_sums():
    config = job(str(TINY), 2, *AUTO[2:], LIMIT, "1", "--training.reduction", "exact")
    job_of = planned_choice(config, 2, None).job
    assert job_of.training.micro_batch_size == 2
    assert job_of.fsdp.zero_stage in (1, 2, 3)


def test_a_pipeline_keeps_enough_micro_batches():
    config = job(str(TINY), 4, *AUTO, LIMIT, "1", "--mesh.pp", "2")
    chosen = planned_choice(config, 4, None).job
    assert accumulation_steps(chosen, mesh_sizes(chosen, 4)) >= 2
    assert chosen.fsdp.zero_stage == 3


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["tp", "cp", "dp_replicate"])
@pytest.mark.parametrize("model", ["experts", "hf"])
def test_any_model_and_mesh_has_a_choice(model, axis, tmp_path):
    name, words = "moe_debug.toml", ()
    if model == "hf":
        name, words = "parity.toml", ("--model.architecture", "hf", "--model.hf", str(write_config(tmp_path, "qwen3")))
    config = job(name, 2, *words, *AUTO, LIMIT, "8", f"--mesh.{axis}", "2", "--mesh.dp_shard", "1")
    assert planned_choice(config, 2, None).job.training.micro_batch_size > 1


STAGED = f"""
base = "{TINY}"
[training]
micro_batch_size = "auto"
[fsdp]
zero_stage = "auto"
[activation_checkpoint]
memory_limit_gib = 1
[[stages]]
at_step = 5
training.global_batch_size = 24
[[stages]]
at_step = 10
training = {{ seq_len = 64, global_batch_size = 2 }}
[[stages]]
at_step = 15
training.micro_batch_size = 1
"""


def test_each_stage_computes_at_most_as_many_tokens_at_once_as_the_largest(tmp_path):
    (tmp_path / "staged.toml").write_text(STAGED)
    staged = load(str(tmp_path / "staged.toml"), (), 1)
    choice = planned_choice(largest_first(staged.stages, 20)[0].config, 1, None)
    configs = [stage.config for stage in with_choice(staged, choice).stages]
    assert [each.training.micro_batch_size for each in configs] == [8, 8, 2, 1]
    for each in configs:
        with closing(build_loader(each, 0, 1, start_sample=0)) as loader:
            assert [len(batch.tokens) for batch in next(loader)] == [each.training.micro_batch_size] * (
                accumulation_steps(each, mesh_sizes(each, 1))
            )


def test_every_stage_of_a_run_fits():
    """A stage with fewer tokens at once may need more: with ZeRO 1 it adds up whole gradients of its micro-batches."""
    words = ("--training.micro_batch_size", "1", "--fsdp.zero_stage", "auto", LIMIT, "1")
    most = job("debug.toml", 4, *words, "--training.global_batch_size", "4")
    other = with_keys(most, training={"seq_len": most.training.seq_len - 16, "global_batch_size": 64})
    sizes = mesh_sizes(most, 4)

    def needed(config, choice):
        return estimate_memory(chosen(config, choice), sizes, "cuda").device

    alone = choose(most, sizes, "cuda", GIB)
    assert alone.job.fsdp.zero_stage == 1
    assert needed(other, alone) > needed(most, alone)
    limit = (needed(other, alone) + needed(most, alone)) // 2
    choice = choose(most, sizes, "cuda", limit, None, [other])
    assert max(needed(most, choice), needed(other, choice)) == choice.needed <= limit
    assert needed(other, choose(most, sizes, "cuda", limit)) > limit


def test_a_run_learns_what_the_keys_by_hand_learn(tmp_path, capsys):
    chosen, by_hand = tmp_path / "chosen", tmp_path / "by hand"
    assert launch_here(chosen, *AUTO, LIMIT, "1") == 0
    said = " ".join(capsys.readouterr().out.split())
    keys = re.search(r'chooses mode = "none", training.micro_batch_size = (\d), fsdp.zero_stage = 3:', said)
    assert keys, said
    assert 'micro_batch_size = "auto"' in (chosen / "run" / "config.toml").read_text()
    assert launch_here(by_hand, "--training.micro_batch_size", keys[1]) == 0
    assert curve(chosen / "run") == curve(by_hand / "run")


def test_a_limit_that_cannot_be_kept_ends_in_one_message(tmp_path, capsys):
    assert launch_here(tmp_path, *AUTO, LIMIT, "0.0001") == 78
    said = " ".join(capsys.readouterr().err.split())
    assert "allows 105 KiB for a rank's tensors, and even with full recomputation they take about" in said
    assert "raise it, or use more ranks" in said
    assert "Traceback" not in said


def test_a_plan_says_the_choice(capsys):
    assert plan.main(("--config", str(TINY), "--ranks", "2", *AUTO, LIMIT, "1")) == 0
    assert re.search(r"training.micro_batch_size = \d, fsdp.zero_stage = \d: about", capsys.readouterr().out)


@pytest.mark.slow
def test_a_resume_on_another_mesh_chooses_anew_and_learns_the_same(tmp_path):
    """4 ranks, then 2 x TP 2 from the middle of the data on; alone, by hand, for comparison."""
    words = " ".join((*AUTO, LIMIT, "1", "--training.steps"))
    moved, alone = tmp_path / "moved", tmp_path / "alone"
    for folder in (moved, alone):
        folder.mkdir()
    first = " ".join(launch(moved, f"{words} 10", ranks=4).out.split())
    then = " ".join(launch(moved, f"{words} 20 --mesh.tp 2", ranks=2).out.split())
    sizes = [re.search(r"micro_batch_size = (\d), fsdp.zero_stage = (\d)", out).groups() for out in (first, then)]
    assert sizes[0] != sizes[1]
    launch(alone)
    for (step, *ours), (_, *theirs) in zip(curve(moved / "run"), curve(alone / "run"), strict=True):
        assert ours == pytest.approx(theirs, rel=2e-5), f"step {step}"
