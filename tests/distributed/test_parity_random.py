"""Jobs drawn at random for the parity table: draws repeat, refusals are no faults, and faults are found."""

import json
import re
import shlex
from dataclasses import replace
from types import SimpleNamespace

import pytest
import tomli

from configs.load import load
from configs.reading.keys import find, flat, key_path
from parallelisms.torch_internals import has_zero_bubble
from scripts import parity, parity_random, rank_pool
from scripts.parity_draw import FLOAT64, WRITTEN, Draw, draw
from scripts.parity_random import Outcome, attempt, run_random, shrunk
from scripts.parity_rows import words
from scripts.rank_pool import RankLost
from tests.conftest import ROOT
from tests.hf_families import NEEDS_TRANSFORMERS
from trainer import average, step, teacher

CONFIG = "parity.toml"
SCHEDULES = ("interleaved_1f1b", "zero_bubble_v") if has_zero_bubble() else ("interleaved_1f1b",)


class Pool:
    """Ranks that run everything within another function, if one is given."""

    def __init__(self, ranks, within=None):
        self.ranks, self.within = ranks, within

    def run(self, n, function, *arguments):
        if self.within:
            return self.ranks(n, self.within, function, *arguments)
        return self.ranks(n, function, *arguments)


def without_the_wait(function, *arguments):
    """On a rank: as if a schedule of several stages began without waiting for anything."""
    with pytest.MonkeyPatch.context() as patch:
        made = step.Pipeline
        patch.setattr(step, "Pipeline", lambda *given, before: made(*given))
        return function(*arguments)


def with_a_wait(seed, jobs):
    """Those draws that wait for owners before a schedule, by number; all others compute the same without the wait."""
    for number in range(jobs):
        drawn = draw(seed, number)
        for keys in (drawn.keys, drawn.run | drawn.moved):
            if keys.get("fsdp.partition") == "owner" and keys.get("pipeline.schedule") in SCHEDULES:
                yield number, drawn
                break


def test_a_draw_depends_on_seed_and_number_alone():
    assert draw(7, 3) == draw(7, 3)
    assert len({str(draw(seed, number)) for seed in range(3) for number in range(50)}) == 150
    # These are the bytes of any Python on any machine.
    assert draw(0, 0).keys["training.seed"] == 928


def test_no_draw_takes_the_sign_of_rounding():
    """A window of one token gives queries and keys a gradient of nothing but rounding; it is drawn for the others."""
    drawn = [draw(seed, number).keys for seed in range(3) for number in range(1000)]
    alone = [keys for keys in drawn if keys.get("model.window") == 1]
    assert alone
    for keys in alone:
        assert keys.get("optimizer.name") != "lion"
        assert "optimizer.cautious_weight_decay" not in keys


def test_no_draw_in_float64_enlarges_rounding():
    """By lr / eps, at most 100; a gradient's rounding has been 1e-13, of Gated DeltaNet."""
    drawn = [each for each in (draw(5, number) for number in range(400)) if not each.is_exact]
    assert {each.keys["optimizer.lr"] for each in drawn} == {1e-3, 1e-2}
    assert max(each.keys["optimizer.lr"] / each.keys["optimizer.eps"] for each in drawn) <= 100 * (1 + 1e-9)


def test_a_draw_is_repeated_by_its_command(monkeypatch):
    tried = []
    monkeypatch.setattr(parity, "run_one", lambda config, drawn: tried.append((config, drawn)) or 0)
    draws = (draw(1, number) for number in range(1000))
    drawn = next(d for d in draws if d.move_at and d.evaluate_at and d.stages and d.teacher)
    _python, _script, *arguments = shlex.split(drawn.command(CONFIG))
    parity.main(arguments)
    ((config, repeated),) = tried
    assert config == CONFIG
    assert words(repeated.keys) == words(drawn.keys)
    assert words(repeated.moved) == words(drawn.moved)
    assert repeated.stages == drawn.stages
    assert words(repeated.teacher) == words(drawn.teacher)
    assert (repeated.ranks, repeated.evaluate_at, repeated.move_at) == (drawn.ranks, drawn.evaluate_at, drawn.move_at)


def test_every_axis_and_technique_is_drawn():
    drawn = [draw(2, number) for number in range(400)]
    keys = {(key, str(value)) for each in drawn for key, value in each.keys.items()}
    expected = {
        *((f"mesh.{axis}", "2") for axis in ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")),
        *(("pipeline.schedule", name) for name in ("gpipe", "1f1b", *SCHEDULES)),
        *(("context.method", name) for name in ("gather", "ring", "all_to_all")),
        *(("activation_checkpoint.mode", name) for name in ("full", "selective")),
        *(("model.router.load_balance", name) for name in ("auxiliary_loss", "bias", "none")),
        ("model.router.auxiliary_loss_over", "global_batch"),
        ("optimizer.name", "muon"),
        ("fsdp.partition", "owner"),
        ("fsdp.zero_stage", "1"),
        ("fsdp.zero_stage", "auto"),
        ("training.micro_batch_size", "auto"),
        ("fsdp.accumulate", "reduce_last"),
        ("data.document_mask", "true"),
        ("average.last", "2"),
        ("average.decay", "0.5"),
        ("average.dtype", "bfloat16"),
    }
    assert expected <= keys
    options = "qk_norm attention_bias attention_gate query_scale window window_pattern window_rope_theta norm_position "
    options += "norm_offset activation embedding_scale rope_fraction no_rope_every rope_scaling tie_embeddings "
    options += "multi_token layers attention shared_expert_gate router.n_groups mup_base_dim"
    assert {f"model.{option}" for option in options.split()} <= {key for key, _ in keys}
    scalings = [value for key, value in keys if key == "model.rope_scaling"]
    assert {kind: any(kind in value for value in scalings) for kind in ("yarn", "linear")} == {
        "yarn": True,
        "linear": True,
    }
    assert {len(each.stages) for each in drawn} == {0, 1, 2}
    stages = "".join(stage for each in drawn for stage in each.stages)
    assert all(key in stages for key in ("seq_len", "global_batch_size", "lr_schedule", "data.sources"))
    assert any(each.keys.get("fsdp.partition") == "owner" and "mesh.ep" in each.keys for each in drawn)
    assert 120 < sum(each.is_exact for each in drawn) < 280


def test_every_key_that_is_drawn_is_a_key():
    """A draw with another one would be refused, and prove nothing."""
    drawn = [draw(3, number) for number in range(400)]
    names = {name for each in drawn for name in (*each.keys, *each.moved, *each.teacher)}
    names |= {path for each in drawn for stage in each.stages for path in flat(tomli.loads(f"x = {stage}")["x"])}
    assert [name for name in sorted(names - {"at_step"}) if find(key_path(name)) is None] == []


def test_a_refusal_is_no_fault(ranks):
    heads = {"model.n_heads": 3, "model.n_kv_heads": 3, "model.head_dim": 8}
    outcome = attempt(Pool(ranks), CONFIG, Draw(2, {"mesh.tp": 2, **heads}))
    assert "does not divide model.n_heads" in outcome.refused
    assert not outcome.fault


@pytest.mark.slow
@NEEDS_TRANSFORMERS
def test_a_mesh_that_a_family_of_transformers_refuses_is_no_fault(ranks, tmp_path):
    """A StableLM of transformers computes attention itself; on a part of the sequence its gradients would be wrong."""
    model = {"model_type": "stablelm", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(model | sizes))
    job = tmp_path / "job.toml"
    job.write_text(
        f'base = "{ROOT / "configs" / CONFIG}"\n[model]\narchitecture = "hf"\nhf = "{tmp_path / "config.json"}"\n'
    )
    keys = FLOAT64 | {"training.steps": 1, "training.seq_len": 16, "mesh.dp_shard": 1}
    assert attempt(Pool(ranks), str(job), Draw(2, keys | {"mesh.dp_shard": 2})) == Outcome()
    outcome = attempt(Pool(ranks), str(job), Draw(2, keys | {"mesh.cp": 2}))
    assert "no layer of stablelm computes attention by transformers' attention interface" in outcome.reason


@pytest.mark.slow
@pytest.mark.skipif(not has_zero_bubble(), reason="this torch has no such schedule")
def test_a_job_that_moves_uses_the_groups_of_its_new_mesh(ranks):
    """With four stages in a V, the ranks of a pipeline fill DTensor's caches with different operations."""
    pipeline = {"mesh.tp": 2, "mesh.pp": 2, "pipeline.schedule": "zero_bubble_v"}
    run = FLOAT64 | {"model.n_layers": 4, "training.steps": 2}
    outcome = attempt(Pool(ranks), CONFIG, Draw(4, run | pipeline, move_at=1, moved={"mesh.dp_shard": 2, "mesh.tp": 2}))
    assert outcome == Outcome()


def test_a_job_that_moves_takes_the_load_of_its_experts_with_it(ranks):
    run = FLOAT64 | {"model.n_layers": 2, "model.n_experts": 4, "training.steps": 2, "training.seq_len": 16}
    run |= {"model.router.auxiliary_loss_over": "global_batch", "model.router.auxiliary_loss_weight": 0.5}
    drawn = Draw(2, run | {"mesh.dp_shard": 2}, move_at=1, moved={"mesh.ep": 2})
    assert attempt(Pool(ranks), CONFIG, drawn) == Outcome()


TAUGHT = Draw(
    2,
    FLOAT64
    | {"training.steps": 2, "training.seq_len": 16, "model.n_layers": 2, "model.vocab_size": 64, "mesh.tp": 2}
    | {"distillation.teacher": WRITTEN, "distillation.weight": 0.5, "distillation.temperature": 2.0},
    teacher={"model.dim": 16, "model.n_layers": 2, "model.vocab_size": 64, "model.init_std": 0.2, "training.seed": 3},
)


def with_less_of_a_lesson(function, *arguments):
    """On a rank: as if a teacher counted for a hundredth less."""
    with pytest.MonkeyPatch.context() as patch:
        made = teacher.Divergence
        less = lambda states, settings, record: made(  # noqa: E731
            states, settings.model_copy(update={"weight": settings.weight * 0.99}), record
        )
        patch.setattr(teacher, "Divergence", less)
        return function(*arguments)


@pytest.mark.slow
def test_a_draw_with_a_teacher_is_right_and_a_wrong_lesson_is_found(ranks):
    assert attempt(Pool(ranks), CONFIG, TAUGHT) == Outcome()
    assert "from the reference: loss" in attempt(Pool(ranks, with_less_of_a_lesson), CONFIG, TAUGHT).fault


STAGED = Draw(
    2,
    FLOAT64 | {"mesh.tp": 2, "training.steps": 3, "model.n_layers": 2},
    stages=("{at_step = 1, training.seq_len = 16, optimizer.lr = 3e-3, optimizer.weight_decay = 0.2}",),
)


@pytest.mark.slow
def test_a_draw_with_a_stage_is_right(ranks):
    assert attempt(Pool(ranks), CONFIG, STAGED) == Outcome()


def as_if_the_job_had_no_stages(function, *arguments):
    """On a rank: a learner that does not take a stage's keys."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step.Learner, "begin_stage", lambda learner, config: None)
        return function(*arguments)


@pytest.mark.slow
def test_keys_of_a_stage_that_have_no_effect_are_found(ranks):
    found = attempt(Pool(ranks, as_if_the_job_had_no_stages), CONFIG, STAGED)
    assert "from the reference: loss" in found.fault
    assert "weights" in found.fault


AVERAGED = Draw(
    2,
    FLOAT64 | {"mesh.dp_shard": 2, "training.steps": 3, "model.n_layers": 2, "average.interval": 1},
    move_at=1,
    moved={"mesh.dp_replicate": 2, "mesh.dp_shard": 1, "fsdp.partition": "owner"},
)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [{"average.decay": 0.5}, {"average.last": 2}])
def test_a_draw_with_an_average_is_right(ranks, kind):
    assert attempt(Pool(ranks), CONFIG, replace(AVERAGED, keys=AVERAGED.keys | kind)) == Outcome()


def as_if_an_average_began_anew(function, *arguments):
    """On a rank: an average that does not take what was loaded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(average.ExponentialAverage, "was_loaded", lambda self: None)
        return function(*arguments)


@pytest.mark.slow
def test_an_average_that_a_move_forgets_is_found(ranks):
    drawn = replace(AVERAGED, keys=AVERAGED.keys | {"average.decay": 0.5})
    found = attempt(Pool(ranks, as_if_an_average_began_anew), CONFIG, drawn).fault
    loss, norm, gradient, weights = (float(each) for each in re.findall(r"\d\.\de[+-]\d+", found.partition(": ")[2]))
    assert max(loss, norm, gradient) < 1e-10 < weights


class DyingPool:
    """A rank dies in these calls, by number; all others say that bits and values are as expected."""

    def __init__(self, *dying):
        self.dying = dying
        self.calls = 0

    def run(self, n, function, *arguments):
        self.calls += 1
        if self.calls in self.dying:
            raise RankLost("rank 0 of 2: the process died (exit code -6)")
        return [SimpleNamespace(passes=lambda dtype: True)]

    def close(self):
        pass


@pytest.mark.parametrize(("dying", "wrong"), [((), 0), ((1,), 0), ((1, 2), 1), ((1, 4), 1)])
def test_a_rank_may_die_once(monkeypatch, capsys, dying, wrong):
    """A job is tried once more, in plain sight; a second death in the same command is a fault."""
    drawn = Draw(2, FLOAT64 | {"mesh.tp": 2})
    monkeypatch.setattr(parity_random, "draw", lambda seed, number: drawn)
    monkeypatch.setattr(parity_random, "shrunk", lambda pool, config, drawn: drawn)
    monkeypatch.setattr(rank_pool, "RankPool", lambda size: DyingPool(*dying))
    assert run_random(CONFIG, jobs=2, seed=0) == wrong
    printed = capsys.readouterr().out
    assert printed.count("tried once more") == bool(dying)
    assert printed.count("job 0: crash: rank 0 of 2: the process died (exit code -6)") == len(dying) - (dying == (1, 4))
    assert f"2 jobs: 0 refused, {wrong} wrong" in printed


@pytest.mark.slow
def test_some_draws_are_right(ranks):
    outcomes = [attempt(Pool(ranks), CONFIG, draw(201, number)) for number in range(6)]
    assert [outcome.fault for outcome in outcomes if outcome.fault] == []
    assert not all(outcome.refused for outcome in outcomes)


@pytest.mark.long
def test_a_missing_wait_is_found_and_shrunk(ranks):
    mutated = Pool(ranks, without_the_wait)
    number, found = next((n, d) for n, d in with_a_wait(0, 200) if attempt(mutated, CONFIG, d).fault)
    print(f"found by job {number}")
    assert not attempt(Pool(ranks), CONFIG, found).fault
    smallest = shrunk(mutated, CONFIG, found)
    assert set(smallest.keys) <= set(found.keys)
    assert {"fsdp.partition", "pipeline.schedule", "mesh.pp"} <= {*smallest.keys, *smallest.moved}
    assert len(smallest.keys) < 12
    load(CONFIG, words(smallest.keys), world_size=smallest.ranks)
