"""Values in a store that nobody else may decide: a wrong keyed hash is refused, and what is forged changes nothing."""

import hashlib
import hmac
import json
import threading
import time

import pytest
import torch.distributed as dist

from configs.secret import SECRET, Forged, signed, verified
from trainer.announce import note_on_secret
from trainer.elastic import release, show_life, wait_idle
from trainer.guards.peers import Peers
from trainer.guards.watchdog import Watchdog
from trainer.lifecycle import StopRequest


@pytest.fixture(autouse=True)
def secret(monkeypatch):
    monkeypatch.setenv(SECRET, "the job's")


def test_the_hash_is_the_standard_one_of_name_and_value():
    digest = hmac.new(b"the job's", b"end\x0075", hashlib.sha256).hexdigest()
    assert signed("end", "75") == f"{digest} 75"
    assert verified("end", f"{digest} 75".encode()) == "75"


@pytest.mark.parametrize(
    "content",
    [b"", b"75", b" 75", signed("end", "0").encode(), signed("heard", "75").encode(), b"\xff\xfe \xff", b"\xc3\xa9 75"],
)
def test_other_hashes_are_refused(content):
    with pytest.raises(Forged, match="wrong keyed hash under end, which is refused"):
        verified("end", content)


def test_a_host_without_the_secret_is_not_believed(monkeypatch):
    told = signed("end", "75").encode()
    monkeypatch.delenv(SECRET)
    with pytest.raises(Forged):
        verified("end", told)
    assert verified("end", signed("end", "75").encode()) == "75"  # one host alone needs none


def test_several_hosts_without_a_secret_are_told():
    assert "KEEL_SECRET is not set" in note_on_secret({"GROUP_WORLD_SIZE": "2"})
    assert note_on_secret({"GROUP_WORLD_SIZE": "2", SECRET: "x"}) == note_on_secret({"GROUP_WORLD_SIZE": "1"}) == ""


def test_an_idle_rank_ignores_a_forged_end_and_hears_the_real_one(tmp_path):
    store, codes, warnings = dist.HashStore(), [], []
    store.set("end", "0")
    wait = lambda: codes.append(wait_idle(store, StopRequest(), 60, warnings.append))  # noqa: E731
    idle = threading.Thread(target=wait)
    idle.start()
    time.sleep(1.5)
    assert not codes
    release(store, 1, 75)
    idle.join(30)
    assert codes == [75]
    assert len(warnings) == 1
    assert "under end" in warnings[0]


def test_a_forged_sign_of_life_keeps_no_idle_rank(tmp_path):
    store = dist.HashStore()
    show_life(store)
    alive = store.get("alive")
    store.set("alive", b"x" + alive)
    assert wait_idle(store, StopRequest(), 0.1, lambda _: None) == 1


def test_ranks_hear_only_what_ranks_have_written(tmp_path):
    store = dist.HashStore()
    here, there = Peers(store, 0, 2, tmp_path / "0"), Peers(store, 1, 2, tmp_path / "1")
    there.tell({"late": []})
    store.set(f"news/{store.add('news', 1)}", json.dumps({"done": 1, "failure": None}))
    assert here.hear() == [{"late": []}]
    assert "under news/2" in here.forged
    store.set("beat/1", json.dumps({**vars(there.own), "crash_file": "/etc/passwd"}))
    assert here.beats([1]) == []
    there.beat(1, "training", 0.0)
    assert [beat.rank for beat in here.beats([1])] == [1]


def test_the_watchdog_warns_once_of_a_forged_loss_and_ends_nothing(tmp_path, capfd):
    store, ended = dist.HashStore(), []
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        watchdog = Watchdog(tmp_path, 8.0, ended.append)
        forger = dist.PrefixStore("watchdog", dist.distributed_c10d._get_default_store())
        for _ in range(2):
            beat = vars(watchdog.peers.own)
            lost = {"beat": beat, "how": "was killed", "is_dead": True}
            forger.set(f"news/{forger.add('news', 1)}", json.dumps({"lost": lost}))
        time.sleep(1.5)
        assert not watchdog._lost
        watchdog.close()
    finally:
        dist.destroy_process_group()
    said = capfd.readouterr().err
    assert said.count("wrong keyed hash under news/1") == 1
    assert "wrong keyed hash" in (tmp_path / "run.log").read_text()
    assert not ended
