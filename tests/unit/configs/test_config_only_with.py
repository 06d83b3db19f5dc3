"""Keys that do something only with others: declared on the schema, a warning where they were set in vain."""

import copy
from pathlib import Path

import pytest
import tomli
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from configs import checks
from configs.checks.idle import idle_keys
from configs.display import help_text
from configs.errors import ConfigError
from configs.load import load
from configs.own_code import EXAMPLE
from configs.reading.keys import schema_keys
from configs.reading.toml_text import table_text
from configs.run_change import run_key_diff
from tests.conftest import ROOT
from tests.unit.small_job import JOB


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text(JOB)


def inheriting(**files):
    """Write job files, each with the one before it as its base, the first with job.toml; the last is to be loaded."""
    base = "job.toml"
    for name, text in files.items():
        Path(f"{name}.toml").write_text(f'base = "{base}"\n{text}')
        base = f"{name}.toml"
    return base


# --------------------------------------------------------------------------- what is overruled, and what is a mistake


@pytest.mark.parametrize("mode", ["none", "full"])
def test_one_edit_turns_an_inherited_mode_off(mode, tmp_path):
    loaded = load("llama_405b", ["--activation_checkpoint.mode", mode])
    assert loaded.config.activation_checkpoint.save_every_nth_matmul == 1
    assert loaded.origins["activation_checkpoint.save_every_nth_matmul"] == "default"
    lines = (ROOT / "configs/llama_405b.toml").read_text().split("\n")
    line = next(i for i, text in enumerate(lines, 1) if text.startswith("save_every_nth_matmul = 2"))
    assert loaded.warnings[0].startswith(
        f"{ROOT}/configs/llama_405b.toml:{line}: activation_checkpoint.save_every_nth_matmul does nothing with mode = "
        f'"{mode}" (--activation_checkpoint.mode), only with "selective"; leave it out'
    )
    (tmp_path / "resolved.toml").write_text(loaded.to_toml())
    again = load("resolved.toml")
    assert again.config == loaded.config
    assert again.warnings == ()


SELECTIVE = '[activation_checkpoint]\nmode = "selective"\nsave_ops = ["aten.mm"]\n'
FULL = '[activation_checkpoint]\nmode = "full"\n'
DELTA = '[model]\nlayers = ["delta"]'
BUDGET = "[activation_checkpoint]\nmemory_budget = 0.25\n"


@pytest.mark.parametrize(
    ("files", "words", "message"),
    [
        ({"a": SELECTIVE}, [], None),
        (
            {"a": SELECTIVE, "b": FULL},
            [],
            'a.toml:4: activation_checkpoint.save_ops does nothing with mode = "full" (b.toml:3), only with '
            '"selective"; leave it out, or change mode',
        ),
        ({"a": FULL, "b": SELECTIVE}, [], None),
        (
            {"a": FULL + 'save_ops = ["aten.mm"]', "b": ""},
            [],
            'a.toml:4: activation_checkpoint.save_ops does nothing with mode = "full" (a.toml:3), only with '
            '"selective"; leave it out, or change mode',
        ),
        (
            {"a": FULL, "b": BUDGET},
            [],
            'b.toml:3: activation_checkpoint.memory_budget does nothing with mode = "full" (a.toml:3), only with '
            '"budget"; leave it out, or change mode',
        ),
        (
            {"a": SELECTIVE, "b": FULL, "c": '[activation_checkpoint]\nsave_ops = ["aten.bmm"]'},
            [],
            'c.toml:3: activation_checkpoint.save_ops does nothing with mode = "full" (b.toml:3)',
        ),
        (
            {"a": SELECTIVE},
            ["--activation_checkpoint.mode=full", "--activation_checkpoint.save_ops=['aten.bmm']"],
            '--activation_checkpoint.save_ops: activation_checkpoint.save_ops does nothing with mode = "full" '
            "(--activation_checkpoint.mode)",
        ),
        (
            {"a": BUDGET},
            [],
            'a.toml:3: activation_checkpoint.memory_budget does nothing with mode = "none" (the default), only with '
            '"budget"; leave it out, or change mode',
        ),
        *(
            (
                {"a": f"{DELTA}\n{key} = {value}"},
                [],
                f'a.toml:4: model.{key} does nothing with layers = ["delta"] (a.toml:3), only with "full"; leave',
            )
            for key, value in (
                ("n_kv_heads", 3),
                ("qk_norm", '"head"'),
                ("attention_bias", "true"),
                ("attention_gate", "true"),
                ("query_scale", 3.0),
                ("rope_fraction", 0.5),
                ("rope_theta", 3.0),
                ("no_rope_every", 2),
                ("window", 8),
            )
        ),
        (
            {"a": f"{DELTA}\n[model.rope_scaling]\nkind = 'yarn'\nfactor = 4.0"},
            [],
            'a.toml:4: model.rope_scaling does nothing with layers = ["delta"] (a.toml:3), only with "full"; leave',
        ),
        ({"a": '[model]\nlayers = ["delta", "full"]\nwindow = 8\nrope_fraction = 0.5'}, [], None),
        ({"a": f"{DELTA}\nwindow = 8\n[model.multi_token]\ndepth = 1"}, [], None),
        (
            {"a": "[model]\nn_dense_layers = 1"},
            [],
            "a.toml:3: model.n_dense_layers does nothing without n_experts; leave",
        ),
        (
            {"a": "[model.router]\nrenormalize = false"},
            [],
            "a.toml:3: model.router.renormalize does nothing without model.n_experts; leave it out, or set model.n_exp",
        ),
    ],
)
def test_a_key_in_vain_is_a_warning(files, words, message):
    loaded = load(inheriting(**files), words)
    assert list(idle_keys(loaded.config, {})) == []
    if message is None:
        assert loaded.warnings == ()
    else:
        (warning,) = loaded.warnings
        assert warning.startswith(message)


@pytest.mark.parametrize(
    ("text", "words", "key", "value"),
    [
        ("[fsdp]\nreshard_after_forward = 'always'", ["--fsdp.zero_stage=2"], "reshard_after_forward", "default"),
        ("[fsdp]\naccumulate = 'reduce_last'", ["--fsdp.zero_stage=2"], "accumulate", "reduce_every"),
        ("[fsdp]\ncpu_offload = true", ["--job.device=cpu"], "cpu_offload", False),
        ("[fsdp]\nzero_stage = 2", ["--fsdp.partition=owner"], "zero_stage", 3),
    ],
)
def test_what_is_overruled_counts_as_not_set(text, words, key, value):
    assert getattr(load(inheriting(a=text), words).config.fsdp, key) == value


def test_an_overruled_key_of_a_list_item():
    text = '[tokenizer]\npath = "t.model"\n[[data.sources]]\nname = "s"\nkind = "text"\npath = "x"\ntext_key = "y"\n'
    loaded = load(inheriting(a=text), ["--data.sources.0.kind", "synthetic"])
    assert (loaded.config.data.sources[0].path, loaded.config.data.sources[0].text_key) == (None, "text")
    assert [warning.split(", ")[0] for warning in loaded.warnings] == [
        'a.toml:7: data.sources.0.path does nothing with kind = "synthetic" (--data.sources.0.kind)',
        'a.toml:8: data.sources.0.text_key does nothing with kind = "synthetic" (--data.sources.0.kind)',
    ]


def test_an_overruled_run_key_is_a_change_of_the_run():
    text = '[fsdp]\npartition = "owner"\nowner_broadcast_dtype = "bfloat16"\n'
    before, after = load(inheriting(a=text)), load("a.toml", ["--fsdp.partition=rows"])
    assert run_key_diff(before.config.model_dump(), after.config.model_dump()) == [
        'fsdp.owner_broadcast_dtype: "bfloat16" -> (not set)'
    ]


def test_a_key_that_needs_one_in_vain_is_in_vain_too():
    words = ["--fsdp.partition=owner", "--fsdp.zero_stage=2", "--fsdp.reshard_after_forward=always"]
    loaded = load("job.toml", words)
    assert [warning.split(": ")[0] for warning in loaded.warnings] == words_without_values(words[1:])
    assert loaded.config.fsdp.zero_stage == 3


def words_without_values(words):
    return [word.partition("=")[0] for word in words]


def test_help_says_what_a_key_needs():
    text = " ".join(help_text(100).split())
    for key in schema_keys().values():
        assert " ".join([key.doc, *map(str, key.conditions)]).replace("\n", " ") in text
    assert 'Only with mode = "full" | "selective".' in text
    assert '"always" only with zero_stage = 3 | "auto".' in text
    assert "Only with n_experts." in text


def test_every_condition_is_of_a_key_with_a_default_and_about_a_key_that_can_meet_it():
    keys = schema_keys()
    declared = {name: key.conditions for name, key in keys.items() if key.conditions}
    assert len(declared) > 25
    for name, needs in declared.items():
        assert not keys[name].required, name
        for condition in needs:
            other = keys[condition.key if "." in condition.key else f"{name.rpartition('.')[0]}.{condition.key}"]
            if other.choices:
                code = {EXAMPLE} if EXAMPLE in other.type else set()  # stands for the user's own
                assert set(condition.values) < {*other.choices, *code}, f"{name}: {condition}"
            assert condition.of is None or f'"{condition.of}"' in keys[name].type
            assert condition.values or not other.choices


# --------------------------------------------------------------------------- every rule runs


def test_a_typo_in_a_rule_is_no_reason_to_skip_it(monkeypatch):
    def with_typo(config, _):
        yield "training.steps", config.training.step

    monkeypatch.setattr(checks, "RULES", (with_typo,))
    with pytest.raises(AttributeError, match="step"):
        load("job.toml")


VALUES = {
    "true or false": st.booleans(),
    "integer": st.sampled_from([0, 1, 2, 3, 4, 8, 16, 64]),
    "number": st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0]),
    "string": st.sampled_from(["", "x", "0-2", "latest", "shard", "runs/x.model"]),
}
DEBUG = tomli.loads((ROOT / "configs/debug.toml").read_text())
MIXTURE = tomli.loads(JOB) | {"model": tomli.loads(JOB)["model"] | {"n_experts": 4}}
LEAVES = {name: key for name, key in schema_keys().items() if not key.is_table and ".N." not in name}


def values_of(key):
    if key.choices:
        return st.sampled_from([int(choice) if str(choice).isdigit() else choice for choice in key.choices])
    return next((values for kind, values in VALUES.items() if key.type.startswith(kind)), st.just([]))


BASES = st.sampled_from([tomli.loads(JOB), MIXTURE, DEBUG])
ANY = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def other_key(name, condition):
    return condition.key if "." in condition.key else f"{name.rpartition('.')[0]}.{condition.key}"


CONDITIONAL = {name: key.conditions for name, key in LEAVES.items() if key.conditions}
NEEDED = [other_key(name, condition) for name, needs in CONDITIONAL.items() for condition in needs]
"""Keys that conditions are about."""


@st.composite
def settings_of(draw, names, at_most):
    """Some of the keys, each with a value of its type."""
    chosen = draw(st.lists(st.sampled_from(sorted({*names} & {*LEAVES})), max_size=at_most, unique=True))
    return {name: draw(values_of(LEAVES[name])) for name in chosen}


@st.composite
def overruled(draw):
    """Two layers: a key with all that it needs, and one of the keys that it needs set to something else."""
    name = draw(st.sampled_from(sorted(CONDITIONAL)))
    met = {other_key(name, each): draw(st.sampled_from(each.values or (4,))) for each in CONDITIONAL[name]}
    other = draw(st.sampled_from(sorted(met)))
    return met | {name: draw(values_of(LEAVES[name]))}, {other: draw(values_of(LEAVES[other]))}


def put(values, given):
    """Set dotted keys in nested tables; None takes one away."""
    for name, value in given.items():
        *tables, last = name.split(".")
        table = values
        for part in tables:
            table = table.setdefault(part, {})
        table[last] = value
        if value is None:
            del table[last]
    return values


@ANY
@given(BASES, overruled(), settings_of([*NEEDED, *CONDITIONAL], 2), settings_of(NEEDED, 1))
def test_any_job_is_a_message_or_loads_back_equal(tmp_path, base, layers, more_below, more_above):
    """Any keys, and others above them: what is valid holds nothing in vain, and its resolved text is the same job."""
    below, above = put(copy.deepcopy(base), more_below | layers[0]), put({}, more_above | layers[1])
    (tmp_path / "below.toml").write_text(table_text(below))
    (tmp_path / "above.toml").write_text('base = "below.toml"\n' + table_text(above))
    try:
        loaded = load("above.toml")
    except ConfigError as error:
        assert not [line for line in str(error).split("\n") if not line.startswith(("above.toml", "below.toml"))]  # noqa: PT017
        return
    assert not list(idle_keys(loaded.config, {}))
    (tmp_path / "resolved.toml").write_text(loaded.to_toml())
    assert load("resolved.toml").config == loaded.config
