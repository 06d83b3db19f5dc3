"""Elastic runs in one process: the mesh that a number of ranks gets, the numbers of launches, and who may write."""

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context

import pytest
import torch.distributed as dist

from checkpoint import incarnation as incarnations
from checkpoint import manager as managers
from checkpoint import manifest as manifests
from checkpoint.incarnation import FOLDER, Superseded, claim, facts_of, last_sign_of_life, newest_number
from checkpoint.lock import FolderInUse, lock_or_take_over
from checkpoint.storage import FolderStorage
from configs.elastic import describe
from configs.errors import ConfigError
from configs.load import load
from configs.schema import Job
from configs.secret import signed
from tests.conftest import ROOT
from tests.unit.checkpoint.test_checkpoint_manager import make_manager, make_state, process_group  # noqa: F401
from tests.unit.trainer.test_metrics import metrics
from trainer import run
from trainer.elastic import release, wait_idle
from trainer.guards.outages import Outages
from trainer.home import home_of
from trainer.lifecycle import StopRequest, write_status
from trainer.report.console import Console
from trainer.report.metrics import MetricsLog

TINY = str(ROOT / "tests/end_to_end/tiny.toml")
ELASTIC = ("--elastic.enable", "true", "--training.micro_batch_size", "1")


@pytest.mark.parametrize("batch", [8, 12])
@pytest.mark.parametrize("tp", [1, 2])
def test_an_open_mesh_is_the_largest_that_the_ranks_and_the_batch_allow(batch, tp):
    words = (*ELASTIC, "--training.global_batch_size", str(batch), "--mesh.tp", str(tp))
    for ranks in range(tp, 15):
        job = load(TINY, words, ranks)
        expected = max(dp * tp for dp in range(1, ranks // tp + 1) if batch % dp == 0)
        assert (job.choice.ranks, job.choice.idle) == (expected, ranks - expected)
        assert job.config.training.global_batch_size == batch


def test_the_first_mesh_that_fits_is_taken():
    meshes = "[{dp_shard = 4, tp = 2}, {dp_replicate = 2, dp_shard = 1, tp = 2}, {dp_shard = -1}]"
    words = (*ELASTIC, "--elastic.meshes", meshes)
    chosen = {ranks: load(TINY, words, ranks) for ranks in (1, 3, 4, 7, 8, 9)}
    assert {ranks: describe(job.config, job.choice) for ranks, job in chosen.items()} == {
        1: "1 rank",
        3: "2 of 3 ranks form the mesh dp_shard 2; the other 1 waits idle",
        4: "4 ranks form the mesh dp_replicate 2 x tp 2",
        7: "4 of 7 ranks form the mesh dp_replicate 2 x tp 2; the other 3 wait idle",
        8: "8 ranks form the mesh dp_shard 4 x tp 2",
        9: "8 of 9 ranks form the mesh dp_shard 4 x tp 2; the other 1 waits idle",
    }
    assert chosen[4].config.mesh.dp_replicate == 2


def test_the_resolved_job_is_as_elastic_as_the_job(tmp_path):
    words = (*ELASTIC, "--mesh.dp_replicate", "2", "--elastic.meshes", "[{dp_shard = 2, tp = 2}, {tp = 2}]")
    job = load(TINY, words, 3)
    (tmp_path / "config.toml").write_text(job.to_toml())
    again = load(str(tmp_path / "config.toml"), (), 4)
    assert job.choice.ranks, again.choice.ranks == (2, 4)
    assert again.choice.table_of_the_job.dp_replicate == 2


@pytest.mark.parametrize(
    ("words", "ranks", "said"),
    [
        (("--elastic.meshes", "[{dp_shard = 4}, {dp_shard = 1, tp = 2}]"), 1, "no mesh of elastic.meshes fits 1 rank"),
        (("--elastic.meshes", "[{tp = 2}, {tp = 3}]"), None, "tp 3 does not divide model.n_heads 4"),
        (("--elastic.meshes", "[{dp_shard = 3}]"), None, "does not divide 8"),
        (("--mesh.tp", "2"), 1, "[mesh] does not, even at its smallest, fit 1 rank (dp_replicate 1 x tp 2)"),
    ],
)
def test_what_never_fits_is_a_mistake_that_says_so(words, ranks, said):
    with pytest.raises(ConfigError) as caught:
        load(TINY, (*ELASTIC, *words), ranks)
    assert said in str(caught.value)


def test_meshes_need_an_elastic_job():
    (warning,) = load(TINY, ("--elastic.meshes", "[{dp_shard = 2}]"), 2).warnings
    assert "does nothing with elastic.enable = false" in warning


# --------------------------------------------------------------------------- numbers


def claims(folder):
    return [claim(folder, {}).number for _ in range(5)]


def test_a_number_is_claimed_once(tmp_path):
    with ProcessPoolExecutor(4, mp_context=get_context("fork")) as pool:
        numbers = [number for found in pool.map(claims, [tmp_path] * 8) for number in found]
    assert sorted(numbers) == list(range(1, 41))


def test_an_older_launch_learns_of_the_newer_one(tmp_path):
    older = claim(tmp_path, {"mesh": "dp_shard 4"})
    older.require_current()
    newer = claim(tmp_path, {})
    with pytest.raises(Superseded, match=rf"incarnation 1 .* superseded by incarnation 2 \(process {os.getpid()} on"):
        older.require_current()
    newer.require_current()
    assert facts_of(tmp_path / FOLDER, 1)["mesh"] == "dp_shard 4"


# --------------------------------------------------------------------------- who may commit


def elastic_manager(folder, log=None):
    manager = make_manager(folder / "checkpoints", log, incarnation=claim(folder, {}))
    manager.resume(make_state(99))
    manager.begin_lineage()
    return manager


def save(manager, step):
    manager.save(step, make_state(step), {"tokens": step, "step": step})


def test_an_older_launch_commits_and_removes_nothing(tmp_path):
    older = elastic_manager(tmp_path)
    save(older, 1)
    newer = elastic_manager(tmp_path)
    assert newer.latest_step() == 1
    before = sorted((tmp_path / "checkpoints").rglob("*"))
    with pytest.raises(Superseded):
        save(older, 2)
    with pytest.raises(Superseded):
        older._leave_later_ones()
    assert sorted((tmp_path / "checkpoints").rglob("*")) == before
    save(newer, 2)
    assert manifests.steps_in(tmp_path / "checkpoints") == [1, 2]


def comes_before(monkeypatch, owner, name, newer):
    """Have `newer` happen just before the first call of a function."""
    original, rest = getattr(owner, name), [newer]

    def halted(*arguments):
        if rest:
            rest.pop()()
        return original(*arguments)

    monkeypatch.setattr(owner, name, halted)


@pytest.mark.parametrize("moment", ["before its folder is made", "before it looks", "after it has looked"])
def test_an_older_launch_that_is_halted_in_a_save_commits_nothing(tmp_path, monkeypatch, moment):
    older = elastic_manager(tmp_path)
    if moment == "before its folder is made":
        comes_before(monkeypatch, FolderStorage, "begin", lambda: save(elastic_manager(tmp_path), 5))
    elif moment == "before it looks":
        comes_before(monkeypatch, managers, "commit", lambda: save(elastic_manager(tmp_path), 5))
    else:
        comes_before(monkeypatch, manifests.Path, "rename", lambda: save(elastic_manager(tmp_path), 5))
    with pytest.raises(Superseded):
        save(older, 5)
    assert manifests.steps_in(tmp_path / "checkpoints") == [5]
    resumed = elastic_manager(tmp_path)
    assert (resumed.latest_step(), resumed._run_id) != (5, older._run_id)
    assert list((tmp_path / "checkpoints").glob("*.tmp")) == []


def test_an_older_launch_adds_no_line_to_the_metrics(tmp_path):
    older = claim(tmp_path, {})
    log = MetricsLog(tmp_path, Outages(print, print), before_writing=older.require_current)
    log.write(metrics(1))
    log.flush()
    written = (tmp_path / "metrics.jsonl").read_bytes()
    claim(tmp_path, {})
    log.write(metrics(2))
    with pytest.raises(Superseded):
        log.flush()
    assert (tmp_path / "metrics.jsonl").read_bytes() == written


def test_a_disk_that_refuses_a_look_for_newer_launches_ends_no_run(tmp_path, monkeypatch):
    """Neither with a line of metrics nor when the end of the run is recorded; the next look finds a newer launch."""
    older = claim(tmp_path, {})
    log = MetricsLog(tmp_path, Outages(print, print), before_writing=older.require_newest_known)

    def refuse(folder):
        raise OSError(errno.EIO, "Input/output error", folder)

    with monkeypatch.context() as outage:
        outage.setattr(os, "listdir", refuse)
        log.write(metrics(1))
        log.flush()
        assert older.is_current()
    assert b'"step": 1' in (tmp_path / "metrics.jsonl").read_bytes()
    claim(tmp_path, {})
    assert not older.is_current()
    log.write(metrics(2))
    with pytest.raises(Superseded):
        log.flush()


def refuse_once(monkeypatch, module, name):
    """Let a disk refuse the first call of a function; returns a list that is empty from then on."""
    function, left = getattr(module, name), [errno.EIO]

    def refused(path, *arguments, **options):
        if left:
            raise OSError(left.pop(), "Input/output error", path)
        return function(path, *arguments, **options)

    monkeypatch.setattr(module, name, refused)
    return left


@pytest.mark.parametrize(("module", "name"), [(os, "listdir"), (incarnations, "write_atomically")])
def test_a_disk_that_refuses_once_does_not_keep_a_launch_from_recording_where_it_begins(
    tmp_path, monkeypatch, module, name
):
    launch = claim(tmp_path, {})
    left = refuse_once(monkeypatch, module, name)
    launch.begin(7)
    assert not left
    assert facts_of(tmp_path / FOLDER, launch.number)["began"] == 7


def test_a_disk_that_refuses_once_to_list_checkpoints_does_not_end_a_run_that_goes_back(tmp_path, monkeypatch):
    manager = make_manager(tmp_path)
    left = refuse_once(monkeypatch, manifests, "steps_in")
    assert not manager.can_rewind(10)
    assert not left


def test_the_end_of_a_run_is_recorded_by_a_disk_that_refuses_a_look(tmp_path, monkeypatch):
    write_status(tmp_path, "running", 5)
    launch = run._Launch(0, tmp_path, Console(rank=1), StopRequest(), started=time.time())
    launch.home = home_of(Job(name="job", output_dir=str(tmp_path)))
    left = [refuse_once(monkeypatch, run, "status_there"), refuse_once(monkeypatch, os, "stat")]
    run._write_end(launch, "failed", None, "the reason")
    assert left == [[], []]
    found = json.loads((tmp_path / "status.json").read_text())
    assert (found["state"], found["step"], found["reason"]) == ("failed", 5, "the reason")


# --------------------------------------------------------------------------- a launch that hangs

HOLDER = """
import sys, time
from pathlib import Path
from checkpoint.incarnation import claim
from checkpoint.lock import lock
folder = Path(sys.argv[1])
lock(folder, print)
mine = claim(folder, {}) if sys.argv[2] == "elastic" else None
print("locked", flush=True)
while True:
    time.sleep(0.1)
    if mine: mine.show_life()
"""


@contextmanager
def holder(folder, kind="elastic"):
    command = [sys.executable, "-c", textwrap.dedent(HOLDER), folder, kind]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "locked\n"
        try:
            yield process
        finally:
            process.kill()


def test_a_launch_that_hangs_is_taken_over_and_one_that_lives_is_not(tmp_path):
    told = []
    with holder(tmp_path) as process:
        with pytest.raises(FolderInUse, match=f"process {process.pid}"):
            lock_or_take_over(tmp_path, told.append, 2.0)
        os.kill(process.pid, signal.SIGSTOP)
        lock_or_take_over(tmp_path, told.append, 2.0)
        assert [line.partition(" it has")[0] for line in told] == [told[0].partition(" it has")[0]]
        assert "no sign of life" in told[0]
        os.kill(process.pid, signal.SIGCONT)
        assert is_locked_for_others(tmp_path)
    assert f"process {os.getpid()} " in (tmp_path / ".lock").read_text()


def is_locked_for_others(folder):
    """Whether the folder is this process's now."""
    script = "import sys; from pathlib import Path; from checkpoint.lock import lock; lock(Path(sys.argv[1]), print)"
    tried = subprocess.run([sys.executable, "-c", script, folder], cwd=ROOT, capture_output=True, text=True)
    return "FolderInUse" in tried.stderr


def test_a_launch_that_is_about_to_end_is_waited_for(tmp_path):
    with holder(tmp_path) as process:
        threading.Timer(0.7, process.kill).start()
        lock_or_take_over(tmp_path, refuse, 60.0)
        assert is_locked_for_others(tmp_path)


def test_a_launch_that_is_not_elastic_is_never_taken_over(tmp_path):
    claim(tmp_path, {})  # by this process, which does not have the folder
    with holder(tmp_path, "plain") as process:
        os.kill(process.pid, signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(FolderInUse):
            lock_or_take_over(tmp_path, refuse, 60.0)
        assert time.monotonic() - began < 30
        os.kill(process.pid, signal.SIGCONT)


def refuse(line):
    raise AssertionError(line)


def test_a_sign_of_life(tmp_path):
    assert last_sign_of_life(tmp_path) == 0 == newest_number(tmp_path / FOLDER)
    mine = claim(tmp_path, {})
    before = last_sign_of_life(tmp_path / FOLDER)
    time.sleep(0.02)
    mine.show_life()
    assert last_sign_of_life(tmp_path / FOLDER) > before > 0


# --------------------------------------------------------------------------- idle ranks


def test_idle_ranks_end_as_the_others_do(tmp_path):
    store, codes = dist.HashStore(), []
    wait = lambda: codes.append(wait_idle(store, StopRequest(), 60, print))  # noqa: E731
    idle = [threading.Thread(target=wait) for _ in range(3)]
    for thread in idle:
        thread.start()
    release(store, 3, 75)
    for thread in idle:
        thread.join(30)
    assert codes == [75] * 3


class _EndsWhenHeard(dist.HashStore):
    """The store of a first rank that ends at once when the idle rank says that it knows the exit code."""

    has_ended = False

    def add(self, key: str, amount: int) -> int:
        count = super().add(key, amount)
        self.has_ended = self.has_ended or (key == "heard" and amount > 0)
        return self._unless_ended(count)

    def get(self, key: str) -> bytes:
        return self._unless_ended(super().get(key))

    def _unless_ended(self, value):
        if self.has_ended:
            raise dist.DistNetworkError("Connection reset by peer")
        return value


def test_an_idle_rank_knows_the_exit_code_before_it_says_so(tmp_path):
    store = _EndsWhenHeard()
    store.set("end", signed("end", "75"))
    assert wait_idle(store, StopRequest(), 60, print) == 75
    assert store.has_ended


def test_idle_ranks_end_when_nobody_trains(tmp_path):
    assert wait_idle(dist.HashStore(), StopRequest(), 0.1, print) == 1


def test_idle_ranks_end_at_a_signal(tmp_path):
    stop = StopRequest()
    stop.record(signal.SIGTERM, None)
    assert wait_idle(dist.HashStore(), stop, 60, print) == 75


def test_what_a_launch_records(tmp_path):
    claim(tmp_path, {"ranks": 6, "mesh": "4 of 6 ranks form the mesh dp_shard 4; the other 2 wait idle"})
    told = json.loads((tmp_path / "incarnations/000001.json").read_text())
    assert told["ranks"] == 6
    assert told["mesh"].startswith("4 of 6 ranks")
    assert {"host", "pid", "time"} < told.keys()
