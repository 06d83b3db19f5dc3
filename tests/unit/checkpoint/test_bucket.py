"""A run in a bucket, in one process: who may write, what counts, what is read, and what is said.

The real server is in tests/bucket; a stub here answers as no real one can be made to.
"""

import errno
import http.server
import json
import os
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash

obstore = pytest.importorskip("obstore", reason="the client for buckets, keel[storage], is not installed")

from checkpoint import bucket as buckets  # noqa: E402
from checkpoint import bucket_launch as launches  # noqa: E402
from checkpoint import bucket_storage as storages  # noqa: E402
from checkpoint.bucket import QUICK, Bucket, BucketError, Patience  # noqa: E402
from checkpoint.bucket_files import UNFINISHED, bring, put_folder  # noqa: E402
from checkpoint.bucket_launch import Claim, claim_in  # noqa: E402
from checkpoint.bucket_storage import BucketStorage, local_copy, place_told, storage_of, with_tensors  # noqa: E402
from checkpoint.incarnation import Superseded  # noqa: E402
from checkpoint.lock import FolderInUse  # noqa: E402
from checkpoint.manager import CheckpointManager  # noqa: E402
from checkpoint.manifest import MANIFEST_NAME, read_manifest, step_folder, steps_in  # noqa: E402
from checkpoint.reader import Description, Log  # noqa: E402
from checkpoint.verify import check  # noqa: E402
from configs.errors import ConfigError, OutageError, UserError  # noqa: E402
from configs.load import load  # noqa: E402
from configs.places import local_folder, url_fault  # noqa: E402
from configs.schema import Checkpoint  # noqa: E402
from scripts import checkpoint as checkpoint_script  # noqa: E402
from scripts import export_hf  # noqa: E402
from scripts.launch import state as launch_state  # noqa: E402
from tests.conftest import ROOT  # noqa: E402
from tests.unit.checkpoint.test_checkpoint_manager import (  # noqa: E402
    CONFIG,
    assert_equal,
    make_state,
    process_group,  # noqa: F401
)
from tests.unit.hf_support import TINY, make_model, save  # noqa: E402

URL = "s3://bucket/run"
BRIEF = Patience(request_seconds=20, seconds=1.5)
SECRETS = {"AWS_ACCESS_KEY_ID": "id-of-a-key-1234", "AWS_SECRET_ACCESS_KEY": "much-too-secret-1234"}


@pytest.fixture
def objects(monkeypatch, tmp_path):
    """The folder whose files are the objects of every bucket; launches are taken for dead after a moment."""

    def store(url, patience):
        return obstore.store.LocalStore(tmp_path / "objects" / url.partition("://")[2], mkdir=True)

    monkeypatch.setattr(buckets, "_store", store)
    monkeypatch.setattr(launches, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(launches, "SILENCE_SECONDS", 0.3)
    monkeypatch.setattr(launches, "_POLL_SECONDS", 0.05)
    monkeypatch.setattr(storages, "PART_BYTES", 100)
    return tmp_path / "objects/bucket/run"


class Host:
    """A launch on a host with a disk of its own."""

    def __init__(self, disk, log=None, **settings):
        self.folder = disk / "runs/s3/bucket/run"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.log = [] if log is None else log
        bucket = Bucket(URL)
        self.claim = claim_in(bucket, self.folder, {}, self.log.append)
        self.storage = BucketStorage(bucket, self.folder, self.claim)
        self.storage.fetch(self.log.append)
        table = Checkpoint(**{"mode": "sync", "interval": 10, **settings})
        run = Description(CONFIG, {"dp_shard": 1})
        told = Log(self.log.append, self.log.append)
        root = self.folder / "checkpoints"
        self.manager = CheckpointManager(root, table, run, told, self.claim, self.storage)
        self.state = make_state(99)

    def begin(self):
        found = self.manager.resume(self.state)
        self.manager.begin_lineage()
        return found and found["step"]

    def save(self, *steps):
        for step in steps:
            self.manager.save(step, make_state(step), {"tokens": step * 100, "step": step})
            self.manager.wait()

    def close(self):
        self.manager.close()
        self.storage.push()
        self.claim.end()


def launched(disk, *steps, **settings):
    """A launch that saves and ends; what it began from."""
    host = Host(disk, **settings)
    began = host.begin()
    host.save(*steps)
    host.close()
    return began


def manifests(objects):
    return sorted(str(path.parent.relative_to(objects / "checkpoints")) for path in objects.rglob(MANIFEST_NAME))


def test_a_stop_that_no_rank_was_left_to_write_is_written(objects, tmp_path, monkeypatch, capsys):
    """Launches as `scripts/launch/elastic.sh` starts them."""
    launched(tmp_path / "a", 10)
    status = {"state": "failed", "step": 10, "reason": "rank 1 was killed", "time": 1.5}
    (objects / "status.json").write_text(json.dumps(status))
    (tmp_path / "b").mkdir()
    monkeypatch.chdir(tmp_path / "b")
    launch_state.main([URL, "SIGTERM"])
    found = json.loads((objects / "status.json").read_text())
    assert (found["state"], found["reason"]) == ("preempted", "SIGTERM, after: rank 1 was killed")
    assert capsys.readouterr().out.startswith("preempted ")


def test_a_disk_that_is_empty_continues_bit_for_bit(objects, tmp_path):
    assert launched(tmp_path / "a", 10, 20, mode="async") is None
    host = Host(tmp_path / "b")
    assert host.begin() == 20
    assert_equal(host.state, make_state(20))
    host.save(30)
    host.close()
    assert manifests(objects) == ["step-00000010/of-1.0", "step-00000020/of-1.0", "step-00000030/of-2.0"]
    # On the second disk no tensor has content, and the files of the run are there.
    distcp = tmp_path / "b/runs/s3/bucket/run/checkpoints/step-00000020/__0_0.distcp"
    assert distcp.stat().st_size > 300
    assert not distcp.read_bytes().strip(b"\0")


def test_the_files_of_the_run_follow_it(objects, tmp_path):
    host = Host(tmp_path / "a")
    host.begin()
    (host.folder / "metrics.jsonl").write_text("one\n")
    (host.folder / "tensorboard").mkdir()
    (host.folder / "tensorboard/events").write_text("curve")
    (host.folder / ".hidden").write_text("no")
    host.save(10)
    assert (objects / "metrics.jsonl").read_text() == "one\n"
    (host.folder / "metrics.jsonl").write_text("one\ntwo\n")
    host.close()
    assert not (objects / ".hidden").exists()
    other = Host(tmp_path / "b")
    assert (other.folder / "metrics.jsonl").read_text() == "one\ntwo\n"
    assert (other.folder / "tensorboard/events").read_text() == "curve"


def test_only_the_parts_that_are_needed_are_read(objects, tmp_path, monkeypatch):
    """Of one tensor: the objects that hold it, and no other."""
    launched(tmp_path / "a", 10)
    host = Host(tmp_path / "b")
    host.begin()
    read = []
    get = Bucket.get
    monkeypatch.setattr(Bucket, "get", lambda self, key: read.append(key) or get(self, key))
    checkpoint = step_folder(host.folder / "checkpoints", 10)
    with host.storage.open(checkpoint / "__0_0.distcp") as file:
        file.seek(250)
        some = file.read(120)
    assert sorted(key.rpartition("/")[2][:6] for key in read) == ["000002", "000003"]  # side by side
    whole = b"".join(path.read_bytes() for path in sorted((objects / "checkpoints").rglob("__0_0.distcp/*")))
    assert some == whole[250:370]


def test_a_prefix_without_a_manifest_is_no_checkpoint_and_is_removed(objects, tmp_path, monkeypatch):
    """Killed after the files, before the manifest; and killed in the middle of the files."""
    host = Host(tmp_path / "a")
    host.begin()
    host.save(10)
    monkeypatch.setattr(host.storage, "commit", killed)
    monkeypatch.setattr(host.storage, "discard", lambda unfinished: None)
    with pytest.raises(Killed):
        host.save(20)
    left = objects / "checkpoints/step-00000020/of-1.0"
    assert (left / "trainer.json").exists()
    (left / "trainer.json").unlink()
    other = Host(tmp_path / "b")
    assert other.begin() == 10
    assert any("has given no sign of life" in line for line in other.log)
    assert any("an interrupted save has left behind" in line for line in other.log)
    assert not [path for path in left.rglob("*") if path.is_file()]
    other.save(20)
    other.close()
    assert launched(tmp_path / "c") == 20


class Killed(BaseException):
    pass


def killed(*arguments):
    raise Killed


def test_of_two_launches_one_has_the_run(objects, tmp_path):
    first = Host(tmp_path / "a")
    first.claim.beat(lambda: None)
    with pytest.raises(FolderInUse, match=r"s3://bucket/run is in use by process \d+ on host"):
        Host(tmp_path / "b")
    first.begin()
    first.save(10)
    first.close()
    assert launched(tmp_path / "b") == 10


def test_a_launch_that_has_lost_the_run_hears_of_it(objects, tmp_path):
    """From its sign of life, without a request for each line of metrics."""
    lost = Host(tmp_path / "a")
    lost.claim.beat(lambda: time.sleep(1))  # the first takes long
    time.sleep(0.2)
    lost.claim.require_newest_known()
    Host(tmp_path / "b")
    for _ in range(100):
        if not lost.claim.is_current():
            break
        time.sleep(0.05)
    with pytest.raises(Superseded, match="superseded by incarnation 2"):
        lost.claim.require_newest_known()


def test_many_claim_at_once_and_each_number_is_given_once(objects, tmp_path, monkeypatch):
    monkeypatch.setattr(launches, "SILENCE_SECONDS", 0)
    monkeypatch.setattr(launches, "_await_end", lambda *arguments: None)
    with ThreadPoolExecutor(8) as pool:
        claims = list(pool.map(lambda _: claim_in(Bucket(URL), tmp_path, {}, print), range(24)))
    assert sorted(claim.number for claim in claims) == [*range(1, 25)]


def test_a_sleeper_that_wakes_can_not_commit(objects, tmp_path, monkeypatch):
    """Not before its look for a newer launch, and not between that look and the commit."""
    sleeper = Host(tmp_path / "a")
    sleeper.begin()
    sleeper.save(10)
    newer = Host(tmp_path / "b")  # the sleeper gives no sign of life
    assert newer.begin() == 10
    with pytest.raises(Superseded, match="superseded by incarnation 2"):
        sleeper.save(20)
    with monkeypatch.context() as late:  # it falls asleep again behind its look
        late.setattr(Claim, "require_current", lambda self: None)
        sleeper.save(30)
    assert "step-00000030/of-1.0" in manifests(objects)
    newer.save(20)
    newer.close()
    third = Host(tmp_path / "c")
    assert steps_in(third.folder / "checkpoints") == [10, 20]
    assert third.begin() == 20


def test_steps_that_a_run_went_back_from_do_not_come_back(objects, tmp_path):
    launched(tmp_path / "a", 10, 20, 30)
    assert launched(tmp_path / "b", 20, load=10, go_back=1) == 10
    assert manifests(objects) == [
        "step-00000010/of-1.0",
        "step-00000020/of-1.0",
        "step-00000020/of-2.0",
        "step-00000030/of-1.0",
    ]
    third = Host(tmp_path / "c")
    assert third.begin() == 20
    assert place_told(step_folder(third.folder / "checkpoints", 20))["place"].endswith("of-2.0/")


def test_a_rewind_within_a_launch_counts_as_a_beginning(objects, tmp_path):
    host = Host(tmp_path / "a")
    host.begin()
    host.save(10, 20)
    assert host.manager.can_rewind(10)
    assert host.manager.rewind(10, host.state)["step"] == 10
    host.save(20)
    host.close()
    assert manifests(objects)[1:] == ["step-00000020/of-1.0", "step-00000020/of-1.1"]
    other = Host(tmp_path / "b")
    assert other.begin() == 20
    assert place_told(step_folder(other.folder / "checkpoints", 20))["place"].endswith("of-1.1/")


def test_old_checkpoints_are_removed_with_all_their_objects(objects, tmp_path):
    launched(tmp_path / "a", 10, 20, 30, keep_last=2)
    assert manifests(objects) == ["step-00000020/of-1.0", "step-00000030/of-1.0"]
    assert not [path for path in (objects / "checkpoints/step-00000010").rglob("*") if path.is_file()]


@pytest.mark.parametrize("damage", ["cut", "changed", "gone", "swapped"])
def test_a_damaged_object_is_found_and_the_checkpoint_before_is_taken(objects, tmp_path, damage):
    launched(tmp_path / "a", 10, 20)
    parts = sorted((objects / "checkpoints/step-00000020").rglob("__0_0.distcp/*"))
    content = parts[3].read_bytes()
    if damage == "cut":
        parts[3].write_bytes(content[:-1])
    elif damage == "changed":
        parts[3].write_bytes(bytes([content[0] ^ 1]) + content[1:])
    elif damage == "swapped":
        parts[3].write_bytes(parts[4].read_bytes())
        parts[4].write_bytes(content)
    else:
        parts[3].unlink()
    host = Host(tmp_path / "b")
    assert host.begin() == 10
    assert_equal(host.state, make_state(10))
    assert any("step-00000020 is damaged" in line and "trying the one before it" in line for line in host.log)


@pytest.mark.parametrize("name", ["index.json", "trainer.json", MANIFEST_NAME])
def test_what_describes_a_checkpoint_is_looked_at_as_well(objects, tmp_path, name):
    launched(tmp_path / "a", 10, 20)
    (file,) = (objects / "checkpoints/step-00000020").rglob(name)
    file.write_bytes(file.read_bytes()[:-3])
    assert Host(tmp_path / "b").begin() == 10


def test_a_sign_of_life_does_not_undo_a_beginning(objects, tmp_path, monkeypatch):
    """Though its request takes long, and that of the beginning does not."""
    host = Host(tmp_path / "a")
    put = Bucket.put

    def slow(self, key, content):
        if threading.current_thread().name == "sign of life":
            time.sleep(0.3)
        put(self, key, content)

    monkeypatch.setattr(Bucket, "put", slow)
    host.claim.beat(lambda: None)
    time.sleep(0.15)  # a sign of life is under way
    host.claim.begin(7)
    monkeypatch.undo()
    time.sleep(0.5)
    assert launches.record_of(host.claim.bucket, 1)["begins"] == [7]
    host.claim._ends.set()


def test_a_bucket_that_can_not_be_read_now_is_no_damage(objects, tmp_path, monkeypatch):
    """Else a run would go back to an older checkpoint because the network was down."""
    launched(tmp_path / "a", 10, 20)
    host = Host(tmp_path / "b")

    def get(self, key):
        raise BucketError(errno.EIO, "the server does not answer in time", f"{URL}/{key}")

    monkeypatch.setattr(Bucket, "get", get)
    with pytest.raises(
        OutageError, match=r"step-00000020 can't be read now: rank 0: s3://bucket/run/checkpoints.*in time"
    ):
        host.begin()


def test_a_save_that_fails_is_tried_again_and_the_run_goes_on(objects, tmp_path, monkeypatch):
    host = Host(tmp_path / "a")
    host.begin()
    host.save(10)
    put = Bucket.put

    def fails(self, key, content):
        if "distcp" in key:
            raise BucketError(errno.EIO, "the server is too busy (503)", f"{URL}/{key}")
        put(self, key, content)

    monkeypatch.setattr(Bucket, "put", fails)
    host.save(20)
    monkeypatch.undo()
    assert any("the server is too busy (503)" in line and "training continues" in line for line in host.log)
    assert steps_in(host.folder / "checkpoints") == [10]


def away(self, prefix=""):
    raise BucketError(errno.EIO, "the server does not answer in time", f"{URL}/{prefix}")


def test_an_outage_while_a_save_is_read_again_is_a_failed_save(objects, tmp_path, monkeypatch):
    host = Host(tmp_path / "a", keep_last=2)
    host.begin()
    host.save(10)
    damage = BucketStorage.damage

    def fails(*arguments):
        with monkeypatch.context() as outage:
            outage.setattr(Bucket, "list", away)
            return damage(*arguments)

    monkeypatch.setattr(BucketStorage, "damage", fails)
    host.save(20)
    monkeypatch.undo()
    assert any("does not answer in time" in line and "failed saves in a row: 1" in line for line in host.log)
    assert steps_in(host.folder / "checkpoints") == [10]


def test_an_outage_while_a_run_goes_back_ends_it_with_one_message(objects, tmp_path, monkeypatch):
    host = Host(tmp_path / "a")
    host.begin()
    host.save(10, 20)
    monkeypatch.setattr(Bucket, "list", away)
    with pytest.raises(OutageError, match="the server does not answer in time"):
        host.manager.rewind(10, host.state)


def test_an_older_status_never_replaces_a_newer_one(objects, tmp_path, monkeypatch):
    """Though the sign of life that puts it takes long, and the launch ends meanwhile."""
    host = Host(tmp_path / "a")
    status = host.folder / "status.json"
    status.write_text("running")
    put = Bucket.put

    def slow(self, key, content):
        time.sleep(0.5 if content == b"running" else 0.0)
        put(self, key, content)

    monkeypatch.setattr(Bucket, "put", slow)
    sign = threading.Thread(target=host.storage.push_status)
    sign.start()
    time.sleep(0.2)
    status.write_text("done")
    host.storage.push()
    sign.join()
    assert (objects / "status.json").read_text() == "done"


@pytest.mark.parametrize("name", ["crashes/rank-00001.txt", "after_save/export/step-00000010.tmp/model"])
def test_what_is_removed_while_the_files_of_the_run_are_put_makes_no_save_fail(objects, tmp_path, monkeypatch, name):
    """As a rank removes its file of crashes, and a command's folder gets another name when it has succeeded."""
    host = Host(tmp_path / "a")
    host.begin()
    host.save(10)
    file = host.folder / name
    file.parent.mkdir(parents=True)
    file.touch()
    scandir, stamp = os.scandir, storages._stamp

    def listed(folder="."):
        if Path(folder) == file.parent and file.parent.name.endswith(".tmp") and file.exists():
            file.unlink()
            file.parent.rmdir()
        return scandir(folder)

    def looked_at(path):
        if path == file:
            file.unlink()
        return stamp(path)

    monkeypatch.setattr(os, "scandir", listed)
    monkeypatch.setattr(storages, "_stamp", looked_at)
    host.save(20)
    monkeypatch.undo()
    assert not file.exists()
    assert steps_in(host.folder / "checkpoints") == [10, 20]


def test_a_copy_has_the_tensors_when_they_are_asked_for(objects, tmp_path, monkeypatch):
    launched(tmp_path / "a", 10, 20)
    (objects / "config.toml").write_text("")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    copy = local_copy(URL)
    assert str(copy) == "runs/copies/s3/bucket/run"
    assert steps_in(copy / "checkpoints") == [10, 20]
    with pytest.raises(UserError, match="has changed"):
        check(step_folder(copy / "checkpoints", 20))
    check(with_tensors(step_folder(copy / "checkpoints", 20)))
    again = local_copy(f"{URL}/checkpoints/step-00000020")
    check(again)  # without bringing them again
    assert (
        steps_in(local_copy("s3://bucket") / "run/checkpoints") == [10, 20]
        if url_fault("s3://bucket") is None
        else True
    )
    with pytest.raises(UserError, match="there is no run or checkpoint of that name"):
        local_copy("s3://bucket/none")


@pytest.mark.parametrize("place", ["s3://bucket/checkpoints/llama", "s3://bucket/checkpoints-old/run"])
def test_a_run_may_lie_in_a_folder_called_checkpoints(objects, tmp_path, monkeypatch, place):
    """Its parent is not listed, which the credentials may not allow."""
    launched(tmp_path / "a", 10)
    (objects / "config.toml").write_text("")
    there = tmp_path / "objects" / place.removeprefix("s3://")
    there.parent.mkdir()
    objects.rename(there)
    listed = []
    objects_of = Bucket.objects
    monkeypatch.setattr(Bucket, "objects", lambda self, prefix="": listed.append(self.url) or objects_of(self, prefix))
    monkeypatch.chdir(tmp_path)
    copy = local_copy(place)
    assert steps_in(copy / "checkpoints") == [10]
    for inside in ("checkpoints", "checkpoints/step-00000010"):
        assert local_copy(f"{place}/{inside}") == copy / inside
    assert {url.rstrip("/") for url in listed} == {place}


def test_a_run_in_a_folder_begins_with_the_weights_of_one_in_a_bucket(objects, tmp_path, monkeypatch):
    """Of two hosts, each with a disk of its own, whose copy may have the content, too."""
    launched(tmp_path / "a", 10, 20)
    (objects / "config.toml").write_text("")
    monkeypatch.chdir(tmp_path)
    copy = step_folder(local_copy(URL) / "checkpoints", 20)
    for fill in (lambda: None, lambda: with_tensors(copy)):
        fill()
        told = place_told(copy)
        monkeypatch.chdir(fresh(tmp_path))  # another host
        storage = storage_of(copy, read_manifest(tmp_path / copy).files, told)
        content = storage.open(copy / "__0_0.distcp").read(1 << 20)
        monkeypatch.chdir(tmp_path)
        assert xxhash.xxh3_128_hexdigest(content) == read_manifest(copy).files["__0_0.distcp"].xxh3
    (tmp_path / "c/checkpoints").mkdir(parents=True)
    settings = Checkpoint(load=URL)
    manager = CheckpointManager(tmp_path / "c/checkpoints", settings, Description(CONFIG, {"dp_shard": 1}), Log())
    state = make_state(99)
    assert manager.resume(state)["step"] == 20
    assert_equal(state, make_state(20))
    check(copy)  # its content has stayed


def test_an_object_replaced_within_a_second_by_one_of_its_size_is_brought_again(objects, tmp_path, monkeypatch):
    """And only then: the copy has another time for it, by which others notice, too."""
    monkeypatch.chdir(fresh(tmp_path))
    objects.mkdir(parents=True)
    times = []
    for content in ("first", "other"):
        file = objects / content
        file.write_text(content)
        os.utime(file, (1_700_000_000, 1_700_000_000))
        file.replace(objects / "a.txt")
        bring(URL)
        copy = Path("runs/copies/s3/bucket/run/a.txt")
        assert copy.read_text() == content
        times.append(copy.stat().st_mtime_ns)
        with monkeypatch.context() as patch:
            patch.setattr(Bucket, "get_range", lambda *_: pytest.fail("it is there"))
            bring(URL)
    assert times[0] != times[1]
    assert {time // 10**9 for time in times} == {1_700_000_000}


def test_an_export_into_a_bucket(objects, tmp_path, monkeypatch, capsys):
    """One that was stopped while it was put, of other files, is replaced; a complete one never is."""
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "step-00000001", make_model(TINY["tied"]))
    words = ["step-00000001", "--tokenizer", "none"]
    assert export_hf.main([*words, "here"]) == 0
    put = Bucket.put

    def stopped(self, key, content):
        if key == "model.safetensors":
            raise KeyboardInterrupt
        put(self, key, content)

    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "put", stopped)
        assert export_hf.main([*words, URL]) == 130
    assert (objects / UNFINISHED).exists()
    assert not (objects / "config.json").exists()
    (objects / "model-00001-of-00002.safetensors").touch()
    assert export_hf.main([*words, URL]) == 0
    here, there = ({file.name: file.read_bytes() for file in place.iterdir()} for place in (Path("here"), objects))
    assert there == here
    assert len(there) == 4
    assert not list(Path("runs/copies/s3/bucket").iterdir())
    capsys.readouterr()
    assert export_hf.main([*words, URL]) == 1
    assert f"error: {URL} exists; name another place, or remove it" in capsys.readouterr().err
    assert {file.name: file.read_bytes() for file in objects.iterdir()} == here
    assert export_hf.main([*words, "s3://bucket"]) == 1
    assert "it names a whole bucket" in capsys.readouterr().err


def test_a_folder_that_was_put_but_for_its_marks_is_put_again(objects, tmp_path, monkeypatch):
    """The manifest of an import or a fork differs each time."""
    (tmp_path / "made").mkdir()
    manifest = tmp_path / "made" / "MANIFEST.json"
    manifest.write_text("first")
    delete = Bucket.delete

    def killed(self, keys):
        if UNFINISHED in keys:
            raise KeyboardInterrupt
        delete(self, keys)

    def put():
        put_folder(manifest.parent, URL, manifest.name, lambda done, total, message: None)

    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "delete", killed)
        with pytest.raises(KeyboardInterrupt):
            put()
    assert {file.name for file in objects.iterdir()} == {UNFINISHED, manifest.name}
    manifest.write_text("second")
    put()
    assert [file.read_text() for file in objects.iterdir()] == ["second"]
    manifest.write_text("third")
    with pytest.raises(UserError, match="another command has put its files here meanwhile"):
        put()


def fresh(tmp_path):
    return Path(tempfile.mkdtemp(dir=tmp_path))


def test_a_fork_that_was_not_put_to_its_end_is_no_run(objects, tmp_path):
    """A launch would begin it from scratch."""
    objects.mkdir(parents=True)
    (objects / UNFINISHED).touch()
    with pytest.raises(UserError, match=f"{URL} has not been put to its end; run the command that puts it again"):
        launched(tmp_path / "a", 10)
    (objects / UNFINISHED).unlink()
    assert launched(tmp_path / "a", 10) is None


def test_a_fork_keeps_its_content_when_the_copy_changes(objects, tmp_path, monkeypatch):
    """They share files."""
    launched(tmp_path / "a", 10)
    (objects / "config.toml").write_text("")
    monkeypatch.chdir(tmp_path)
    copy = with_tensors(step_folder(local_copy(URL) / "checkpoints", 10))
    before = (copy / "__0_0.distcp").read_bytes()
    os.link(copy / "__0_0.distcp", tmp_path / "fork")
    files = read_manifest(copy).files
    files["__0_0.distcp"] = replace(files["__0_0.distcp"], size=7)
    storage_of(copy, files, place_told(copy))
    assert (tmp_path / "fork").read_bytes() == before


def test_prune_takes_the_run_and_knows_what_it_went_back_from(objects, tmp_path, monkeypatch, capsys):
    launched(tmp_path / "a", 10, 20, 30)
    launched(tmp_path / "b", 20, load=10, go_back=1)
    (objects / "config.toml").write_text("")
    monkeypatch.chdir(tmp_path)
    words = ["prune", URL, "--keep-last", "1", "--abandoned"]
    assert checkpoint_script.main([*words, "--dry-run"]) == 0
    assert len(manifests(objects)) == 4
    assert checkpoint_script.main(words) == 0
    assert manifests(objects) == ["step-00000020/of-2.0"]
    left = [path for path in (objects / "checkpoints").rglob("*") if path.is_file()]
    assert all("step-00000020/of-2.0" in str(path) for path in left)
    said = capsys.readouterr().out
    assert "runs/copies/s3/bucket/run/checkpoints/step-00000030.of-1.0: removed" in said
    assert launched(tmp_path / "c") == 20
    live = Host(tmp_path / "d")
    live.claim.beat(lambda: None)
    assert checkpoint_script.main(words) != 0
    assert "s3://bucket/run is in use by process" in capsys.readouterr().err
    live.claim.end()
    assert checkpoint_script.main(["prune", "s3://bucket/none", "--keep-last", "1"]) != 0
    assert not [path for path in (objects.parent / "none").rglob("*") if path.is_file()]


def test_prune_removes_nothing_when_the_newest_lacks_a_part(objects, tmp_path, monkeypatch, capsys):
    launched(tmp_path / "a", 10, 20)
    (objects / "config.toml").write_text("")
    sorted((objects / "checkpoints/step-00000020").rglob("__0_0.distcp/*"))[3].unlink()
    monkeypatch.chdir(tmp_path)
    assert checkpoint_script.main(["prune", URL, "--keep-last", "1"]) != 0
    assert "__0_0.distcp has" in capsys.readouterr().err
    assert len(manifests(objects)) == 2


# ------------------------------------------------------------------- what the server says


@pytest.fixture
def stub(monkeypatch):
    """A server that answers each request by a function of its number: (status, code), None to hang, b"" to hang up."""
    answers = []

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self):
            self.rfile.read(int(self.headers.get("content-length", 0)))
            stubbed.requests += 1
            told = answers[-1](stubbed.requests)
            if told is None:
                over.wait(30)
            if not told:
                self.close_connection = True
                return
            status, code = told
            text = f"<Error><Code>{code}</Code><Message>{SECRETS}</Message><Region>eu-west-1</Region></Error>".encode()
            self.send_response(status)
            self.send_header("content-length", str(len(text)))
            self.send_header("ETag", '"1"')
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(text)

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = answer

        def log_message(self, *arguments):
            pass

    class Stub:
        requests = 0

        def bucket(self, answer, patience=BRIEF):
            answers.append(answer)
            return Bucket(URL, patience, patience)

    over = threading.Event()
    stubbed = Stub()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    for name, value in {
        **SECRETS,
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    yield stubbed
    over.set()
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("status", "code", "said", "may_pass"),
    [
        (404, "NoSuchBucket", "there is no such bucket; create it", False),
        (403, "AccessDenied", "permission is denied; .* list and read objects there and, where Keel writes", False),
        (400, "ExpiredToken", "the credentials have expired; renew them", False),
        (403, "InvalidAccessKeyId", "the credentials are not valid; correct them", False),
        (403, "SignatureDoesNotMatch", "the credentials are not valid; correct them", False),
        (400, "AuthorizationHeaderMalformed", r"in another region; set AWS_REGION to it \(eu-west-1\)", False),
        (403, "RequestTimeTooSkewed", "this host's clock is wrong", False),
        (503, "SlowDown", r"the server is too busy \(503\)", True),
        (418, "Teapot", "418", True),
    ],
)
def test_one_message_for_each_thing_that_is_wrong(stub, status, code, said, may_pass):
    with pytest.raises(BucketError, match=said) as raised:
        stub.bucket(lambda _: (status, code)).require_usable()
    assert raised.value.may_pass is may_pass
    assert str(raised.value).startswith(URL)
    assert "\n" not in str(raised.value)
    assert not [secret for secret in SECRETS.values() if secret in str(raised.value)]


@pytest.mark.parametrize(
    "name", ["step-00000563", "AccessDenied", "SlowDown", "connection", "ExpiredToken 500", "100%/503 Service"]
)
@pytest.mark.parametrize("status", [418, 404])
def test_a_name_is_no_reason(stub, name, status):
    bucket = stub.bucket(lambda _: (status, "Teapot"))
    actions = [
        lambda: bucket.put(name, b""),
        lambda: bucket.get(name),
        lambda: bucket.look(name),
        lambda: bucket.list(name),
    ]
    for action in actions:
        with pytest.raises(BucketError if status == 418 else (BucketError, FileNotFoundError)) as raised:
            action()
        assert "no such object" in str(raised.value) or str(status) in str(raised.value).replace(name, "")


def test_what_passes_is_waited_for(stub):
    stub.bucket(lambda number: (503, "SlowDown") if number < 4 else (200, ""), QUICK).put("key", b"content")
    assert stub.requests == 4


def test_a_server_that_hangs_is_given_up_in_time(stub):
    started = time.monotonic()
    with pytest.raises(BucketError, match="the server does not answer in time"):
        stub.bucket(lambda _: None, Patience(request_seconds=0.5, seconds=1.5)).create("key", b"content")
    assert time.monotonic() - started < 20


def test_a_connection_that_is_closed_is_made_again(stub):
    stub.bucket(lambda number: b"" if number < 3 else (200, ""), QUICK).put("key", b"content")
    assert stub.requests == 3


def test_a_server_that_is_not_there(monkeypatch):
    for name, value in {**SECRETS, "AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_ALLOW_HTTP": "true"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(BucketError, match="the server can't be reached"):
        Bucket(URL, BRIEF, BRIEF).require_usable()


def test_an_answer_that_was_lost_is_no_second_winner(objects):
    bucket = Bucket(URL)
    bucket.create("key", b"ours")
    bucket.create("key", b"ours")
    with pytest.raises(FileExistsError):
        bucket.create("key", b"theirs")


def test_a_client_that_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(UserError, match=r"s3://bucket/run needs the package obstore: pip install 'keel\[storage\]'"):
        Bucket(URL)


# ------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("s3://bucket", "names a whole bucket"),
        ("s3://bucket/", "names a whole bucket"),
        ("s3://key:secret@bucket/run", "holds no credentials"),
        ("s3://bucket/run?endpoint=x", "holds no credentials"),
        ("hdfs://host/run", "s3:// or gs:// or az://"),
        ("s3://bucket/../run", "s3:// or gs:// or az://"),
        ("s3://bucket//run", "s3:// or gs:// or az://"),
    ],
)
def test_a_name_that_is_none(name, said):
    assert said in url_fault(name)
    with pytest.raises(ConfigError, match=r"job\.output_dir") as raised:
        load(str(ROOT / "tests/end_to_end/tiny.toml"), ("--job.output_dir", name))
    assert said in str(raised.value)


def test_the_folder_that_stands_for_a_place():
    assert str(local_folder("gs://a-bucket/some/run")) == "runs/gs/a-bucket/some/run"
    job = load(str(ROOT / "tests/end_to_end/tiny.toml"), ("--job.output_dir", "s3://bucket/run")).config.job
    assert (str(job.folder), job.place) == ("runs/s3/bucket/run", "s3://bucket/run")


@pytest.mark.parametrize("key", ["load", "init_from"])
def test_a_place_to_begin_from(key):
    load(str(ROOT / "tests/end_to_end/tiny.toml"), (f"--checkpoint.{key}", URL))
    with pytest.raises(ConfigError, match=rf"checkpoint\.{key}: a place in object storage is s3://"):
        load(str(ROOT / "tests/end_to_end/tiny.toml"), (f"--checkpoint.{key}", "ftp://bucket/run"))
