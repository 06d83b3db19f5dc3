"""Hosts that share no run folder: ranks that pretend to be on hosts, which are lost, come back and change places."""

import errno
import json
import shutil
from contextlib import chdir, contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from checkpoint import exchange as exchanges
from checkpoint import run_folders
from checkpoint.incarnation import FOLDER, claim, facts_of
from checkpoint.manager import CheckpointManager
from checkpoint.manifest import step_folder, steps_in
from checkpoint.run_folders import SHARED, OwnFolders
from checkpoint.store import SaveFailed
from checkpoint.verify import check
from configs.errors import UserError
from configs.schema import Checkpoint
from parallelisms.ranks import on_rank_zero
from tests.distributed.test_checkpoint import reference, sharded, whole, zeros
from tests.distributed.test_memory_copies import fill, flip, names, on_host
from trainer.guards import shared_folder

RUN = Path("run")
METRICS = "metrics.jsonl"


def launch(base, hosts, mesh_shape, dims, saves=(), breaks=None, copies=True, on_damage="fall_back"):
    """A launch on ranks of `hosts` that then dies; returns from which step it went on, wrong tensors, and its log.

    saves: steps whose state is copied to memory, in parentheses those of checkpoints; a record is written before each.
    breaks: called on each rank before the first save.
    copies: False: copies in memory are not looked at, as if they were damaged.
    """
    host, log = hosts[dist.get_rank()], []
    (base / host / "disk").mkdir(parents=True, exist_ok=True)
    with on_host(base, host), chdir(base / host / "disk"), patch.object(shared_folder, "_PATIENCE_SECONDS", 0.1):
        lacking, lacks = shared_folder.who_lacks(RUN)
        run_folder = SHARED
        if lacking:
            run_folder = OwnFolders.meet(RUN, not lacks)
            run_folder.unite()
        RUN.mkdir(exist_ok=True)
        incarnation = on_rank_zero(None, lambda: claim(RUN, {}))
        run_folder.bring_home(log.append, log.append)
        settings = Checkpoint(mode="async", memory_copies=1, memory_interval=1, keep_last=9, on_damage=on_damage)
        given = (lambda old, new: [], False, log.append, log.append)
        manager = CheckpointManager(
            RUN / "checkpoints", settings, {}, {}, *given, incarnation=incarnation, run_folder=run_folder
        )
        if not copies:
            manager._copies.find = lambda: []
        tensors = sharded(zeros(reference()), mesh_shape, dims)
        found = manager.resume(tensors)
        step = found["tokens"] if found else 0
        loaded = whole(tensors)
        wrong = [name for name in loaded if found and not torch.equal(loaded[name], reference()[name] + step)]
        manager.begin_line()
        on_rank_zero(None, lambda: cut_back(step))
        with breaks() if breaks else patch.dict({}):
            for each in saves:
                step = each[0] if isinstance(each, tuple) else each
                fill({"tensors": tensors, "layout": (mesh_shape, dims)}, step)
                on_rank_zero(None, lambda step=step: record(step, host))
                try:
                    manager.save(step, tensors, {"tokens": step}, in_memory=not isinstance(each, tuple))
                    manager.wait()
                except SaveFailed as error:
                    log.append(str(error))
        manager._writer.close()
        return found and found["tokens"], wrong, log


def record(step, host):
    with (RUN / METRICS).open("a") as file:
        file.write(json.dumps({"step": step, "of": host}) + "\n")


def cut_back(step):
    kept = [line for line in recorded(Path.cwd().parent) if line["step"] <= step]
    (RUN / METRICS).write_text("".join(json.dumps(line) + "\n" for line in kept))


def recorded(host: Path):
    file = host / "disk" / RUN / METRICS
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def steps_recorded(host: Path):
    return [line["step"] for line in recorded(host)]


def found_by(ranks, base, hosts, mesh_shape, dims, **options):
    """The step from which a launch goes on, whose tensors must be right bit for bit, and the first rank's log."""
    outcomes = ranks(len(hosts), launch_with, base, hosts, mesh_shape, dims, options)
    assert all(wrong == [] for _, wrong, _ in outcomes), outcomes
    [step] = {step for step, _, _ in outcomes}
    return step, "\n".join(outcomes[0][2])


def launch_with(base, hosts, mesh_shape, dims, options):
    return launch(base, hosts, mesh_shape, dims, **options)


def checkpoints(base, host):
    return base / host / "disk" / RUN / "checkpoints"


def lose_memory(base, *hosts):
    for host in hosts:
        for folder in (base / host).glob("keel-*"):
            shutil.rmtree(folder)


def lose(base, host):
    shutil.rmtree(base / host)


TWO = ["a", "a", "b", "b"]


def test_checkpoints_are_whole_at_home_and_records_everywhere(ranks, tmp_path):
    found_by(ranks, tmp_path, TWO, (4,), (0,), saves=[5, (10,), 12])
    assert {f"__{rank}_0.distcp" for rank in range(4)} < names(step_folder(checkpoints(tmp_path, "a"), 10))
    check(step_folder(checkpoints(tmp_path, "a"), 10))
    assert names(checkpoints(tmp_path, "b")) == set()
    assert steps_recorded(tmp_path / "a") == steps_recorded(tmp_path / "b") == [5, 10, 12]
    accounts = [facts_of(tmp_path / host / "disk" / RUN / FOLDER, 1) for host in "ab"]
    assert accounts[0] == accounts[1]
    assert accounts[0]["began"] == 0


@pytest.mark.parametrize("lost", ["a", "b"])
def test_a_host_is_lost_with_its_disk(ranks, tmp_path, lost):
    found_by(ranks, tmp_path, TWO, (4,), (0,), saves=[5, (10,), 12])
    lose(tmp_path, lost)
    [left] = {"a", "b"} - {lost}
    step, log = found_by(ranks, tmp_path, ["c", left, left], (3,), (1,), saves=[14, (15,)])
    assert step == 12, log
    assert steps_recorded(tmp_path / "c") == [5, 10, 12, 14, 15]  # the new host is home
    assert steps_in(checkpoints(tmp_path, "c")) == ([15] if lost == "a" else [10, 15])
    check(step_folder(checkpoints(tmp_path, "c"), 15))


def test_the_newest_checkpoint_is_brought_home(ranks, tmp_path):
    """Hosts change places, and none has its memory any more; each rank loads what it needs from the home's disk."""
    found_by(ranks, tmp_path, TWO, (4,), (0,), saves=[(5,), (10,)])
    lose_memory(tmp_path, "a", "b")
    step, log = found_by(ranks, tmp_path, ["b", "a", "a", "c"], (2, 2), (1, 0), saves=[(11,)])
    assert step == 10
    assert "step 10 was brought from another host's disk (rank 1)" in log
    assert steps_in(checkpoints(tmp_path, "b")) == [10, 11]
    assert names(step_folder(checkpoints(tmp_path, "a"), 10)) == names(step_folder(checkpoints(tmp_path, "b"), 10))
    assert steps_recorded(tmp_path / "b") == [5, 10, 11]
    assert not list(tmp_path.glob("*/disk/run/checkpoints/*.tmp"))
    step, log = found_by(ranks, tmp_path, ["b", "a"], (2,), (0,))
    assert step == 11
    assert "brought" not in log


def test_a_checkpoint_at_home_is_loaded_by_hosts_that_lack_it(ranks, tmp_path):
    found_by(ranks, tmp_path, TWO, (4,), (0,), saves=[(5,)])
    lose_memory(tmp_path, "a", "b")
    step, log = found_by(ranks, tmp_path, ["a", "b", "c"], (3,), (1,))
    assert step == 5
    assert "brought" not in log
    assert found_by(ranks, tmp_path, ["a", "a"], (2,), (1,))[0] == 5  # one host alone shares its folder with nobody


def test_what_is_out_of_date_is_not_gone_on_from(ranks, tmp_path):
    """The home is away with step 10, while the run goes on from step 5 without it; then it is home again."""
    found_by(ranks, tmp_path, ["a", "b"], (2,), (0,), saves=[(3,), 5, (10,)])
    shutil.move(tmp_path / "a", tmp_path / "away")
    assert found_by(ranks, tmp_path, ["b", "c"], (2,), (0,), saves=[(7,)])[0] == 5
    shutil.move(tmp_path / "away", tmp_path / "a")
    lose_memory(tmp_path, "a", "b", "c")
    step, log = found_by(ranks, tmp_path, ["a", "b"], (2,), (0,), saves=[(8,)])
    assert step == 7, log
    assert "from which the run has not gone on were moved to run/checkpoints/abandoned-001" in log
    assert steps_in(checkpoints(tmp_path, "a")) == [3, 7, 8]
    assert steps_in(checkpoints(tmp_path, "a") / "abandoned-001") == [10]
    assert [(line["step"], line["of"]) for line in recorded(tmp_path / "a")] == [(3, "a"), (5, "a"), (7, "b"), (8, "a")]
    set_aside = (checkpoints(tmp_path, "a") / "abandoned-001" / METRICS).read_text().splitlines()
    assert [json.loads(line)["step"] for line in set_aside] == [3, 5, 10]


def test_a_host_that_was_idle_learns_where_launches_began(ranks, tmp_path):
    """It knows that there was one."""
    found_by(ranks, tmp_path, ["a", "b"], (2,), (0,), saves=[(3,), 5])
    account = tmp_path / "b/disk/run" / FOLDER / "000001.json"
    facts = json.loads(account.read_text())
    del facts["lines"]
    account.write_text(json.dumps(facts))
    assert found_by(ranks, tmp_path, ["b", "a"], (2,), (0,))[0] == 5


def test_an_older_home_has_what_a_later_one_lacks(ranks, tmp_path):
    """Its checkpoint is not out of date, since the later launch has begun there and saved nothing."""
    found_by(ranks, tmp_path, ["a", "b"], (2,), (0,), saves=[(3,)])
    lose_memory(tmp_path, "a", "b")
    assert found_by(ranks, tmp_path, ["b", "a"], (2,), (0,))[0] == 3
    lose(tmp_path, "b")
    assert found_by(ranks, tmp_path, ["c", "a"], (2,), (0,))[0] == 3


def test_records_are_those_of_the_newest_launch(ranks, tmp_path):
    """The host that was home before has longer ones, of steps that the newest launch has repeated."""
    found_by(ranks, tmp_path, ["a", "b"], (2,), (0,), saves=[2, 4])
    with (tmp_path / "a/disk/run" / METRICS).open("a") as file:  # steps after the last copy
        file.writelines(json.dumps({"step": step, "of": "a"}) + "\n" for step in range(5, 50))
    assert found_by(ranks, tmp_path, ["b", "a"], (2,), (0,), saves=[5, (6,)])[0] == 4
    assert found_by(ranks, tmp_path, ["a", "b"], (2,), (0,))[0] == 6
    expected = [(2, "a"), (4, "a"), (5, "b"), (6, "b")]
    assert [(line["step"], line["of"]) for line in recorded(tmp_path / "a")] == expected


def test_mirrored_records_are_as_new_as_their_launch(ranks, tmp_path):
    """A host that was away has longer ones, which an older launch has sent it."""
    found_by(ranks, tmp_path, ["a", "b"], (2,), (0,), saves=[(3,), 4, 6, 8])
    lose_memory(tmp_path, "a", "b")
    assert found_by(ranks, tmp_path, ["a", "c"], (2,), (0,), saves=[5])[0] == 3
    lose(tmp_path, "a")
    assert found_by(ranks, tmp_path, ["b", "c"], (2,), (0,))[0] == 5
    assert steps_recorded(tmp_path / "b") == [3, 5]


@pytest.mark.parametrize("damage", ["a bit", "a missing file", "no manifest"])
def test_a_damaged_checkpoint_is_not_brought(ranks, tmp_path, damage):
    found_by(ranks, tmp_path, TWO, (4,), (0,), saves=[(5,), (10,)])
    lose_memory(tmp_path, "a", "b")
    name = "MANIFEST.json" if damage == "no manifest" else "__2_0.distcp"
    file = step_folder(checkpoints(tmp_path, "a"), 10) / name
    flip(file) if damage == "a bit" else file.unlink()
    step, log = found_by(ranks, tmp_path, ["b", "a"], (2,), (0,))
    assert step == 5
    assert steps_in(checkpoints(tmp_path, "b")) == [5]
    assert ("the checkpoint of step 10 on another host is not used" in log) == (damage != "no manifest")
    assert not list(tmp_path.glob("*/disk/run/checkpoints/*.tmp"))


def test_damage_at_home_falls_back(ranks, tmp_path):
    found_by(ranks, tmp_path, TWO, (4,), (0,), saves=[(5,), (10,)])
    lose_memory(tmp_path, "a", "b")
    flip(step_folder(checkpoints(tmp_path, "a"), 10) / "__2_0.distcp")
    step, log = found_by(ranks, tmp_path, ["a", "b"], (2,), (0,))
    assert step == 5
    assert "__2_0.distcp has changed since it was written" in log


@contextmanager
def full(names):
    """The second rank's host has no room for files of these names."""
    really, really_open = exchanges._Arriving._append, Path.open

    def append(self, content):
        if any(name in self._path.name for name in names):
            raise OSError(errno.ENOSPC, "No space left on device")
        really(self, content)

    def opened(self, *arguments, **options):
        if self.name in names and arguments[:1] != ("rb",):
            raise OSError(errno.ENOSPC, "No space left on device", str(self))
        return really_open(self, *arguments, **options)

    is_full = dist.get_rank() == dist.get_world_size() - 1
    with (
        patch.object(exchanges._Arriving, "_append", append if is_full else really),
        patch.object(Path, "open", opened if is_full else really_open),
    ):
        yield


@contextmanager
def full_of_records():
    with full([METRICS]):
        yield


@contextmanager
def full_home():
    really = exchanges._Arriving._append

    def refuse(self, content):
        raise OSError(errno.ENOSPC, "No space left on device")

    with patch.object(exchanges._Arriving, "_append", refuse if dist.get_rank() < 2 else really):
        yield


def test_a_copy_whose_records_cannot_be_kept_is_none(ranks, tmp_path):
    """Otherwise the host that takes over would have a hole in them."""
    found_by(ranks, tmp_path, ["a", "b"], (2,), (0,), saves=[5])
    _, log = found_by(ranks, tmp_path, ["a", "b"], (2,), (0,), saves=[10], breaks=full_of_records)
    assert "the copy of step 10 in the hosts' memory has failed, TRAINING GOES ON" in log
    assert "bringing the run's records to other hosts" in log
    lose(tmp_path, "a")
    assert found_by(ranks, tmp_path, ["b", "c"], (2,), (0,))[0] == 5
    assert steps_recorded(tmp_path / "b") == [5]


def test_a_checkpoint_that_does_not_arrive_is_none(ranks, tmp_path):
    _, log = found_by(ranks, tmp_path, TWO, (4,), (0,), saves=[(5,)], breaks=full_home)
    assert "checkpoint step-00000005.of-1 could not be written" in log
    assert "No space left on device" in log
    assert not list(tmp_path.glob("*/disk/run/checkpoints/*"))


def test_what_an_interrupted_save_left_on_another_host_is_removed(ranks, tmp_path):
    found_by(ranks, tmp_path, ["a", "b"], (2,), (0,), saves=[5])
    left = checkpoints(tmp_path, "b") / "step-00000007.of-1.tmp"
    left.mkdir(parents=True)
    (left / "__1_0.distcp").write_bytes(b"half")
    found_by(ranks, tmp_path, ["a", "b"], (2,), (0,))
    assert not left.exists()


def test_two_hosts_that_went_on_apart_agree_on_the_later_one(ranks, tmp_path):
    """As after a network has split, and each was started alone: both have claimed the same number."""
    found_by(ranks, tmp_path, ["a", "b"], (2,), (0,), saves=[(3,), 5])
    assert found_by(ranks, tmp_path, ["a"], (1,), (0,), saves=[(20,)])[0] == 5
    assert found_by(ranks, tmp_path, ["b"], (1,), (0,), saves=[(9,)])[0] == 5
    lose_memory(tmp_path, "a", "b")
    step, _ = found_by(ranks, tmp_path, ["a", "b"], (2,), (0,))
    assert step == 9
    assert steps_in(checkpoints(tmp_path, "a")) == [3, 9]
    assert steps_in(checkpoints(tmp_path, "a") / "abandoned-001") == [20]


def test_records_are_sent_only_once(ranks, tmp_path):
    """What a long run has recorded would otherwise be sent with each copy."""
    assert ranks(2, bytes_of_mirrors, tmp_path) == [[6, 0, 3, 3], [6, 0, 3, 3]]


def bytes_of_mirrors(base):
    rank, sent = dist.get_rank(), []
    folder = base / "ab"[rank] / "run"
    folder.mkdir(parents=True)
    own = OwnFolders.meet(folder, is_home=rank == 0)
    own.unite()
    on_rank_zero(None, lambda: claim(folder, {}))
    own.bring_home(lambda line: None, lambda line: None)
    really = run_folders._tail

    def tail(path, start):
        content = really(path, start)
        if path.name == METRICS:
            sent.append(len(content))
        return content

    with patch.object(run_folders, "_tail", tail):
        for text in ("first\n", "", "ab\n", "cd\n"):
            on_rank_zero(None, lambda text=text: (folder / METRICS).open("a").write(text))
            if rank == 1 and text == "ab\n":  # what a full disk has left of an earlier call
                with (folder / METRICS).open("a") as file:
                    file.write("half a li")
            own.mirror()
    assert (folder / METRICS).read_text() == "first\nab\ncd\n"
    dist.broadcast_object_list(sent_by_first := [sent], src=0)
    return sent_by_first[0]


def test_a_folder_that_cannot_be_made_is_named(ranks, tmp_path):
    (tmp_path / "b").write_text("a file")
    [said] = set(ranks(2, refused, tmp_path))
    assert f"the run folder {tmp_path}/b/run can't be created: Not a directory" in said


def refused(base):
    with pytest.raises(UserError) as caught:
        OwnFolders.meet(base / "ab"[dist.get_rank()] / "run", is_home=dist.get_rank() == 0)
    return str(caught.value)
