"""Runs whose token files are in a bucket of a real S3 server, without a cache to begin with."""

import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import numpy as np
import pytest

from checkpoint.bucket import Bucket
from scripts import prepare_data
from tests.bucket.ceph import Ceph
from tests.end_to_end.launch import ENVIRONMENT, ROOT, curve, finish, keel, launch, records, start
from trainer.data.text.token_writer import TokenFileWriter
from trainer.data.tokenizer import load_tokenizer, train_sentencepiece

pytestmark = pytest.mark.slow

VOCAB = 384
FILES = sorted((ROOT / "docs").glob("*.md"))


@pytest.fixture(scope="module")
def place(server: Ceph, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `text`, a tokenizer, and `data`, which is in the bucket as well: prepared from texts in it."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "text").mkdir()
    texts = Bucket("s3://keel/text")
    for file in FILES:
        (folder / "text" / file.name).write_bytes(file.read_bytes())
        texts.put(file.name, file.read_bytes())
    train_sentencepiece((file.read_text() for file in FILES[:8]), folder / "tokenizer.model", VOCAB)
    common = ["--tokenizer", str(folder / "tokenizer.model"), "--validation-fraction", "0.2", "--processes", "1"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert prepare_data.main(["text", "--output", "data", *common]) == 0
        assert prepare_data.main(["s3://keel/text", "--output", "s3://keel/data", *common]) == 0
    return folder


def words(place: Path, data: str, **keys: str) -> str:
    def sources(split: str) -> str:
        return f"""'[{{name = "text", kind = "tokens", path = "{data}/{split}"}}]'"""

    tokenizer = f"{data}/tokenizer.model" if "://" in data else place / "tokenizer.model"
    common = f"--model.vocab_size {VOCAB} --tokenizer.path {tokenizer} --data.document_mask true"
    validation = f"--validation.interval 10 --validation.sequences 13 --validation.sources {sources('validation')}"
    further = " ".join(f"--{key} {value}" for key, value in keys.items())
    return f"{common} --data.sources {sources('train')} {validation} --training.seq_len 64 {further}"


def test_the_same_bits_as_from_a_disk_stopped_and_resumed_with_an_empty_cache(
    server: Ceph, place: Path, tmp_path: Path
):
    env = server.environment
    for run, data in (("run_here", str(place / "data")), ("run_there", "s3://keel/data")):
        cache = {"job.output_dir": run, "data.cache_folder": "cache"}
        launch(tmp_path, words(place, data, **cache), ranks=2, env=env)
    assert curve(tmp_path / "run_there") == curve(tmp_path / "run_here")
    for command in ("step {} 7", "find {} 'keel prepare'", "find {} --document 3", "ledger {} --step 12", "ledger {}"):
        told, told_of_bucket = (keel_data(tmp_path, command.format(run), env) for run in ("run_here", "run_there"))
        assert len(told.splitlines()) >= 2
        assert told_of_bucket.replace("s3://keel/data", str(place / "data")) == told.replace("run_here", "run_there")
    halves = {"job.output_dir": "halves", "checkpoint.interval": "10"}
    for number, steps in enumerate(("10", "20")):
        own = {"data.cache_folder": f"cache-{number}", "training.steps": steps}
        outcome = launch(tmp_path, words(place, "s3://keel/data", **halves, **own), ranks=2, env=env)
        assert "requests were made by this rank for the data's list, headers and tables" in outcome.out
    assert curve(tmp_path / "halves") == curve(tmp_path / "run_here")
    assert [record.get("validation_loss") for record in records(tmp_path / "halves")] == [
        record.get("validation_loss") for record in records(tmp_path / "run_here")
    ]


def keel_data(folder: Path, words: str, env: dict[str, str]) -> str:
    """What `keel data` prints of a run."""
    done = keel(folder, "data", *shlex.split(words), env=env)
    assert done.code == 0, done.err
    return done.out


@pytest.fixture(scope="module")
def large(place: Path) -> str:
    """A place with random tokens, of which each window needs a request; and the same in the folder `large`."""
    bucket = Bucket("s3://keel/large/train")
    (place / "large/train").mkdir(parents=True)
    rng = np.random.default_rng(0)
    digest = load_tokenizer(place / "tokenizer.model").hash
    for name in ("a.tokens", "b.tokens"):
        with TokenFileWriter(place / "large/train" / name, VOCAB, digest) as writer:
            for _ in range(200):
                writer.append(rng.integers(0, VOCAB, 50_000))
        bucket.put(name, (place / "large/train" / name).read_bytes())
    return "s3://keel/large"


def job(place: Path, data: str, run: str, steps: int, **keys: str) -> str:
    tokenizer = f"--model.vocab_size {VOCAB} --tokenizer.path {place / 'tokenizer.model'} --training.steps {steps}"
    source = f"""--data.sources '[{{name = "text", kind = "tokens", path = "{data}/train"}}]'"""
    further = " ".join(f"--{key} {value}" for key, value in keys.items())
    return f"{tokenizer} {source} --metrics.tensorboard false --job.output_dir {run} {further}"


def test_a_server_that_is_away_for_a_while_is_waited_for_and_a_changed_object_ends_the_run(
    server: Ceph, place: Path, large: str, tmp_path: Path
):
    process = start(tmp_path, job(place, large, "run", 100_000, **{"data.cache_gib": "0"}), env=server.environment)
    ended = threading.Thread(target=process.wait)
    ended.start()
    wait_for(tmp_path / "run", 20, ended)
    server.kill_gateway()
    time.sleep(12)
    waiting = len(curve(tmp_path / "run"))
    time.sleep(2)
    assert len(curve(tmp_path / "run")) == waiting
    server.start_gateway()
    wait_for(tmp_path / "run", waiting + 20, ended)
    content = bytearray((place / "large/train/b.tokens").read_bytes())
    Bucket(f"{large}/train").put("b.tokens", bytes(content[:-1]) + b"x")
    outcome = finish(process)
    Bucket(f"{large}/train").put("b.tokens", bytes(content))
    assert outcome.code == 1
    assert "tokens, which has not come for 5 s" in outcome.err
    assert "the run goes on" in outcome.err
    assert "s3://keel/large/train/b.tokens: the object has changed since this launch began" in outcome.err


def wait_for(run: Path, steps: int, process: threading.Thread) -> None:
    while not (run / "metrics.jsonl").exists() or len(curve(run)) < steps:
        assert process.is_alive()
        time.sleep(0.05)


@pytest.fixture
def slow(server: Ceph) -> Iterator[dict[str, str]]:
    """The environment of a client for which a request takes 50 ms, and all bytes 20 MB/s."""
    port = server.environment["AWS_ENDPOINT_URL"].rpartition(":")[2]
    command = [sys.executable, "-m", "tests.bucket.slow", port]
    with subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        yield server.environment | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{process.stdout.readline().strip()}"}
        process.kill()


def test_a_step_takes_as_long_as_from_a_disk_when_the_server_is_slow(
    slow: dict[str, str], place: Path, large: str, tmp_path: Path
):
    """Eight windows a step, each a request that no cache has."""
    keys = {"training.seq_len": "512", "data.cache_gib": "0"}
    for run, data in (("here", str(place / "large")), ("there", large)):
        launch(tmp_path, job(place, data, run, 40, **keys), env=slow)
    here, there = records(tmp_path / "here")[5:], records(tmp_path / "there")[5:]
    assert [record["loss"] for record in here] == [record["loss"] for record in there]
    waited = sum(record["data_seconds"] for record in there)
    assert waited < 0.1 * sum(record["step_seconds"] for record in there)
    assert median(r["step_seconds"] for r in there) < 2 * median(r["step_seconds"] for r in here)  # a busy machine
