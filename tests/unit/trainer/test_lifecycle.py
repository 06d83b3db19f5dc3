"""Signals, exit codes, and the status file, as the contract words them."""

import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from configs.errors import ConfigError, UserError
from trainer import lifecycle
from trainer.lifecycle import (
    StopRequest,
    exit_code,
    install_signal_handlers,
    read_status,
    refresh_status,
    write_status,
)

ROOT = Path(__file__).parents[3]


@pytest.fixture
def request_():
    before = {number: signal.getsignal(number) for number in (*lifecycle.STOP_SIGNALS, signal.SIGHUP)}
    yield install_signal_handlers()
    signal.set_wakeup_fd(-1)
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_closed_terminal_ends_nothing_but_torchruns_hangup_stops(request_, monkeypatch):
    signal.raise_signal(signal.SIGHUP)
    assert not request_
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    worker = install_signal_handlers()
    signal.raise_signal(signal.SIGHUP)
    assert worker.reason == "SIGHUP"


def test_a_process_is_asked_to_stop_when_its_launcher_is_gone(request_, monkeypatch):
    assert request_.launcher is None  # one that a shell has started goes on without it
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    worker = install_signal_handlers()
    assert (worker.launcher, bool(worker), worker.arrived()) == (os.getppid(), False, "")
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert worker
    assert worker.wait(0)
    assert worker.reason == worker.arrived() == "the end of its launcher"
    signal.raise_signal(signal.SIGTERM)
    assert worker.reason == "SIGTERM"


@pytest.mark.parametrize(
    ("first_process", "is_gone"), [(b"/sbin/init\0splash", True), (b"/usr/bin/python3\0/usr/bin/torchrun\0", False)]
)
def test_a_launcher_that_was_gone_before_its_rank_could_look(request_, monkeypatch, first_process, is_gone):
    """Unless it is the container's first process itself."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setattr(os, "getppid", lambda: 1)
    monkeypatch.setattr(lifecycle.Path, "read_bytes", lambda path: first_process)
    assert bool(install_signal_handlers()) is is_gone


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_is_recorded_and_nothing_else_happens(request_, number):
    assert not request_
    signal.raise_signal(number)
    assert request_
    assert request_.reason == number.name


def test_a_signal_is_heard_of_in_a_long_call_of_c(request_):
    """Where Python's handlers do not run, as in a collective or on the way back through a model."""
    store, heard = dist.HashStore(), []

    def watch() -> None:
        time.sleep(0.2)  # by then the call has most likely begun; if it has not, the test is an easy one
        os.kill(os.getpid(), signal.SIGTERM)
        while not (reason := request_.arrived()):
            time.sleep(0.01)
        heard.append(reason)
        store.set("step", "has ended")

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    store.wait(["step"], timedelta(seconds=30))
    thread.join()
    assert heard == ["SIGTERM"]
    assert request_.reason == "SIGTERM"
    assert request_.arrived() == "SIGTERM"


def test_a_childs_signals_are_its_own(request_):
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)
    os.waitpid(child, 0)
    assert request_.arrived() == ""


def test_the_first_signal_is_the_reason(request_):
    signal.raise_signal(signal.SIGUSR1)
    signal.raise_signal(signal.SIGTERM)
    assert request_.reason == "SIGUSR1"


@pytest.mark.parametrize(
    ("at_terminal", "seconds_apart", "second", "raises"),
    [
        (True, 2.0, signal.SIGINT, True),
        (False, 2.0, signal.SIGINT, False),  # torchrun forwards each Ctrl-C
        (True, 0.01, signal.SIGINT, False),  # one keystroke that arrives twice
        (True, 2.0, signal.SIGTERM, False),
    ],
)
def test_only_a_persons_second_interrupt_raises(monkeypatch, at_terminal, seconds_apart, second, raises):
    monkeypatch.setattr(lifecycle, "_at_terminal", lambda: at_terminal)
    request = StopRequest()
    request.record(signal.SIGINT, None)
    request.received_at -= seconds_apart
    if raises:
        with pytest.raises(KeyboardInterrupt):
            request.record(second, None)
    else:
        request.record(second, None)
    assert request.reason == "SIGINT"


def test_a_process_under_a_terminal_survives_one_interrupt_and_not_two():
    program = (
        "import time; from trainer.lifecycle import install_signal_handlers; r = install_signal_handlers();"
        "print('ready', flush=True)\n"
        "while not r: time.sleep(0.01)\n"
        "print(r.reason, flush=True); time.sleep(30)"
    )
    terminal, child_side = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdin=child_side, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == b"SIGINT\n"
        time.sleep(0.6)
        process.send_signal(signal.SIGINT)
        assert b"KeyboardInterrupt" in process.communicate(timeout=10)[1]
    finally:
        process.kill()
        os.close(terminal)
        os.close(child_side)


def test_exit_codes_are_the_contracts():
    assert [exit_code(state) for state in ("done", "preempted", "failed", "running")] == [0, 75, 1, 1]
    assert exit_code("failed", ConfigError("x")) == 78
    assert exit_code("failed", UserError("x")) == 1
    assert exit_code("failed", ZeroDivisionError()) == 1
    assert exit_code("failed", KeyboardInterrupt()) == 1


def test_status_holds_the_contracts_keys(tmp_path):
    write_status(tmp_path, "running", 0)
    write_status(tmp_path, "preempted", 120, "SIGTERM", checkpoint="step-00000120")
    status = json.loads((tmp_path / "status.json").read_text())
    assert status["state"] == "preempted"
    assert (status["step"], status["reason"], status["checkpoint"]) == (120, "SIGTERM", "step-00000120")
    assert abs(status["time"] - time.time()) < 60
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]  # no temporary file stays behind


def test_a_running_job_renews_its_status_and_one_that_has_ended_does_not(tmp_path):
    write_status(tmp_path, "running", 5, "starting")
    written = read_status(tmp_path)
    refresh_status(tmp_path, 7)
    assert read_status(tmp_path) == written | {"step": 7, "time": read_status(tmp_path)["time"]}
    assert read_status(tmp_path)["time"] > written["time"]
    refresh_status(tmp_path, 7, "step 8 hangs")
    assert read_status(tmp_path)["reason"] == "step 8 hangs"
    refresh_status(tmp_path, 8, "")
    assert read_status(tmp_path)["reason"] == ""
    (tmp_path / "status.json").unlink()
    refresh_status(tmp_path, 8)
    assert (read_status(tmp_path)["state"], read_status(tmp_path)["step"]) == ("running", 8)
    write_status(tmp_path, "failed", 7, "why")
    ended = read_status(tmp_path)
    refresh_status(tmp_path, 8)
    assert read_status(tmp_path) == ended
    foreign = ended | {"state": "running", "pid": os.getpid() + 1}
    (tmp_path / "status.json").write_text(json.dumps(foreign))
    refresh_status(tmp_path, 9)
    assert read_status(tmp_path) == foreign


def test_a_status_that_is_none_is_empty(tmp_path):
    assert read_status(tmp_path) == {}
    for text in ("", "[1]", "{"):
        (tmp_path / "status.json").write_text(text)
        assert read_status(tmp_path) == {}
