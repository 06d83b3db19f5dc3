"""Stages of a run: which keys apply from which step on, what is refused with which line, what may change later."""

import math

import pytest
import tomli

from configs.errors import ConfigError
from configs.load import load
from configs.run_stages import Border, border_of, in_effect, require_counted, stage_of, trained_diff
from tests.unit.small_job import JOB
from trainer.lr_schedule import learning_rate_of
from trainer.planning.stage_table import stage_table

STAGES = """
[[stages]]
at_step = 3
training.seq_len = 64
optimizer.lr = 2e-3
data.sources = [
  {name = "random", kind = "synthetic", weight = 3},
  {name = "other", kind = "synthetic"},
]
[[stages]]
at_tokens = 2000
training.global_batch_size = 4
lr_schedule.name = "constant"
lr_schedule.total_steps = 5
model.rope_scaling = {kind = "linear", factor = 2.0}
[[stages]]
at_step = 8
model.rope_scaling = "none"
validation = {interval = 2, sources = [{name = "held out", kind = "synthetic"}]}
"""


@pytest.fixture
def job(tmp_path):
    def write(stages=STAGES, *words, ranks=None):
        (tmp_path / "job.toml").write_text(JOB + stages)
        return load(str(tmp_path / "job.toml"), words, ranks)

    return write


def test_a_stored_job_is_read_as_of_a_step(job, tmp_path):
    """What a score is computed with; overrides apply to the stage's keys."""
    stored = tmp_path / "stored.toml"
    stored.write_text(job().to_toml())
    stages = job().stages
    for step in (0, 1, 3, 4, 6, 7, 8, 9, 50):
        found = load(str(stored), is_stored=True, at_step=step)
        assert found.later_stages == ()
        assert found.config == stage_of(stages, max(1, step)).config.model_copy(update={"stages": []})
    found = load(str(stored), ["--training.seq_len", "48", "--data.sources.1.weight", "2"], is_stored=True, at_step=7)
    assert (found.config.training.seq_len, found.config.training.global_batch_size) == (48, 4)
    assert [source.weight for source in found.config.data.sources] == [3, 2]


def test_a_stage_holds_until_another_sets_the_key_again(job):
    stages = job("[average]\ninterval = 1\n" + STAGES).stages
    # 3 steps of 8 x 32 tokens, then 8 x 64: 2,000 tokens are reached with the sixth step.
    borders = [(0, 0, 0, 0), (3, 768, 0, 0), (6, 2304, 6, 2304), (8, 2816, 6, 2304)]
    assert [stage.border for stage in stages] == [Border(*each) for each in borders]
    assert [stage.config.training.seq_len for stage in stages] == [32, 64, 64, 64]
    assert [stage.config.training.global_batch_size for stage in stages] == [8, 8, 4, 4]
    assert [stage.config.optimizer.lr for stage in stages] == [1e-3, 2e-3, 2e-3, 2e-3]
    assert [len(stage.config.data.sources) for stage in stages] == [1, 2, 2, 2]
    assert [stage.config.lr_schedule.name for stage in stages] == ["cosine", "cosine", "constant", "constant"]
    assert [stage.config.model.rope_scaling is None for stage in stages] == [True, True, False, True]
    assert [stage.config.validation.interval for stage in stages] == [0, 0, 0, 2]
    assert {stage.config.average.interval for stage in stages} == {1}
    assert [stages.index(stage_of(stages, step)) for step in range(1, 11)] == [0] * 3 + [1] * 3 + [2] * 2 + [3] * 2
    assert [stages[2].schedule_place(step) for step in (7, 10)] == [(0, 1), (3, 1)]


def test_a_new_schedule_has_nothing_of_the_one_before(job):
    stages = job("warmup_steps = 7\nmin_lr_ratio = 0.5\n[[stages]]\nat_step = 4\nlr_schedule.total_steps = 5\n").stages
    schedule = stages[1].config.lr_schedule
    assert (schedule.warmup_steps, schedule.total_steps, schedule.min_lr_ratio) == (0, 5, 0.1)


def test_a_schedule_in_tokens_does_not_depend_on_the_tokens_of_a_step(job):
    """The rates of a ramp are those of the curve over tokens; a stage's own schedule counts from its first token."""
    ramp = """
[[stages]]
at_step = 2
every_steps = 2
training.global_batch_size = [16, 24]
[[stages]]
at_step = 6
lr_schedule = {name = "linear", total_tokens = 3072, min_lr_ratio = 0.0}
"""
    stages = job(ramp, "--lr_schedule.total_steps", "none", "--lr_schedule.total_tokens", "4096").stages
    places = [stage_of(stages, step).schedule_place(step) for step in range(1, 9)]
    assert places[:6] == [(0, 256), (256, 256), (512, 512), (1024, 512), (1536, 768), (2304, 768)]
    assert places[6:] == [(0, 768), (768, 768)]
    rates = [learning_rate_of(stage_of(stages, step), step) for step in range(1, 9)]
    tokens = [0, 256, 512, 1024, 1536, 2304]
    cosine = [1e-3 * (0.1 + 0.9 * (1 + math.cos(math.pi * done / 4096)) / 2) for done in tokens]
    assert rates == pytest.approx([*cosine, 1e-3, 0.75e-3], rel=1e-12)


def test_a_ramp_is_several_stages_in_one_table(job):
    ramp = """
[[stages]]
at_step = 2
every_steps = 3
training.global_batch_size = [16, 24, 32]
training.seq_len = [32, 16, 8]
lr_schedule = {name = "constant", total_steps = 9}
data.sources = [{name = "other", kind = "synthetic"}]
[[stages]]
at_step = 9
training.max_norm = 2.0
"""
    stages = job(ramp).stages
    assert [stage.border.after for stage in stages] == [0, 2, 5, 8, 9]
    assert [stage.border.schedule_after for stage in stages] == [0, 2, 2, 2, 2]
    assert [stage.border.tokens for stage in stages] == [0, 512, 2048, 3200, 3456]
    assert [stage.config.training.global_batch_size for stage in stages] == [8, 16, 24, 32, 32]
    assert [stage.config.training.seq_len for stage in stages] == [32, 32, 16, 8, 8]
    assert {stage.config.lr_schedule.name for stage in stages[1:]} == {"constant"}
    with pytest.raises(
        ConfigError, match=r"job\.toml:\d+: this stage begins after step 7, and the one before it after"
    ):
        job(ramp, "--stages.1.at_step", "7")


def test_the_stored_job_has_the_same_stages(job, tmp_path):
    before = job()
    (tmp_path / "config.toml").write_text(before.to_toml())
    assert load(str(tmp_path / "config.toml")).stages == before.stages
    assert job(STAGES, "--stages.1.training.global_batch_size", "2").stages[2].config.training.global_batch_size == 2


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        (
            "at_step = 3\ntraining.seq_lenn = 8",
            "job.toml:23: unknown key training.seq_lenn; did you mean training.seq_len?",
        ),
        ("at_step = 3\ntraining.seq_len = 0", "job.toml:23: training.seq_len must be an integer > 0, got 0"),
        ("at_step = 3\ntraining.seed = 1", "job.toml:23: training.seed is the same in the whole run; a stage may set"),
        ("at_step = 3\nmesh.tp = 2", "job.toml:23: unknown table [stages.0.mesh]"),
        (
            "at_step = 3\nevery_steps = 1\ntraining.seq_len = 8",
            "job.toml:23: every_steps needs a list in place of a value",
        ),
        ("at_step = 3\nevery_steps = 1\ntraining.seq_len = [8, 0]", "training.seq_len must be an integer > 0, got 0"),
        ("at_step = 3\ntraining.seq_len = [8, 16]", "training.seq_len must be an integer > 0, got"),
        ("at_step = 3", "job.toml:21: this stage changes nothing; it may set training.seq_len"),
        ("training.seq_len = 8", "job.toml:21: a stage begins at_step or at_tokens, and this one has neither"),
        (
            "at_step = 3\nat_tokens = 9\ntraining.seq_len = 8",
            "job.toml:21: a stage begins at_step or at_tokens, and this",
        ),
        (
            "at_step = 3\nlr_schedule.name = 'linear'",
            "or at total_tokens, and this one has neither",
        ),
        ("at_step = 3\nlr_schedule = {total_steps = 2, warmup_steps = 3}", "warmup_steps 3 is above total_steps 2"),
        (
            "at_step = 3\ndata.sources = [{name = 'a', kind = 'synthetic'}, {name = 'a', kind = 'synthetic'}]",
            'job.toml:23: duplicate source name "a"',
        ),
        (
            "at_step = 3\ntraining.seq_len = 8\n[[stages]]\nat_step = 3\ntraining.seq_len = 9",
            "job.toml:24: this stage begins after step 3, and the one before it after step 3; the steps must ascend",
        ),
        (
            "at_step = 3\noptimizer.groups = [{pattern = 'embed_tokens.*', freeze = true}]",
            "job.toml:23: freeze = true is for the whole run",
        ),
    ],
)
def test_a_mistake_names_the_line_of_its_stage(job, stages, said):
    with pytest.raises(ConfigError) as error:
        job(f"[[stages]]\n{stages}\n")
    assert said in str(error.value)


OWN = "data.sources = [{name = 'a', kind = 'tests.unit.data.test_fork:Counted'}]"
TEXT = "data.sources = [{name = 'a', kind = 'text', path = 'a.txt'}]"
SYNTHETIC = "data.sources = [{name = 'b', kind = 'synthetic'}]"


@pytest.mark.parametrize(
    ("later", "line"),
    [
        ("[[stages]]\nat_step = 5\ntraining.seq_len = 8", 24),
        (f"[[stages]]\nat_step = 5\ntraining.seq_len = 8\n{SYNTHETIC}\n[[stages]]\nat_step = 7\n{OWN}", 28),
    ],
)
def test_a_source_of_ones_own_keeps_its_length_also_if_a_stage_leaves_it_out(job, later, line):
    with pytest.raises(ConfigError) as error:
        job(f"[[stages]]\nat_step = 3\n{OWN}\n{later}\n")
    said = 'the source "a" of kind "tests.unit.data.test_fork:Counted" is read in sequences of 32 before, and of 8 here'
    assert f"job.toml:{line}: {said}" in str(error.value)
    in_between = f"[[stages]]\nat_step = 5\ntraining.seq_len = 8\n{SYNTHETIC}\n"
    again = f"[[stages]]\nat_step = 7\ntraining.seq_len = 32\n{OWN}\n"
    job(f"[[stages]]\nat_step = 3\n{OWN}\n{in_between}{again}")
    job(f"[[stages]]\nat_step = 3\n{TEXT}\n{later.replace(OWN, TEXT)}\n", "--tokenizer.path", "t.model")


def test_more_stages_than_anyone_means_are_refused(job):
    with pytest.raises(ConfigError, match="1,000 stages are too many; at most 256"):
        job(f"[[stages]]\nat_step = 1\nevery_steps = 1\ntraining.global_batch_size = {[8] * 1000}\n")


def test_a_mesh_must_form_the_batches_of_the_stages_that_a_launch_reaches(job):
    stages = "[[stages]]\nat_step = 6\ntraining.global_batch_size = 2\n"
    with pytest.raises(ConfigError, match=r"job\.toml:23: a global batch of 2 sequences cannot be cut"):
        job(stages, ranks=4)
    assert job(stages, "--training.steps", "6", ranks=4).config.training.steps == 6


def test_what_is_trained_stays_and_what_is_not_may_change(job):
    old = job().config.model_dump(mode="json")

    def diff(stages, steps, *words):
        return trained_diff(old, job(stages, *words).config.model_dump(mode="json"), steps)

    assert diff(STAGES, 10) == (0, [])
    assert diff(STAGES, 10, "--optimizer.lr", "5e-3") == (1, ["optimizer.lr: 0.001 -> 0.005"])
    other = STAGES.replace("seq_len = 64", "seq_len = 48")
    assert diff(other, 3) == (0, [])
    assert diff(other, 4) == (4, ["training.seq_len: 64 -> 48"])
    assert diff(STAGES.replace("at_step = 3", "at_step = 2"), 3)[0] == 3
    assert diff(STAGES.replace("at_step = 3", "at_step = 4"), 4)[0] == 4
    fewer = STAGES[: STAGES.index("[[stages]]\nat_tokens")]
    assert diff(fewer, 6) == (0, [])
    assert diff(fewer, 7)[0] == 7
    assert diff(f"{STAGES}[[stages]]\nat_step = 9\ntraining.seq_len = 8\n", 9) == (0, [])
    moved = "[[stages]]\nat_step = {}\nlr_schedule.total_steps = 10\n"
    old = job(moved.format(3)).config.model_dump(mode="json")
    assert diff(moved.format(5), 6) == (4, ["lr_schedule counts from step 3 -> 0"])


def test_the_keys_of_a_checkpoint_are_those_of_its_last_step(job):
    config = tomli.loads(job().to_toml())
    lengths = [in_effect(config, steps)["training"]["seq_len"] for steps in range(5)]
    assert lengths == [32, 32, 32, 32, 64]
    assert "rope_scaling" in in_effect(config, 7)["model"]
    assert "stages" not in in_effect(config, 7)
    assert border_of(config, 8).schedule_after == 6


RAMP = [{"at_step": 1, "every_steps": 1, "training": {"seq_len": 8}}]
RAMPS = [{"at_step": 1, "every_steps": 1, "training": {"seq_len": [8] * 1000}}]


@pytest.mark.parametrize("stages", [3, [3], [{"at_step": "x"}], [{"at_tokens": 5}], [{}], RAMP, RAMPS])
def test_a_strangers_stages_are_one(stages):
    assert in_effect({"stages": stages, "model": {"dim": 8}}, 5)["model"] == {"dim": 8}


def test_the_plan_as_a_table(job):
    lines = stage_table(job("[average]\ninterval = 1\n" + STAGES, "--training.steps", "8"))
    cells = [line.split() for line in lines[1:]]
    assert [row[:3] for row in cells] == [["1", "1", "0"], ["2", "4", "768"], ["3", "7", "2,304"], ["4", "9", "2,816"]]
    assert "8 x 64" in lines[2]
    assert "random 1,152 tokens, other 384 tokens" in lines[2]
    assert "0.002 to 0.002" in lines[3]
    assert "none: training.steps is before" in lines[4]
    assert stage_table(job("")) == []


@pytest.mark.parametrize(
    ("source", "key", "change"),
    [
        ('kind = "synthetic", document_length = 8', "document_length", "(not set) -> 8"),
        ('kind = "tokens", path = "x"', "kind", '"synthetic" -> "tokens"'),
    ],
)
def test_a_source_whose_name_stands_for_other_data_is_refused(job, source, key, change):
    """Else a run ends at the border, as the data has changed; also if a stage in between leaves the source out."""
    for between in ("", '\n[[stages]]\nat_step = 2\ndata.sources = [{name = "other", kind = "synthetic"}]'):
        stages = f'{between}\n[[stages]]\nat_step = 3\ndata.sources = [\n  {{name = "random", {source}}},\n]'
        with pytest.raises(ConfigError, match="give other data another name") as refused:
            job(stages, "--tokenizer.path", "t.model")
        assert f'{key} of the source "random" changes here: {change}. It would go on' in str(refused.value)


@pytest.mark.parametrize(
    ("stages", "sizes", "step", "key"),
    [
        (STAGES, {}, 3, ""),
        (STAGES, {"seq_len": 16}, 2, "stages.1.at_tokens"),
        (STAGES, {"seq_len": 16}, 9, ""),  # that stage has begun
        ("[[stages]]\nat_step = 9\nlr_schedule.total_tokens = 9000\n", {"seq_len": 16}, 3, ""),  # a later schedule
        ("[[stages]]\nat_step = 9\nlr_schedule.total_tokens = 9000\n", {"seq_len": 16}, 9, ""),
        ("[[stages]]\nat_step = 9\nlr_schedule.total_tokens = 9000\n", {"seq_len": 16}, 10, "lr_schedule.total_tokens"),
    ],
)
def test_a_job_that_goes_on_counts_the_tokens_that_were_trained(job, stages, sizes, step, key):
    before = job(stages)
    old = before.config.model_dump(mode="json")
    new = job(stages, *(word for name, size in sizes.items() for word in (f"--training.{name}", str(size))))
    tokens = stage_of(before.stages, step + 1).tokens_before(step + 1)
    for known, expected in ((old, key), (new.config.model_dump(mode="json"), "")):  # a mistake of before goes on
        if expected:
            with pytest.raises(ConfigError, match=rf"^{expected} counts tokens, and .* these had {tokens:,}\."):
                require_counted(known, new.config.model_dump(mode="json"), step, tokens)
        else:
            require_counted(known, new.config.model_dump(mode="json"), step, tokens)
