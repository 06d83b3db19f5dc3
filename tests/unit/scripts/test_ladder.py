"""`keel ladder`: the law is found, its interval holds, and a rung is the job by the stated rules."""

import math
import re

import numpy as np
import pytest

from configs.errors import ConfigError
from scripts import ladder
from scripts.scaling.law import fit
from scripts.scaling.rungs import choose_rungs, choose_widths, load_target, training_flops, with_narrower_heads
from scripts.widths.picture import Line, Panel, picture
from tests.end_to_end.launch import TINY

PARTS = [0.002, 0.01, 0.04, 0.1, 0.2]
VALIDATED = ("--validation.interval", "20", "--validation.sources", '[{name = "held out", kind = "synthetic"}]')
LLAMA = ("llama_8b.toml", VALIDATED)


def losses_by(irreducible, reducible, exponent):
    return irreducible + reducible * np.array(PARTS) ** -exponent


@pytest.mark.parametrize(
    ("irreducible", "reducible", "exponent"), [(1.7, 0.9, 0.2), (0.0, 3.0, 0.05), (2.0, 0.4, 0.5), (1.9, 0.01, 1.5)]
)
def test_a_law_without_noise_is_found(irreducible, reducible, exponent):
    law = fit(PARTS, losses_by(irreducible, reducible, exponent)[:, None], 0.9)
    assert law.predicted == pytest.approx(irreducible + reducible, abs=2e-3)
    assert law.residual < 1e-4
    assert law.exponent == pytest.approx(exponent, rel=0.02)
    assert law.at(1 / 16) == pytest.approx(irreducible + reducible * 16**exponent, abs=2e-3)


def test_no_law_of_a_fine_grid_is_better():
    noisy = losses_by(1.7, 0.9, 0.2) + np.array([0.01, -0.02, 0.015, 0.0, -0.01])
    law = fit(PARTS, noisy[:, None], 0.9)
    e, a, exponent = np.meshgrid(
        np.linspace(0, 3, 121), np.linspace(0, 3, 121), np.geomspace(0.05, 1, 60), indexing="ij"
    )
    squares = sum((loss - e - a * part**-exponent) ** 2 for loss, part in zip(noisy, PARTS, strict=True))
    assert len(PARTS) * law.residual**2 <= squares.min()


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [1, 3])
def test_the_interval_has_the_next_run_as_often_as_it_says(seeds):
    drawn = np.random.default_rng(5)
    trials = 120
    within = 0
    for _ in range(trials):
        law = fit(PARTS, losses_by(1.7, 0.9, 0.2)[:, None] + drawn.normal(0, 0.01, (len(PARTS), seeds)), 0.8)
        within += law.low <= 2.6 + drawn.normal(0, 0.01) <= law.high
    assert within / trials > 0.8 - 2 * math.sqrt(0.8 * 0.2 / trials)


def test_a_law_that_does_not_fit_has_a_wide_interval():
    bent = losses_by(1.7, 0.9, 0.2)
    bent[2] += 0.1
    ours = fit(PARTS, bent[:, None] + np.zeros((5, 3)), 0.9)  # seeds agree
    theirs = fit(PARTS, losses_by(1.7, 0.9, 0.2)[:, None] + np.zeros((5, 3)), 0.9)
    assert ours.high - ours.low > 10 * (theirs.high - theirs.low)


def test_rungs_of_a_large_job():
    job, words = LLAMA
    target = load_target(job, words).config
    rungs = choose_rungs(job, words, target, 5, None, 1, "mup")
    assert [rung.dim for rung in rungs] == [512, 1024, 1536, 2048, 2560]
    whole = target.training
    for rung in rungs:
        config = rung.job.config
        model, training = config.model, config.training
        assert (model.n_heads, model.n_kv_heads, model.head_dim) == (rung.dim // 128, rung.dim // 512, 128)
        assert (model.ffn_dim, model.n_layers, model.mup_base_dim) == (rung.dim * 7 // 2, 32, 4096)
        # 6 per element of the matrices, and causal attention; counted here by hand.
        matrices = 32 * (2 * rung.dim**2 + 2 * rung.dim * rung.dim // 4 + 3 * rung.dim * model.ffn_dim)
        token = 6 * (matrices + rung.dim * 128256) + 6 * 32 * rung.dim * 8192
        large = 6 * (32 * (2.5 * 4096**2 + 3 * 4096 * 14336) + 4096 * 128256) + 6 * 32 * 4096 * 8192
        cost = token / large
        tokens = training.steps * training.global_batch_size
        assert tokens == pytest.approx(whole.steps * whole.global_batch_size * cost, rel=0.01)
        assert training.global_batch_size == pytest.approx(128 * math.sqrt(cost), abs=1)
        assert config.optimizer.lr == pytest.approx(
            target.optimizer.lr * math.sqrt(training.global_batch_size / 128), rel=1e-12
        )
        assert config.lr_schedule.total_steps / training.steps == pytest.approx(
            target.lr_schedule.total_steps / whole.steps, rel=0.01
        )
        assert config.lr_schedule.warmup_steps / training.steps == pytest.approx(
            target.lr_schedule.warmup_steps / whole.steps, rel=0.01
        )
        assert training.steps == 20 * config.validation.interval
        assert training.global_batch_size % training.micro_batch_size == 0
        assert rung.flops / training_flops(target) == pytest.approx(cost**2, rel=0.02)


def test_by_compute_depth_shrinks_too_and_batch_and_rate_follow_the_flops():
    job, words = LLAMA
    target = load_target(job, words).config
    rungs = choose_rungs(job, words, target, 5, None, 1, "compute")
    assert [(rung.dim, rung.n_layers) for rung in rungs] == [(512, 4), (1024, 8), (1536, 12), (2048, 16), (2560, 20)]
    for rung in rungs:
        config = rung.job.config
        assert config.model.mup_base_dim is None
        part = rung.flops / training_flops(target)
        assert config.training.global_batch_size == pytest.approx(128 * part**0.3271, abs=1)
        assert config.optimizer.lr == pytest.approx(target.optimizer.lr * part**-0.125, rel=0.001)


@pytest.mark.parametrize(
    ("job", "layers", "heads"),
    [
        ("qwen3_next_80b_a3b.toml", [8, 8, 12, 16, 24], [2, 3, 4, 6, 8]),  # three of four layers are delta
        ("gemma3_1b.toml", [6, 6, 6, 12, 12], None),  # every sixth layer sees all tokens
    ],
)
def test_by_compute_a_pattern_of_layers_stays_whole(job, layers, heads):
    target = load_target(job, VALIDATED).config
    rungs = choose_rungs(job, VALIDATED, target, 5, None, 1, "compute")
    assert [rung.n_layers for rung in rungs] == layers
    models = [rung.job.config.model for rung in rungs]
    if heads:
        assert [model.delta.key_heads for model in models] == heads
        assert [model.delta.value_heads for model in models] == [2 * n for n in heads]
        assert {model.n_experts for model in models} == {target.model.n_experts}


@pytest.mark.parametrize(
    ("job", "words", "layers"),
    [
        ("moe_debug.toml", "--model.n_dense_layers 1", [(2, 1), (2, 1), (2, 1), (2, 1), (2, 1)]),  # one has experts
        ("moe_debug.toml", "--model.n_dense_layers 3", [(2, 1), (2, 1), (2, 1), (2, 1), (3, 2)]),
        ("debug.toml", "--model.window 64 --model.window_pattern 6", [(4, 0)] * 5),  # as the job, which has no period
    ],
)
def test_by_compute_a_model_is_no_deeper_than_the_job_and_has_both_kinds_of_layers(job, words, layers):
    target = load_target(job, words.split()).config
    rungs = choose_rungs(job, words.split(), target, 5, None, 1, "compute")
    models = [rung.job.config.model for rung in rungs]
    assert [(model.n_layers, model.n_dense_layers) for model in models] == layers


def test_a_job_with_owners_has_rungs_on_several_ranks(tmp_path):
    job = tmp_path / "owners.toml"
    job.write_text('base = "debug.toml"\n[mesh]\ndp_replicate = 2\ndp_shard = 1\n[fsdp]\npartition = "owner"\n')
    rungs = choose_rungs(str(job), (), load_target(str(job), ()).config, 5, None, 2, "mup")
    assert [rung.job.config.mesh.dp_shard for rung in rungs] == [-1] * 5


def test_batches_are_whole_on_several_ranks():
    job, words = LLAMA
    target = load_target(job, words).config
    rungs = choose_rungs(job, words, target, 4, [512, 1024, 1536, 2048], 3, "mup")
    assert all(rung.job.config.training.global_batch_size % 3 == 0 for rung in rungs)


def test_heads_get_narrower_where_fewer_give_too_few_widths():
    model = load_target("debug.toml", ()).config.model
    form, widths = choose_widths(model, 5)
    assert form.mup_base_head_dim == 32
    assert widths == [24, 36, 48, 72, 96]
    assert choose_widths(with_narrower_heads(model), 5) == (form, widths)
    with pytest.raises(ConfigError, match=r"only 15 widths below model.dim 192 .*12, 24, 36.* --sizes is 16"):
        choose_widths(model, 16)


def test_whatever_is_a_part_of_the_run_stays_that_part():
    words = (
        *("--optimizer.groups", '[{pattern = "embed*", freeze_until_step = 30}]', "--lr_schedule.total_steps", "none"),
        *("--lr_schedule.warmup_steps", "0", "--lr_schedule.total_tokens", "1228800"),
        *("--lr_schedule.warmup_tokens", "122880"),
    )
    target = load_target("debug.toml", words).config
    rung = choose_rungs("debug.toml", words, target, 5, None, 1, "mup")[-1].job.config
    assert rung.optimizer.groups[0].freeze_until_step == rung.training.steps // 10
    tokens = rung.training.steps * rung.training.global_batch_size * rung.training.seq_len
    assert rung.lr_schedule.total_tokens == tokens
    assert rung.lr_schedule.warmup_tokens == pytest.approx(tokens / 10, abs=1)


def never(command):
    raise AssertionError(f"nothing was to be trained: {command}")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((str(TINY),), "a ladder predicts the validation loss: set validation.interval and validation.sources"),
        ((str(TINY), *VALIDATED, "--dims", "8,16,24,28"), "at dim 8 a run would have"),
        (("debug.toml", "--dims", "24,48,96,192"), "--dims: 192 is not below the job's model.dim 192"),
        (("debug.toml", "--dims", "25,48,72,96"), "at dim 25, 25/192 of the job's 192"),
        (("debug.toml", "--sizes", "16"), "only 15 widths below model.dim 192"),
        (("gemma3_1b.toml", *VALIDATED), "embedding_scale = 33.9411; or take the rule without muP: --rule compute"),
        (("olmo3_7b_stages.toml", *VALIDATED), "the job has [[stages]]"),
        (
            ("debug.toml", "--rule", "compute", "--optimizer.groups", '[{pattern = "layers.3.*", weight_decay = 0.0}]'),
            "at dim 24 and n_layers 1: --optimizer.groups",
        ),
        (("no_such_job.toml",), "no_such_job.toml"),
        (("debug.toml", "--run", "runs/none"), "runs/none"),
    ],
)
def test_what_is_refused(capsys, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    assert ladder.main(words, never)
    printed = capsys.readouterr()
    assert message in printed.out + printed.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", [("--sizes", "3"), ("--dims", "24,48,96"), ("--sizes", "6", "--dims", "24,36,48,72")])
def test_a_ladder_has_four_rungs_or_more(capsys, words):
    with pytest.raises(SystemExit):
        ladder.main(("debug.toml", *words), never)
    printed = capsys.readouterr().err
    assert "4 sizes or more" in printed or "expected 4 or more" in printed or "not allowed with" in printed


def test_a_picture_leaves_out_what_a_logarithmic_axis_does_not_have():
    """The interval of few runs that hardly agree may reach below zero."""
    law = fit([0.01, 0.03, 0.1, 0.3], np.array([[3.9], [3.5], [3.3], [2.95]]), 0.99)
    assert law.low < 0
    drawn = picture("Loss", "FLOPs", [[Panel("job", [Line("interval", [(0.5, 3.0), (1, law.low), (1, law.high)])])]])
    (points,) = re.findall('polyline points="([^"]*)"', drawn)
    assert len(points.split()) == 2
