"""Files that are put in parts, as those over 5,000 MiB are; here from 6 MiB on."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("obstore", reason="the client for buckets, keel[storage], is not installed")

from checkpoint import bucket_files
from checkpoint.bucket import Bucket, Patience
from checkpoint.bucket_files import UNFINISHED, bring, put_folder
from configs.errors import UserError
from tests.bucket.between import Between, between
from tests.bucket.ceph import Ceph
from tests.bucket.clouds import Azure, Google, Kind, served
from tests.bucket.test_run_in_bucket import content
from tests.end_to_end.launch import ENVIRONMENT, ROOT

pytestmark = pytest.mark.slow

PART_BYTES = 5 << 20
"""The least that S3 takes."""
LOWERED = {"_ONE_REQUEST": 6 << 20, "_PART_BYTES": PART_BYTES}
COMMAND = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs the tests in the background ignores it
from pathlib import Path
from checkpoint import bucket_files
from scripts.command import run_command

vars(bucket_files).update({lowered})
work = lambda console: bucket_files.put_folder(Path("made"), sys.argv[1], "index.json", lambda *told, **more: None)
sys.exit(run_command(work, "stopped; not complete"))
"""


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a file of nine parts and an empty one; here, and in this process, large is what is over 6 MiB."""
    for name, value in LOWERED.items():
        monkeypatch.setattr(bucket_files, name, value)
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "made"
    (folder / "inside").mkdir(parents=True)
    (folder / "inside/adamw.pt").write_bytes(np.random.default_rng(0).bytes(8 * PART_BYTES + 12345))
    (folder / "empty").write_bytes(b"")
    (folder / "index.json").write_bytes(b"{}")
    return folder


@pytest.fixture
def way(server: Ceph, monkeypatch: pytest.MonkeyPatch) -> Iterator[Between]:
    """What stands between this process and the server."""
    with between(server.environment) as (way, environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        yield way


def put(made: Path, url: str) -> None:
    put_folder(made, url, "index.json", lambda done, total, message: None)


def assert_put(server: Ceph, made: Path, url: str) -> None:
    """All files are there, and nothing else, seen or unseen."""
    assert content(bring(url)) == content(made)
    name = url.removeprefix("s3://keel/")
    assert sorted(key for key in server.entries("keel") if name in key) == [f"{name}/{key}" for key in content(made)]


def uploads(server: Ceph, url: str) -> list[int]:
    """How many parts have arrived of each upload that has neither come to its end nor been removed.

    A part that the server was receiving when an upload was removed is not counted, and may stay: so S3 has it.
    """
    found = [key.split("/", 1)[1] for key in server.entries("keel") if f"_multipart_{url[10:]}/" in key]
    return [sum(key.startswith(name[:-4]) for key in found) - 1 for name in found if name.endswith(".meta")]


def when(condition, action) -> threading.Thread:
    """Do something as soon as a condition holds."""

    def wait() -> None:
        while not condition():
            time.sleep(0.01)
        action()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def test_the_same_bytes_are_told_and_not_brought_again(server: Ceph, made: Path, monkeypatch: pytest.MonkeyPatch):
    url = "s3://keel/large"
    told: list[int] = []
    put_folder(made, url, "index.json", lambda done, total, message: told.append(done))
    assert told == sorted(told)
    assert len(set(told)) == 10
    assert_put(server, made, url)
    assert Bucket(url).look("inside/adamw.pt").e_tag.endswith("-9")  # of nine parts
    monkeypatch.setattr(Bucket, "get_range", None)
    bring(url)


@pytest.mark.parametrize(("scheme", "kind"), [("gs", Google), ("az", Azure)])
def test_the_other_clouds(made: Path, monkeypatch: pytest.MonkeyPatch, scheme: str, kind: Kind):
    url = f"{scheme}://keel/large"
    with served(kind) as (objects, environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        put(made, url)
        assert content(bring(url)) == content(made)
        assert objects.uploads == 1
        assert not objects.parts


def test_a_server_that_is_busy_between_the_parts_and_one_that_is_killed(server: Ceph, made: Path, way: Between):
    url = "s3://keel/busy_between"
    way.passes, way.error = 8, (503, "SlowDown")
    ended = when(lambda: way.passes < -3, lambda: setattr(way, "error", None))
    put(made, url)
    ended.join()
    assert_put(server, made, url)

    url = "s3://keel/killed_between"
    way.rate = 5e6

    def kill() -> None:
        server.kill_gateway()
        time.sleep(1)
        server.start_gateway()

    ended = when(lambda: any(uploads(server, url)), kill)
    put(made, url)
    ended.join()
    assert_put(server, made, url)


@pytest.mark.parametrize("status", [503, 403])
def test_a_server_that_refuses_to_the_end_leaves_nothing(
    server: Ceph, made: Path, way: Between, monkeypatch: pytest.MonkeyPatch, status: int
):
    """It answers again when the client removes what had arrived."""
    url = f"s3://keel/refused_{status}"
    monkeypatch.setattr(bucket_files, "Patience", lambda request_seconds, seconds: Patience(request_seconds, 1))
    way.passes, way.error = 7, (status, "SlowDown" if status == 503 else "AccessDenied")
    way.spares = "DELETE"
    with pytest.raises(UserError, match="too busy" if status == 503 else "permission is denied"):
        put(made, url)
    way.error = None
    assert Bucket(url).list().keys() == {UNFINISHED, f"inside/{UNFINISHED}", "empty"}
    assert not uploads(server, url)
    put(made, url)
    assert_put(server, made, url)


@pytest.mark.parametrize("still_knows", [True, False])
def test_the_answer_to_the_last_request_of_an_upload_may_be_lost(
    server: Ceph, made: Path, way: Between, monkeypatch: pytest.MonkeyPatch, still_knows: bool
):
    """A server may still know the upload when it is asked again, as Ceph does, or not, as Google says of its own."""
    url = "s3://keel/lost"
    if still_knows:
        way.unanswered = "POST /keel/lost/inside/adamw.pt?uploadId="
        put(made, url)
        assert way.unanswered is None
        assert_put(server, made, url)
        return
    url = "gs://keel/lost"
    with served(Google) as (objects, environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        Bucket(url).put("inside/adamw.pt", bytes((made / "inside/adamw.pt").stat().st_size))
        objects.answers_lost = 1
        put(made, url)
        assert objects.answers_lost == 0
        assert content(bring(url)) == content(made)
        objects.uploads_lost = True
        with pytest.raises(UserError, match=r"gs://keel/again/inside/adamw\.pt: the server has lost the upload"):
            put(made, "gs://keel/again")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_command_that_is_stopped(server: Ceph, made: Path, number: signal.Signals):
    """By Ctrl-C: nothing is left but the mark; killed: parts as well, which no listing shows."""
    url = f"s3://keel/stopped_{number.name}"
    command = [sys.executable, "-c", COMMAND.replace("{lowered}", repr(LOWERED)), url]
    with between(server.environment) as (way, environment):
        way.rate = 6e6
        environment = ENVIRONMENT | environment | {"PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(command, cwd=made.parent, env=environment, stderr=subprocess.PIPE, text=True)
        when(
            lambda: process.poll() is not None or any(uploads(server, url)), lambda: process.send_signal(number)
        ).join()
        way.rate = None
        _, said = process.communicate()
    assert process.returncode != 0
    assert "Traceback" not in said
    assert bool(uploads(server, url)) == (number == signal.SIGKILL)
    assert "inside/adamw.pt" not in Bucket(url).list()
    assert UNFINISHED in Bucket(url).list()
    put(made, url)
    assert content(bring(url)) == content(made)


def test_the_size_of_a_part_grows_with_the_file():
    """No upload has more than 10,000 parts."""
    for size in (1, 5000 << 20, 10_000 * (16 << 20), 10_000 * (16 << 20) + 1, 5 << 40):
        part = bucket_files._part_bytes(size)
        assert part >= 16 << 20
        assert -(-size // part) <= 10_000
