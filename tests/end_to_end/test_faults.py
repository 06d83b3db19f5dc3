"""Ranks that are killed, crash or stop: the others end, say who it was, and status.json is true."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.end_to_end.launch import ROOT, finish, launch_here, start, status
from tests.end_to_end.signals import ranks_of, signal_at_step, wait_until

LONG = "--training.steps 100000 --metrics.tensorboard false --checkpoint.interval 0"
HOST = os.uname().nodename


def start_forked(
    folder: Path, words: str, ranks: int, program: str = "forked.py", **env: str
) -> tuple[subprocess.Popen, list[int]]:
    """A job without torchrun; returns it, and the process ids of its ranks."""
    env |= {"PYTHONPATH": str(ROOT), "FORKED_RANKS": str(ranks)}
    process = start(folder, f"{LONG} {words}", env=env, program=ROOT / "tests" / "end_to_end" / program)
    assert process.stdout
    return process, [int(word) for word in process.stdout.readline().split()[1:]]


def codes(out: str) -> list[int]:
    """How the ranks of a forked job have ended."""
    return [int(word) for word in out.splitlines()[-1].split()[1:]]


def assert_names(run: Path, err: str, rank: int, pid: int, how: str) -> None:
    """Assert that status.json, run.log and the last line of the console say which rank was lost, and how."""
    found = status(run)
    text = f"rank {rank} on host {HOST} (process {pid}) {how}"
    assert found["state"] == "failed"
    assert found["reason"].startswith(text)
    assert [(lost["rank"], lost["pid"]) for lost in found["lost"]] == [(rank, pid)]
    # A thread writes status.json; on a busy machine some of the steps, 20 ms each, pass before it has.
    assert abs(found["lost"][0]["step"] - found["step"]) <= 5
    ours = [line for line in err.splitlines() if "rank" in line and not re.search("torch|c10d", line)]
    assert text in ours[-1]
    assert "Traceback" not in "".join(ours)
    assert text in (run / "run.log").read_text().splitlines()[-1]


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.long)])
def test_a_rank_is_killed_under_torchrun(tmp_path: Path, victim: int):
    process = start(tmp_path, LONG, ranks=2)
    signal_at_step(process, tmp_path / "run", 5, 0)
    pid = ranks_of(process)[victim]
    os.kill(pid, signal.SIGKILL)
    outcome = finish(process)
    ours = "\n".join(line for line in outcome.err.splitlines() if "error: rank" in line)
    assert_names(tmp_path / "run", ours, victim, pid, "was killed")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "how"), [(signal.SIGKILL, "was killed: it left no trace"), (signal.SIGBUS, "has crashed (Bus error; ")]
)
def test_rank_0_dies_without_an_agent_and_with_it_the_store(tmp_path: Path, number: signal.Signals, how: str):
    process, pids = start_forked(tmp_path, "", ranks=2)
    signal_at_step(process, tmp_path / "run", 5, number, pids[0])
    outcome = finish(process)
    assert codes(outcome.out) == [-number, 1]
    assert_names(tmp_path / "run", outcome.err, 0, pids[0], how)


@pytest.mark.slow
def test_ranks_of_a_host_that_is_lost_are_named_by_those_of_others(tmp_path: Path):
    """The ranks take themselves for the only ones of their hosts, so that they cannot look for others' processes."""
    process, pids = start_forked(tmp_path, "--job.timeout_seconds 120", ranks=4, LOCAL_WORLD_SIZE="1")
    signal_at_step(process, tmp_path / "run", 5, 0)
    for victim in (2, 3):
        os.kill(pids[victim], signal.SIGKILL)
    began = time.monotonic()
    outcome = finish(process)
    assert time.monotonic() - began < 40
    assert codes(outcome.out) == [1, 1, -signal.SIGKILL, -signal.SIGKILL]
    found = status(tmp_path / "run")
    assert found["state"] == "failed"
    assert {lost["rank"] for lost in found["lost"]} <= {2, 3}
    assert found["reason"].startswith(f"rank {found['lost'][0]['rank']} on host {HOST}")
    assert "does not answer: no beat for" in found["reason"]


@pytest.mark.slow
def test_a_stopped_rank_ends_the_run_within_the_timeout(tmp_path: Path):
    """On a mesh whose groups are not that of all ranks; what each of the others did is collected before."""
    run = tmp_path / "run"
    words = "--job.timeout_seconds 30 --mesh.dp_replicate 2 --mesh.tp 2"
    process, pids = start_forked(tmp_path, words, ranks=4)
    signal_at_step(process, run, 5, signal.SIGSTOP, pids[1])
    wait_until(process, lambda: status(run)["state"] != "running")
    os.kill(pids[1], signal.SIGKILL)
    outcome = finish(process)
    assert codes(outcome.out) == [1, -signal.SIGKILL, 1, 1]
    assert_names(run, outcome.err, 1, pids[1], "is stopped")
    [folder] = (run / "hangs").iterdir()
    reports = {path.name: path.read_text() for path in folder.iterdir()}
    assert sorted(reports) == ["rank-00000.txt", "rank-00002.txt", "rank-00003.txt"]
    for text in reports.values():
        assert "trainer.py" in text.partition("Python stacks:")[2]
        assert "gloo:all_reduce" in text.partition("The last ones, oldest first:")[2]
    [line] = [line for line in (run / "run.log").read_text().splitlines() if "has not ended for" in line]
    assert f"rank 1 on host {HOST} (process {pids[1]}) is stopped" in line
    assert str(folder.relative_to(tmp_path)) in line


@pytest.mark.slow
def test_a_launch_that_could_say_nothing_is_mentioned_by_the_next(tmp_path: Path, capsys: pytest.CaptureFixture):
    process = start(tmp_path, LONG)
    signal_at_step(process, tmp_path / "run", 5, signal.SIGKILL)
    finish(process)
    assert status(tmp_path / "run")["state"] == "running"
    assert launch_here(tmp_path, "--training.steps", "3") == 0
    said = f"the last launch (process {process.pid} on host {HOST}) ended unexpectedly at step "
    assert said in capsys.readouterr().err
    assert said in (tmp_path / "run" / "run.log").read_text()
    assert status(tmp_path / "run")["state"] == "done"
    assert not (tmp_path / "run" / "crashes").exists()


@pytest.mark.long
def test_nobody_waits_for_a_dead_rank_while_rank_0_works_in_its_own_time(tmp_path: Path):
    """Rank 1 dies; rank 0 works, and rank 2 waits for it, where no collective tells them of it."""
    process, pids = start_forked(tmp_path, "", ranks=4, program="patience.py")
    wait_until(process, lambda: (tmp_path / "begun").exists())
    os.kill(pids[1], signal.SIGKILL)
    outcome = finish(process)
    assert codes(outcome.out) == [1, -signal.SIGKILL, 1, 1]
    assert_names(tmp_path / "run", outcome.err, 1, pids[1], "was killed")


@pytest.mark.slow
def test_nobody_waits_for_a_rank_0_that_is_stopped_in_its_work(tmp_path: Path):
    process, pids = start_forked(tmp_path, "--job.timeout_seconds 10", ranks=2, program="patience.py")
    wait_until(process, lambda: (tmp_path / "begun").exists())
    os.kill(pids[0], signal.SIGSTOP)
    wait_until(process, lambda: status(tmp_path / "run")["state"] == "failed")
    os.kill(pids[0], signal.SIGKILL)
    outcome = finish(process)
    assert codes(outcome.out) == [-signal.SIGKILL, 1]
    assert status(tmp_path / "run")["reason"].startswith("rank 0")
    assert "does not answer" in status(tmp_path / "run")["reason"]
    assert "Connection" not in outcome.err
