"""What the ranks know of each other, and what they say of a hang, without other processes where that is enough."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from configs.errors import OutageError
from configs.secret import signed
from trainer.guards.hang import late
from trainer.guards.peers import Beat, Peers
from trainer.guards.watchdog import Watchdog


@pytest.fixture
def world():
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield store
    dist.destroy_process_group()


def test_a_process_is_named_dead_or_stopped_but_not_one_that_has_ended_itself(tmp_path: Path):
    store, sleeper = dist.HashStore(), "import time; print(flush=True); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", sleeper], stdout=subprocess.PIPE)
    process.stdout.read(1)
    here, crash_file = Peers(store, 0, 2, tmp_path / "0"), tmp_path / "1"
    crash_file.touch()
    there = Peers(store, 1, 2, crash_file)
    born = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19]
    beat = vars(there.own) | {"pid": process.pid, "born": born}
    store.set("beat/1", signed("beat/1", json.dumps(beat)))
    here.find_neighbors()
    assert here.lost_neighbors(5) == []
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    [stopped] = here.lost_neighbors(5)
    assert "is stopped" in str(stopped)
    assert not stopped.is_dead
    process.send_signal(signal.SIGCONT)
    process.kill()
    process.wait()
    [dead] = here.lost_neighbors(5)
    assert dead.is_dead
    assert f"rank 1 on host {os.uname().nodename} (process {process.pid}) was killed" in str(dead)
    assert "its last step was 5" in str(dead)
    crash_file.write_text("Fatal Python error: Segmentation fault\n\nThread 0x1:\n")
    assert "has crashed (Segmentation fault; its stacks are in" in str(here.lost_neighbors(5)[0])
    crash_file.unlink()  # as a rank does that ends of itself
    assert here.lost_neighbors(5) == []


def test_another_process_of_the_same_id_is_not_taken_for_the_rank(tmp_path: Path):
    store, crash_file = dist.HashStore(), tmp_path / "1"
    here = Peers(store, 0, 2, tmp_path / "0")
    crash_file.touch()
    there = Peers(store, 1, 2, crash_file)
    store.set("beat/1", signed("beat/1", json.dumps(vars(there.own) | {"born": "1"})))
    here.find_neighbors()
    assert [loss.is_dead for loss in here.lost_neighbors(0)] == [True]


def test_a_rank_of_another_host_is_named_when_its_beat_stands_still(tmp_path: Path):
    store = dist.HashStore()
    here = Peers(store, 0, 3, tmp_path / "0")
    for rank in (1, 2):
        beat = Beat(rank, f"far-{rank}", 7, f"far-{rank} pid:[1]", "1", "", step=40)
        store.set(f"beat/{rank}", signed(f"beat/{rank}", json.dumps(vars(beat))))
    here.find_neighbors()
    assert here.lost_neighbors(41) == []
    assert here.silent(0.05, [1, 2]) == []
    assert here.silent(0.05, [1, 2]) == []
    time.sleep(0.1)
    store.set("beat/2", signed("beat/2", json.dumps(vars(beat) | {"count": 1})))
    [loss] = here.silent(0.05, [1, 2])
    assert str(loss).startswith("rank 1 on host far-1 (process 7) does not answer: no beat for ")
    assert loss.beat.step == 40


def test_the_store_is_asked_no_more_once_it_is_gone(tmp_path: Path):
    class Gone:
        asked = 0

        def set(self, key: str, value: str) -> None:
            self.asked += 1
            raise dist.DistNetworkError("Broken pipe")

    store = dist.HashStore()
    peers = Peers(store, 0, 2, tmp_path / "0")
    assert peers.is_first("word")
    assert not Peers(store, 1, 2, tmp_path / "1").is_first("word")
    peers._store = Gone()
    for _ in range(3):
        with pytest.raises(RuntimeError):
            peers.beat(1, "training", 0.0)
    assert peers._store.asked == 1
    assert peers.is_first("word")  # it is better said twice than never


def test_the_ranks_that_the_others_wait_for_are_those_that_issued_less():
    issued = {0: {"tp of ranks 0, 1": 7, "all": 3}, 1: {"tp of ranks 0, 1": 6, "all": 3}, 2: {"all": 3}}
    assert late(issued) == {1: "has not arrived at collective 7 of tp of ranks 0, 1"}
    assert late({0: {"all": 3}, 1: {"all": 3}}) == {}


def test_a_hang_is_reported_once_with_stacks_and_collectives(world, tmp_path, capfd):
    dist.all_reduce(torch.ones(7))
    watchdog = Watchdog(tmp_path, 2.0, print)
    watchdog.step(120)
    _a_place_that_hangs(tmp_path)
    watchdog.close()
    text = (tmp_path / "hangs" / "step-00000120" / "rank-00000.txt").read_text()
    assert "training after step 120" in text
    assert "_a_place_that_hangs" in text
    assert "number 1, gloo:all_reduce [[7]], completed, for" in text
    assert text.count("Python stacks:") == 1
    for said in ((tmp_path / "run.log").read_text(), capfd.readouterr().err):
        assert said.count("step 121 (training) has not ended for") == 1
        assert "all ranks have issued the same collectives" in said


def _a_place_that_hangs(folder: Path):
    deadline = time.monotonic() + 60
    while not (folder / "run.log").exists():
        assert time.monotonic() < deadline
        threading.Event().wait(0.1)


def test_the_watchdog_is_silent_while_steps_end_in_time_or_may_last(world, tmp_path, capfd):
    watchdog = Watchdog(tmp_path, 1.0, print)
    deadline = time.monotonic() + 2.0
    while time.monotonic() < deadline:
        watchdog.step(1)
        time.sleep(0.01)
    watchdog.on_first_rank("preparing data", lambda: time.sleep(1.5))
    watchdog.close()
    assert list(tmp_path.iterdir()) == []
    assert "rank 0" not in capfd.readouterr().err


def test_an_error_of_its_own_is_no_others_fault(world, tmp_path):
    watchdog = Watchdog(tmp_path, 60.0, print)
    for error in (ValueError("Connection"), RuntimeError("gloo: Connection closed by peer")):
        assert watchdog.explain(error) == []
    with pytest.raises(ZeroDivisionError):
        watchdog.on_first_rank("dividing", lambda: print(1 // 0))
    watchdog.close()
    watchdog.close()


class _NoStore:
    """A store whose server is gone."""

    def __getattr__(self, name):
        raise dist.DistNetworkError("Broken pipe")


@pytest.mark.parametrize("rank", [0, 1])
def test_all_go_on_from_what_nobody_needs_when_torchrun_and_its_store_are_gone(world, tmp_path, monkeypatch, rank):
    """As from commands after the last save: everything is saved, so the run has not failed."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    watchdog = Watchdog(tmp_path, 2.0, print)
    watchdog.rank = rank
    watchdog.peers._store = _NoStore()
    done: list[int] = []
    watchdog.on_first_rank("commands after the save", lambda: done.append(rank), is_needed=False)
    assert done == [0] * (rank == 0)
    watchdog.close()


def test_rank_0_is_named_when_its_host_is_lost_with_the_store(world, tmp_path, monkeypatch):
    """As in an elastic run, whose first rank has the store: nobody is left to tell whose beat has stopped."""
    monkeypatch.setattr("trainer.guards.watchdog.SILENT_SECONDS", -4.0)
    watchdog = Watchdog(tmp_path, 60.0, print)
    first = Peers(world, 0, 8, tmp_path / "0")
    world.set("beat/0", signed("beat/0", json.dumps(vars(first.own) | {"host": "node1", "space": "node1", "pid": 7})))
    watchdog.peers = Peers(world, 5, 8, tmp_path / "5")
    watchdog.peers.find_neighbors()
    error = RuntimeError("gloo: Connection reset by peer")
    assert watchdog.explain(error) == []
    watchdog.peers._store = _NoStore()
    with pytest.raises(RuntimeError, match="Broken pipe"):
        watchdog.peers.beat(3, "training", 0.0)
    watchdog.step(3)
    assert [str(loss) for loss in watchdog.explain(error)] == [
        "rank 0 on host node1 (process 7) does not answer: its host's store, by which ranks hear of each other, is "
        "gone (it was killed, or its host is down or unreachable); its last step was 3"
    ]
    watchdog.close()


def test_without_a_store_that_was_part_of_rank_0_the_others_do_not_take_its_work_for_done(world, tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    watchdog = Watchdog(tmp_path, 0.5, print)
    watchdog.rank = 1
    watchdog.peers._store = _NoStore()
    with pytest.raises(OutageError, match="rank 0, for which all others wait"):
        watchdog.on_first_rank("commands after the save", print, is_needed=False)
    watchdog.close()


def test_the_watchdog_outlives_an_error_of_what_it_asks(world, tmp_path, capfd, monkeypatch):
    """As torch raises for a group that is being destroyed: without this thread, nobody ends a rank that is stuck."""

    def fails(*_):
        raise KeyError("group")

    watchdog = Watchdog(tmp_path, 1.0, print)
    monkeypatch.setattr("trainer.guards.watchdog.write_report", fails)
    watchdog.step(3)
    beats = watchdog.peers.own.count
    _a_place_that_hangs(tmp_path)  # until run.log is there
    time.sleep(0.5)
    assert watchdog._thread.is_alive()
    assert watchdog.peers.own.count > beats
    watchdog.close()
    assert capfd.readouterr().err.count("the watchdog goes on after an error: KeyError('group')") == 1


def test_a_rank_is_ended_although_its_report_fails(world, tmp_path, monkeypatch):
    ended = threading.Event()
    monkeypatch.setattr("trainer.guards.watchdog.GRACE_SECONDS", 0.0)

    def fails(*_):
        raise KeyError("group")

    monkeypatch.setattr("trainer.guards.watchdog.write_report", fails)
    watchdog = Watchdog(tmp_path, 1.0, lambda losses: ended.set())
    watchdog.peers.tell({"lost": asdict(watchdog.peers.own_end(3))})
    assert ended.wait(10)
    watchdog.close()


def test_what_few_ranks_have_not_answered_is_found_in_few_requests(tmp_path):
    class Counted:
        def __init__(self):
            self.store, self.requests = dist.HashStore(), 0

        def __getattr__(self, name):
            self.requests += 1
            return getattr(self.store, name)

    store = Counted()
    peers = Peers(store, 0, 1024, tmp_path / "0")
    for rank in range(1024):
        if rank != 700:
            store.store.set(f"hang 5/{rank}", signed(f"hang 5/{rank}", json.dumps({"all": rank})))
    store.requests = 0
    answers = peers.answers("hang 5")
    assert set(answers) == set(range(1024)) - {700}
    assert store.requests <= 22  # 1,025 if each rank is asked for


def test_ranks_of_other_hosts_are_read_once(tmp_path, monkeypatch):
    """Without torchrun's LOCAL_WORLD_SIZE any rank may be on this host."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    store = dist.HashStore()
    read = []
    monkeypatch.setattr(Peers, "_read", lambda self, keys, of=Peers._read: (read.extend(keys), of(self, keys))[1])
    here = Peers(store, 0, 3, tmp_path / "0")
    for rank in (1, 2):
        beat = Beat(rank, f"far-{rank}", 7, f"far-{rank} pid:[1]", "1", "", step=40)
        store.set(f"beat/{rank}", signed(f"beat/{rank}", json.dumps(vars(beat))))
    for _ in range(5):
        here.find_neighbors()
    assert sorted(read) == [1, 2]
    assert here.lost_neighbors(0) == []
