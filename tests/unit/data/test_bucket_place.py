"""Token files in a bucket: the same tokens as from a disk, what is requested and kept, and what is said.

The real server is in tests/bucket; here a folder of files stands for it.
"""

import errno
import logging
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from multiprocessing import get_context

import numpy as np
import pytest

obstore = pytest.importorskip("obstore", reason="the client for buckets, keel[storage], is not installed")

from checkpoint import bucket as buckets  # noqa: E402
from checkpoint.bucket import Bucket, BucketError  # noqa: E402
from configs.errors import ConfigError, OutageError, UserError  # noqa: E402
from configs.load import load  # noqa: E402
from scripts import prepare_data  # noqa: E402
from tests.conftest import ROOT  # noqa: E402
from trainer.data import block_cache, bucket_place  # noqa: E402
from trainer.data.block_cache import WAYS, BlockCache  # noqa: E402
from trainer.data.loader import build_loader  # noqa: E402
from trainer.data.packing import packed_for, write_mark  # noqa: E402
from trainer.data.text.token_writer import TokenFileWriter  # noqa: E402
from trainer.data.token_file import BLOCK_BYTES, HEADER_BYTES, TokenFolder, folder_fingerprint  # noqa: E402
from trainer.data.tokenizer import load_tokenizer, train_sentencepiece  # noqa: E402

VOCAB = 1000
URL = "s3://bucket/data/train"
TEXTS = ["def f(x):\n    return x\n" * 30, "class A:\n    pass\n" * 40, "import os, sys\nprint(os.name)\n" * 20]


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """The folder whose files are the objects of URL: three token files of some blocks; there is no cache yet."""
    root = tmp_path / "objects"

    def store(url, patience):
        return obstore.store.LocalStore(root / url.partition("://")[2], mkdir=True)

    monkeypatch.setattr(buckets, "_store", store)
    monkeypatch.setattr(bucket_place, "TELL_SECONDS", 0.2)
    # The threads of a store last as long as its process, and reports of hangs have the stacks of a hundred at most.
    monkeypatch.setattr(bucket_place, "REQUESTS_AT_ONCE", 2)
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    train = root / "bucket/data/train"
    train.mkdir(parents=True)
    for name in "abc":
        with TokenFileWriter(train / f"{name}.tokens", VOCAB, "0" * 32) as writer:
            for _ in range(12):
                writer.append(rng.integers(0, VOCAB, rng.integers(2_000, 20_000)))
    yield train
    forget()


def forget():
    """What another process does not know."""
    bucket_place.bucket_place.cache_clear()
    bucket_place._store_of.cache_clear()


@pytest.fixture
def data(tmp_path):
    return table(tmp_path)


def table(tmp_path, **keys):
    words = {"data.cache_folder": str(tmp_path / "cache"), "data.cache_gib": "0.02", **keys}
    flags = [word for key, value in words.items() for word in (f"--{key}", value)]
    return load(str(ROOT / "tests/end_to_end/tiny.toml"), flags).config.data


@pytest.fixture
def asked(monkeypatch):
    """The ranges that are requested: (key, start, stop)."""
    found = []
    get_range = Bucket.get_range

    def get(self, key, start, stop):
        found.append((key, start, stop))
        return get_range(self, key, start, stop)

    monkeypatch.setattr(Bucket, "get_range", get)
    return found


def assert_same(folder, url, data, windows=40):
    here, there = TokenFolder(folder, VOCAB), TokenFolder(url, VOCAB, data=data)
    assert here.fingerprint == there.fingerprint == folder_fingerprint(url, data)
    assert here.n_tokens == there.n_tokens
    rng = np.random.default_rng(1)
    for length in (1, 100, 5_000, 40_000):
        for start in rng.integers(0, here.n_tokens - length, windows // 4).tolist():
            assert np.array_equal(here.read(start, length), there.read(start, length))
            assert np.array_equal(here.document_starts(start, length), there.document_starts(start, length))


def test_the_same_tokens_as_from_a_disk_and_each_byte_once(folder, data, asked):
    assert_same(folder, URL, data)
    spans = sorted(asked)
    assert all(a[0] != b[0] or a[2] <= b[1] for a, b in pairwise(spans))
    assert len(asked) <= 3 * 9
    del asked[:]
    forget()  # another launch on this host
    assert_same(folder, URL, data)
    assert not asked


@pytest.mark.parametrize("gib", ["0", "0.0006"])
def test_a_cache_that_is_too_small_for_the_data_or_none(folder, tmp_path, monkeypatch, gib):
    """Eight blocks, or none, on the disk, and three in memory."""
    monkeypatch.setattr(bucket_place, "_KEPT_BLOCKS", 3)
    assert_same(folder, URL, table(tmp_path, **{"data.cache_gib": gib}))
    size = sum(file.stat().st_size for file in tmp_path.glob("cache/*"))
    assert size < 0.0006 * 2**30 + BLOCK_BYTES


def test_a_start_takes_one_listing_and_two_requests_a_file_at_most(folder, data, asked):
    before = bucket_place.requests_made()
    folder_fingerprint(URL, data)
    TokenFolder(URL, VOCAB, data=data)
    assert len(asked) <= 6
    assert bucket_place.requests_made() - before == 1 + len(asked)


def _read_all(url, folder, objects):
    buckets._store = lambda url, patience: obstore.store.LocalStore(objects / url.partition("://")[2])
    made = []
    get_range = Bucket.get_range

    def get(self, key, start, stop):
        made.append(key)
        time.sleep(0.05)
        return get_range(self, key, start, stop)

    Bucket.get_range = get
    read = TokenFolder(url, VOCAB, data=table(folder))
    return read.read(0, read.n_tokens).sum().item(), len(made)


@pytest.mark.slow
def test_the_ranks_of_a_host_share_the_cache_and_bring_a_block_once(folder, tmp_path):
    with get_context("spawn").Pool(3) as pool:
        found = pool.starmap(_read_all, 3 * [(URL, tmp_path, tmp_path / "objects")])
    here = TokenFolder(folder, VOCAB)
    assert {total for total, _ in found} == {here.read(0, here.n_tokens).sum().item()}
    blocks = sum(file.stat().st_size // BLOCK_BYTES + 1 for file in folder.iterdir())
    assert sum(made for _, made in found) <= blocks + 3


def test_of_processes_that_write_one_slot_at_once_nobody_reads_what_was_not_put(tmp_path):
    """All blocks in one set of eight slots, by caches that know nothing of each other."""
    contents = [os.urandom(3000) for _ in range(20)]

    def use(seed):
        cache = BlockCache(tmp_path / "cache", 1, 4096)
        found = 0
        for number in np.random.default_rng(seed).integers(0, 20, 300).tolist():
            key = number.to_bytes(16, "little")
            content = cache.get(0, key)
            assert content in (None, contents[number])
            found += content is not None
            if content is None:
                cache.put(0, key, contents[number])
        return found

    with ThreadPoolExecutor(4) as pool:
        assert min(pool.map(use, range(4))) > 20


def test_threads_take_slots_of_their_own(tmp_path):
    """Eight blocks of one set come at the same time, as those of several files do."""
    for number in range(20):
        cache = BlockCache(tmp_path / str(number), 1, 4096)
        together = threading.Barrier(WAYS)

        def put(nth, cache=cache, together=together):
            together.wait()
            cache.put(0, bytes([nth]) * 16, bytes([nth]) * 4000)

        with ThreadPoolExecutor(WAYS) as pool:
            list(pool.map(put, range(WAYS)))
        assert all(cache.get(0, bytes([nth]) * 16) == bytes([nth]) * 4000 for nth in range(WAYS))


def test_a_block_that_the_local_disk_has_changed_is_requested_again(folder, data, tmp_path, asked):
    assert_same(folder, URL, data)
    [file] = (tmp_path / "cache").iterdir()
    with file.open("r+b") as disk:
        disk.seek(file.stat().st_size - 100)
        disk.write(b"x" * 50)
    del asked[:]
    forget()
    assert_same(folder, URL, data)
    assert len(asked) == 1


def test_a_full_disk_is_told_once_and_the_data_come_all_the_same(folder, data, monkeypatch, caplog):
    monkeypatch.setattr(block_cache, "_LEFT_BYTES", 1 << 60)
    assert_same(folder, URL, data)
    [said] = caplog.messages
    assert "blocks of data can't be kept here (its disk has less than" in said
    assert "data.cache_folder" in said


def test_a_folder_that_others_may_write_to_is_refused(folder, data, tmp_path):
    (tmp_path / "cache").mkdir(mode=0o777)
    (tmp_path / "cache").chmod(0o777)
    with pytest.raises(UserError, match=r"others may write to it.*data\.cache_folder"):
        TokenFolder(URL, VOCAB, data=data)


def test_an_object_that_changes_is_named_and_never_mixed_with_the_old_one(folder, data):
    read = TokenFolder(URL, VOCAB, data=data)
    path = folder / "b.tokens"
    content = path.read_bytes()
    path.write_bytes(content[: HEADER_BYTES + 70_000] + content[HEADER_BYTES + 70_000 :][::-1])
    before = read.files[0].n_tokens
    with pytest.raises(UserError, match=rf"{URL}/b.tokens: the object has changed since .*its ETag was .*and now is"):
        read.read(before + 40_000, 60_000)
    path.unlink()
    with pytest.raises(UserError, match=rf"{URL}/b.tokens: the object is gone since this launch began"):
        read.read(before + 40_000, 60_000)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda content: content[:-9], "truncated"),
        (lambda content: content[:70_000] + bytes([content[70_000] ^ 1]) + content[70_001:], "the tokens are damaged"),
        (lambda content: content[:300] + content[400:500] + content[300:400] + content[500:], "tokens are damaged"),
        (lambda content: content[:-9] + b"\1" * 9, "the tables after the tokens are damaged"),
        (lambda content: b"x" + content[1:], "not a token file of Keel"),
    ],
)
def test_bytes_that_are_cut_changed_or_swapped_are_named(folder, data, change, said):
    path = folder / "b.tokens"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(UserError, match=said) as raised:
        TokenFolder(URL, VOCAB, data=data).read(0, 300_000)
    assert f"{URL}/b.tokens" in str(raised.value)


@pytest.mark.parametrize(("at", "said"), [(0, "the tokens are damaged"), (200_000, "the tables .* are damaged")])
def test_what_was_damaged_on_its_way_is_not_kept(folder, data, monkeypatch, at, said):
    """A transfer without TLS; the next launch finds what is in the bucket."""
    get_range = Bucket.get_range

    def get(self, key, start, stop):
        content, e_tag = get_range(self, key, start, stop)
        is_damaged = key == "a.tokens" and (start == 0 if at == 0 else start > at)
        return content[:-50] + bytes(50) if is_damaged else content, e_tag

    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "get_range", get)
        with pytest.raises(UserError, match=said):
            TokenFolder(URL, VOCAB, data=data).read(0, 1000)
    forget()
    assert_same(folder, URL, data)


def test_names_where_nothing_is(folder, data):
    with pytest.raises(UserError, match="there is nothing below this name; keel prepare"):
        TokenFolder("s3://bucket/none", VOCAB, data=data)
    with pytest.raises(UserError, match=r"no tokens in this folder .*there are some in s3://bucket/data/train"):
        TokenFolder("s3://bucket/data", VOCAB, data=data)


def test_a_server_that_is_away_for_a_moment_is_waited_for_and_the_wait_is_told(folder, data, monkeypatch, caplog):
    read = TokenFolder(URL, VOCAB, data=data)
    get_range = Bucket.get_range
    back_at = time.monotonic() + 0.8

    def get(self, key, start, stop):
        time.sleep(0.05)
        if time.monotonic() < back_at:
            raise BucketError(errno.EIO, "the server can't be reached", self.url)
        return get_range(self, key, start, stop)

    monkeypatch.setattr(Bucket, "get_range", get)
    assert np.array_equal(read.read(0, 100_000), TokenFolder(folder, VOCAB).read(0, 100_000))
    assert len(caplog.messages) == 2
    assert "the run waits for s3://bucket/data/train/a.tokens" in caplog.messages[0]
    assert "the server can't be reached" in caplog.messages[0]
    assert "has come, after 1 s; the run goes on" in caplog.messages[1]


def test_a_server_that_stays_away_ends_the_run_as_an_outage(folder, data, monkeypatch, caplog):
    caplog.set_level(logging.CRITICAL)
    read = TokenFolder(URL, VOCAB, data=data)
    monkeypatch.setattr(bucket_place, "WAIT_SECONDS", 0.3)

    def get(self, key, start, stop):
        time.sleep(0.05)
        raise BucketError(errno.EIO, "the server can't be reached", f"{self.url}/{key}")

    monkeypatch.setattr(Bucket, "get_range", get)
    with pytest.raises(OutageError, match=r"a\.tokens: the server can't be reached"):
        read.read(0, 100_000)


def test_a_server_that_refuses_at_once_is_asked_again_after_a_pause(folder, data, monkeypatch, caplog):
    caplog.set_level(logging.CRITICAL)
    read = TokenFolder(URL, VOCAB, data=data)
    monkeypatch.setattr(bucket_place, "WAIT_SECONDS", 0.5)
    asked = []

    def get(self, key, start, stop):
        asked.append(start)
        raise BucketError(errno.EIO, "the server fails", f"{self.url}/{key}")

    monkeypatch.setattr(Bucket, "get_range", get)
    with pytest.raises(OutageError, match="the server fails"):
        read.read(100_000, 1)
    assert len(asked) == 2


def test_an_outage_at_the_mark_of_packed_text_is_no_damage(folder, data, monkeypatch):
    write_mark(folder, 499)
    place = TokenFolder(URL, VOCAB, data=data).place

    def away(self, key):
        raise BucketError(errno.EIO, "the server can't be reached", f"{self.url}/{key}")

    monkeypatch.setattr(Bucket, "get", away)
    with pytest.raises(OutageError, match=r"packed\.json: the server can't be reached"):
        packed_for(place)


# ------------------------------------------------------------------- a job


def job(tmp_path, path, *words):
    tokenizer = tmp_path / "tokenizer.model"
    if not tokenizer.exists():
        train_sentencepiece(iter(TEXTS * 20), tokenizer, 300)
    source = f'[{{name = "text", kind = "tokens", path = "{path}"}}]'
    flags = ["--data.sources", source, "--tokenizer.path", str(tokenizer), "--model.vocab_size", str(VOCAB)]
    cache = ["--data.cache_folder", str(tmp_path / "cache"), "--data.cache_gib", "0.02"]
    return load(str(ROOT / "tests/end_to_end/tiny.toml"), [*flags, *cache, *words]).config


def with_hash(tmp_path, folder):
    """The token files again, of the job's tokenizer."""
    digest = load_tokenizer(job(tmp_path, URL).tokenizer.path).hash
    for path in folder.glob("*.tokens"):
        read = TokenFolder(folder, VOCAB)
        tokens = read.read(0, 30_000)
        with TokenFileWriter(path.with_suffix(".new"), VOCAB, digest) as writer:
            for start in range(0, 30_000, 500):
                writer.append(tokens[start : start + 500])
    for path in folder.glob("*.new"):
        path.replace(path.with_suffix(".tokens"))


@pytest.mark.parametrize("validation", [False, True])
def test_a_loader_gives_the_same_batches_by_several_requests_at_once(folder, tmp_path, monkeypatch, validation):
    """Before they are read."""
    with_hash(tmp_path, folder)
    words = ["--training.seq_len", "100", "--data.document_mask", "true"]
    configs = []
    for path in (folder, URL):
        config = job(tmp_path, path, *words)
        validated = config.validation.model_copy(update={"sources": config.data.sources})
        configs.append(config.model_copy(update={"validation": validated}))
    get_range = Bucket.get_range
    at_once = []
    now = set()

    def get(self, key, start, stop):
        now.add(threading.get_ident())
        at_once.append(len(now))
        time.sleep(0.05)
        now.discard(threading.get_ident())
        return get_range(self, key, start, stop)

    monkeypatch.setattr(Bucket, "get_range", get)
    loaders = [build_loader(config, 0, 1, start_sample=0, validation=validation) for config in configs]
    for here, there in zip(*(iter(loader) for loader in loaders), strict=False):
        assert [batch.digest() for batch in here] == [batch.digest() for batch in there]
        if loaders[0].next_sample >= 400:
            break
    for loader in loaders:
        loader.close()
    assert max(at_once) >= 2


def test_packed_windows(folder, tmp_path, asked):
    with_hash(tmp_path, folder)
    write_mark(folder, 499)
    found = []
    for path in (folder, URL):
        loader = build_loader(job(tmp_path, path, "--training.seq_len", "499"), 0, 1, start_sample=0)
        found.append([sum(batch.digest() for batch in next(loader)) for _ in range(5)])
        loader.close()
    assert found[0] == found[1]
    assert asked
    with pytest.raises(UserError, match=r"s3://bucket/data/train: packed for training.seq_len = 499"):
        build_loader(job(tmp_path, URL, "--training.seq_len", "100"), 0, 1, start_sample=0)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--data.sources", '[{name = "a", kind = "text", path = "s3://b/c"}]'], 'of kind "tokens" are read from obj'),
        (
            ["--data.sources", '[{name = "a", kind = "collections:OrderedDict", path = "s3://b/c"}]'],
            'only sources of kind "tokens"',
        ),
        (["--data.sources", '[{name = "a", kind = "tokens", path = "s3://b"}]'], "it names a whole bucket"),
        (["--data.sources", '[{name = "a", kind = "tokens", path = "s3://k:s@b/c"}]'], "holds no credentials"),
        (
            ["--data.prepare", '{input = ["s3://b/c"], output = "d"}'],
            "prepares text from and into folders of",
        ),
        (
            ["--data.prepare", '{input = ["c"], output = "s3://b/d"}'],
            "prepares text from and into folders of",
        ),
        (["--tokenizer.train_on", '["s3://b/c"]'], "a tokenizer is trained from and into files of this host"),
        (["--tokenizer.path", "s3://b"], "it names a whole bucket"),
    ],
)
def test_what_is_not_read_from_a_bucket_is_refused_by_the_job(words, said):
    with pytest.raises(ConfigError) as raised:
        load(str(ROOT / "tests/end_to_end/tiny.toml"), ["--tokenizer.path", "t.model", *words])
    assert said in str(raised.value)


# ------------------------------------------------------------------- preparation


def prepared(capsys, *words, code=0):
    assert prepare_data.main([*words]) == code
    said = capsys.readouterr()
    return said.out + said.err


@pytest.fixture
def texts(folder, tmp_path):
    there = tmp_path / "objects/bucket/texts"
    there.mkdir(parents=True)
    for number, text in enumerate(TEXTS):
        (there / f"{number}.txt").write_text(text)
    job(tmp_path, URL)
    return there


def test_a_preparation_from_and_into_a_bucket(texts, tmp_path, capsys, monkeypatch):
    (tmp_path / "objects/bucket/t.model").write_bytes((tmp_path / "tokenizer.model").read_bytes())
    words = ["s3://bucket/texts", "--output", "s3://bucket/mine", "--tokenizer", "s3://bucket/t.model"]
    words += ["--validation-fraction", "0.4", "--processes", "1"]
    said = prepared(capsys, *words)
    assert "s3://bucket/mine/train: " in said
    prepared(capsys, str(texts), "--output", "here", "--tokenizer", "tokenizer.model", *words[5:])
    mine = tmp_path / "objects/bucket/mine"
    for file in (tmp_path / "here").rglob("*.tokens"):
        assert file.read_bytes() == (mine / file.relative_to(tmp_path / "here")).read_bytes()
    assert (mine / "tokenizer.model").exists()
    assert not list(mine.rglob(".unfinished"))
    assert not (tmp_path / "runs/copies/s3/bucket/mine").exists()
    assert "already there" in prepared(capsys, *words)
    assert "was made with other settings" in prepared(capsys, *words, "--separator", "x", code=1)
    (texts / "0.txt").write_text("other")
    assert "was made from other files" in prepared(capsys, *words, code=1)


def test_an_upload_that_was_killed_is_no_data_and_the_same_command_ends_it(texts, tmp_path, capsys, monkeypatch, data):
    words = [str(texts), "--output", "s3://bucket/mine", "--tokenizer", "tokenizer.model", "--processes", "1"]

    def killed(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "create", killed)
        prepare_data.main(words)
    capsys.readouterr()
    with pytest.raises(UserError, match="a preparation has not put all of its files here; run the same keel prepare"):
        TokenFolder("s3://bucket/mine/train", VOCAB, data=data)
    (tmp_path / "objects/bucket/mine/train/stale.tokens").write_text("of another division of the text")
    prepared(capsys, *words)
    assert TokenFolder("s3://bucket/mine/train", VOCAB, data=data).n_tokens
    assert "has other objects than prepared text" in prepared(capsys, words[0], "--output", URL, *words[3:], code=1)
    with pytest.raises(SystemExit):
        prepare_data.main(["s3://bucket/text", "--output", "mine", *words[3:], "--ray", "auto"])
    assert "--ray with inputs in object storage needs --output there, too" in capsys.readouterr().err
