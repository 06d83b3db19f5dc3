"""What a person reads after a mistake: each message says what is wrong, and what to do."""

import errno
import os
from pathlib import Path

import pytest

import trainer.home
from checkpoint.manifest import read_manifest
from configs.command_line import answer, load_for_run, parse_command_line
from configs.errors import ConfigError, UserError
from configs.layout import MeshSizes, named_axes
from configs.load import load
from configs.run_change import function_diff
from scripts import checkpoint, data, plan, runs
from tests.conftest import ROOT
from tests.end_to_end.launch import launch_here

TINY = str(ROOT / "tests/end_to_end/tiny.toml")
SOURCES = "--data.sources"
EXPERTS = ["--model.n_experts", "4"]
EXPORT = [
    *("--checkpoint.interval", "1", "--checkpoint.after_save"),
    '[{name = "export", command = "keel export {checkpoint} {output}/model", every = 1}]',
]


def refused(*words):
    with pytest.raises(ConfigError) as caught:
        load(TINY, words)
    return str(caught.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([SOURCES, "[]"], "data.sources is empty; it needs at least one table [[data.sources]]"),
        ([SOURCES, "[{name=a kind=b}]"], '(column 8); strings in it need quotes: [{name = "a"}]'),
        (
            ["--data.sources.0", "{}"],
            "data.sources is a list; set a key of one of its items: --data.sources.0.KEY VALUE",
        ),
        (["--data.sources.5.name", "x"], "data.sources has no item 5; it is a list of 1, counted from 0"),
        (["--validation.sources.1.name", "x"], "validation.sources has no item 1; it is a list of 0"),
        (["--job.name", "x" * 300], "at most 200 bytes"),
        (["--job.name", '"a\\nb"'], "name must be one line"),
        (["--job.output_dir", ""], "output_dir is empty; leave it out for runs/<job.name>"),
        (["--job.timeout_seconds", "99999999999999"], "must be an integer > 0 and < 2**31"),
        (["--model.dim", "64000000000000000000000000"], "64 bits"),
        (["--model.dim", "4000000000000000000"], "more than 64 bits can count"),
        (["--model.vocab_size", "1"], "must be an integer >= 2"),
        (
            ["--model.rope_scaling.factor", "0.5", "--model.rope_scaling.original_seq_len", "8"],
            "factor must be a number >= 1",
        ),
        (["--data.document_mask", "true", "--data.sources.0.document_length", "1"], "have no token to predict"),
        (
            [*EXPERTS, "--model.n_shared_experts", "1", "--model.qk_norm", "head", *EXPORT],
            "Qwen3MoeForCausalLM is the nearest class, and computes other models: n_shared_experts is 1, not 0",
        ),
        (
            [*EXPERTS, "--model.router.load_balance", "bias", *EXPORT],
            "router.load_balance is 'bias', not 'auxiliary_loss' or 'none'",
        ),
        ([*EXPERTS, "--model.router.scoring", "sigmoid", *EXPORT], "router.scoring is 'sigmoid', not 'softmax'"),
        (["--model.n_heads", "5", "--model.n_kv_heads", "5", "--model.head_dim", "8", *EXPORT], "not a multiple of"),
    ],
)
def test_a_mistake_in_a_key(words, said):
    assert said in refused(*words)


@pytest.mark.parametrize("value", ["", "many"])
def test_what_is_no_number_without_quotes_either_gets_no_such_advice(value):
    assert "quotes" not in refused("--optimizer.lr", value)


def test_an_unknown_key_is_not_taken_for_a_table():
    assert "did you mean" not in refused("--job.date", "x")


def test_exports_that_are_possible_are_accepted():
    assert load(TINY, EXPORT).config.checkpoint.after_save[0].name == "export"
    assert load(TINY, [*EXPERTS, *EXPORT]).config.model.n_experts == 4


@pytest.mark.parametrize(
    ("words", "table", "key", "value"),
    [
        (["--job.name", "2024"], "job", "name", "2024"),
        (["--job.name", "true"], "job", "name", "true"),
        (["--job.name", "1e3"], "job", "name", "1e3"),
        (["--job.name", '"1e3"'], "job", "name", "1e3"),
        (
            ["--activation_checkpoint.mode", "full", "--activation_checkpoint.layers", "0"],
            "activation_checkpoint",
            "layers",
            "0",
        ),
        (["--model.head_dim", "none"], "model", "head_dim", None),
        (["--model.n_kv_heads", "none"], "model", "n_kv_heads", None),
        (["--checkpoint.load", "none"], "checkpoint", "load", "none"),
    ],
)
def test_a_value_on_the_command_line(words, table, key, value):
    assert getattr(getattr(load(TINY, words).config, table), key) == value


def test_a_table_or_a_key_of_a_base_can_be_unset(tmp_path):
    (tmp_path / "base.toml").write_text(
        f'base = "{TINY}"\n[model]\nhead_dim = 16\n[model.rope_scaling]\nfactor = 2.0\n[job]\noutput_dir = "x"\n'
    )
    (tmp_path / "job.toml").write_text('base = "base.toml"\n[model]\nhead_dim = "none"\nrope_scaling = "none"\n')
    config = load(str(tmp_path / "job.toml"), ["--job.output_dir", "none"]).config
    assert (config.model.head_dim, config.model.rope_scaling) == (None, None)
    assert str(config.job.folder) == "runs/tiny"


def test_index_0_of_a_list_that_is_not_set_creates_the_item():
    words = ["--validation.sources.0.name", "v", "--validation.sources.0.kind", "synthetic"]
    [source] = load(TINY, words).config.validation.sources
    assert (source.name, source.kind) == ("v", "synthetic")
    assert load(TINY, ["--optimizer.groups.0.pattern", "*norm*"]).config.optimizer.groups[0].pattern == "*norm*"
    words = ["--elastic.enable", "true", "--elastic.meshes.0.dp_shard", "2"]
    assert load(TINY, words).config.elastic.meshes[0].dp_shard == 2
    assert "[data.sources]] lacks kind" in refused("--validation.sources.0.name", "v").replace("validation", "data")
    assert load(TINY, words).to_toml(with_origins=True)


def test_a_value_in_a_file_that_must_be_in_quotes(tmp_path):
    job = tmp_path / "job.toml"
    job.write_text(f'base = "{TINY}"\n[job]\nname = 1e3\n')
    with pytest.raises(ConfigError, match=r"job.name must be a string, got 1000.0; write it in quotes"):
        load(str(job))


def test_a_job_that_is_not_a_file(tmp_path):
    with pytest.raises(ConfigError, match="is a folder; name the job file in it"):
        load(str(tmp_path))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="is not a regular file"):
        load(str(tmp_path / "pipe"))


def test_an_unexpected_argument():
    with pytest.raises(ConfigError, match=r'unexpected argument "extra"; did you mean --config extra?'):
        parse_command_line(["extra"])


@pytest.mark.parametrize("environment", [{"RANK": "0", "WORLD_SIZE": "2"}, {"WORLD_SIZE": "2"}, {"RANK": "0"}])
def test_ranks_that_nothing_has_started(environment):
    with pytest.raises(ConfigError, match=r"lacks .*MASTER_ADDR, MASTER_PORT; start ranks with `torchrun"):
        load_for_run(parse_command_line(["--config", TINY]), environment)


def test_validation_names_the_axes_that_are_used(capsys):
    assert answer(parse_command_line(["--config", TINY, "--validate", "--mesh.cp", "2"]), {"WORLD_SIZE": "2"})
    assert "2 ranks: cp 2, " in capsys.readouterr().out
    assert str(MeshSizes(1, 2, 2, ep=2)) == "dp_shard 2 x tp 2; experts: ep 2 x shard 1"
    assert named_axes({"dp_replicate": 1, "tp": 1}) == "one rank"


@pytest.mark.parametrize("ranks", ["0", "-8", "many"])
def test_a_plan_for_no_ranks(capsys, ranks):
    with pytest.raises(SystemExit):
        plan.main(["--config", TINY, f"--ranks={ranks}"])
    assert f"argument --ranks: {ranks} is not a whole number of at least 1" in capsys.readouterr().err


def test_a_step_beyond_all_use(capsys, tmp_path):
    for digits in (20, 5000):  # beyond 64 bits, and beyond what Python converts
        with pytest.raises(SystemExit):
            data.main(["step", str(tmp_path), "9" * digits])
        assert "9 is more than 999,999,999,999,999\n" in capsys.readouterr().err


def test_a_run_is_not_a_checkpoint_but_has_some(tmp_path):
    (tmp_path / "x/checkpoints/step-00000007").mkdir(parents=True)
    newest = tmp_path / "x/checkpoints/step-00000007"
    for folder in (tmp_path / "x", tmp_path / "x/checkpoints"):
        with pytest.raises(UserError) as caught:
            read_manifest(folder)
        said = f"{folder} is not a checkpoint (no MANIFEST.json in it); the newest in it is {newest}"
        assert str(caught.value) == said


def test_a_folder_of_runs_has_no_checkpoints(tmp_path, capsys):
    for name in ("tiny", "debug"):
        (tmp_path / name / "checkpoints").mkdir(parents=True)
    assert checkpoint.main(["list", str(tmp_path)]) == 1
    assert "no checkpoints here; runs in this folder: debug, tiny" in capsys.readouterr().err
    assert checkpoint.main(["list", str(tmp_path / "tiny")]) == 1
    assert capsys.readouterr().err.endswith("tiny/checkpoints: no checkpoints here\n")


def test_models_that_compute_something_else_from_the_same_weights():
    def model(*words):
        return load(TINY, words).config.model_dump()

    same = ["--model.n_kv_heads", "2", "--model.head_dim", "8", "--model.init_std", "0.5"]
    assert function_diff(model(), model(*same)) == []
    other = ["--model.rope_theta", "500000.0", "--model.n_heads", "8", "--model.norm_eps", "1e-6"]
    assert function_diff(model(), model(*other)) == [
        "model.n_heads: 4 -> 8",
        "model.head_dim: 8 -> 4",
        "model.rope_theta: 10000.0 -> 500000.0",
        "model.norm_eps: 1e-05 -> 1e-06",
    ]
    assert function_diff(model(), model("--model.rope_scaling.factor", "8.0"))
    assert function_diff({"model": "a stranger's"}, model()) == []


def test_runs_are_listed_with_their_last_metrics(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("time.time", lambda: 10_000.0)
    for name, state, step, time, reason in (
        ("old", "done", 20, 1000.0, ""),
        ("dead", "running", 7, 5000.0, ""),
        ("new", "running", 1234, 9990.0, ""),
        ("stopped", "preempted", 3, 4000.0, "SIGTERM"),
    ):
        (tmp_path / name).mkdir()
        text = f'{{"state": "{state}", "step": {step}, "time": {time}, "reason": "{reason}"}}'
        (tmp_path / name / "status.json").write_text(text)
    line = '{"step": 1230, "loss": 2.5, "tokens_per_second": 12345.6}\n'
    (tmp_path / "new" / "metrics.jsonl").write_text(f'{{"loss": 9}}\n{line}{{"step": 12')
    (tmp_path / "other").mkdir()
    assert runs.main([str(tmp_path)]) == 0
    header, *lines = (line.split() for line in capsys.readouterr().out.splitlines())
    assert header == ["run", "state", "step", "loss", "tokens/s", "age"]
    assert [[Path(words[0]).name, *words[1:]] for words in lines] == [
        ["new", "running", "1,234", "2.5000", "12,346", "10", "s"],
        ["dead", "silent", "7", "-", "-", "1", "h", "23", "min"],
        ["stopped", "preempted", "3", "-", "-", "1", "h", "40", "min", "SIGTERM"],
        ["old", "done", "20", "-", "-", "2", "h", "30", "min"],
    ]
    assert runs.main([str(tmp_path / "other")]) == 1
    assert "no runs here" in capsys.readouterr().err


def test_a_run_folder_that_cannot_be_written_is_one_message(tmp_path, monkeypatch, capsys):
    def refuse(*_):
        raise OSError(errno.EROFS, "Read-only file system", "run/.lock")

    monkeypatch.setattr(trainer.home, "take_folder", refuse)
    assert launch_here(tmp_path) == 78
    assert capsys.readouterr().err == (
        f"error: the run folder {tmp_path}/run can't be written (run/.lock: Read-only file system); "
        "set job.output_dir to another folder\n"
    )
    assert not list((tmp_path / "run").iterdir())


def test_tables_of_ranks_that_communicate_the_same_are_one(monkeypatch):
    monkeypatch.setattr(plan, "kinds_of_ranks", lambda *_: {0: "the first rank", 1: "the last rank", 2: "a third"})
    tables = {0: [("gather", "2 calls"), ("traced in", "1 s")], 1: [("gather", "2 calls"), ("traced in", "2 s")]}
    tables[2] = [("gather", "3 calls"), ("traced in", "3 s")]
    monkeypatch.setattr(plan, "traffic_rows", lambda config, ranks, rank: tables[rank])
    assert plan._traced(load(TINY).config, 3) == {
        "the first rank and of the last rank": tables[0],
        "a third": tables[2],
    }


def test_a_batch_that_is_too_small_for_the_ranks_names_the_micro_batch_that_fits():
    with pytest.raises(ConfigError, match=r"a global batch of 4096 would do, or micro_batch_size 1$"):
        load("llama_405b", (), 16_384)
    assert load("llama_405b", ("--training.micro_batch_size", "1"), 16_384)


def test_ranks_that_are_too_few_are_started_by_either_launcher():
    with pytest.raises(
        ConfigError, match=r"start 4 ranks \(keel train JOB --ranks 4, or torchrun --nproc-per-node 4\)"
    ):
        load(TINY, ("--mesh.tp", "4"), 2)
