"""Text in a bucket of a real S3 server, prepared into it by hosts that share no disk, of which one is killed."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from checkpoint.bucket import Bucket
from scripts.prepare_data import main as prepare_data
from tests.bucket.ceph import Ceph
from tests.end_to_end.launch import ENVIRONMENT, ROOT
from trainer.data.tokenizer import train_sentencepiece

pytestmark = pytest.mark.slow

URL = "s3://keel/prepared/mine"
TEXT = ["s3://keel/texts", "--tokenizer", "s3://keel/t.model"]
WORDS = [*TEXT, "--validation-fraction", "0.1", "--drop-duplicates", "--processes", "1"]
KILLED_WHILE_PUTTING = """
import os, signal, sys
from checkpoint.bucket import Bucket
from scripts.prepare_data import main

def put_and_die(self, key, content, put=Bucket.put):
    if key.startswith("raw/"):
        os.kill(os.getpid(), signal.SIGKILL)
    put(self, key, content)

Bucket.put = put_and_die
main(sys.argv[1:])
"""


@pytest.fixture
def texts(server: Ceph, tmp_path: Path) -> None:
    """Four files of a megabyte, so that each becomes a token file, and a tokenizer."""
    texts = [f"def function_{i % 3000}(x):\n    return x + {i % 3000}\n" * 9 for i in range(9600)]
    bucket = Bucket("s3://keel/texts")
    for i in range(4):
        lines = [json.dumps({"text": text}) + "\n" for text in texts[i::4]]
        bucket.put(f"{i}.jsonl", "".join(lines).encode())
    train_sentencepiece(iter(texts[:50]), tmp_path / "t.model", 300)
    Bucket("s3://keel").put("t.model", (tmp_path / "t.model").read_bytes())


def start(folder: Path, server: Ceph, *words: str, code: str = "") -> subprocess.Popen[bytes]:
    folder.mkdir(exist_ok=True)
    program = ["-c", code] if code else [str(ROOT / "scripts/prepare_data.py")]
    environment = ENVIRONMENT | server.environment | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, *program, *WORDS, "--output", URL, *words]
    return subprocess.Popen(command, cwd=folder, env=environment)


def content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def check(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare what is in the bucket with what one process makes on a disk."""
    (folder / "one").mkdir()
    monkeypatch.chdir(folder / "one")
    assert prepare_data([*WORDS, "--output", "mine"]) == 0
    bucket = Bucket("s3://keel/prepared")
    there = {key: bucket.get(key) for key in bucket.list()}
    bucket.delete(there)
    assert there.pop("mine/tokenizer.model") == (folder / "t.model").read_bytes()
    assert there == {f"mine/{key}": data for key, data in content(folder / "one/mine").items()}


def test_shares_of_three_hosts_of_which_some_are_killed(
    server: Ceph, texts: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Two begin at once and plan at once; one is killed in the middle of a file, and one while it puts its files."""
    both = [start(tmp_path / f"host{share}", server, "--shard", f"{share}/3") for share in (0, 2)]
    killed = start(tmp_path / "host1", server, "--shard", "1/3")
    while not list((tmp_path / "host1").rglob("unfinished.*/raw/.*.tmp")):
        assert killed.poll() is None
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    assert [process.wait(120) for process in both] == [0, 0]
    while_putting = start(tmp_path / "host1", server, "--shard", "1/3", code=KILLED_WHILE_PUTTING)
    assert while_putting.wait(120) == -signal.SIGKILL
    assert start(tmp_path / "last", server, "--finish").wait(120) == 1
    assert start(tmp_path / "another", server, "--shard", "1/3").wait(120) == 0
    assert start(tmp_path / "last", server, "--finish").wait(120) == 0
    check(tmp_path, monkeypatch)
