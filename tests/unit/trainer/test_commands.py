"""Commands beside the training, in one process: what a disk that refuses and signals make of them."""

import errno
import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from checkpoint.lock import BeingRead, not_being_read
from checkpoint.manifest import MANIFEST_NAME, step_folder, steps_in
from configs.load import load
from trainer import commands
from trainer.commands import Commands
from trainer.lifecycle import StopRequest

TABLE = '[{name = "export", command = "true", every = 10}]'


@pytest.fixture(autouse=True)
def world():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_disk_that_can_not_be_listed_for_a_moment_ends_no_run(tmp_path, monkeypatch):
    words = ("--job.output_dir", str(tmp_path), "--checkpoint.interval", "10", "--checkpoint.after_save", TABLE)
    said: list[str] = []
    console: Any = SimpleNamespace(line=said.append, warning=said.append)
    nothing: Any = None
    begun = Commands(load("parity.toml", words).config, console, StopRequest(), nothing, lambda: 10, said.append)

    def refuse(folder):
        raise OSError(errno.EIO, "Input/output error", str(folder))

    with monkeypatch.context() as outage:
        outage.setattr(commands, "steps_in", refuse)
        begun.poll()
        begun.poll()
    [warning] = said
    assert "can't be used (Input/output error); training continues without it" in warning


SLEEP = """sh -c 'echo $$ > "$1/new"; mv "$1/new" "$1/pid"; sleep 600' sh {run}"""
UNTIL_STEP_10 = """sh -c 'echo $$ > "$1/new"; mv "$1/new" "$1/pid"; test $2 -ge 10 || sleep 600' sh {run} {step}"""
DEAF = """sh -c 'trap "" TERM USR1; echo $$ > "$1/new"; mv "$1/new" "$1/pid"; sleep 600' sh {run}"""
ELSEWHERE = """sh -c 'setsid sleep 600 & echo $! > "$1/new"; mv "$1/new" "$1/pid"; wait' sh {run}"""
"""In a session of its own, as torchrun starts its ranks."""


class Launch:
    """A launch's commands after every fifth step, by default of one alone, and what the console says of them."""

    def __init__(self, run: Path, command: str, *others: str) -> None:
        self.run = run
        self.said: list[str] = []
        named = {"task": command, **{f"other{number}": other for number, other in enumerate(others)}}
        tables = [f'{{name = "{name}", command = {json.dumps(each)}, every = 5}}' for name, each in named.items()]
        table = f"[{', '.join(tables)}]"
        words = ("--job.output_dir", str(run), "--checkpoint.interval", "5", "--checkpoint.after_save", table)
        console: Any = SimpleNamespace(line=self.said.append, warning=self.said.append)
        watchdog: Any = SimpleNamespace(on_first_rank=lambda doing, run, is_needed: run())
        config = load("parity.toml", words).config
        self.stop = StopRequest()
        self.commands = Commands(config, console, self.stop, watchdog, self.newest, lambda result: None)
        self.commands.open()

    def newest(self) -> int | None:
        return max(steps_in(self.run / "checkpoints"), default=None)

    def commit(self, step: int) -> None:
        folder = step_folder(self.run / "checkpoints", step)
        folder.mkdir(parents=True)
        (folder / MANIFEST_NAME).write_text("{}")

    def save(self, step: int) -> None:
        self.commit(step)
        self.commands.poll()

    def process_of_the_command(self) -> int:
        deadline = time.monotonic() + 20
        while not (self.run / "pid").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return int((self.run / "pid").read_text())

    def signal_all(self, number: int) -> None:
        """Send what Slurm and systemd send to all processes of a job to those of the command."""
        assert self.commands._running is not None
        (_, process) = self.commands._running
        os.killpg(process.pid, number)
        process.wait(timeout=20)

    def is_kept(self, step: int) -> bool:
        try:
            with not_being_read(step_folder(self.run / "checkpoints", step)):
                return False
        except BeingRead:
            return True

    def has_run(self, name: str = "task") -> list[int]:
        return steps_in(self.run / "after_save" / name)


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def ends(pid: int) -> bool:
    deadline = time.monotonic() + 20
    while lives(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not lives(pid)


@pytest.mark.parametrize(("saved", "due"), [((5, 7), [5]), ((5, 10, 12), [5, 10])])
def test_one_that_never_succeeded_is_run_for_what_a_stop_interrupted_or_kept_waiting(tmp_path, saved, due):
    stopped = Launch(tmp_path, SLEEP, "true")
    for step in saved[:-1]:
        stopped.save(step)
    stopped.process_of_the_command()
    stopped.save(saved[-1])  # by the stop
    stopped.commands.finish(is_done=False)
    assert stopped.said == ["task after step 5: interrupted; it runs again when the run goes on"]
    resumed = Launch(tmp_path, "true", "true")
    resumed.commands.finish(is_done=True)
    assert resumed.has_run() == resumed.has_run("other0") == due


def test_one_that_is_new_is_run_for_the_newest_checkpoint_of_its_own(tmp_path):
    """A stop saves after any step, which none is due for."""
    before = Launch(tmp_path, "false")
    before.commands.config.checkpoint.after_save.clear()
    for step in (5, 10, 12):
        before.save(step)
    resumed = Launch(tmp_path, "true")
    resumed.commands.finish(is_done=True)
    assert resumed.has_run() == [10]


def test_a_rewind_begins_no_command_and_the_same_launch_runs_what_it_interrupted(tmp_path):
    """A command of the checkpoint that was saved last would begin on what the rewind sets aside."""
    launch = Launch(tmp_path, SLEEP)
    launch.save(5)
    launch.process_of_the_command()
    launch.commit(10)
    launch.commands.finish(is_done=False)
    assert launch.said == ["task after step 5: interrupted; it runs again when the run goes on"]
    launch.commands.open()
    launch.commands.poll()
    assert launch.commands._running is not None
    (due, _) = launch.commands._running
    assert due.step == 5
    launch.commands.finish(is_done=False)


def test_a_signal_that_does_not_come_from_the_run_is_a_failure(tmp_path):
    launch = Launch(tmp_path, UNTIL_STEP_10)
    launch.save(5)
    launch.process_of_the_command()
    launch.signal_all(signal.SIGKILL)
    launch.save(10)
    launch.commands.finish(is_done=True)
    [failed, done] = launch.said
    assert failed.startswith("task after step 5 failed, training continues: signal 9 ended it (see ")
    assert done == "task after step 10: done"


def test_a_signal_to_all_processes_of_the_job_begins_no_other_command(tmp_path):
    """A later step's success would say that the interrupted one has run."""
    launch = Launch(tmp_path, UNTIL_STEP_10)
    launch.save(5)
    launch.process_of_the_command()
    launch.save(10)
    launch.stop.record(signal.SIGTERM, None)
    launch.signal_all(signal.SIGTERM)
    launch.commands.poll()
    assert launch.said == ["task after step 5: interrupted; it runs again when the run goes on"]
    assert launch.commands._running is None
    # The stop's save, which is still to come, would remove a checkpoint that nothing needs.
    assert [step for step in (5, 10) if launch.is_kept(step)] == [5, 10]
    launch.commands.finish(is_done=False)
    resumed = Launch(tmp_path, "true")
    resumed.commands.finish(is_done=True)
    assert resumed.has_run() == [5, 10]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_command_that_ignores_a_signal_to_all_processes_ends(tmp_path, number):
    launch = Launch(tmp_path, DEAF)
    launch.save(5)
    pid = launch.process_of_the_command()
    launch.signal_all(number)
    assert ends(pid)


def test_a_command_that_has_lost_the_process_beside_the_run_ends(tmp_path):
    """It would go on writing to its output, which is removed, and outlive the run."""
    launch = Launch(tmp_path, DEAF)
    launch.save(5)
    pid = launch.process_of_the_command()
    assert launch.commands._running is not None
    (_, process) = launch.commands._running
    process.kill()
    process.wait(timeout=20)
    launch.commands.poll()
    assert "signal 9 ended it" in launch.said[0]
    assert ends(pid)


def test_a_stop_ends_what_the_command_has_started_in_another_session(tmp_path):
    launch = Launch(tmp_path, ELSEWHERE)
    launch.save(5)
    pid = launch.process_of_the_command()
    launch.commands.finish(is_done=False)
    assert launch.said == ["task after step 5: interrupted; it runs again when the run goes on"]
    assert ends(pid)
