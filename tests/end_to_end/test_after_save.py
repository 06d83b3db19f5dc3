"""`checkpoint.after_save`: real commands beside real runs, which they neither slow, change nor outlive."""

import json
import re
import shutil
import signal
import time
from pathlib import Path

import pytest

from checkpoint.manifest import steps_in
from configs.errors import ConfigError
from configs.load import load
from scripts import export_hf
from tests.end_to_end.launch import ROOT, TINY, curve, finish, launch_here, start, status
from tests.end_to_end.signals import wait_until

COPY = """sh -c 'cp "$1/MANIFEST.json" "$2" && echo copied' sh {checkpoint} {output}"""
SLOW_COPY = """sh -c 'sleep 0.3; cp "$1/MANIFEST.json" "$2"' sh {checkpoint} {output}"""
# The file is renamed, so that whoever finds it finds the number in it.
SLEEP = """sh -c 'sleep 600 & echo $! > "$1.new"; mv "$1.new" "$1"; wait' sh {run}/pid"""


def after_save(**commands: str | tuple[str, int]) -> tuple[str, str]:
    """The words for commands by name, each after every fifth step unless it says otherwise."""
    tables = []
    for name, command in commands.items():
        text, every = command if isinstance(command, tuple) else (command, 5)
        tables.append(f"{{name = {json.dumps(name)}, command = {json.dumps(text)}, every = {every}}}")
    return "--checkpoint.after_save", f"[{', '.join(tables)}]"


def saving(interval: int = 5, steps: int = 20) -> tuple[str, ...]:
    return ("--checkpoint.interval", str(interval), "--training.steps", str(steps))


def as_words(*words: str) -> str:
    return " ".join("'" + word.replace("'", "'\\''") + "'" for word in words)


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def said(run: Path, name: str) -> list[str]:
    """What the run says of a command."""
    lines = (run / "run.log").read_text().splitlines()
    return [line[line.index(f"{name} after step") :] for line in lines if f"{name} after step" in line]


@pytest.mark.slow
def test_commands_run_in_order_and_leave_what_they_wrote(tmp_path):
    """A folder's name, whatever is in it, is one word, and nothing in it is run or replaced."""
    folder = tmp_path / "a b; touch hacked; $(touch hacked) {step}'"
    chain = """sh -c 'cat "$1"/copy/step-*/MANIFEST.json >"$2"/all' sh {run}/after_save {output}"""
    assert launch_here(folder, *after_save(copy=COPY, chain=(chain, 10)), *saving()) == 0
    run = folder / "run"
    assert steps_in(run / "after_save/copy") == [5, 10, 15, 20]
    assert steps_in(run / "after_save/chain") == [10, 20]
    copies = [run / f"after_save/copy/step-{step:08d}/MANIFEST.json" for step in (5, 10, 15, 20)]
    for copy in copies:
        assert copy.read_bytes() == (run / "checkpoints" / copy.parent.name / copy.name).read_bytes()
    assert (run / "after_save/chain/step-00000020/all").read_bytes() == b"".join(c.read_bytes() for c in copies)
    assert [path.read_text() for path in (run / "after_save/copy").glob("*.log")] == ["copied\n"] * 4
    assert said(run, "copy") == [f"copy after step {step}: done" for step in (5, 10, 15, 20)]
    assert not list(tmp_path.rglob("hacked"))
    assert launch_here(tmp_path / "plain", *saving()) == 0
    assert curve(tmp_path / "plain/run") == curve(run)


def test_a_wait_for_the_last_command_is_not_counted_as_start_up(tmp_path, capsys):
    assert launch_here(tmp_path, *after_save(late="sleep 2"), *saving(5, 5)) == 0
    seconds = dict(re.findall(r"(start-up|checkpoint) ([\d.]+) s", capsys.readouterr().out.partition("Done:")[2]))
    assert float(seconds["checkpoint"]) >= 1.9 > float(seconds.get("start-up", 0))


def test_a_command_sees_neither_gpu_nor_launch_nor_secret(tmp_path, monkeypatch):
    monkeypatch.setenv("KEEL_SECRET", "secret")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("OF_MY_OWN", "kept")
    assert launch_here(tmp_path, *after_save(env="env"), *saving(5, 5)) == 0
    log = (tmp_path / "run/after_save/env/step-00000005.log").read_text()
    found = dict(line.split("=", 1) for line in log.splitlines() if "=" in line)
    assert found["CUDA_VISIBLE_DEVICES"] == ""
    assert found["OF_MY_OWN"] == "kept"
    assert not {"KEEL_SECRET", "TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "MASTER_PORT"} & found.keys()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", pytest.param("async", marks=pytest.mark.slow)])
def test_a_checkpoint_is_kept_until_its_commands_have_run(tmp_path, mode):
    words = ("--checkpoint.keep_last", "1", "--checkpoint.mode", mode)
    assert launch_here(tmp_path, *after_save(copy=(SLOW_COPY, 1)), *saving(1, 6), *words) == 0
    assert steps_in(tmp_path / "run/after_save/copy") == [1, 2, 3, 4, 5, 6]
    assert steps_in(tmp_path / "run/checkpoints") == [6]


@pytest.mark.slow
def test_a_command_that_fails_is_a_warning_and_leaves_its_log_alone(tmp_path):
    command = """sh -c 'touch "$1/half"; echo began; echo no such luck >&2; test $2 -ne 10' sh {output} {step}"""
    assert launch_here(tmp_path, *after_save(luck=(command, 10), silent=("false", 10)), *saving(10)) == 0
    run = tmp_path / "run"
    log = run.absolute() / "after_save/luck/step-00000010.log"
    assert said(run, "luck") == [
        f"luck after step 10 failed, training continues: no such luck (see {log})",
        "luck after step 20: done",
    ]
    assert said(run, "silent")[0].startswith("silent after step 10 failed, training continues: exit code 1 (see ")
    left = ["step-00000010.log", "step-00000020", "step-00000020.log"]
    assert sorted(path.name for path in (run / "after_save/luck").iterdir()) == left
    assert log.read_text() == "began\nno such luck\n"
    assert status(run)["state"] == "done"


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/after_save").write_text("in the way")
    assert launch_here(tmp_path, *after_save(copy=COPY), *saving(5, 5)) == 0
    assert "can't be used (Not a directory); training continues without it" in (tmp_path / "run/run.log").read_text()


def test_a_program_that_vanishes_is_a_warning(tmp_path):
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\nrm $0\n")
    program.chmod(0o755)
    assert launch_here(tmp_path, *after_save(mine=(str(program), 10)), *saving(10)) == 0
    assert said(tmp_path / "run", "mine")[0] == "mine after step 10: done"
    assert f"continues: {program} can't be started: No such file" in said(tmp_path / "run", "mine")[1]


@pytest.mark.slow
def test_what_a_stop_interrupts_the_next_launch_runs(tmp_path):
    """The command, which would take ten minutes, ends with the run; those that waited for it are not lost."""
    words = (*after_save(task=SLEEP), *saving(5, 100_000), "--job.grace_seconds", "30")
    process = start(tmp_path, as_words(*words))
    run = tmp_path / "run"
    wait_until(process, lambda: (run / "pid").exists() and len(steps_in(run / "checkpoints")) > 1)
    pid = int((run / "pid").read_text())
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert finish(process).code == 75
    assert time.monotonic() - began < 20
    assert not lives(pid)
    assert said(run, "task") == ["task after step 5: interrupted; it runs again when the run goes on"]
    assert {path.suffix for path in (run / "after_save/task").iterdir()} == {".log"}
    steps = steps_in(run / "checkpoints")
    (run / "after_save/task/step-00000005").mkdir()  # as if that one had succeeded
    assert launch_here(tmp_path, *after_save(task=COPY), "--training.steps", str(steps[-1]), *saving()[:2]) == 0
    assert steps_in(run / "after_save/task") == [step for step in steps if step % 5 == 0]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [0, 2])
def test_a_stop_after_the_last_step_asks_for_another_launch(tmp_path, ranks):
    """Exit code 0 would say that nothing is left to do; the next launch has only the command to run."""
    process = start(tmp_path, as_words(*after_save(task=(SLEEP, 10)), *saving(10, 10)), ranks)
    run = tmp_path / "run"
    wait_until(process, (run / "pid").exists)
    process.send_signal(signal.SIGTERM)
    assert finish(process).code == (1 if ranks else 75)  # torchrun's own
    assert status(run)["state"] == "preempted"
    assert launch_here(tmp_path, *after_save(task=(COPY, 10)), *saving(10, 10)) == 0
    assert status(run)["state"] == "done"
    assert steps_in(run / "after_save/task") == [10]


@pytest.mark.slow
def test_a_command_ends_with_a_run_that_is_killed(tmp_path):
    process = start(tmp_path, as_words(*after_save(task=SLEEP), *saving(5, 10)))
    wait_until(process, (tmp_path / "run/pid").exists)
    pid = int((tmp_path / "run/pid").read_text())
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 20
    while lives(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not lives(pid)
    (tmp_path / "run/after_save/task/step-00000010.tmp").mkdir(exist_ok=True)
    assert launch_here(tmp_path, *after_save(task=COPY), *saving(5, 10)) == 0
    assert steps_in(tmp_path / "run/after_save/task")[-1] == 10
    assert not list((tmp_path / "run/after_save").glob("*/*.tmp"))


@pytest.mark.slow
def test_going_back_sets_aside_what_belongs_to_later_steps(tmp_path):
    run = tmp_path / "run"
    assert launch_here(tmp_path, *after_save(copy=COPY), *saving()) == 0
    (run / "evaluations/step-00000020").mkdir(parents=True)
    old = (run / "after_save/copy/step-00000015/MANIFEST.json").read_bytes()
    back = ("--checkpoint.load", "10", "--checkpoint.go_back", "1")
    assert launch_here(tmp_path, *saving(5, 15), *back) == 0  # also of a command that the job no longer has
    assert steps_in(run / "after_save/copy") == [5, 10]
    assert (run / "after_save/copy/abandoned-001/step-00000015/MANIFEST.json").read_bytes() == old
    assert (run / "evaluations/abandoned-001/step-00000020").is_dir()


def test_a_rewind_ends_a_command_and_begins_again_with_it(tmp_path):
    """A rewind may move the checkpoint that the command reads. Here every loss is a spike from step 9 on."""
    rule = {"action": "rewind", "window": 8, "rewind_interval": 10, "threshold": 1e-9}
    sync = ("--checkpoint.mode", "sync")
    spiky = (word for key, value in rule.items() for word in (f"--fault.spikes.{key}", str(value)))
    assert launch_here(tmp_path, *after_save(task=(SLEEP, 10)), *saving(), *sync, *spiky) == 1
    assert "back to step 10" in (tmp_path / "run/run.log").read_text()
    interrupted = "task after step 10: interrupted; it runs again when the run goes on"
    assert set(said(tmp_path / "run", "task")) == {interrupted}


@pytest.mark.slow
def test_a_run_exports_its_checkpoints(tmp_path):
    script = ROOT / "scripts/export_hf.py"
    command = f"python {script} {{checkpoint}} {{output}}/model --tokenizer none"
    words = (*after_save(export=(command, 10)), *saving(10))
    assert launch_here(tmp_path, *words) == 0
    run = tmp_path / "run"
    for step in ("step-00000010", "step-00000020"):
        assert export_hf.main([str(run / "checkpoints" / step), str(tmp_path / step), "--tokenizer", "none"]) == 0
        files = sorted(path.name for path in (tmp_path / step).iterdir())
        assert sorted(path.name for path in (run / "after_save/export" / step / "model").iterdir()) == files
        for name in files:
            made = run / "after_save/export" / step / "model" / name
            assert made.read_bytes() == (tmp_path / step / name).read_bytes()
    shutil.rmtree(run / "after_save/export/step-00000020")
    assert launch_here(tmp_path, *words) == 0  # for the checkpoint that it goes on from
    assert steps_in(run / "after_save/export") == [10, 20]


# --------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (after_save(a=("true", 7)), "every 7 is not a multiple of checkpoint.interval 5"),
        (after_save(a="true {chekpoint}"), "{chekpoint} stands for nothing; there are {checkpoint}, {step}, {run}"),
        (after_save(a="true 'b"), "the command can't be split into words: No closing quotation"),
        (after_save(a=""), "the command is empty"),
        (after_save(**{"a/b": "true"}), 'checkpoint.after_save.0.name must be a string such as "export", got "a/b"'),
        (
            ("--checkpoint.after_save", '[{name="a", command="true", every=5}, {name="a", command="true", every=5}]'),
            'two commands have the name "a"; each needs a folder of its own',
        ),
        (
            (*after_save(a="keel export {checkpoint} {output}/model"), "--model.n_experts", "4")
            + ("--model.router.scoring", "sigmoid"),
            "no checkpoint of this model can be exported: MixtralForCausalLM is the nearest class",
        ),
        (
            ("--checkpoint.export_every", "5"),
            "--checkpoint.export_every: checkpoint.export_every is no longer a key; it is a command now: "
            '[[checkpoint.after_save]] with name, every (in steps) and command = "keel export {checkpoint} '
            '{output}/model"',
        ),
        (("--evaluation.interval", "5"), 'command = "keel evaluate {checkpoint} --tasks NAME,NAME"'),
    ],
)
def test_a_mistake_is_one_message(words, message):
    with pytest.raises(ConfigError) as error:
        load(str(TINY), (*saving(), *words))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_program_that_is_missing_is_found_before_training(tmp_path, capsys):
    words = after_save(a="no_such_program {checkpoint}")
    assert launch_here(tmp_path, *words, *saving()) == 78
    assert "--checkpoint.after_save: checkpoint.after_save.0.command starts no_such_program: no such program" in (
        capsys.readouterr().err
    )
    assert not list((tmp_path / "run/checkpoints").glob("step-*"))
