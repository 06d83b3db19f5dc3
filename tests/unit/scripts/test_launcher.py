"""Ranks started by `keel train --ranks N`: their exit codes are Keel's, and a signal reaches them."""

import logging
import os
import signal
import tempfile
import threading
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from scripts import launcher
from scripts.launcher import run_ranks
from scripts.one_host import OneHost

RANK = "import os, signal, sys, time\nrank = os.environ['RANK']\n"
WAIT = (
    RANK
    + """
stopped = []
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, lambda number, frame: stopped.append(number))
open(f"ready-{rank}", "w").close()
while not stopped:
    time.sleep(0.02)
open(f"stopped-{rank}", "w").write(str(stopped[0]))
sys.exit(75)
"""
)

TOO_EARLY = "error: stopped by SIGTERM before the ranks began; the same command starts them again\n"
HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@pytest.fixture(autouse=True)
def in_a_folder_with_everything_restored(monkeypatch, tmp_path):
    before = {number: signal.getsignal(number) for number in (*HANDLED, signal.SIGHUP)}
    monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "")
    monkeypatch.setenv("KEEL_SECRET", "of this launch")
    monkeypatch.chdir(tmp_path)
    yield
    logging.disable(logging.NOTSET)
    for number, handler in before.items():
        signal.signal(number, handler)


def run(folder, program, ranks=2):
    (folder / "program.py").write_text(program)
    return run_ranks(str(folder / "program.py"), ["a", "b c"], ranks)


@pytest.mark.parametrize(
    ("ending", "code", "said"),
    [
        ("assert sys.argv[1:] == ['a', 'b c'] and os.environ['WORLD_SIZE'] == '2'", 0, ""),
        ("sys.exit(78)", 78, ""),
        ("sys.exit(75)", 75, ""),
        ("sys.exit(3)", 1, ""),
        ("os.kill(os.getpid(), 9) if rank == '1' else time.sleep(600)", 1, "rank 1 was killed by SIGKILL\n"),
    ],
)
def test_the_exit_code_is_that_of_the_ranks(tmp_path, capfd, ending, code, said):
    before = [signal.getsignal(number) for number in HANDLED]
    assert run(tmp_path, RANK + ending) == code
    assert capfd.readouterr().err == said
    # What a command does next, such as a replay its verdict, ends at a signal again.
    assert [signal.getsignal(number) for number in HANDLED] == before


def test_a_signal_while_ranks_are_being_started_reaches_them(tmp_path, monkeypatch):
    start = LocalElasticAgent._start_workers

    def start_and_signal(agent, group):
        started = start(agent, group)
        while not all((tmp_path / f"ready-{rank}").exists() for rank in range(2)):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)  # the agent does not know its ranks yet
        return started

    monkeypatch.setattr(LocalElasticAgent, "_start_workers", start_and_signal)
    assert run(tmp_path, WAIT) == 75
    assert {(tmp_path / f"stopped-{rank}").read_text() for rank in range(2)} == {"15"}


def test_ranks_that_are_signalled_before_they_can_save_are_preempted(tmp_path, capfd):
    def send():
        while not (tmp_path / "ready-0").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    sender = threading.Thread(target=send)
    sender.start()
    assert run(tmp_path, RANK + 'open(f"ready-{rank}", "w").close(); time.sleep(600)') == 75
    sender.join()
    assert capfd.readouterr().err == TOO_EARLY


def test_a_signal_while_torch_is_imported_is_not_lost(tmp_path, monkeypatch, capfd):
    """An exception in an import may be; and no files are left."""
    make = launcher._agent
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def make_and_signal(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        return make(*arguments)

    monkeypatch.setattr(launcher, "_agent", make_and_signal)
    assert run(tmp_path, WAIT) == 75
    assert [file.name for file in tmp_path.iterdir()] == ["program.py"]
    assert capfd.readouterr().err == TOO_EARLY


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_is_passed_on_and_the_ranks_end_in_their_own_time(tmp_path, capfd, number):
    def send():
        while not all((tmp_path / f"ready-{rank}").exists() for rank in range(2)):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGHUP)  # does nothing
        os.kill(os.getpid(), number)

    sender = threading.Thread(target=send)
    sender.start()
    assert run(tmp_path, WAIT) == 75
    sender.join()
    assert {(tmp_path / f"stopped-{rank}").read_text() for rank in range(2)} == {str(int(number))}
    assert capfd.readouterr().err == ""


def test_no_other_host_reaches_the_store_of_ranks_on_one_host():
    handler = OneHost("name")
    info = handler.next_rendezvous()
    assert info.bootstrap_store_info
    assert (info.rank, info.world_size, info.bootstrap_store_info.master_addr) == (0, 1, "127.0.0.1")
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    places = [fields[1].split(":") for fields in lines if fields[3] == "0A"]
    port = info.bootstrap_store_info.master_port
    assert [address for address, place in places if int(place, 16) == port] == ["0100007F"]
