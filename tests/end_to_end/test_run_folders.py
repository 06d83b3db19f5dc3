"""Hosts that share no disk, as processes: each rank in a folder of its own, with a relative `job.output_dir`."""

import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from checkpoint.manifest import steps_in
from tests.end_to_end.launch import curve, finish, launch, records, start, status
from tests.end_to_end.signals import wait_until

JOB = "--metrics.tensorboard false --training.micro_batch_size 1 --training.reduction exact"
COPIES = "--checkpoint.memory_copies 1 --checkpoint.memory_interval 3 --checkpoint.interval 40"
OWN = f"{JOB} --elastic.enable true {COPIES}"


def start_on(base: Path, hosts: str, words: str) -> list[subprocess.Popen]:
    """A rank on each host, as torchrun would start them."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": str(len(hosts)), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    started = []
    for rank, host in enumerate(hosts):
        (base / host).mkdir(exist_ok=True)
        env = shared | {"RANK": str(rank), "LOCAL_RANK": "0", "KEEL_MEMORY_FOLDER": str(base / host)}
        started.append(start(base / host, words, env=env))
    return started


def run_of(base: Path, host: str) -> Path:
    return base / host / "run"


def saved(base: Path, host: str) -> int:
    """The newest checkpoint on a host's disk; 0: none."""
    return max(steps_in(run_of(base, host) / "checkpoints"), default=0)


def copied(base: Path, host: str) -> int:
    """The newest copy in a host's memory; 0: none."""
    return max((int(path.name[5:13]) for path in base.glob(f"{host}/keel-*/step-*-of-*[0-9a-f]")), default=0)


def kill_after(base: Path, hosts: str, words: str, step: int) -> str:
    """A launch that is killed once the run has so many records, and on two hosts a copy that is newer than the newest
    checkpoint, of which there is one; returns what its first rank has said."""
    ranks = start_on(base, hosts, words)
    metrics = run_of(base, hosts[0]) / "metrics.jsonl"

    def has_come_to() -> bool:
        if not metrics.exists() or metrics.read_text().count("\n") < step:
            return False
        return min(copied(base, host) for host in hosts[:2]) > saved(base, hosts[0]) > 0

    wait_until(ranks[0], has_come_to)
    for rank in ranks:
        rank.kill()
    said = [finish(rank).out for rank in ranks]
    return said[0]


def ends_on(base: Path, hosts: str, words: str, expect: int = 0) -> list[str]:
    """A launch that comes to its end; returns what its ranks have said."""
    outcomes = [finish(rank) for rank in start_on(base, hosts, words)]
    assert {outcome.code for outcome in outcomes} == {expect}, outcomes
    return [outcome.out + outcome.err for outcome in outcomes]


@pytest.mark.slow
def test_a_run_goes_on_whichever_host_is_home(tmp_path: Path):
    """Kills, hosts that change places, one that is lost with its disk, one idle: the curve is the undisturbed one."""
    long = f"{OWN} --training.steps 4000"
    said = kill_after(tmp_path, "abc", long, 50)
    assert "2 of 3 ranks form the mesh dp_shard 2; the other 1 waits idle" in said
    assert f"3 hosts have a run folder each; the run's is that of rank 0, {run_of(tmp_path, 'a')}" in said
    newest = saved(tmp_path, "a")
    assert newest % 40 == 0
    assert not saved(tmp_path, "b")
    said = kill_after(tmp_path, "bca", long, 90)  # the host that was home is idle
    assert f"checkpoint step {newest} was brought from another host's disk (rank 2)" in said
    assert "from copies in the memory of host" in said
    (tmp_path / "b").rename(tmp_path / "lost")
    said = kill_after(tmp_path, "cd", long, 130)
    assert "from copies in the memory of host" in said
    (tmp_path / "lost").rename(tmp_path / "b")
    newest = curve(run_of(tmp_path, "c"))[-1][0] + 20
    said = ends_on(tmp_path, "bda", f"{OWN} --training.steps {newest}")[0]
    assert "from copies in the memory of host" in said
    steps = [record["step"] for record in records(run_of(tmp_path, "b"))]
    assert steps == list(range(1, newest + 1))
    launch(tmp_path, f"{JOB} --training.steps {newest} --job.output_dir undisturbed")
    assert curve(run_of(tmp_path, "b")) == curve(tmp_path / "undisturbed") == curve(run_of(tmp_path, "d"))
    assert status(run_of(tmp_path, "d"))["state"] == "done"
    launches = [each for record in records(run_of(tmp_path, "b")) for each in record.get("launches", [])]
    assert [each["incarnation"] for each in launches] == [1, 2, 3, 4]
    assert not list(tmp_path.glob("[abd]/keel-*/step-*"))  # the run is over; c was not there


@pytest.mark.slow
def test_a_stop_keeps_the_copies_and_a_failure_ends_all(tmp_path: Path):
    ranks = start_on(tmp_path, "ab", f"{OWN} --training.steps 4000")
    wait_until(ranks[0], lambda: (run_of(tmp_path, "b") / "metrics.jsonl").exists())
    ranks[1].send_signal(signal.SIGTERM)
    assert {finish(rank).code for rank in ranks} == {75}
    stopped = status(run_of(tmp_path, "a"))["step"]
    assert steps_in(run_of(tmp_path, "a") / "checkpoints")[-1] == stopped
    assert list(tmp_path.glob("b/keel-*/step-*"))  # the next launch may lack the disk of the other host
    began = time.monotonic()
    said = ends_on(tmp_path, "ba", f"{OWN} --training.steps 4000 --optimizer.lr 1e-3", expect=78)
    assert f"checkpoint step {stopped} was brought" in said[0]
    assert "optimizer.lr" in said[0]
    assert "Traceback" not in "".join(said)
    assert time.monotonic() - began < 200  # job.timeout_seconds is 600


@pytest.mark.slow
def test_going_back_after_a_spike_needs_a_shared_folder(tmp_path: Path):
    words = f"{OWN} --fault.spikes.action rewind --fault.spikes.rewind_interval 10"
    said = "".join(ends_on(tmp_path, "ab", words, expect=78))
    assert 'fault.spikes.action = "rewind" needs a run folder that all hosts share' in said
    assert "Traceback" not in said
