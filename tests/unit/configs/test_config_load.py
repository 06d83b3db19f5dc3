"""Layers of a job, origins, and the resolved config that loads back to an equal one."""

import copy
import json
import string

import pytest
import tomli
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from configs.errors import ConfigError
from configs.load import JOB_FILES, load
from configs.reading.keys import flat, schema_keys
from configs.reading.removed import REMOVED
from configs.reading.toml_text import table_text
from configs.run_change import run_key_diff
from tests.removed_keys import add_removed_keys

BASE = """[job]
name = "base"
[model]
dim = 64
n_layers = 4
n_heads = 4
ffn_dim = 128
vocab_size = 512
rope_scaling = {factor = 8.0, low_freq_factor = 2.0}
[[data.sources]]
name = "one"
kind = "synthetic"
[[data.sources]]
name = "two"
kind = "synthetic"
[training]
steps = 10
seq_len = 32
global_batch_size = 8
[optimizer]
lr = 1e-3
[lr_schedule]
total_steps = 10
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "base.toml").write_text(BASE)
    (tmp_path / "job.toml").write_text(
        'base = "shared/base.toml"\n[model.rope_scaling]\nfactor = 4.0\n'
        '[[data.sources]]\nname = "only"\nkind = "synthetic"\n'
    )
    return tmp_path


def test_a_bare_base_is_a_file_beside_the_job_or_else_a_shipped_one(folder):
    (folder / "mine.toml").write_text('base = "debug.toml"\n[training]\nsteps = 3\n')
    shipped = load("mine.toml")
    assert (shipped.config.job.name, shipped.config.training.steps) == ("debug", 3)
    assert shipped.origins["job.name"].startswith(f"{JOB_FILES}/debug.toml:")
    (folder / "debug.toml").write_text(BASE)
    assert load("mine.toml").config.job.name == "base"


def test_a_job_with_a_shipped_ones_name_may_inherit_from_that(folder):
    (folder / "debug.toml").write_text('base = "debug.toml"\n[training]\nsteps = 3\n')
    (folder / "link.toml").symlink_to("debug.toml")
    for name in ("debug.toml", "link.toml"):
        loaded = load(name)
        assert (loaded.config.job.name, loaded.config.training.steps) == ("debug", 3)
    (folder / "other.toml").write_text('base = "debug.toml"\n')
    (folder / "debug.toml").write_text('base = "other.toml"\n')
    with pytest.raises(ConfigError, match=r"circle: debug.toml -> other.toml -> debug.toml"):
        load("debug.toml")


def test_tables_of_a_base_are_merged_and_lists_replaced(folder):
    loaded = load("job.toml")
    assert loaded.config.model.rope_scaling.factor == 4.0
    assert loaded.config.model.rope_scaling.low_freq_factor == 2.0
    assert [source.name for source in loaded.config.data.sources] == ["only"]
    assert {key: loaded.origins[key] for key in ("job.name", "model.rope_scaling.factor", "data.sources.0.name")} == {
        "job.name": "shared/base.toml:2",
        "model.rope_scaling.factor": "job.toml:3",
        "data.sources.0.name": "job.toml:5",
    }
    assert loaded.origins["model.rope_scaling.low_freq_factor"] == "shared/base.toml:9"
    assert loaded.origins["training.seed"] == "default"
    assert "data.sources.1.name" not in loaded.origins


def test_of_an_override_given_twice_the_last_one_counts(folder):
    job = load("debug", ["--training.steps", "5", "--optimizer.lr=1e-3", "--training.steps=7"])
    assert (job.config.training.steps, job.config.optimizer.lr) == (7, 1e-3)


def test_the_last_of_two_equal_overrides_counts_at_its_place(folder):
    """What stands between the two must not undo it; nor does a mistake in the first matter any more."""
    sources = '[{name = "x", kind = "synthetic"}]'
    words = ["--data.sources.0.weight=2.0", "--data.sources", sources, "--data.sources.0.weight", "3.0"]
    assert load("job.toml", words).config.data.sources[0].weight == 3.0
    assert load("job.toml", ["--optimizer.betas=[1", "--optimizer.betas=[0.5, 0.6]"]).config.optimizer.betas == [
        0.5,
        0.6,
    ]


def test_overrides_are_toml_and_bare_words_strings(folder):
    words = [
        "--training.steps",
        "1_000",
        "--optimizer.lr=1e-4",
        "--training.max_norm",
        "inf",
        "--compile.enable",
        "true",
    ]
    words += [
        "--job.name",
        "a b",
        "--job.output_dir",
        "/x/00=1",
        "--checkpoint.load",
        "00000100",
        "--mesh.dp_shard",
        "-1",
    ]
    words += [
        "--model.rope_scaling",
        "{factor = 2.0}",
        "--data.sources.0.weight",
        "3.0",
        "--optimizer.betas=[0.8, 0.9]",
    ]
    loaded = load("job.toml", words)
    config = loaded.config
    assert (config.training.steps, config.optimizer.lr, config.training.max_norm) == (1000, 1e-4, float("inf"))
    assert (config.compile.enable, config.job.name, config.job.output_dir) == (True, "a b", "/x/00=1")
    assert (config.checkpoint.load, config.mesh.dp_shard, config.optimizer.betas) == ("00000100", -1, [0.8, 0.9])
    assert (config.model.rope_scaling.factor, config.model.rope_scaling.low_freq_factor) == (2.0, 2.0)
    assert (config.data.sources[0].weight, config.data.sources[0].name) == (3.0, "only")
    assert loaded.origins["training.steps"] == "--training.steps"
    assert loaded.origins["data.sources.0.weight"] == "--data.sources.0.weight"
    assert loaded.origins["data.sources.0.name"] == "job.toml:5"
    assert loaded.origins["optimizer.betas"] == "--optimizer.betas"


def test_a_whole_list_of_tables_from_the_command_line(folder):
    loaded = load("shared/base.toml", ["--data.sources", '[{name = "x", kind = "synthetic"}]'])
    assert [source.name for source in loaded.config.data.sources] == ["x"]
    assert loaded.origins["data.sources.0.name"] == "--data.sources"
    assert "data.sources.1.name" not in loaded.origins


def test_a_bare_name_is_looked_up_here_then_in_configs(folder):
    assert load("llama_7b").config.model.ffn_dim == load("llama_7b.toml").config.model.ffn_dim == 11008
    (folder / "llama_7b.toml").write_text(BASE)
    assert load("llama_7b.toml").config.model.ffn_dim == 128


def test_an_error_starts_with_where_the_key_was_set(folder):
    loaded = load("job.toml", ["--training.steps=5"])
    assert str(loaded.error("job.name", "no")) == "shared/base.toml:2: no"
    assert str(loaded.error("data.sources.0.name", "no")) == "job.toml:5: no"
    assert str(loaded.error("training.steps", "no")) == "--training.steps: no"
    assert str(loaded.error("training.seed", "no")) == "shared/base.toml:16: no"  # not set: where its table begins
    assert str(loaded.error("mesh.tp", "no")) == "job.toml: no"
    assert isinstance(loaded.error("mesh.tp", "no"), ConfigError)


def test_a_config_is_frozen(folder):
    with pytest.raises(ValueError, match="frozen"):
        load("job.toml").config.training.steps = 5


TEXT = st.text(max_size=12)
NAMED = TEXT.filter(lambda t: t not in ("", "none"))
"""Values of keys where "" is a mistake and "none" means that the key is not set."""
POSITIVE = st.floats(min_value=0, exclude_min=True, allow_infinity=False, allow_nan=False)
SOURCES = st.lists(TEXT, min_size=1, max_size=3, unique=True).map(
    lambda names: [
        {"name": name, "kind": "text", "path": name + "x", "text_key": name, "weight": 0.5} for name in names
    ]
)
JOBS = st.fixed_dictionaries(
    {
        "job": st.fixed_dictionaries(
            {"name": TEXT.filter(str.isprintable), "output_dir": NAMED.filter(lambda t: "\0" not in t)}
        ),
        "model": st.fixed_dictionaries(
            {
                "dim": st.integers(1, 10**4).map(lambda n: 8 * n),
                "n_layers": st.integers(1, 4096),
                "n_heads": st.just(4),
                "ffn_dim": st.just(3),
                "vocab_size": st.just(5),
                "rope_theta": POSITIVE,
            },
            optional={
                "n_kv_heads": st.just(2),
                "rope_scaling": st.just({"factor": 3.0}),
                "tie_embeddings": st.booleans(),
            },
        ),
        "tokenizer": st.fixed_dictionaries({"path": TEXT.map(lambda t: t + ".model"), "train_on": st.lists(TEXT)}),
        "data": st.fixed_dictionaries(
            {"sources": SOURCES}, optional={"prepare": st.fixed_dictionaries({"input": st.just(["a"]), "output": TEXT})}
        ),
        "training": st.fixed_dictionaries(
            {"steps": st.just(9), "seq_len": st.just(8), "global_batch_size": st.just(4)},
            optional={"max_norm": POSITIVE | st.just(float("inf")), "seed": st.integers(0, 2**63 - 1)},
        ),
        "optimizer": st.fixed_dictionaries(
            {"lr": POSITIVE | st.integers(1, 9)},
            optional={
                "groups": st.lists(TEXT.filter(bool), unique=True, max_size=2).map(
                    lambda ts: [{"pattern": t} for t in ts]
                )
            },
        ),
        "lr_schedule": st.just({"total_steps": 9}),
    },
    optional={"checkpoint": st.fixed_dictionaries({"load": NAMED | st.integers(0, 10**9)})},
)


@pytest.mark.slow
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(JOBS, st.booleans())
def test_the_resolved_config_loads_back_equal(tmp_path, values, with_origins):
    file, again = tmp_path / "job.toml", tmp_path / "again.toml"
    file.write_text(table_text(values), encoding="utf-8", newline="")
    loaded = load(str(file))
    assert flat(values).items() <= flat(loaded.config.model_dump()).items()
    again.write_text(loaded.to_toml(with_origins), encoding="utf-8", newline="")
    assert load(str(again)).config == loaded.config


NESTED = st.recursive(
    st.integers() | st.floats(allow_nan=False) | st.booleans() | TEXT | st.lists(st.integers() | TEXT, max_size=3),
    lambda inner: st.dictionaries(TEXT, inner, max_size=3),
)


@settings(max_examples=50, deadline=None)
@given(
    st.dictionaries(st.text(string.printable, max_size=5), NESTED | st.lists(st.dictionaries(TEXT, NESTED, max_size=2)))
)
def test_any_table_is_read_back_equal(values):
    assert tomli.loads(table_text(values)) == values


def test_origins_stand_in_comments(folder):
    lines = load("job.toml", ["--training.steps=5"]).to_toml(with_origins=True).splitlines()
    assert "steps = 5                                 # --training.steps" in lines
    assert 'name = "only"                             # job.toml:5' in lines
    assert "seed = 0                                  # default" in lines
    assert "# head_dim is not set" in lines


def test_run_keys_that_differ(folder):
    old = load("shared/base.toml").config.model_dump()
    new = load("shared/base.toml", ["--training.seed=1", "--data.sources.1.weight=2.0", "--model.n_kv_heads=2"]).config
    assert run_key_diff(old, new.model_dump()) == [
        "data.sources.1.weight: 1.0 -> 2.0",
        "model.n_kv_heads: (not set) -> 2",
        "training.seed: 0 -> 1",
    ]


def test_machine_keys_are_free_to_change(folder):
    old = load("shared/base.toml").config.model_dump()
    words = ["--training.steps=99", "--training.micro_batch_size=2", "--mesh.tp=2", "--compile.enable=true"]
    assert run_key_diff(old, load("shared/base.toml", words).config.model_dump()) == []
    words = ["--fsdp.partition=owner"]
    assert run_key_diff(old, load("shared/base.toml", words).config.model_dump()) == []


def test_the_micro_batch_of_exact_reductions_is_a_run_key(folder):
    exact, words = "--training.reduction=exact", ["--training.micro_batch_size=2", "--fsdp.zero_stage=1"]
    fast = load("shared/base.toml").config.model_dump()
    old, new = (load("shared/base.toml", [exact, *more]).config.model_dump() for more in ([], words))
    assert run_key_diff(old, new) == ["training.micro_batch_size: 1 -> 2"]
    assert run_key_diff(fast, new) == ['training.reduction: "fast" -> "exact"']
    del fast["training"]["reduction"]  # saved before the key existed
    assert run_key_diff(fast, new) == ['training.reduction: "fast" -> "exact"']


def test_exact_reductions_need_a_norm_of_products(folder):
    load("shared/base.toml", ["--training.reduction=exact", "--training.norm_type=inf"])
    with pytest.raises(ConfigError, match=r'norm_type: with reduction "exact" .* whole number or inf, got 2.5'):
        load("shared/base.toml", ["--training.reduction=exact", "--training.norm_type=2.5"])


def test_exact_reductions_reduce_every_micro_batch(folder):
    loaded = load("shared/base.toml", ["--training.reduction=exact", "--fsdp.accumulate=reduce_last"])
    assert 'reduce_last" does nothing with training.reduction = "exact"' in loaded.warnings[0]
    assert loaded.config.fsdp.accumulate == "reduce_every"


def test_a_machine_key_that_changes_values_is_a_run_key(folder):
    old = load("shared/base.toml").config.model_dump()
    words = ["--fsdp.partition=owner", "--fsdp.owner_broadcast_dtype=bfloat16"]
    assert run_key_diff(old, load("shared/base.toml", words).config.model_dump()) == [
        'fsdp.owner_broadcast_dtype: (not set) -> "bfloat16"'
    ]


def test_a_config_that_went_through_toml_has_not_changed(folder):
    loaded = load("shared/base.toml")
    assert run_key_diff(tomli.loads(loaded.to_toml()), loaded.config.model_dump()) == []


def test_a_key_newer_than_the_checkpoint_counts_as_its_default(folder):
    config = load("shared/base.toml").config
    old = config.model_dump()
    del old["training"]["z_loss_weight"], old["data"]["sources"][0]["weight"], old["optimizer"]["groups"]
    assert run_key_diff(old, config.model_dump()) == []
    changed = load("shared/base.toml", ["--training.z_loss_weight=1e-4"]).config
    assert run_key_diff(old, changed.model_dump()) == ["training.z_loss_weight: 0.0 -> 0.0001"]


def test_a_source_more_is_a_change(folder):
    old = load("job.toml").config.model_dump()
    lines = run_key_diff(old, load("shared/base.toml").config.model_dump())
    assert 'data.sources.0.name: "only" -> "one"' in lines
    assert 'data.sources.1.name: (not set) -> "two"' in lines


def with_removed(values, **others):
    values = copy.deepcopy(values)
    add_removed_keys(values, **others)
    return values


def test_the_config_of_an_old_run_with_removed_keys_is_valid_and_may_be_resumed(folder):
    new = load("shared/base.toml").config
    (folder / "old.toml").write_text(table_text(with_removed(new.model_dump())))
    assert load("old.toml").config == new
    assert load("shared/base.toml", ["--checkpoint.verify=hash"]).config == new
    old = json.loads(json.dumps(with_removed(new.model_dump(mode="json"))))
    assert run_key_diff(old, new.model_dump(mode="json")) == []
    old = with_removed(new.model_dump(), **{"optimizer.newton_schulz_steps": 3, "checkpoint.verify": "size"})
    assert run_key_diff(old, new.model_dump()) == ["optimizer.newton_schulz_steps: 3 -> 5"]


def test_a_removed_key_with_another_value_says_what_to_do(folder):
    (folder / "old.toml").write_text('base = "shared/base.toml"\n[comm]\nprefetch_forward = 2\n')
    with pytest.raises(ConfigError) as error:
        load("old.toml", ["--compile.options", "{max_autotune = true}"])
    assert str(error.value).split("\n") == [
        "old.toml:3: comm.prefetch_forward is no longer a key; set comm.prefetch, for both directions",
        "--compile.options: compile.options is no longer a key; set compile.mode, or the compiler's environment "
        "variables (TORCHINDUCTOR_...)",
    ]
    assert not REMOVED.keys() & schema_keys().keys()
