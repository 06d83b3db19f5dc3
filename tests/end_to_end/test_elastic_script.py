"""`scripts/launch/elastic.sh` with a real rendezvous store, and a torchrun that ends as the test says."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from scripts.launch.rendezvous import meet, say_ended
from tests.end_to_end.signals import wait_until

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = r"""#!/bin/bash
echo "$@" >>"$CALLS"
[[ $* =~ --rdzv-id\ job-([0-9]+) ]]
END=$(head -n $((BASH_REMATCH[1] + 1)) <<<"$ENDS" | tail -n 1)
case $END in
    done) exit 0 ;;
    closed) echo "torch.distributed.elastic.rendezvous.api.RendezvousClosedError" >&2 ;;
    hangs) exec sleep 600 ;;
esac
exit 1
"""


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def loop(base: Path, host: str, ends: str, port: int) -> subprocess.Popen:
    """The script on one host, whose torchrun ends in these ways, by rounds."""
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
        "KEEL_RUN_FOLDER": str(base / f"run-{host}"),
        "KEEL_PAUSE_SECONDS": "1",
    }
    command = [ROOT / "scripts/launch/elastic.sh", "debug", "--training.steps", "7"]
    return subprocess.Popen(command, env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def rounds(base: Path, host: str) -> list[str]:
    """The rendezvous of each torchrun that a host has started."""
    calls = base / f"{host}.calls"
    words = [line.split() for line in calls.read_text().splitlines()] if calls.exists() else []
    return [each[each.index("--rdzv-id") + 1] for each in words]


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


def test_rounds_begin_once_and_again_with_a_new_store(store):
    assert [meet(store, "job"), meet(store, "job")] == ["0", "0"]
    assert [meet(store, "job", closed=0), meet(store, "job", closed=0), meet(store, "other")] == ["1", "1", "0"]
    new = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert meet(new, "job", closed=1) == "0"  # else hosts that come later would wait in another round
    say_ended(store, "job")
    assert [meet(store, "job"), meet(store, "job", closed=1), meet(store, "other")] == ["ended", "ended", "0"]


@pytest.mark.slow
def test_a_store_that_is_away_is_waited_for_and_a_stop_ends_the_loop(tmp_path, store):
    port = store.port
    asked = [sys.executable, ROOT / "scripts/launch/rendezvous.py", "meet", "127.0.0.1:1", "job"]
    away = subprocess.run(asked, capture_output=True, text=True)
    assert away.returncode == 1
    assert away.stderr.startswith("the rendezvous store at 127.0.0.1:1 does not answer"), away.stderr
    host = loop(tmp_path, "a", "hangs", port)
    wait_until(host, lambda: bool(rounds(tmp_path, "a")))
    host.terminate()
    assert host.wait(60) == 75
