"""The scripts that plan and measure, through their command line."""

import errno
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from configs.errors import ConfigError, UserError
from configs.layout import mesh_sizes
from scripts import (
    benchmark,
    compare,
    coordinates,
    data,
    evaluate,
    fork,
    ladder,
    parity,
    plan,
    prepare_data,
    replay,
    report,
    reproduce,
    sample,
    score,
    train_tokenizer,
)
from scripts.command import end, folder_for, run_command
from scripts.parity_rows import REFUSED, table
from scripts.score import load_for_scoring
from tests.conftest import ROOT
from tests.end_to_end.launch import run_script
from trainer.report.console import Console

TINY = ["--model.dim", "32", "--model.n_layers", "2", "--model.ffn_dim", "64", "--model.vocab_size", "256"]
TINY += ["--training.seq_len", "32"]


@pytest.mark.slow
def test_a_plan_of_7b_over_8_ranks_takes_no_memory_for_it():
    done = run_script(ROOT, "plan.py", "--config", "llama_7b.toml", "--ranks", "8")
    assert done.code == 0, done.err
    assert "6.74 B parameters" in done.out
    assert "3.14 GiB of parameters" in done.out  # 6,738,415,616 x 4 bytes / 8
    peak = done.out.split("this process")[1].split()
    assert peak[1] == "MiB"  # and not GiB
    assert float(peak[0]) < 1000


@pytest.mark.slow
def test_a_plan_that_no_mesh_fits_is_refused():
    done = run_script(ROOT, "plan.py", "--config", "llama_70b.toml", "--ranks", "7")
    assert done.code == 78
    assert "does not divide 7" in done.err
    assert "Traceback" not in done.err


@pytest.mark.slow
def test_the_benchmark_measures_what_it_says(tmp_path):
    path = tmp_path / "speed.json"
    variants = ["--variants", "bare-eager,keel-eager", "--rounds", "2", "--steps", "1"]
    done = run_script(ROOT, "benchmark.py", "--config", "benchmark_10m.toml", "--json", str(path), *variants, *TINY)
    assert done.code == 0, done.err
    figures = json.loads(path.read_text())
    for row in figures["variants"].values():
        assert row["tokens_per_second"] == pytest.approx(4 * 32 / (sum(row["seconds"]) / 2))
        assert row["mfu"] is None  # no peak is known of a CPU
    bare, keel = (figures["variants"][f"{name}-eager"]["seconds"] for name in ("bare", "keel"))
    ratios = [b / k for b, k in zip(bare, keel, strict=True)]
    assert figures["keel_over_bare"] == {"eager": pytest.approx(sum(ratios) / 2)}


@pytest.mark.slow
def test_the_parity_script_lists_its_rows():
    done = run_script(ROOT, "parity.py", "--list")
    assert done.code == 0
    assert len(done.out.splitlines()) == len(list(table())) + len(REFUSED)
    assert run_script(ROOT, "parity.py", "--rows", "nothing like it").code == 1


def test_a_parity_table_of_which_no_row_can_run_is_no_success(capsys):
    assert parity.main(["--rows", "float8*", "--dtype", "float32"]) == 1
    assert "rows of float8 matmuls are left out" in capsys.readouterr().out


@pytest.mark.parametrize("error", [UserError("the bucket refuses"), KeyboardInterrupt()])
def test_what_could_not_be_put_into_a_bucket_does_not_stay_on_the_disk(tmp_path, monkeypatch, error):
    def put(*_):
        raise error

    monkeypatch.setattr("scripts.command.room_for", lambda output: tmp_path / "room")
    monkeypatch.setattr("scripts.command.put_folder", put)

    def export():
        with folder_for("s3://bucket/model", "config.json", Console(rank=1)) as folder:
            folder.mkdir()
            (folder / "model.safetensors").write_bytes(b"weights")

    with pytest.raises(type(error)):
        export()
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("ends_by", "code", "said"),
    [
        (None, 0, ""),
        (UserError("no such file"), 1, "no such file"),
        (KeyboardInterrupt(), 130, "nothing was written"),
        (PermissionError(errno.EACCES, "Permission denied", "/root/x"), 1, "error: /root/x: Permission denied"),
    ],
)
def test_a_command_ends_with_a_message_and_a_code(capsys, ends_by, code, said):
    def work(_console):
        if ends_by is not None:
            raise ends_by

    assert run_command(work, "stopped; nothing was written") == code
    printed = capsys.readouterr()
    assert said in printed.out + printed.err
    assert "Traceback" not in printed.out + printed.err


def test_a_command_stopped_among_its_imports_ends_with_one_line(capsys, monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")
    with pytest.raises(SystemExit) as ended:
        end(interrupted)
    assert (ended.value.code, capsys.readouterr().err) == (130, "error: stopped\n")


SIGNALLED = """
import os, sys
from scripts import {module}
{module}.{work} = lambda *_: os.kill(os.getpid(), int(sys.argv[1]))
{module}.main({words})
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    ("module", "work", "words", "remedy"),
    [
        ("score", "score_run", ["run"], "the same command computes the losses from the beginning"),
        ("compare", "_trained", ["debug", "debug"], "the same command continues"),
        ("ladder", "_climb", ["debug"], "the same command continues"),
    ],
)
def test_a_signal_between_two_runs_is_one_line_and_the_code_of_a_stop(number, module, work, words, remedy):
    program = SIGNALLED.format(module=module, work=work, words=words)
    done = subprocess.run([sys.executable, "-c", program, str(int(number))], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (75, f"error: stopped by {number.name}; {remedy}\n")


def test_a_fork_of_the_current_folder_lies_beside_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert fork._beside(Path(".")) == tmp_path.parent / f"{tmp_path.name}-fork"
    assert fork._beside(Path("runs/debug")) == Path("runs/debug-fork")


def test_a_file_of_a_run_whose_name_is_too_long_is_an_error(monkeypatch, capsys):
    def ended(code):
        raise SystemExit(code)

    monkeypatch.setattr(reproduce, "end_process", ended)
    with pytest.raises(SystemExit, match="1"):
        reproduce.main(["x" * 300])
    assert "xxx: File name too long" in capsys.readouterr().err


def test_figures_that_a_full_disk_has_lost_are_an_error_and_those_of_a_closed_pipe_are_not(capsys):
    full = open("/dev/full", "w")  # noqa: SIM115 - closing it fails
    assert run_command(lambda console: console.line("figures"), "stopped", full) == 1
    assert capsys.readouterr().err == "error: the output can't be written: No space left on device\n"
    reader, writer = os.pipe()
    os.close(reader)
    with suppress(BrokenPipeError), open(writer, "w") as pipe:
        assert run_command(lambda console: console.line("figures"), "stopped", pipe) == 0
    assert capsys.readouterr().err == ""
    with suppress(OSError):
        full.close()


@pytest.mark.parametrize(
    ("main", "words", "said"),
    [
        (sample.main, ["nowhere", "--max-tokens", "3", "a prompt"], "nowhere: no such folder"),
        (compare.main, ["a.toml", "--seeds", "1", "b.toml"], "job a.toml: no job file"),
        (report.main, ["nowhere", "--output", "page.html", "elsewhere"], "nowhere"),
        (prepare_data.main, ["nowhere", "--tokenizer", "t.model", "--output", "tokens", "elsewhere"], "t.model"),
        (train_tokenizer.main, ["nowhere", "--output", "t", "--vocab-size", "300", "elsewhere"], "nowhere"),
    ],
)
def test_options_may_stand_between_inputs(tmp_path, monkeypatch, capsys, main, words, said):
    monkeypatch.chdir(tmp_path)
    assert main(words) in (1, 78)
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("mesh", "words", "ranks", "sizes"),
    [
        ("tp = 2", (), 1, (1, 1, 1)),
        ("tp = 2\npp = 2", (), 1, (1, 1, 1)),
        ("dp_replicate = 2\ncp = 2", (), 1, (1, 1, 1)),
        ("tp = 2", (), 2, (1, 2, 1)),
        ("tp = 2", ("--mesh.tp", "1"), 2, (2, 1, 1)),
        ("tp = 2\n[elastic]\nenable = true\nmeshes = [{tp = 4}, {tp = 2}]", (), 1, (1, 1, 1)),
    ],
)
def test_one_rank_scores_a_run_of_any_mesh(tmp_path, mesh, words, ranks, sizes):
    inherited = ROOT / "configs" / "parity.toml"
    (tmp_path / "config.toml").write_text(f'base = "{inherited}"\n[mesh]\n{mesh}\n')
    found = mesh_sizes(load_for_scoring(tmp_path, 1, words, ranks).config, ranks)
    assert (found.dp, found.tp, found.pp) == sizes


def test_a_mesh_that_the_user_sets_is_kept(tmp_path):
    (tmp_path / "config.toml").write_text(f'base = "{ROOT / "configs" / "parity.toml"}"\n')
    with pytest.raises(ConfigError, match="mesh"):
        load_for_scoring(tmp_path, 1, ("--mesh.tp", "2"), 1)


@pytest.mark.parametrize(
    ("main", "words", "said"),
    [
        (
            coordinates.main,
            ["debug", "--dims", "64,96", "--training.steps", "9"],
            "--training.steps: only with --rates",
        ),
        (
            coordinates.main,
            ["debug", "--dims", "64,96", "--rates", "1,2", "--optimizer.lr=1"],
            "--optimizer.lr: --rates",
        ),
        (benchmark.main, ["loader", "--training.seq_len", "512"], "--training.seq_len 512: the loader is measured"),
        (compare.main, ["debug", "debug", "--job.output_dir", "here"], "--job.output_dir: --output FOLDER names"),
        (ladder.main, ["debug", "--job.output_dir", "here"], "--job.output_dir: --output FOLDER names"),
        (compare.main, ["debug", "--sweep", "job.output_dir=a,b"], "--job.output_dir: --output FOLDER names"),
        (compare.main, ["debug", "--sweep", "training.seed=1,2"], "--training.seed: every config is trained with"),
        (
            compare.main,
            ["debug", "debug", "--job.allow_run_change", "true"],
            "--job.allow_run_change: each run trains from its beginning",
        ),
        (
            ladder.main,
            ["debug", "--job.allow_run_change=true"],
            "--job.allow_run_change: each run trains from its beginning",
        ),
        (ladder.main, ["debug", "--mesh.tp", "2"], "--mesh.tp: a ladder's runs choose this themselves"),
    ],
)
def test_a_key_without_effect_in_a_command_is_refused(capsys, main, words, said):
    assert main(words) == 78
    printed = capsys.readouterr()
    assert said in printed.out + printed.err


def test_steps_that_no_rates_are_trained_for_are_refused(capsys):
    with pytest.raises(SystemExit):
        coordinates.main(["debug", "--dims", "96,192", "--rates", "1e-3,2e-3", "--steps", "9"])
    assert "--rates, which trains to the job's end: --training.steps N" in capsys.readouterr().err


@pytest.mark.parametrize(
    "key", ["training.seed", "optimizer.lr", "lr_schedule.warmup_steps", "average.interval", "data.sources.0.weight"]
)
def test_a_score_refuses_the_keys_that_only_training_reads(tmp_path, key):
    (tmp_path / "config.toml").write_text(f'base = "{ROOT / "configs" / "parity.toml"}"\n')
    with pytest.raises(ConfigError, match=f"^--{key}: without effect on a run that is trained already"):
        load_for_scoring(tmp_path, 1, (f"--{key}=1",), 1)


def test_a_score_takes_the_names_of_own_code(tmp_path):
    (tmp_path / "config.toml").write_text(f'base = "{ROOT / "configs" / "parity.toml"}"\n')
    job = load_for_scoring(tmp_path, 1, ("--optimizer.name", "lion", "--validation.sequences", "3"), 1)
    assert (job.config.optimizer.name, job.config.validation.sequences) == ("lion", 3)


def run_peers(*words):
    return subprocess.run([sys.executable, "-m", "tests.peers", *words], cwd=ROOT, capture_output=True, text=True)


@pytest.mark.slow
def test_keel_and_the_bare_loop_take_turns_as_processes(tmp_path):
    path = tmp_path / "peers.json"
    words = ["--modes", "eager", "--rounds", "3", "--steps", "1", "--json", str(path), *TINY]
    done = run_peers(*words)
    assert done.returncode == 0, done.stderr
    figures = json.loads(path.read_text())
    assert list(figures["rows"]) == ["bare-eager", "keel-eager"]
    for name, row in figures["rows"].items():
        assert row["tokens_per_second"] == pytest.approx(4 * 32 / sorted(row["seconds"])[1])
        assert row["warm_start_cpu_seconds"] > 0
        assert row["cold_start_seconds"] is None  # nothing is compiled
        assert 50 * 2**20 < row["resident_peak_bytes"] < 4 * 2**30
        ratio = [bare / own for bare, own in zip(figures["rows"]["bare-eager"]["seconds"], row["seconds"], strict=True)]
        assert figures["over_bare"][name]["speed"] == pytest.approx(ratio)
    assert done.stdout.splitlines()[1].startswith("bare-eager")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--litgpt", sys.executable], f"--litgpt: {sys.executable} lacks a package that is needed: No module named"),
        (["--litgpt", "/nowhere/python"], "--litgpt: /nowhere/python can't be started (No such file or directory)"),
        (["--optimizer.name", "muon", "--fsdp.partition", "owner"], "optimizer.name: not every framework has the same"),
        (["--model.qk_norm", "head", "--litgpt", "python"], "--litgpt: trains Llama here, not Qwen3ForCausalLM; leave"),
    ],
)
def test_what_cannot_be_compared_is_a_message(words, message):
    done = run_peers("--modes", "eager", *words, *TINY)
    assert done.returncode == 78
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("main", "words"),
    [
        (train_tokenizer.main, ["text", "--output", "t.model", "--vocab-size", "300", "--max-bad-files", "-1"]),
        (train_tokenizer.main, ["text", "--output", "t.model", "--vocab-size", "0"]),
        (data.main, ["find", "runs/debug", "text", "--most", "0"]),
        (plan.main, ["--config", "debug", "--ranks", "1", "--memory-gib", "0"]),
        (plan.main, ["--config", "debug", "--ranks", "1", "--memory-gib", "nan"]),
        (plan.main, ["--config", "debug", "--ranks", "1", "--memory-gib", "1e300"]),
        (benchmark.main, ["debug", "--rounds", "0"]),
        (benchmark.main, ["debug", "--steps", "-1"]),
        (parity.main, ["--random", "-1"]),
        (parity.main, ["--ranks", "0"]),
        (parity.main, ["--ranks", "2", "--evaluate-at", "x"]),
    ],
)
def test_an_impossible_number_is_a_message(capsys, main, words):
    with pytest.raises(SystemExit):
        main(words)
    assert f"argument {words[-2]}: {words[-1]} is not a" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("main", "words", "place"),
    [
        (benchmark.main, ["loader"], "scripts.benchmarks.bare.loader_speed"),
        (parity.main, ["--random", "1"], "scripts.parity.run_random"),
    ],
)
def test_ctrl_c_is_one_message(capsys, monkeypatch, main, words, place):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(place, interrupted)
    assert main(words) == 130
    assert capsys.readouterr().err.startswith("error: stopped")


def test_figures_that_can_not_be_written_are_a_message(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("scripts.benchmarks.bare.loader_speed", lambda: 7.0)
    assert benchmark.main(["loader", "--json", f"{tmp_path}/none/speed.json"]) == 78
    assert f"--json {tmp_path}/none/speed.json: there is no folder {tmp_path}/none" in capsys.readouterr().err
    assert benchmark.main(["loader", "--json", str(tmp_path)]) == 78
    assert f"--json {tmp_path} is a folder; name a file" in capsys.readouterr().err
    assert benchmark.main(["loader", "--json", str(tmp_path / "speed.json")]) == 0
    assert json.loads((tmp_path / "speed.json").read_text()) == {"loader_tokens_per_second": 7.0}


@pytest.mark.parametrize(
    ("main", "words"),
    [
        (coordinates.main, ["debug.toml", "--dims", "96,192", "--json"]),
        (compare.main, ["debug.toml", "debug.toml", "--json"]),
        (evaluate.main, ["runs/debug", "--tasks", "arc_easy", "--json"]),
        (plan.main, ["debug.toml", "--ranks", "1", "--html"]),
    ],
)
def test_a_folder_that_does_not_exist_is_told_before_the_work(tmp_path, capsys, main, words):
    assert main([*words, str(tmp_path / "none" / "file")]) == 78
    assert f"{words[-1]} {tmp_path}/none/file: there is no folder {tmp_path}/none" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("main", "words"),
    [
        (compare.main, ["debug", "debug", "--output"]),
        (ladder.main, ["debug", "--output"]),
        (replay.main, ["runs/debug", "--step", "1", "--folder"]),
    ],
)
def test_a_place_in_a_bucket_is_not_taken_for_a_folder(capsys, main, words):
    with pytest.raises(SystemExit):
        main([*words, "s3://bucket/runs"])
    said = f"argument {words[-1]}: s3://bucket/runs: this command writes into folders of this host's disks only"
    assert said in capsys.readouterr().err


def test_a_file_is_not_taken_for_a_run_folder(tmp_path, capsys):
    file = tmp_path / "file"
    file.touch()
    assert score.main([str(file)]) == 1
    assert f"{file}: not a folder; name a run folder" in capsys.readouterr().err


def test_a_picture_that_can_not_be_written_is_told_before_the_work(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert coordinates.main(["debug.toml", "--dims", "96,192", "--output", str(tmp_path)]) == 78
    assert f"--output {tmp_path} is a folder; name a file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--random 1 --ranks 2", "--random draws ranks and keys itself; leave it or --ranks out"),
        ("--move-at 2", "--move-at goes with --ranks"),
        ("--random 1 --evaluate-at 1", "--evaluate-at goes with --ranks"),
        ("--ranks 2 --seed 3", "--seed goes with --random"),
        ("--ranks 2 --rows TP*", "--rows does not go with --ranks"),
        ("--random 1 --exact", "--exact does not go with --random"),
    ],
)
def test_an_option_of_another_form_of_parity_is_refused(capsys, words, says):
    with pytest.raises(SystemExit):
        parity.main(words.split())
    assert says in capsys.readouterr().err


def test_the_reason_why_a_single_parity_job_is_refused_is_whole(capsys):
    assert parity.main(["--ranks", "1", "--training.steps", "0"]) == 0
    assert "refused: --training.steps: training.steps must be an integer > 0, got 0" in capsys.readouterr().out


@pytest.mark.parametrize(("option", "step"), [("--move-at", 3), ("--evaluate-at", 2)])
def test_a_parity_job_that_ends_before_it_moves_or_is_evaluated_is_refused(capsys, option, step):
    assert parity.main(["--ranks", "1", "--training.steps", "2", option, str(step)]) == 78
    assert f"{option} {step}: " in capsys.readouterr().err


def test_a_tokenizer_is_not_written_under_a_name_that_says_otherwise(tmp_path, capsys):
    output = tmp_path / "tokenizer.json"
    (tmp_path / "text.txt").write_text("some text " * 100)
    assert train_tokenizer.main([str(tmp_path / "text.txt"), "--output", str(output), "--vocab-size", "270"]) == 1
    assert "name it .model" in capsys.readouterr().err
    assert not output.exists()
