"""Shares of a preparation as tasks of a real Ray, of which a worker is killed: pip install ray."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from checkpoint.bucket import Bucket
from scripts.prepare_data import main as prepare_data
from tests.end_to_end.launch import ROOT
from tests.preparing import prepare
from trainer.data.tokenizer import train_sentencepiece

pytestmark = [pytest.mark.slow, pytest.mark.long]
ENVIRONMENT = os.environ | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1"}


def free_port():
    """Below those that Ray gives its workers."""
    for port in range(7379, 9000):
        with socket.socket() as tried:
            if tried.connect_ex(("127.0.0.1", port)) != 0:
                return port
    raise AssertionError("no port is free")


@pytest.fixture
def cluster(tmp_path):
    """The address and the session of a Ray with two CPUs."""
    yield from started(tmp_path, ENVIRONMENT)


@pytest.fixture
def cluster_beside_a_bucket(server, tmp_path):
    """The same; its hosts have the credentials of a server."""
    yield from started(tmp_path, ENVIRONMENT | server.environment)


def started(tmp_path, environment):
    pytest.importorskip("ray")
    port = free_port()
    words = f"start --head --port {port} --num-cpus 2 --include-dashboard=false --object-store-memory 100000000 --block"
    command = [str(Path(sys.executable).with_name("ray")), *words.split()]
    with (tmp_path / "ray.log").open("w") as log:
        head = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        deadline = time.monotonic() + 200
        while "Ray runtime started" not in (tmp_path / "ray.log").read_text():
            begins = head.poll() is None and time.monotonic() < deadline
            assert begins, (tmp_path / "ray.log").read_text()
            time.sleep(0.2)
        yield f"127.0.0.1:{port}", head.pid
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            for pid in of_session(head.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            time.sleep(1)
        head.wait()


def of_session(session, title=""):
    """The processes of a session whose command line begins with a title."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(place.name)) == session and (place / "cmdline").read_text().startswith(title):
                found.append(int(place.name))
        except OSError:  # it has ended
            continue
    return found


def content(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("named", ["--ray", "RAY_ADDRESS", "auto"])
def test_a_cluster_of_ray_gives_the_bytes_of_one_process_although_a_worker_is_killed(cluster, tmp_path, named):
    address, session = cluster
    environment = ENVIRONMENT | ({"RAY_ADDRESS": address} if named == "RAY_ADDRESS" else {})
    texts = [f"def function_{i % 3000}(x):\n    return x + {i % 3000}\n" * 9 for i in range(20_000)]
    (tmp_path / "text").mkdir()
    for i in range(4):
        lines = [json.dumps({"text": text}) + "\n" for text in texts[i::4]]
        (tmp_path / "text" / f"{i}.jsonl").write_text("".join(lines))
    train_sentencepiece(iter(texts[:50]), tmp_path / "t.model", 300)
    prepare([str(tmp_path / "text")], tmp_path / "one", tmp_path / "t.model", drop_duplicates=True)

    words = [str(tmp_path / "text"), "--output", str(tmp_path / "out"), "--tokenizer", str(tmp_path / "t.model")]
    command = [sys.executable, str(ROOT / "scripts/prepare_data.py"), *words, "--drop-duplicates"]
    command += ["--ray", address if named == "--ray" else "auto"]
    process = subprocess.Popen(command, env=environment)
    working = tmp_path / ".out.shards"
    while not list(working.glob("unfinished.*/raw/.*.tmp")):  # until one is in the middle of a file
        assert process.poll() is None
        time.sleep(0.02)
    workers = of_session(session, "ray::_make_share")
    assert workers
    os.kill(workers[0], signal.SIGKILL)
    assert process.wait(300) == 0
    assert content(tmp_path / "out") == content(tmp_path / "one")


def test_a_cluster_of_ray_works_in_a_bucket(cluster_beside_a_bucket, server, tmp_path, monkeypatch):
    """The text, the tokenizer and the output are in a bucket; a worker is killed."""
    address, session = cluster_beside_a_bucket
    texts = [f"def function_{i % 3000}(x):\n    return x + {i % 3000}\n" * 9 for i in range(20_000)]
    bucket = Bucket("s3://keel/ray")
    for i in range(4):
        lines = [json.dumps({"text": text}) + "\n" for text in texts[i::4]]
        bucket.put(f"text/{i}.jsonl", "".join(lines).encode())
    train_sentencepiece(iter(texts[:50]), tmp_path / "t.model", 300)
    bucket.put("t.model", (tmp_path / "t.model").read_bytes())
    words = ["s3://keel/ray/text", "--tokenizer", "s3://keel/ray/t.model", "--drop-duplicates"]
    (tmp_path / "driver").mkdir()
    command = [sys.executable, str(ROOT / "scripts/prepare_data.py"), *words, "--output", "s3://keel/ray/out"]
    process = subprocess.Popen(
        [*command, "--ray", address], env=ENVIRONMENT | server.environment, cwd=tmp_path / "driver"
    )
    while not list(tmp_path.rglob("unfinished.*/raw/.*.tmp")):  # until one is in the middle of a file
        assert process.poll() is None
        time.sleep(0.02)
    os.kill(of_session(session, "ray::_make_share")[0], signal.SIGKILL)
    assert process.wait(300) == 0
    (tmp_path / "one").mkdir()
    monkeypatch.chdir(tmp_path / "one")
    assert prepare_data([*words, "--output", "out"]) == 0
    there = {key: bucket.get(key) for key in bucket.list() if not key.startswith("text/")}
    assert there.pop("out/tokenizer.model") == there.pop("t.model")
    assert there == {f"out/{key}": data for key, data in content(tmp_path / "one/out").items()}


@pytest.mark.parametrize("address", ["127.0.0.1:1", "here", "127.0.0.1:123456"])
def test_where_no_ray_runs_one_line_says_so(tmp_path, capsys, monkeypatch, address):
    pytest.importorskip("ray")
    (tmp_path / "a.txt").write_text("a text")
    train_sentencepiece(iter(["a text " * 99, "another one " * 99]), tmp_path / "t.model", 270)
    words = [str(tmp_path / "a.txt"), "--output", str(tmp_path / "out"), "--tokenizer", str(tmp_path / "t.model")]
    assert prepare_data([*words, "--ray", address]) == 1
    assert f"error: --ray {address}: not HOST:PORT of a cluster of Ray that runs (" in capsys.readouterr().err
    monkeypatch.setenv("RAY_ADDRESS", address)
    assert prepare_data([*words, "--ray", "auto"]) == 1
    assert f"error: RAY_ADDRESS {address}: not HOST:PORT of a cluster of Ray that runs (" in capsys.readouterr().err
