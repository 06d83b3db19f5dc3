"""Shares of a preparation by hosts that share no disk: the bytes of one process, whatever is stopped or late."""

import errno
import json
import os
import shutil

import pytest

obstore = pytest.importorskip("obstore", reason="the client for buckets, keel[storage], is not installed")

from checkpoint import bucket as buckets  # noqa: E402
from checkpoint.bucket import Bucket, BucketError  # noqa: E402
from scripts.prepare_data import main as prepare_data  # noqa: E402
from tests.unit.data.test_shares import content, small_parts, text_of, write_corpus  # noqa: E402
from tests.unit.data.test_shares import tokenizer as tokenizer  # noqa: E402
from trainer.data.text import finish, shares_in_bucket  # noqa: E402

INPUTS = ["s3://bucket/in"]
URL = "s3://bucket/data/mine"


class Hosts:
    """Folders of hosts that share nothing but the bucket, whose objects are files."""

    def __init__(self, folder, tokenizer, monkeypatch):
        self.bucket = folder / "objects/bucket"
        self.folder = folder
        self._patch = monkeypatch
        self._tokenizer = tokenizer

    def prepare(self, host, *words, output=URL, options=("--drop-duplicates",)):
        """Run the command on a host; returns the exit code."""
        (self.folder / host).mkdir(exist_ok=True)
        self._patch.chdir(self.folder / host)
        common = ["--tokenizer", str(self._tokenizer), "--processes", "1", "--validation-fraction", "0.2"]
        return prepare_data([*INPUTS, "--output", output, *common, *options, *words])

    def left(self):
        """What is in the bucket beside the inputs and the data."""
        return {name for name in content(self.bucket) if not name.startswith(("in/", "data/mine/"))}


@pytest.fixture
def hosts(tmp_path, tokenizer, monkeypatch):
    def store(url, patience):
        return obstore.store.LocalStore(tmp_path / "objects" / url.partition("://")[2], mkdir=True)

    monkeypatch.setattr(buckets, "_store", store)
    (tmp_path / "objects/bucket/in").mkdir(parents=True)
    write_corpus(tmp_path / "objects/bucket/in")
    for file in (tmp_path / "objects/bucket/in").rglob("*.*"):
        os.utime(file, (1_700_000_000, 1_700_000_000))
    with small_parts():
        yield Hosts(tmp_path, tokenizer, monkeypatch)


def check(hosts, options=("--drop-duplicates",)):
    """Compare the data in the bucket with those that one process makes on a disk."""
    assert hosts.prepare("one", output="mine", options=options) == 0
    there = content(hosts.bucket / "data/mine")
    assert there.pop("tokenizer.model") == hosts._tokenizer.read_bytes()
    assert there == content(hosts.folder / "one/mine")
    assert hosts.left() == set()


@pytest.mark.parametrize(("n", "options"), [(3, ("--drop-duplicates",)), (2, ("--pack", "64")), (9, ())])
def test_hosts_without_a_shared_disk_give_the_bytes_of_one_process(hosts, capsys, n, options):
    """2: each share writes token files; 9: several share one. Each host brings only the inputs that its shard reads."""
    copies = "runs/copies/s3/bucket/in"
    for share in reversed(range(n)):
        assert hosts.prepare(f"host{share}", "--shard", f"{share}/{n}", options=options) == 0
        there = content(hosts.folder / f"host{share}" / copies)
        texts = {name for name, text in there.items() if text.strip(b"\0")}
        assert texts < content(hosts.bucket / "in").keys()
    assert not [path for path in hosts.folder.glob("host*/runs/copies/s3/bucket/data/**/*") if path.suffix == ".tokens"]
    assert hosts.prepare("last", "--finish", options=options) == 0
    assert not b"".join(content(hosts.folder / "last" / copies).values()).strip(b"\0")
    check(hosts, options)
    capsys.readouterr()
    for words in (("--finish",), ("--shard", f"0/{n}")):
        assert hosts.prepare("later", *words, options=options) == 0
        assert f"{URL}: already there" in capsys.readouterr().out
    assert hosts.prepare("later", "--shard", "0/2", options=("--text-key", "other")) == 1
    assert "was made with other settings" in capsys.readouterr().err


def test_files_whose_content_decides_how_they_are_divided(hosts):
    """A .json that is read as lines, one that is not, and row groups of .parquet files, of which one is damaged."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    texts = [text_of(i) for i in range(40)]
    folder = hosts.bucket / "in"
    (folder / "a.json").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[:10]))
    (folder / "b.json").write_text(json.dumps([{"text": text} for text in texts[10:20]]))
    parquet.write_table(pyarrow.table({"text": texts[20:]}), folder / "c.parquet", row_group_size=3)
    (folder / "d.parquet").write_bytes((folder / "c.parquet").read_bytes()[:-9] + b"\xffPAR1")
    options = ("--max-bad-files", "3")
    for share in range(3):
        assert hosts.prepare(f"host{share}", "--shard", f"{share}/3", options=options) == 0
    assert hosts.prepare("last", "--finish", options=options) == 0
    plan = hosts.folder / "host2/runs/copies/s3/bucket/data/.mine.shards/plan.jsonl"
    rows = list(map(json.loads, plan.read_text().splitlines()))
    assert [len(pieces) for _, path, pieces in rows[1:] if "c.parquet" in path] == [7]
    check(hosts, options)


def test_a_share_that_was_stopped_is_done_again_and_one_that_is_finished_is_not(hosts, capsys, monkeypatch):
    put = Bucket.put

    def stopped(self, key, content):
        if key.startswith(("raw/", "reports/")):
            raise KeyboardInterrupt
        put(self, key, content)

    assert hosts.prepare("a", "--shard", "0/3") == 0
    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "put", stopped)
        assert hosts.prepare("b", "--shard", "1/3") == 130
    capsys.readouterr()
    assert hosts.prepare("c", "--finish") == 1
    said = "s3://bucket/data/.mine.shards: 2 of 3 shards are not finished: 1-2. Run each of them as --shard I/3"
    assert said in capsys.readouterr().err
    for host, share, words in (("d", 1, "2 were written now, 0"), ("d", 2, "1 were written now, 0")):
        assert hosts.prepare(host, "--shard", f"{share}/3") == 0
        assert f"{words} were there" in capsys.readouterr().out
    assert hosts.prepare("e", "--shard", "0/3") == 0
    assert "0 were written now, 2 were there" in capsys.readouterr().out
    assert hosts.prepare("c", "--finish") == 0
    check(hosts)


def test_what_a_host_puts_late_is_not_mixed_with_what_another_has_put(hosts, capsys, monkeypatch):
    """A text changes while share 0 is made; another host makes the share again, and then the first puts its files."""
    for share in (1, 2):
        assert hosts.prepare("a", "--shard", f"{share}/3") == 0
    put_parts = shares_in_bucket._put_parts

    def late(*arguments):
        monkeypatch.setattr(shares_in_bucket, "_put_parts", put_parts)
        text = hosts.bucket / "in/text/00.py"
        text.write_text(text_of(0).replace("x", "y"))
        for share in range(3):
            assert hosts.prepare("c", "--shard", f"{share}/3") == 0
        monkeypatch.chdir(hosts.folder / "b")
        put_parts(*arguments)

    monkeypatch.setattr(shares_in_bucket, "_put_parts", late)
    assert hosts.prepare("b", "--shard", "0/3") == 0
    assert hosts.prepare("d", "--finish") == 1
    said = "in/text/00.py: changed while the shards were made. Run shards 0-1 of 3 again"
    assert said in capsys.readouterr().err
    assert hosts.prepare("b", "--shard", "0/3") == 0
    assert hosts.prepare("d", "--finish") == 0
    check(hosts)


@pytest.mark.parametrize("host", ["a", "b"])
def test_an_upload_of_the_end_that_was_stopped_goes_on(hosts, monkeypatch, host):
    """There, or on another host."""
    for share in range(2):
        assert hosts.prepare("a", "--shard", f"{share}/2") == 0
    put = Bucket.put

    def stopped(self, key, content):
        if key.endswith("1.tokens"):
            raise KeyboardInterrupt
        put(self, key, content)

    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "put", stopped)
        assert hosts.prepare("a", "--finish") == 130
    assert hosts.prepare("a", "--shard", "0/2") == 0
    assert not (hosts.bucket / "data/mine/prepare.json").exists()
    assert hosts.prepare(host, "--finish") == 0
    check(hosts)


def test_nothing_counts_that_a_host_still_has_of_work_that_was_deleted(hosts, monkeypatch):
    """Which differs in its settings alone."""

    def stop(*_):
        raise KeyboardInterrupt

    for options in ((), ("--pack", "64")):
        for share in range(9):
            assert hosts.prepare("a", "--shard", f"{share}/9", options=options) == 0
        if not options:
            with monkeypatch.context() as patch:
                patch.setattr(finish, "seal", stop)
                assert hosts.prepare("b", "--finish", options=options) == 130
            assert list((hosts.folder / "b").rglob(".mine.shards/output/train/*.tokens"))
            shutil.rmtree(hosts.bucket / "data/.mine.shards")
    assert hosts.prepare("b", "--finish", options=("--pack", "64")) == 0
    check(hosts, ("--pack", "64"))


@pytest.mark.parametrize("method", ["create", "put", "get_range"])
def test_a_bucket_that_refuses_is_named(hosts, capsys, monkeypatch, method):
    def refuses(self, *_):
        raise BucketError(errno.EACCES, "permission is denied", self.url)

    monkeypatch.setattr(Bucket, method, refuses)
    assert hosts.prepare("a", "--shard", "0/2") == 1
    place = "s3://bucket/in" if method == "get_range" else "s3://bucket/data/.mine.shards"
    assert f"error: {place}: permission is denied" in capsys.readouterr().err


def test_other_options_and_a_new_beginning(hosts, capsys):
    assert hosts.prepare("a", "--shard", "0/2", options=()) == 0
    assert hosts.prepare("b", "--shard", "1/2") == 1
    said = capsys.readouterr().err
    assert "drop_duplicates: False then, True now" in said
    assert "To begin again with all shards, delete s3://bucket/data/.mine.shards" in " ".join(said.split())
    assert hosts.prepare("b", "--shard", "1/3", options=()) == 1
    assert "the work is divided into 2 shards" in capsys.readouterr().err
    shutil.rmtree(hosts.bucket / "data/.mine.shards")
    for share in (0, 1):
        assert hosts.prepare("a", "--shard", f"{share}/2") == 0
    assert hosts.prepare("a", "--finish") == 0
    check(hosts)
    assert hosts.prepare("c", "--finish", output="s3://bucket/data/other") == 1
    assert "s3://bucket/data/.other.shards: no shards are there" in capsys.readouterr().err
