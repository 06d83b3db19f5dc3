"""What a user reads who made a mistake: each with its file and line, all at once."""

import copy
from pathlib import Path

import pytest
import tomli
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from configs.errors import ConfigError
from configs.load import load
from configs.paths import missing_paths
from configs.reading.toml_text import table_text
from tests.conftest import ROOT
from tests.unit.small_job import JOB

NOT_TOML = """\
--data.sources: not valid TOML: Invalid value (column 8); strings in it need quotes: [{name = "a"}]
    [{name=}]
           ^"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "valid.toml").write_text(JOB)


def mistakes(text, *overrides, world_size=None):
    """The messages for a file that begins with `base = "valid.toml"` (line 1)."""
    with open("job.toml", "w", encoding="utf-8") as file:
        file.write('base = "valid.toml"\n' + text)
    with pytest.raises(ConfigError) as caught:
        load("job.toml", overrides, world_size)
    assert caught.value.exit_code == 78
    return str(caught.value).split("\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[training]\nstepz = 1", "job.toml:3: unknown key training.stepz; did you mean training.steps?"),
        ("[training]\nlr = 1", "job.toml:3: unknown key training.lr; did you mean optimizer.lr?"),
        (
            "training.warmup_step = 1",
            "job.toml:2: unknown key training.warmup_step; did you mean lr_schedule.warmup_steps?",
        ),
        (
            '[model]\nlayers = ["delta", "ful"]',
            'job.toml:3: model.layers must be a list of strings, each "delta" | "full", got ["delta", "ful"]',
        ),
        ("[model]\ndmi = 1", "job.toml:3: unknown key model.dmi; did you mean model.dim?"),
        ("[model]\nhidden_size = 1", "job.toml:3: unknown key model.hidden_size; did you mean model.dim?"),
        ("steps = 1", "job.toml:2: unknown key steps; did you mean training.steps?"),
        ("[mesh]\nTP = 1", "job.toml:3: unknown key mesh.TP; did you mean mesh.tp?"),
        ("[model.delta]\nheads = 1", "job.toml:3: unknown key model.delta.heads; did you mean model.delta.key_heads?"),
        ("[mesh]\nqq = 1", "job.toml:3: unknown key mesh.qq; [mesh] has dp_replicate, dp_shard, cp, tp, pp, ep"),
        ("[trainning]\nx = 1", "job.toml:2: unknown table [trainning]; did you mean [training]?"),
        ("[training]\nmesh.tp = 1", "job.toml:3: unknown table [training.mesh]; did you mean [mesh]?"),
        (
            "model = {rope_scaling = {factor = 8.0,\nlo_freq_factor = 1}}",
            "job.toml:2: unknown key model.rope_scaling.lo_freq_factor; did you mean "
            "model.rope_scaling.low_freq_factor?",
        ),
        (
            '[[validation.sources]]\nname = "a"\nkind = "synthetic"\n\n[[validation.sources]]\n"knd" = ""\nname = "b"',
            "job.toml:7: unknown key validation.sources.1.knd; did you mean validation.sources.1.kind?",
        ),
    ],
)
def test_unknown_keys_name_the_nearest(text, message):
    assert mistakes(text) == [message]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[training]\nsteps = "100"', 'training.steps must be an integer > 0, got "100"; write it without the quotes'),
        ("[training]\nsteps = 100.0", "training.steps must be an integer > 0, got 100.0"),
        ("[fsdp]\nzero_stage = true", 'fsdp.zero_stage must be one of 1 | 2 | 3 | "auto", got true'),
        ('[fsdp]\nzero_stage = "four"', 'fsdp.zero_stage must be one of 1 | 2 | 3 | "auto", got "four"'),
        (
            '[fsdp]\nzero_stage = "aut"',
            'fsdp.zero_stage must be one of 1 | 2 | 3 | "auto", got "aut"; did you mean "auto"?',
        ),
        ("[training]\nsteps = 0", "training.steps must be an integer > 0, got 0"),
        (
            "[activation_checkpoint]\nmemory_limit_gib = 1e300",
            'activation_checkpoint.memory_limit_gib must be a number >= 0 and < 1e+09 or "device", got 1e+300',
        ),
        ("[data]\ncache_gib = inf", "data.cache_gib must be a number >= 0 and < 1e+09, got inf"),
        ("[training]\nseed = -1", "training.seed must be an integer >= 0 and < 2**63, got -1"),
        (
            '[validation]\nsources = {name = "a"}',
            'validation.sources must be a list of tables, got {name = "a"}; write [[validation.sources]]',
        ),
        ("[optimizer]\nlr = true", "optimizer.lr must be a number > 0, got true"),
        ("[optimizer]\nlr = nan", "optimizer.lr must be a number > 0, got nan"),
        ("[job]\nname = 2024", "job.name must be a string, got 2024; write it in quotes"),
        ('[compile]\nenable = "True"', 'compile.enable must be true or false, got "True"; write it without the quotes'),
        (
            '[training]\ndtype = "fp32"',
            'training.dtype must be one of "float32" | "bfloat16" | "float64", got "fp32"; did you mean "float32"?',
        ),
        (
            '[metrics]\nsink = "wandb"',
            'metrics.sink must be a string such as "module:Class", got "wandb"',
        ),
        (
            '[metrics]\nsink = "mine"',
            'metrics.sink must be a string such as "module:Class", got "mine"',
        ),
        ("[data]\nsources = [3]", "data.sources.0 must be a table, got 3"),
        ("[tokenizer]\ntrain_on = [1]", "tokenizer.train_on must be a list of strings, got [1]"),
        ("[checkpoint]\nload = 1.5", "checkpoint.load must be a string or integer, got 1.5"),
    ],
)
def test_wrong_types_say_what_was_expected_and_what_was_got(text, message):
    assert mistakes(text) == [f"job.toml:3: {message}"]


def test_a_list_of_several_lines_is_blamed_at_its_key():
    text = "[optimizer]\nbetas = [\n  0.9,\n  1.5,\n]"
    assert mistakes(text) == [
        "job.toml:3: optimizer.betas must be a list of 2 numbers, each >= 0 and < 1, got [0.9, 1.5]"
    ]


def test_a_value_instead_of_a_table_and_the_reverse():
    assert mistakes("model = 3\njob.name.x = 1") == [
        "job.toml:2: model must be a table, got 3",
        "job.toml:3: job.name must be a string, got {x = 1}",
    ]


def test_missing_keys_name_table_and_file():
    with open("short.toml", "w", encoding="utf-8") as file:
        file.write(
            JOB.replace("seq_len = 32\n", "").replace("[optimizer]\nlr = 1e-3\n", "").replace('name = "random"', "")
        )
    with pytest.raises(ConfigError) as caught:
        load("short.toml")
    assert str(caught.value).split("\n") == [
        "short.toml: the table [optimizer] is missing; it needs lr",
        "short.toml:10: [[data.sources]] lacks name (string): Name of the source; "
        "the order of its samples depends on it.",
        "short.toml:13: [training] lacks seq_len (integer > 0): Sequence length in tokens.",
    ]


def test_a_missing_table_without_required_keys_is_to_be_added():
    with open("short.toml", "w", encoding="utf-8") as file:
        file.write(JOB.replace("[lr_schedule]\ntotal_steps = 10\n", ""))
    with pytest.raises(ConfigError) as caught:
        load("short.toml")
    assert str(caught.value) == "short.toml: the table [lr_schedule] is missing; add it"


def test_a_missing_key_is_one_line_however_long_its_description():
    with open("short.toml", "w", encoding="utf-8") as file:
        file.write(JOB + '[data.prepare]\noutput = "x"\n')
    with pytest.raises(
        ConfigError, match=r"lacks input \(list of strings\): Files, .*standard library's source"
    ) as caught:
        load("short.toml")
    assert all(line.startswith("short.toml:") for line in str(caught.value).split("\n"))


def test_a_misspelled_required_key_is_one_mistake():
    with open("short.toml", "w", encoding="utf-8") as file:
        file.write(JOB.replace("seq_len", "seqlen"))
    with pytest.raises(ConfigError, match=r"did you mean training\.seq_len") as caught:
        load("short.toml")
    assert len(str(caught.value).split("\n")) == 1


def test_everything_at_once_and_each_at_its_own_place():
    """Mistakes of the file, of its base, between keys, and of the command line."""
    with open("middle.toml", "w", encoding="utf-8") as file:
        file.write('base = "valid.toml"\n[comm]\nprefetch = -1\n[model]\nn_kv_heads = 3\n')
    with open("top.toml", "w", encoding="utf-8") as file:
        file.write('base = "middle.toml"\n[training]\ndtype = 1\n[lr_schedule]\nwarmup_steps = 11\n')
    with pytest.raises(ConfigError) as caught:
        load("top.toml", ["--training.stepz=5", "--job.device", "gpu"])
    assert str(caught.value).split("\n") == [
        "middle.toml:3: comm.prefetch must be an integer >= 0, got -1",
        "middle.toml:5: n_heads 4 is not divisible by n_kv_heads 3 (4 / 3 = 1.33); change one of them",
        'top.toml:3: training.dtype must be one of "float32" | "bfloat16" | "float64", got 1',
        "top.toml:5: warmup_steps 11 is above total_steps 10; change one of them",
        '--job.device: job.device must be one of "auto" | "cpu" | "cuda", got "gpu"; did you mean "cpu"?',
        "--training.stepz: unknown key training.stepz; did you mean training.steps?",
    ]


@pytest.mark.parametrize("more", ["", "[model.options]\nwidth = 8"])
def test_an_unknown_architecture_is_one_mistake(more):
    """The keys of the model below it stay, and those of the one that was meant are not judged."""
    expected = 'model.architecture must be one of "llama" | "hf" or string such as "module:Class", got "my_model"'
    assert mistakes(f'[model]\narchitecture = "my_model"\n{more}') == [f"job.toml:3: {expected}"]
    assert mistakes(more, "--model.architecture", "my_model") == [f"--model.architecture: {expected}"]


def test_a_key_of_another_architecture_says_of_which():
    (found,) = mistakes("[model]\noptions = {width = 8}")
    assert found.startswith('job.toml:3: model.options is no key of architecture "llama"; leave it out, or set ')
    assert found.endswith('architecture = "module:Class", a model of your own')


def test_a_flag_that_cannot_be_set_is_reported_beside_what_is_wrong_between_keys():
    found = mistakes("[model]\nn_kv_heads = 3", "--training.seed.x=1")
    assert [line.split(" ")[0] for line in found] == ["job.toml:3:", "--training.seed.x:"]


def test_a_check_that_needs_a_wrong_table_keeps_quiet():
    """dim is no number, so nothing is said of what else [model] is about; all other tables are checked."""
    found = mistakes('[model]\ndim = "x"\nn_kv_heads = 3\n[tokenizer]\ntrain_on = ["a"]')
    assert [line.split(" ")[:2] for line in found] == [["job.toml:3:", "model.dim"], ["job.toml:6:", "train_on"]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[job]\nname = b", "job.toml:3: not valid TOML: Invalid value (strings need quotes"),
        ('[job]\nname = "b', "job.toml:3: not valid TOML"),
        (
            '[job]\nname = "b"\nname = "c"\n[x]\n',
            "job.toml:4: not valid TOML: Cannot overwrite a value (the key was already set",
        ),
    ],
)
def test_no_toml(text, message):
    lines = mistakes(text)
    assert lines[0].startswith(message)
    assert lines[1].strip() in text
    assert lines[2].strip() == "^"


def test_bases_that_lead_nowhere_or_back(tmp_path):
    bases = (("a", '"b.toml"'), ("b", '"a.toml"'), ("c", '"nope.toml"'), ("d", "3"), ("e", '"e.toml"'), ("f", '"x/y"'))
    for name, base in bases:
        with open(f"{name}.toml", "w", encoding="utf-8") as file:
            file.write(f"\nbase = {base}\n")
    for name, message in {
        "a": "b.toml:2: the bases form a circle: a.toml -> b.toml -> a.toml",
        "c": f'c.toml:2: base = "nope.toml": no such file: {tmp_path}/nope.toml (nor is it one of the jobs in '
        f"{ROOT}/configs)",
        "d": "d.toml:2: base must be the path of another job file, got 3",
        "e": "e.toml:2: the bases form a circle: e.toml -> e.toml",
        "f": f'f.toml:2: base = "x/y": no such file: {tmp_path}/x/y',
    }.items():
        with pytest.raises(ConfigError) as caught:
            load(f"{name}.toml")
        assert str(caught.value) == message


def test_a_file_that_is_not_utf8(tmp_path):
    (tmp_path / "latin.toml").write_bytes(b'[job]\nname = "\xe9"')
    with pytest.raises(ConfigError, match=r"latin\.toml:2: byte 0xe9 is not UTF-8"):
        load("latin.toml")


def test_a_name_that_is_no_file():
    with pytest.raises(ConfigError, match=r"job debugg: no job file at /.*/debugg or in configs/; did you mean debug"):
        load("debugg")
    with pytest.raises(ConfigError, match=r"no job file at /.*/some/where.toml; .*configs has .*debug, .*llama_1b"):
        load("some/where.toml")


TOO_LONG = "x" * 300
"""A name that no file system takes: the error comes in the same place as that of a folder that may not be entered."""


def test_files_that_cannot_be_looked_at(tmp_path):
    with pytest.raises(ConfigError, match=f"^job {TOO_LONG}: cannot be read: File name too long$"):
        load(TOO_LONG)
    (tmp_path / "job.toml").write_text(f'base = "{TOO_LONG}"\n')
    with pytest.raises(ConfigError, match=rf'job.toml:1: base = "{TOO_LONG}" cannot be read: File name too long$'):
        load(str(tmp_path / "job.toml"))


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["--tokenizer.path", TOO_LONG], "tokenizer.path"),
        (["--tokenizer.path", "a.model", "--tokenizer.train_on", f'["{TOO_LONG}"]'], "tokenizer.train_on"),
        (["--data.sources.0.kind", "tokens", "--data.sources.0.path", TOO_LONG], "data.sources.0.path"),
        (["--data.sources.0.kind", "text", "--data.sources.0.path", TOO_LONG], "data.sources.0.path"),
        (["--data.prepare", f'{{input = ["{TOO_LONG}"], output = "{TOO_LONG}"}}'], "data.prepare.input"),
        (["--checkpoint.load", TOO_LONG], "checkpoint.load"),
        (["--checkpoint.init_from", TOO_LONG, "--job.output_dir", TOO_LONG], "checkpoint.init_from"),
    ],
)
def test_inputs_that_cannot_be_looked_at_are_named(words, key):
    tiny = Path(__file__).parents[2] / "end_to_end" / "tiny.toml"
    [*_, problem] = missing_paths(load(str(tiny), ["--tokenizer.path", "a.model", *words]))
    assert problem.partition(": ")[2] == f'{key} is "{TOO_LONG}", which can\'t be looked at: File name too long'


@pytest.mark.parametrize("output", ["made", "{}/made", "./x/../made"])
@pytest.mark.parametrize("path", ["made/train", "{}/made/train", "x/../made/train"])
def test_what_the_job_makes_itself_is_not_missing_however_it_is_named(output, path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").touch()
    tiny = Path(__file__).parents[2] / "end_to_end" / "tiny.toml"
    prepare = f'{{input = ["text"], output = "{output.format(tmp_path)}"}}'
    words = ["--tokenizer.path", "text", "--data.prepare", prepare]
    words += ["--data.sources.0.kind", "tokens", "--data.sources.0.path", path.format(tmp_path)]
    assert missing_paths(load(str(tiny), words)) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--data.sources.3.name", "x"],
            "--data.sources.3.name: data.sources has no item 3; it is a list of 1, counted from 0",
        ),
        (["--model.dim.x", "3"], "--model.dim.x: model.dim is not a table, so it has no key x"),
        (
            ["--optimizer.betas", "[0.5, 0.9]", "--optimizer.betas.0", "0.6"],
            "--optimizer.betas.0: optimizer.betas is a list; set all of it: --optimizer.betas '[0.5, 0.9]'",
        ),
        (
            ["--data.sources.name", "a"],
            "--data.sources.name: data.sources is a list; set a key of one of its items: --data.sources.0.name VALUE",
        ),
        (
            ["--job.output_dir", '"a\\u0000b"'],
            "--job.output_dir: output_dir has a NUL character, which no name of a folder can have",
        ),
        (["--job.name", "[2024]"], "--job.name: job.name must be a string, got [2024]"),
        (["--training.steps"], "--training.steps: needs a value: --training.steps VALUE"),
        (["--data.sources", "[{name=}]"], NOT_TOML),
        (["--job.name", "a\udcff"], "--job.name: the value is not UTF-8"),
        (["job.name=a"], "job.name=a: unexpected on the command line; set keys as --table.key VALUE"),
    ],
)
def test_overrides(words, message):
    assert "\n".join(mistakes("", *words)) == message


NONSENSE = st.sampled_from(
    [0, -1, 3, 1.5, float("nan"), True, "", "x", [], {}, [3], [[]], [{}], {"x": 1}, [{"x": 1}, {"name": "a"}], "0-2"]
)
JOB_FILES = [tomli.loads(JOB), tomli.loads((Path(__file__).parents[3] / "configs" / "debug.toml").read_text())]


def _tables(value):
    if isinstance(value, dict):
        yield value
        for item in value.values():
            yield from _tables(item)
    elif isinstance(value, list):
        for item in value:
            yield from _tables(item)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_no_nonsense_ends_in_anything_but_a_message(data):
    """Any keys deleted, added or set to anything: every line of the message says where."""
    values = copy.deepcopy(data.draw(st.sampled_from(JOB_FILES)))
    for _ in range(data.draw(st.integers(1, 4))):
        table = data.draw(st.sampled_from(list(_tables(values))))
        key = data.draw(st.sampled_from([*table, "layers", "tp", "sources", "rope_scaling", "groups", "new"]))
        if key in table and data.draw(st.booleans()):
            del table[key]
        else:
            table[key] = copy.deepcopy(data.draw(NONSENSE))
    Path("job.toml").write_text(table_text(values), encoding="utf-8")
    try:
        load("job.toml", world_size=data.draw(st.sampled_from([None, 1, 2])))
    except ConfigError as error:
        for line in str(error).split("\n"):
            assert line.startswith("job.toml:")
