"""The command line, and that its three questions are answered fast and without torch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from configs.command_line import CommandLine, answer, load_for_run, parse_command_line
from configs.errors import ConfigError
from configs.reading.keys import schema_keys
from scripts.command import without_overrides
from tests.cpu_time import takes_a_second_at_most

ROOT = Path(__file__).resolve().parents[3]


def test_a_run():
    command = parse_command_line(["--training.steps", "5", "--config", "debug.toml", "--job.name=x=y"])
    assert command == CommandLine("debug.toml", ("--training.steps=5", "--job.name=x=y"), "run")
    assert not answer(command, {})
    assert load_for_run(command, {}).config.job.name == "x=y"


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_question_may_stand_anywhere(place):
    words = ["--config=debug", "--training.steps=5"]
    words.insert(place, "--validate")
    assert parse_command_line(words) == CommandLine("debug", ("--training.steps=5",), "validate")


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["--config", "nope", "--help"], ["--nonsense", "--help"]])
def test_help_needs_nothing(words):
    assert parse_command_line(words).action == "help"


@pytest.mark.parametrize(
    ("words", "messages"),
    [
        ([], ["no job is named; to try Keel: keel train debug.toml, or python train.py --config debug.toml"]),
        (
            ["--config", "a", "--gpus", "4"],
            [
                "--gpus: unknown flag; keel train JOB --ranks N starts N ranks, and so does torchrun "
                "--nproc-per-node N train.py ..."
            ],
        ),
        (
            ["--config", "a", "--resume"],
            [
                "--resume: unknown flag; the same command resumes from the newest checkpoint; checkpoint.load names "
                "another"
            ],
        ),
        (["--config"], ["--config: needs a value: --config NAME_OR_PATH"]),
        (["--config", "a", "--config=b"], ["--config: given 2 times: a, b"]),
        (["--config", "a", "b.toml"], ['unexpected argument "b.toml"; did you mean --config b.toml?']),
        (["--config", "a", "--steps", "5"], ["--steps: unknown flag; did you mean --training.steps?"]),
        (["--config", "a", "--lr=1"], ["--lr: unknown flag; did you mean --optimizer.lr?"]),
        (["--config", "a", "--valdate"], ["--valdate: unknown flag; did you mean --validate?"]),
        (["--config", "a", "--qqq"], ["--qqq: unknown flag; --help lists all flags"]),
        (["--config", "a", "--stages"], ["--stages: needs a value: --stages VALUE"]),
        (["--config", "a", "--mesh", "2"], ["--mesh: is a table; set its keys one by one: --mesh.KEY VALUE"]),
        (["--config", "a", "--validate", "--print-config"], ["--print-config and --validate: choose one"]),
        (
            ["--nproc-per-node", "4", "--config", "a"],
            ["--nproc-per-node: a flag of torchrun; put it before train.py: torchrun --nproc-per-node 4 train.py ..."],
        ),
        (
            ["--cofig", "a", "--training.steps", "--job.name"],
            [
                "--cofig: unknown flag; did you mean --config?",
                "--training.steps: needs a value: --training.steps VALUE",
                "--job.name: needs a value: --job.name VALUE",
                "no job is named; to try Keel: keel train debug.toml, or python train.py --config debug.toml",
            ],
        ),
    ],
)
def test_mistakes_come_all_at_once(words, messages):
    with pytest.raises(ConfigError) as caught:
        parse_command_line(words)
    assert str(caught.value).split("\n") == messages


def test_a_list_of_tables_that_is_in_no_table_is_set_as_a_whole(capsys):
    assert answer(parse_command_line(["--config", "debug_stages.toml", "--stages", "[]", "--validate"]))
    assert "stage " not in capsys.readouterr().out
    assert answer(parse_command_line(["--config", "debug.toml", "--print-config", "--stages=[]"]))
    assert "--stages" in capsys.readouterr().out
    assert without_overrides(["RUN", "--stages", "[]"]) == (["RUN"], ["--stages", "[]"])


def test_help_lists_every_key_with_type_default_and_sentence(capsys):
    answer(parse_command_line(["--help"]), {})
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert max(map(len, lines)) <= 120
    for key in schema_keys().values():
        assert key.doc.strip(), f"{key.name} has no docstring"
        if not key.is_table:
            (at,) = (i for i, line in enumerate(lines) if line.startswith(f"  --{key.name}  "))
            values, sentence = (lines[at], lines[at + 1])
            if sentence.startswith(" " * 10):
                values, sentence = (f"{values} {sentence.strip()}", lines[at + 2])
            assert key.type in values
            assert key.doc.split()[0] in sentence
    names = '"cosine" | "linear" | "warmup_stable_decay" | "constant" | "inverse_sqrt" | "power" or string such'
    at = lines.index(f"  --lr_schedule.name  {names}")
    assert lines[at + 1] == '          as "module:Class"; default "cosine"'
    assert "  --training.seq_len  integer > 0; required" in lines
    assert "  --model.head_dim  integer > 0; optional" in lines


@pytest.mark.parametrize(
    ("environment", "ranks"),
    [
        ({}, "1, 2 or 4 ranks"),
        ({"WORLD_SIZE": "1"}, "1 rank, 4 micro-batches per step"),
        ({"WORLD_SIZE": "4"}, "4 ranks: dp_shard 4, 1 micro-batch per step"),
    ],
)
def test_validate_says_what_the_job_is(tmp_path, monkeypatch, capsys, environment, ranks):
    monkeypatch.chdir(ROOT)
    words = ["--training.global_batch_size=16", "--training.micro_batch_size=4", "--training.steps=150"]
    answer(parse_command_line(["--config", "debug.toml", "--validate", *words]), environment)
    line = capsys.readouterr().out
    assert line.startswith("configs/debug.toml is valid (3.")
    assert line.endswith(f"global batch 16 sequences = 4,096 tokens, 150 steps = 614,400 tokens, {ranks})\n")


def test_validate_warns_of_what_is_not_on_this_machine(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.jsonl").touch()
    (tmp_path / "job.toml").write_text(
        f'base = "{ROOT}/configs/debug.toml"\n[tokenizer]\npath = "t.model"\n'
        'train_on = ["python_stdlib", "no.txt", "*.jsonl", "*.no"]\n'
        '[checkpoint]\nload = "far/step-00000001"\n[[data.sources]]\nname = "a"\nkind = "text"\npath = "hub:x"\n'
        '[[data.sources]]\nname = "b"\nkind = "text"\npath = "there.jsonl"\n'
        '[[data.sources]]\nname = "c"\nkind = "tokens"\npath = "there.jsonl"\n'
        '[[data.sources]]\nname = "d"\nkind = "tokens"\npath = "runs/data/python_stdlib/train"\n'
    )
    assert answer(parse_command_line(["--config", "job.toml", "--validate"]), {})
    valid, *warnings = capsys.readouterr().out.splitlines()
    assert valid.startswith("job.toml is valid")
    assert [line.split(";")[0] for line in warnings] == [
        f'warning: job.toml:4: tokenizer.train_on names "no.txt": no such file or folder: {tmp_path}/no.txt',
        f'warning: job.toml:4: tokenizer.train_on names "*.no": no such file or folder: {tmp_path}/*.no',
        'warning: job.toml:18: data.sources.2.path is "there.jsonl": no such folder of token files: '
        f"{tmp_path}/there.jsonl",
        'warning: job.toml:6: checkpoint.load is "far/step-00000001": no such folder (use "latest", "none", a step '
        f"or a path): {tmp_path}/far/step-00000001",
    ]
    assert all(line.endswith("; the machine that runs the job needs it") for line in warnings)


@pytest.mark.parametrize(
    ("batch", "words", "ranks"),
    [
        (2, (), "1 or 2 ranks"),
        (1, (), "1 rank"),
        (6, ("--mesh.tp=2",), "2, 4, 6 or 12 ranks"),
        (2, ("--mesh.tp=2",), "2 or 4 ranks"),
        (6, ("--mesh.dp_shard=2",), "2 ranks"),
        (720, (), "1, 2, 3, 4, 5, 6, 8, 9, 10, 12 or up to 720 ranks (30 counts)"),
    ],
)
def test_validate_says_on_how_many_ranks_the_job_runs(monkeypatch, capsys, batch, words, ranks):
    monkeypatch.chdir(ROOT)
    words = [f"--training.global_batch_size={batch}", "--training.micro_batch_size=1", *words]
    answer(parse_command_line(["--config", "debug.toml", "--validate", *words]), {})
    assert capsys.readouterr().out.endswith(f" tokens, {ranks})\n")


def test_only_the_first_rank_answers(capsys):
    answer(parse_command_line(["--help"]), {"RANK": "1"})
    assert capsys.readouterr().out == ""


def test_a_run_without_torchrun_has_one_rank():
    command = parse_command_line(["--config", "debug", "--mesh.tp=2"])
    started = {"RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    with pytest.raises(ConfigError, match="1 rank cannot form the mesh"):
        load_for_run(command, {})
    assert load_for_run(command, started | {"WORLD_SIZE": "2"}).config.mesh.tp == 2
    with pytest.raises(ConfigError, match="WORLD_SIZE must be a number"):
        load_for_run(command, {"WORLD_SIZE": "two"})


@pytest.mark.parametrize("words", [["--help"], ["--config=debug", "--validate"], ["--config=debug", "--print-config"]])
def test_answers_come_without_torch_and_within_a_second(words):
    program = (
        "import sys; from configs.command_line import answer, parse_command_line; "
        "answer(parse_command_line(sys.argv[1:])); "
        "assert not {'torch', 'numpy', 'models', 'trainer'} & sys.modules.keys()"
    )
    command = [sys.executable, "-c", program, *words]
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}

    def ask() -> None:
        process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert process.returncode == 0, process.stderr
        assert process.stdout

    assert takes_a_second_at_most(ask)


def test_a_closed_pipe_is_no_error():
    program = "from configs.command_line import answer, parse_command_line as p; answer(p(['--help']))"
    process = subprocess.run(
        ["bash", "-c", f'{sys.executable} -c "{program}" | head -n 1; exit ${{PIPESTATUS[0]}}'],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (process.returncode, process.stderr) == (0, "")


@pytest.mark.parametrize(("words", "code"), [("--help", 0), ("--config debug --steps 5", 78)])
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_change_no_exit_code(words, code, closed):
    command = f"{sys.executable} train.py {words} {closed}"
    assert subprocess.run(["sh", "-c", command], cwd=ROOT, timeout=300, capture_output=True).returncode == code


@pytest.mark.parametrize(
    "words", ["train.py --help", "train.py --config debug.toml --validate", "scripts/keel.py --help"]
)
def test_an_output_on_a_full_disk_is_one_message(words):
    done = subprocess.run(
        ["sh", "-c", f"{sys.executable} {words} > /dev/full"], cwd=ROOT, timeout=300, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr.removeprefix("error: ") == "the output can't be written: No space left on device\n"


@pytest.mark.parametrize("action", ["--validate", "--print-config"])
@pytest.mark.parametrize(
    "environment", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}]
)
def test_characters_that_the_terminal_lacks_are_escaped(tmp_path, action, environment):
    job = tmp_path / "prüfung.toml"
    job.write_text(f'base = "{ROOT}/configs/debug.toml"\n[job]\noutput_dir = "läufe"\n', encoding="utf-8")
    command = [sys.executable, "train.py", "--config", str(job), action]
    done = subprocess.run(
        command, cwd=ROOT, timeout=300, capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert (done.returncode, done.stderr) == (0, "")
    escaped = r"pr\xfcfung" if "PYTHONIOENCODING" in environment else r"pr\udcc3\udcbcfung"  # the bytes of its name
    assert escaped in done.stdout


@pytest.mark.parametrize(
    "words", ["train.py --config debug.toml --validate", "scripts/keel.py train debug.toml", "scripts/runs.py"]
)
def test_a_current_folder_that_was_removed_is_one_message(tmp_path, words):
    gone = tmp_path / "gone"
    command = f"mkdir {gone}; cd {gone}; rmdir {gone}; exec {sys.executable} {ROOT}/{words}"
    done = subprocess.run(["sh", "-c", command], timeout=300, capture_output=True, text=True)
    assert done.returncode == 78
    message = "the current folder can't be found (No such file or directory); change to one that exists\n"
    assert done.stderr.removeprefix("error: ") == message


@pytest.mark.parametrize(
    ("job", "said"), [("gemma3_1b", "1B parameters"), ("llama_1b", "1.24B parameters"), ("debug", "3.29M parameters")]
)
def test_validate_says_the_size_in_three_digits(capsys, job, said):
    assert answer(parse_command_line(["--config", job, "--validate"]), {})
    assert f"({said}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--pipeline.schedule", "gpipe"], 'pipeline.schedule = "gpipe" does nothing with mesh.pp = 1'),
        (
            [
                "--validation.interval",
                "50",
                "--training.steps",
                "4",
                "--validation.sources",
                "[{name='v',kind='synthetic'}]",
            ],
            "validation.interval = 50 is beyond training.steps = 4: there is no validation",
        ),
        (
            ["--model.no_rope_every", "100"],
            "model.no_rope_every = 100 is beyond model.n_layers = 4: all layers are rotated",
        ),
        (
            ["--model.window", "8", "--model.window_pattern", "100"],
            "model.window_pattern = 100 is beyond model.n_layers = 4: no layer sees all earlier tokens",
        ),
        (
            ["--training.dtype", "bfloat16"],
            'with training.dtype = "bfloat16", an update that changes a weight by less than 1/512 of it does nothing; '
            'set optimizer.rounding = "stochastic", or training.dtype = "float32" and training.compute_dtype = '
            '"bfloat16"',
        ),
        (
            ["--training.dtype", "bfloat16", "--optimizer.name", "lion"],
            'with training.dtype = "bfloat16", an update that changes a weight by less than 1/512 of it does nothing; '
            'set training.dtype = "float32" and training.compute_dtype = "bfloat16"',
        ),
        (
            ["--compile.mode", "max-autotune", "--compile.enable", "false"],
            "--compile.mode: compile.mode does nothing with enable = false (--compile.enable), which compiles nothing; "
            "leave it out, or change enable",
        ),
    ],
)
def test_a_setting_without_effect_is_a_warning_of_validate(capsys, words, said):
    job = ["--config", "debug", "--validation.interval", "0", "--job.device", "cuda"]
    assert answer(parse_command_line([*job, *words, "--validate"]), {})
    assert f"warning: {said}\n" in capsys.readouterr().out
    rounded = ["--training.dtype", "bfloat16", "--optimizer.rounding", "stochastic"]
    for silent in ([], rounded):
        assert answer(parse_command_line([*job, *silent, "--validate"]), {})
        assert "does nothing" not in capsys.readouterr().out


def test_a_schedule_has_an_effect_if_any_mesh_of_an_elastic_job_is_a_pipeline(capsys):
    words = ["--pipeline.schedule", "gpipe", "--elastic.enable", "true", "--elastic.meshes", "[{pp = 2}, {}]"]
    assert answer(parse_command_line(["--config", "debug", *words, "--validate"]), {})
    assert "pipeline.schedule" not in capsys.readouterr().out
