"""Whole runs in a bucket: a slow or a busy server, credentials that expire, a full local disk, a second launch."""

import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from checkpoint.bucket import Bucket
from checkpoint.manifest import MANIFEST_NAME
from tests.bucket.between import between
from tests.bucket.ceph import Ceph
from tests.end_to_end.launch import curve, finish, launch, start, status
from tests.torture.full_disk import RUN_DISK_BYTES, assert_recorded, small_disk, whole_run

pytestmark = pytest.mark.slow

WORDS = "--metrics.tensorboard false --checkpoint.interval 10"
LARGE = "--model.dim 128 --model.ffn_dim 512"
"""A checkpoint of 7 MB."""


def left_over(url: str) -> list[str]:
    """The keys below prefixes of checkpoints that were never committed."""
    keys = Bucket(url).list("checkpoints/")
    complete = tuple(key.removesuffix(MANIFEST_NAME) for key in keys if key.endswith(f"/{MANIFEST_NAME}"))
    return [key for key in keys if not key.startswith(complete)]


def committed(url: str) -> list[str]:
    return sorted(key for key in Bucket(url).list("checkpoints/") if key.endswith(f"/{MANIFEST_NAME}"))


def begun(folder: Path, words: str, env: dict[str, str]) -> tuple[subprocess.Popen, threading.Thread]:
    """A launch, and a thread that ends with it."""
    process = start(folder, words, env=env)
    ended = threading.Thread(target=process.wait)
    ended.start()
    return process, ended


def waited_for(condition, ended: threading.Thread) -> None:
    while not condition():
        assert ended.is_alive()
        time.sleep(0.02)


@pytest.mark.long  # mostly waits
def test_a_server_that_takes_one_megabyte_a_second_only_makes_the_next_save_wait(server: Ceph, tmp_path: Path):
    url = "s3://keel/slow"
    with between(server.environment) as (way, environment):
        way.rate = 1e6
        process, ended = begun(tmp_path, f"{WORDS} {LARGE} --training.steps 30 --job.output_dir {url}", env=environment)
        run = tmp_path / "runs/s3/keel/slow"
        waited_for(lambda: (run / "metrics.jsonl").exists() and len(curve(run)) == 20, ended)
        assert not committed(url)  # training has gone on to the next save
        time.sleep(1)
        assert len(curve(run)) == 20
        outcome = finish(process)
    assert outcome.code == 0, outcome.err
    assert "training continues" not in outcome.err
    assert len(committed(url)) == 3
    assert not left_over(url)
    launch(tmp_path, f"{WORDS} {LARGE} --training.steps 30 --job.output_dir whole")
    assert curve(run) == curve(tmp_path / "whole")


def test_a_server_that_is_busy_for_half_a_minute_costs_the_run_nothing(server: Ceph, tmp_path: Path):
    """From the middle of a save on, every request is answered with 503 (SlowDown)."""
    url = "s3://keel/busy"
    with between(server.environment) as (way, environment):
        process, ended = begun(tmp_path, f"{WORDS} {LARGE} --training.steps 60 --job.output_dir {url}", env=environment)
        waited_for(lambda: committed(url), ended)
        way.rate = 1e6
        waited_for(lambda: left_over(url), ended)
        way.error = (503, "SlowDown")
        way.rate = None
        time.sleep(30)
        assert len(committed(url)) < 6
        way.error = None
        outcome = finish(process)
    assert outcome.code == 0, outcome.err
    assert "warning" not in outcome.err
    assert len(committed(url)) == 6
    assert not left_over(url)
    launch(tmp_path, f"{WORDS} {LARGE} --training.steps 60 --job.output_dir whole")
    assert curve(tmp_path / "runs/s3/keel/busy") == curve(tmp_path / "whole")


def test_of_two_launches_at_once_one_goes_on(server: Ceph, tmp_path: Path):
    """On two hosts that share no disk; the other ends with one message and has put nothing into the bucket."""
    url = "s3://keel/two"
    words = f"{WORDS} --training.steps 300 --job.output_dir {url}"
    processes = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        processes.append(start(tmp_path / name, words, env=server.environment))
    outcomes = {process: finish(process) for process in processes}
    assert sorted(outcome.code for outcome in outcomes.values()) == [0, 1]
    [refused] = [outcome for outcome in outcomes.values() if outcome.code]
    [goes_on] = [process for process, outcome in outcomes.items() if not outcome.code]
    assert f"error: {url} is in use by process {goes_on.pid} on host" in refused.err
    assert "Traceback" not in refused.err
    assert len(committed(url)) == 30
    assert not left_over(url)
    launch(tmp_path, f"{WORDS} --training.steps 300 --job.output_dir whole")
    [run] = [run for run in tmp_path.glob("*/runs/s3/keel/two") if (run / "metrics.jsonl").exists()]
    assert curve(run) == curve(tmp_path / "whole")


def test_a_host_that_sleeps_and_wakes_has_lost_the_run(server: Ceph, tmp_path: Path):
    """While it sleeps, another takes the run over and ends it; of what it puts then, nothing is committed or stays."""
    url = "s3://keel/asleep"
    words = f"{WORDS} --training.steps 500 --checkpoint.keep_last 3 --job.output_dir {url}"
    (tmp_path / "one").mkdir()
    (tmp_path / "other").mkdir()
    first, ended = begun(tmp_path / "one", words, env=server.environment)
    waited_for(lambda: len(committed(url)) == 3, ended)
    os.killpg(first.pid, signal.SIGSTOP)
    outcome = launch(tmp_path / "other", words, env=server.environment)
    assert "resuming from" in outcome.out
    kept = committed(url)
    os.killpg(first.pid, signal.SIGCONT)
    woken = finish(first)
    assert woken.code == 1
    assert "error: incarnation 1 of this run was superseded by incarnation 2 (process " in woken.err
    assert "Traceback" not in woken.err
    assert committed(url) == kept
    launch(tmp_path / "other", f"{words} --training.steps 510", env=server.environment)
    assert not left_over(url)
    launch(tmp_path, f"{WORDS} --training.steps 510 --job.output_dir whole")
    assert curve(tmp_path / "other/runs/s3/keel/asleep") == curve(tmp_path / "whole")


def test_credentials_that_expire_in_a_save_cost_no_step_that_was_committed(server: Ceph, tmp_path: Path):
    url = "s3://keel/expired"
    words = f"{WORDS} {LARGE} --training.steps 300 --job.output_dir {url}"
    said = "s3://keel/expired: the credentials have expired; renew them in the environment"
    with between(server.environment) as (way, environment):
        process, ended = begun(tmp_path, words, env=environment)
        waited_for(lambda: committed(url), ended)
        way.rate = 1e6
        waited_for(lambda: left_over(url), ended)  # a save is on its way
        way.error = (400, "ExpiredToken")
        way.rate = None
        before = time.monotonic()
        outcome = finish(process)
        assert time.monotonic() - before < 60
        assert outcome.code == 1, outcome.err
        assert said in outcome.err
        assert "failed saves in a row: 3" in outcome.err
        assert "Traceback" not in outcome.err
        assert status(tmp_path / "runs/s3/keel/expired")["state"] == "failed"
        kept = committed(url)
        before = time.monotonic()
        outcome = launch(tmp_path, words, env=environment, expect=78)
        assert time.monotonic() - before < 20
        assert said in outcome.err
        way.error = None
        outcome = launch(tmp_path, words, env=environment)
    assert "which an interrupted save has left behind" in outcome.out
    assert f"resuming from {tmp_path}" in outcome.out or "resuming from runs/s3" in outcome.out
    assert set(kept) < set(committed(url))
    assert not left_over(url)
    launch(tmp_path, f"{WORDS} {LARGE} --training.steps 300 --job.output_dir whole")
    assert curve(tmp_path / "runs/s3/keel/expired") == curve(tmp_path / "whole")


@pytest.mark.long  # mostly waits
def test_credentials_that_expire_between_the_start_and_the_load_of_a_resume(server: Ceph, tmp_path: Path):
    """Each request of a launch may be the first that fails: it ends with one message, and nothing is damaged."""
    url = "s3://keel/expires"
    words = f"{WORDS} --training.steps 20 --job.output_dir {url}"
    launch(tmp_path, f"{words} --training.steps 10", env=server.environment)
    kept = committed(url)
    for n_requests in (1, 6, 12, 16, 20):
        with between(server.environment) as (way, environment):
            way.error = (400, "ExpiredToken")
            way.passes = n_requests
            outcome = launch(tmp_path, words, env=environment, expect=78)
        assert "the credentials have expired; renew them in the environment" in outcome.err, outcome.err
        assert "Traceback" not in outcome.err
        assert committed(url) == kept
    outcome = launch(tmp_path, words, env=server.environment)
    assert "resuming from" in outcome.out


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a disk needs root")
def test_a_local_disk_that_is_full(server: Ceph):
    url = "s3://keel/full"
    with small_disk(RUN_DISK_BYTES, 1000) as disk:
        ended = whole_run(disk, place=url, env=server.environment)
        ended.out.pop(0)  # said before the log is open
        assert_recorded(disk / "runs/s3/keel/full", ended)
        assert not left_over(url)
