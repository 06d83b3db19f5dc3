"""`scripts/launch/elastic.sh` with a real rendezvous store, and a torchrun that ends as the test says."""

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from configs.secret import SECRET, Forged, signed
from scripts.launch.rendezvous import meet, say_ended
from tests.end_to_end.signals import taking_interrupts, wait_until
from tests.preloaded import children
from trainer.lifecycle import read_status, write_status

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = r"""#!/bin/bash
echo "$@" >>"$CALLS"
[[ $* =~ --rdzv-id\ job-([0-9]+)- ]]
END=$(head -n $((BASH_REMATCH[1] + 1)) <<<"$ENDS" | tail -n 1)
case $END in
    done) exit 0 ;;
    closed) echo "torch.distributed.elastic.rendezvous.api.RendezvousClosedError" >&2 ;;
    mistake)
        echo "error: --training.steps: 7 is wrong" >&2
        echo "failed (exitcode: 78) local_rank: 0 (pid: 10815) of binary: python" >&2
        exec sleep 600
        ;;
    hangs) exec sleep 600 ;;
esac
exit 1
"""


@pytest.fixture
def store() -> TCPStore:
    return new_store()


def loop(base: Path, host: str, ends: str, port: int, run: str = "") -> subprocess.Popen:
    """The script on one host, whose torchrun ends in these ways, by rounds; the run is the host's own, if not `run`."""
    programs = base / "programs"
    programs.mkdir(exist_ok=True)
    (programs / "torchrun").write_text(TORCHRUN)
    (programs / "torchrun").chmod(0o755)
    env = os.environ | {
        "PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "ENDS": "\n".join(ends.split()),
        "CALLS": str(base / f"{host}.calls"),
        "KEEL_RENDEZVOUS": f"127.0.0.1:{port}",
        "KEEL_JOB": "job",
        "KEEL_SECRET": "s" * 32,
        "KEEL_RUN_FOLDER": run or str(base / f"run-{host}"),
        "KEEL_PAUSE_SECONDS": "1",
    }
    command = [ROOT / "scripts/launch/elastic.sh", "debug", "--training.steps", "7"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, env=env, cwd=ROOT, text=True, start_new_session=True, **pipes)


def rounds(base: Path, host: str) -> list[str]:
    """The rendezvous of each torchrun that a host has started, without the store's name."""
    calls = base / f"{host}.calls"
    words = [line.split() for line in calls.read_text().splitlines()] if calls.exists() else []
    return [each[each.index("--rdzv-id") + 1].rpartition("-")[0] for each in words]


@pytest.mark.slow
def test_hosts_meet_in_the_round_after_a_closed_one_and_hear_of_the_end(tmp_path, store):
    """Hosts that share no disk: what one knows of rounds, and of the end of the job, the others get to know."""
    first = loop(tmp_path, "a", "closed closed fails", store.port)
    wait_until(first, lambda: rounds(tmp_path, "a")[-1:] == ["job-2"])
    second = loop(tmp_path, "b", "hangs hangs done", store.port)
    said = [host.communicate(timeout=300)[0] for host in (second, first)]
    assert (first.returncode, second.returncode) == (0, 0), said
    assert rounds(tmp_path, "b") == ["job-2"]
    assert list(dict.fromkeys(rounds(tmp_path, "a"))) == ["job-0", "job-1", "job-2"]
    assert "torchrun has ended (1); starting it again" in said[1]
    assert "the job job has come to its end" in said[1]


@pytest.mark.slow
def test_a_mistake_in_the_job_ends_it_on_all_hosts(tmp_path, store):
    """torchrun would start the ranks again, a thousand times."""
    first = loop(tmp_path, "a", "mistake", store.port, run="s3://bucket/run")
    said = first.communicate(timeout=120)[0]
    assert first.returncode == 78, said
    message = "the job has a mistake, and is not started again\nerror: --training.steps: 7 is wrong\n"
    assert message in said
    assert "--job.output_dir s3://bucket/run --elastic.enable true" in (tmp_path / "a.calls").read_text()
    second = loop(tmp_path, "b", "done", store.port)
    assert "the job job has come to its end" in second.communicate(timeout=120)[0]
    assert rounds(tmp_path, "b") == []


def new_store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_a_round_is_the_same_for_all_and_a_closed_one_is_left_once(store):
    first = meet(store, "job")
    assert (first[:2], meet(store, "job")) == ("0-", first)
    assert meet(store, "other") != first
    second = meet(store, "job", closed=first)
    assert [meet(store, "job", closed=first), meet(store, "job")] == [second] * 2
    assert second == f"1{first[1:]}"
    say_ended(store, "job")
    assert [meet(store, "job"), meet(store, "job", closed=second), meet(store, "other")[:2]] == ["ended", "ended", "0-"]


def test_a_round_that_was_closed_in_a_store_that_is_gone_closes_none_in_the_next_store(store):
    """Else the host that knows of the closed round leaves the others, who have met in the new store's first round."""
    closed, another = meet(store, "job"), new_store()
    waiting = meet(another, "job")
    assert [meet(another, "job", closed=closed), meet(another, "job")] == [waiting] * 2


@pytest.mark.parametrize("value", ["ended", "7", signed("keel/another/round", "ended"), "x" * 64 + " ended", "\xff"])
def test_what_somebody_else_writes_ends_no_job_and_moves_no_host(store, value, monkeypatch):
    monkeypatch.setenv(SECRET, "the job's")
    begun = meet(store, "job")
    store.set("keel/job/round", value)
    for closed in (None, begun):
        with pytest.raises(Forged, match="wrong keyed hash under keel/job/round"):
            meet(store, "job", closed)
    monkeypatch.setenv(SECRET, "another's")
    say_ended(store, "job")
    monkeypatch.setenv(SECRET, "the job's")
    with pytest.raises(Forged, match="KEEL_SECRET is not the same"):
        meet(store, "job")


@pytest.mark.slow
def test_a_host_waits_out_a_forged_end_and_stays_out_without_a_secret(tmp_path, store):
    store.set("keel/job/round", "ended")
    host = loop(tmp_path, "a", "done", store.port)
    assert host.stdout
    line = host.stdout.readline()
    assert "refused: KEEL_SECRET is not the same on all hosts, or somebody else" in line
    assert host.poll() is None
    store.delete_key("keel/job/round")
    said = host.communicate(timeout=120)[0]
    assert (host.returncode, rounds(tmp_path, "a")) == (0, ["job-0"]), said

    script, secret = [ROOT / "scripts/launch/elastic.sh", "debug"], tmp_path / "secret"
    env = os.environ | {"KEEL_RUN_FOLDER": str(tmp_path), "KEEL_RENDEZVOUS": "127.0.0.1:1", "KEEL_JOB": "job"}
    env.pop(SECRET, None)
    none = subprocess.run(script, env=env, capture_output=True, text=True)
    assert (none.returncode > 0, "set KEEL_SECRET, or KEEL_SECRET_FILE" in none.stderr) == (True, True), none.stderr
    secret.write_text("s")
    secret.chmod(0o640)
    shown = subprocess.run(script, env=env | {"KEEL_SECRET_FILE": str(secret)}, capture_output=True, text=True)
    assert (shown.returncode, "others may read KEEL_SECRET_FILE" in shown.stderr) == (78, True), shown.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("words", "listens"), [([], "127.0.0.1"), (["--host", "0.0.0.0"], "0.0.0.0")])
def test_the_store_listens_where_it_is_told_to_and_else_on_this_host_only(words, listens):
    """A TCPStore by itself listens on all addresses, whatever host it is given."""
    command = [sys.executable, ROOT / "scripts/launch/rendezvous.py", "0", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        line = process.stdout.readline()
        port = int(line.split("port ")[1].split(",")[0])
        found = Path(f"/proc/{process.pid}/net/tcp").read_text() + Path(f"/proc/{process.pid}/net/tcp6").read_text()
        process.kill()
    listening = [fields[1] for fields in map(str.split, found.splitlines()) if fields[3] == "0A"]
    [address] = [each.split(":")[0] for each in listening if int(each.split(":")[1], 16) == port]
    assert socket.inet_ntoa(bytes.fromhex(address)[::-1]) == listens
    assert ("only this host reaches" in line) == (listens == "127.0.0.1")


@pytest.mark.slow
def test_a_store_that_is_away_is_waited_for_and_a_stop_ends_the_loop(tmp_path, store):
    port = store.port
    asked = [sys.executable, ROOT / "scripts/launch/rendezvous.py", "meet", "127.0.0.1:1", "job"]
    away = subprocess.run(asked, capture_output=True, text=True)
    assert away.returncode == 1
    assert away.stderr.startswith("the rendezvous store at 127.0.0.1:1 does not answer"), away.stderr
    run = tmp_path / "run-a"
    run.mkdir()
    write_status(run, "failed", 7, "rank 1 was killed")
    host = loop(tmp_path, "a", "hangs", port)
    wait_until(host, lambda: bool(rounds(tmp_path, "a")))
    host.terminate()
    assert host.wait(60) == 75
    assert read_status(run)["state"] == "preempted"


@pytest.mark.slow
def test_a_terminals_interrupt_while_the_store_is_asked_says_nothing_of_python(tmp_path, store):
    with taking_interrupts():
        host = loop(tmp_path, "a", "hangs", store.port)

    def asks() -> bool:
        pids = [host.pid]
        for pid in pids:
            pids += children(pid)
            with suppress(FileNotFoundError, ProcessLookupError):
                if "libtorch" in Path(f"/proc/{pid}/maps").read_text():
                    return True
        return False

    wait_until(host, asks)
    os.killpg(host.pid, signal.SIGINT)
    said = host.communicate(timeout=120)[0]
    assert (host.returncode, "Traceback" in said, rounds(tmp_path, "a")) == (75, False, []), said
