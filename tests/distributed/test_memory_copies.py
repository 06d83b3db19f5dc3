"""Copies of the state in hosts' memory: ranks that pretend to be on several hosts, which are then lost or come back."""

import errno
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from checkpoint import exchange as exchanges
from checkpoint import memory_copies
from checkpoint.exchange import Transfer, exchange
from checkpoint.incarnation import claim
from checkpoint.manager import CheckpointManager
from checkpoint.manifest import FileEntry, read_manifest, step_folder, steps_in
from checkpoint.memory_copies import PARENT, folder_in_memory
from checkpoint.room import measure_room
from checkpoint.store import shards_of
from configs.errors import UserError
from configs.layout import mesh_sizes
from configs.load import load
from configs.schema import Checkpoint
from parallelisms.mesh import build_mesh
from parallelisms.ranks import on_rank_zero
from tests.cost_of_copies import COPIES
from tests.distributed.test_checkpoint import reference, sharded, whole, zeros
from tests.end_to_end.launch import TINY
from trainer.planning.memory_copies import host_copies
from trainer.step import build_learner

FROM_MEMORY = "resuming from step {}, from copies in the memory of host"


@contextmanager
def on_host(base: Path, name: str) -> Iterator[None]:
    """This rank is on a host of this name, whose memory is a folder."""
    (base / name).mkdir(exist_ok=True)
    with patch.dict("os.environ", {PARENT: str(base / name)}), patch.object(socket, "gethostname", lambda: name):
        yield


def fill(state, step):
    for name, tensor in sharded(reference(), *state["layout"]).items():
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        target = state["tensors"][name]
        (target.to_local() if hasattr(target, "to_local") else target).copy_(local + step)


def launch(base, hosts, mesh_shape, dims, copies=1, saves=(), rewinds_to=None, breaks=None, **settings):
    """A launch on ranks of `hosts` that makes copies and saves, then dies; returns what it has found, and its log.

    saves: steps, at those in parentheses a checkpoint on disk: [5, (10,)].
    breaks: called on each rank before the first save.
    """
    run, log = base / "run", []
    with on_host(base, hosts[dist.get_rank()]):
        run.mkdir(exist_ok=True)
        incarnation = on_rank_zero(None, lambda: claim(run, {}))
        table = Checkpoint(mode="async", memory_copies=copies, memory_interval=1, **settings)
        given = (lambda old, new: [], False, log.append, log.append)
        manager = CheckpointManager(run / "checkpoints", table, {}, {}, *given, incarnation=incarnation)
        tensors = sharded(zeros(reference()), mesh_shape, dims)
        found = manager.resume(tensors)
        loaded = whole(tensors)
        step = found["tokens"] if found else 0
        wrong = [name for name in loaded if found and not torch.equal(loaded[name], reference()[name] + step)]
        manager.begin_line()
        manager.check_room(tensors)
        if rewinds_to is not None:
            assert manager.can_rewind(rewinds_to)
            manager.rewind(rewinds_to, tensors)
        with breaks() if breaks else patch.dict({}):
            for each in saves:
                step = each[0] if isinstance(each, tuple) else each
                fill({"tensors": tensors, "layout": (mesh_shape, dims)}, step)
                manager.save(step, tensors, {"tokens": step}, in_memory=not isinstance(each, tuple))
                manager.wait()
        manager._writer.close()
        return found and found["tokens"], wrong, log


def found_by(ranks, base, hosts, mesh_shape, dims, **options):
    """The step from which a launch goes on, whose tensors must be right bit for bit, and the first rank's log."""
    outcomes = ranks(len(hosts), launch_with, base, hosts, mesh_shape, dims, options)
    assert all(wrong == [] for _, wrong, _ in outcomes), outcomes
    [step] = {step for step, _, _ in outcomes}
    return step, "\n".join(outcomes[0][2])


def launch_with(base, hosts, mesh_shape, dims, options):
    return launch(base, hosts, mesh_shape, dims, **options)


def memory_of(base, host):
    """The folders of copies on a host, by step."""
    with patch.dict("os.environ", {PARENT: str(base / host)}):
        folder = folder_in_memory(base / "run")
    return {int(path.name[5:13]): path for path in folder.iterdir()} if folder.exists() else {}


def names(folder):
    return {path.name for path in folder.iterdir()}


def data_files(folder):
    return {name for name in names(folder) if name.endswith(".distcp")}


def flip(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def lose(base, host):
    shutil.rmtree(base / host)


THREE = ["a", "a", "b", "b", "c", "c"]


def test_each_host_has_its_own_files_and_those_of_the_one_before_it(ranks, tmp_path):
    _, log = found_by(ranks, tmp_path, THREE, (6,), (0,), saves=[5, 10, 15])
    of = {host: memory_of(tmp_path, host) for host in "abc"}
    assert all(sorted(found) == [10, 15] for found in of.values())
    for step in (10, 15):
        here = {host: {name.split("_")[2] for name in data_files(of[host][step])} for host in "abc"}
        assert here == {"a": {"0", "1", "4", "5"}, "b": {"2", "3", "0", "1"}, "c": {"4", "5", "2", "3"}}
        assert all({".metadata", "trainer.json", "MANIFEST.json"} <= names(of[host][step]) for host in "abc")
    assert "is in the memory of hosts a, b, c" in log
    assert (tmp_path / "a").stat().st_uid == of["a"][15].parent.stat().st_uid
    assert of["a"][15].parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("lost", ["a", "b", "c"])
def test_a_host_is_lost_and_another_mesh_goes_on(ranks, tmp_path, lost):
    found_by(ranks, tmp_path, THREE, (6,), (0,), saves=[(3,), 5, 10])
    lose(tmp_path, lost)
    left = [host for host in "abc" if host != lost]
    step, log = found_by(ranks, tmp_path, [left[0], left[0], left[1], "d"], (2, 2), (0, 1), saves=[12])
    assert step == 10, log
    assert FROM_MEMORY.format(10) in log
    assert sorted(memory_of(tmp_path, "d")) == [10, 12]  # what it fetched is a part of that copy, too
    step, _ = found_by(ranks, tmp_path, ["d"], (1,), (0,))
    assert step == 3  # alone it has not everything


def test_two_hosts_are_lost(ranks, tmp_path):
    found_by(ranks, tmp_path, THREE, (6,), (0,), saves=[(3,), 5, 10])
    lose(tmp_path, "a")
    lose(tmp_path, "b")
    step, log = found_by(ranks, tmp_path, ["c", "c"], (2,), (0,))
    assert step == 3
    assert "the copy of step 10 in memory is incomplete: 2 of 8 files were lost" in log


def test_two_hosts_of_three_are_lost_with_two_copies(ranks, tmp_path):
    found_by(ranks, tmp_path, THREE, (6,), (0,), copies=2, saves=[(3,), 5])
    lose(tmp_path, "a")
    lose(tmp_path, "b")
    assert found_by(ranks, tmp_path, ["c", "d"], (2,), (1,))[0] == 5


def test_ranks_are_lost_on_one_host(ranks, tmp_path):
    _, log = found_by(ranks, tmp_path, ["a", "a"], (2,), (0,), saves=[5])
    assert "its own memory only, which survives its ranks, but not the host" in log
    assert found_by(ranks, tmp_path, ["a"], (1,), (None,))[0] == 5


def test_a_damaged_file_is_taken_from_another_host(ranks, tmp_path):
    found_by(ranks, tmp_path, ["a", "b"], (2,), (0,), saves=[5, 10])
    file = memory_of(tmp_path, "a")[10] / "__0_0.distcp"
    flip(file)
    step, log = found_by(ranks, tmp_path, ["a", "b"], (2,), (0,))
    assert step == 10
    assert "__0_0.distcp has changed since it was written" in log
    assert "(host a)" in log


def test_damage_everywhere_falls_back(ranks, tmp_path):
    found_by(ranks, tmp_path, ["a", "b"], (2,), (0,), saves=[(3,), 5, 10])
    for host in "ab":
        flip(memory_of(tmp_path, host)[10] / "__0_0.distcp")
    step, log = found_by(ranks, tmp_path, ["a", "b"], (2,), (0,))
    assert step == 5
    assert "the copy of step 10 in memory is damaged" in log


def test_damage_without_a_checkpoint_starts_from_scratch(ranks, tmp_path):
    found_by(ranks, tmp_path, ["a", "b"], (2,), (0,), saves=[5])
    for host in "ab":
        flip(memory_of(tmp_path, host)[5] / "MANIFEST.json")
    step, log = found_by(ranks, tmp_path, ["a", "b"], (2,), (0,))
    assert step is None
    assert "a copy in the memory of host a is not used" in log
    assert not memory_of(tmp_path, "a")


def test_a_newer_checkpoint_on_disk_wins(ranks, tmp_path):
    found_by(ranks, tmp_path, ["a", "b"], (2,), (0,), saves=[5, (10,)])
    step, log = found_by(ranks, tmp_path, ["a", "b"], (2,), (0,))
    assert step == 10
    assert "memory" not in log
    assert not memory_of(tmp_path, "a")


def test_a_host_that_comes_back_does_not_bring_the_run_back(ranks, tmp_path):
    """It has all of step 10, from which the run has not gone on."""
    found_by(ranks, tmp_path, ["a", "b"], (2,), (0,), saves=[(3,), 5, 10])
    shutil.move(tmp_path / "b", tmp_path / "hangs")
    lose(tmp_path, "a")
    assert found_by(ranks, tmp_path, ["c"], (1,), (0,))[0] == 3  # it begins there, and dies before it has saved
    shutil.move(tmp_path / "hangs", tmp_path / "b")
    step, log = found_by(ranks, tmp_path, ["b"], (1,), (0,))
    assert step == 3
    assert "the run has gone on from an earlier step" in log
    assert not memory_of(tmp_path, "b")


def test_a_launch_that_has_cut_nothing_makes_no_copy_out_of_date(ranks, tmp_path):
    found_by(ranks, tmp_path, ["a", "b"], (2,), (0,), saves=[(3,), 5])
    claim(tmp_path / "run", {})
    assert found_by(ranks, tmp_path, ["b"], (1,), (0,))[0] == 5
    assert found_by(ranks, tmp_path, ["b"], (1,), (0,))[0] == 5  # a launch that began at that step does not, either


def test_another_run_in_a_folder_of_the_same_name(ranks, tmp_path):
    found_by(ranks, tmp_path, ["a"], (1,), (0,), saves=[5])
    shutil.rmtree(tmp_path / "run")
    assert found_by(ranks, tmp_path, ["a"], (1,), (0,))[0] is None


def test_going_back_in_training_forgets_copies(ranks, tmp_path):
    found_by(ranks, tmp_path, ["a", "b"], (2,), (0,), saves=[(3,), 5])
    shutil.copytree(tmp_path / "b", tmp_path / "kept", symlinks=True)
    found_by(ranks, tmp_path, ["a", "b"], (2,), (0,), rewinds_to=3)
    assert not memory_of(tmp_path, "a")
    assert found_by(ranks, tmp_path, ["kept"], (1,), (0,))[0] == 3


def test_the_next_checkpoint_continues_the_one_before(ranks, tmp_path):
    """The run goes on from a copy without leaving its checkpoints, and saves the step of the copy if it ends there."""
    found_by(ranks, tmp_path, ["a", "b"], (2,), (0,), saves=[(3,), 5])
    _, log = found_by(ranks, tmp_path, ["a", "b"], (2,), (0,), saves=[(5,), (8,)])
    assert "moved to" not in log
    assert steps_in(tmp_path / "run/checkpoints") == [3, 5, 8]
    manifests = [read_manifest(step_folder(tmp_path / "run/checkpoints", step)) for step in (3, 5, 8)]
    assert len({manifest.run_id for manifest in manifests}) == 1
    assert [manifest.parent and manifest.parent.step for manifest in manifests] == [None, 3, 5]
    assert manifests[1].parent_seal


@contextmanager
def full():
    """The second rank's host has no room when files arrive."""

    def refuse(self, content):
        raise OSError(errno.ENOSPC, "No space left on device")

    with patch.object(exchanges._Arriving, "_append", refuse) if dist.get_rank() == 1 else patch.dict({}):
        yield


def test_a_host_without_room_keeps_what_it_had(ranks, tmp_path):
    found_by(ranks, tmp_path, ["a", "b"], (2,), (0,), saves=[5])
    _, log = found_by(ranks, tmp_path, ["a", "b"], (2,), (0,), saves=[10], breaks=full)
    assert "the copy of step 10 in the hosts' memory has failed, TRAINING GOES ON" in log
    assert "No space left on device (host b)" in log
    assert [sorted(memory_of(tmp_path, host)) for host in "ab"] == [[5], [5]]
    assert found_by(ranks, tmp_path, ["b"], (1,), (0,))[0] == 5


def refused(base, hosts, prepare):
    with on_host(base, hosts[dist.get_rank()]), pytest.raises(UserError) as caught, prepare():
        launch(base, hosts, (len(hosts),), (0,))
    return str(caught.value)


@contextmanager
def small():
    with patch.object(memory_copies.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, 5000)):
        yield


@contextmanager
def everyones():
    if dist.get_rank() == 1:
        folder = folder_in_memory(Path(memory_copies.os.environ[PARENT]).parent / "run")
        folder.mkdir()
        folder.chmod(0o755)
    yield


def test_too_little_room_is_said_before_training(ranks, tmp_path):
    [said] = set(ranks(2, refused, tmp_path, ["a", "b"], small))
    assert "host a would hold" in said
    assert "which has room for 5,000" in said


def test_a_folder_that_others_can_enter_is_refused(ranks, tmp_path):
    [said] = set(ranks(2, refused, tmp_path, ["a", "b"], everyones))
    assert "it is not a folder of this user alone; remove it (host b)" in said


# --------------------------------------------------------------------------- files between ranks


def exchanged(base, sizes, transfers, round_bytes):
    """What each rank then has, and its problems."""
    rank = dist.get_rank()
    folder = base / f"of-{rank}"
    folder.mkdir()
    contents = {
        name: bytes(torch.randint(256, (size,), generator=torch.Generator().manual_seed(size)).tolist())
        for name, size in sizes.items()
    }
    entries = {
        name: FileEntry(len(content), memory_copies.xxhash.xxh3_128_hexdigest(content))
        for name, content in contents.items()
    }
    for each in transfers:
        if each.source == rank:
            (folder / each.name).write_bytes(contents[each.name])
    with patch.object(exchanges, "ROUND_BYTES", round_bytes):
        problems = exchange(folder, transfers, entries, dist.group.WORLD)
    assert all((folder / each.name).read_bytes() == contents[each.name] for each in transfers if each.target == rank)
    return problems, sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("round_bytes", [1, 7, 64, 1000])
def test_files_arrive_whatever_the_rounds(ranks, tmp_path, round_bytes):
    sizes = {"one": 1, "some": 40, "more": 63, "none": 0}
    transfers = [
        Transfer("more", 0, 1),
        Transfer("one", 1, 0),
        Transfer("more", 0, 2),
        Transfer("some", 2, 1),
        Transfer("none", 2, 0),
    ]
    found = ranks(3, exchanged, tmp_path, sizes, transfers, round_bytes)
    assert [problems for problems, _ in found] == [[], [], []]
    assert [there for _, there in found] == [["more", "none", "one"], ["more", "one", "some"], ["more", "none", "some"]]


# --------------------------------------------------------------------------- what a plan says of them

SIZED = "--model.dim 128 --model.n_heads 4 --model.n_kv_heads 4 --model.ffn_dim 352 --model.vocab_size 1024"
PLANNED = {
    # name: (ranks, hosts, words)
    "FSDP 2": (2, 2, ""),
    "HSDP 2 x 2": (4, 2, "--mesh.dp_replicate 2 --mesh.dp_shard 2"),
    "PP 2, uneven stages": (4, 2, "--mesh.pp 2 --model.n_layers 3 --training.micro_batch_size 1"),
    "FSDP 2 x TP 2, moments in bfloat16": (4, 2, "--mesh.tp 2 --checkpoint.optimizer_dtype bfloat16"),
    "FSDP 3, a copy on two hosts": (3, 3, "--checkpoint.memory_copies 2 --training.global_batch_size 12"),
    "FSDP 3, a copy on one of three hosts": (3, 3, "--training.global_batch_size 12"),
    "FSDP 2 on one host": (2, 1, ""),
}


def planned_and_there(base, n_hosts, words):
    """On a rank: what the plan says of a host; by host, bytes at rest, while a copy is completed, and of it by rank."""
    n, rank = dist.get_world_size(), dist.get_rank()
    host, names_of_hosts = f"host{rank * n_hosts // n}", [f"host{index}" for index in range(n_hosts)]
    config = load(str(TINY), (*COPIES, *SIZED.split(), *words.split()), n).config
    plan = host_copies(config, mesh_sizes(config, n), n // n_hosts)
    state = build_learner(config, build_mesh(mesh_sizes(config, n), torch.device("cpu"))).state()
    at_the_peak = {}
    with on_host(base, host):
        incarnation = on_rank_zero(None, lambda: claim(base, {}))
        given = (lambda old, new: [], False, lambda line: None, lambda line: None)
        manager = CheckpointManager(base / "checkpoints", config.checkpoint, {}, {}, *given, incarnation=incarnation)
        manager.find()
        manager.begin_line()
        manager.check_room(state)
        is_current = type(incarnation).require_current

        def look(which):  # when all hosts have all of a copy, just before it gets its name
            at_the_peak.update({name: bytes_in(base / name) for name in names_of_hosts})
            is_current(which)

        with patch.object(type(incarnation), "require_current", look):
            for step in (1, 2, 3):
                manager.save(step, state, {"tokens": step}, in_memory=True)
                manager.wait()
        dist.barrier()
        at_rest = {name: bytes_in(base / name) for name in names_of_hosts}
        folders = {name: next((base / name).glob("*/step-00000003-*")) for name in names_of_hosts}
        newest = {name: {path.name: path.stat().st_size for path in folders[name].iterdir()} for name in folders}
        dist.barrier()
        staged = measure_room(shards_of(state), manager._writer.saved_dtype, dist.group.WORLD)
        manager.close()
    return plan, at_rest, at_the_peak, newest, staged


def bytes_in(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("name", PLANNED)
def test_the_plan_counts_what_is_in_dev_shm(ranks, name):
    n, n_hosts, words = PLANNED[name]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as base:
        [plan, at_rest, at_the_peak, newest, staged], *_ = ranks(n, planned_and_there, Path(base), n_hosts, words)
    assert plan.held == pytest.approx(max(at_the_peak.values()), rel=0.03)
    assert max(at_rest.values()) <= max(at_the_peak.values())
    of_ranks = {file: n_bytes for held in newest.values() for file, n_bytes in held.items() if file.endswith("distcp")}
    written = [0] * n_hosts
    for file, n_bytes in of_ranks.items():
        written[int(file.split("_")[2]) * n_hosts // n] += n_bytes
    assert plan.copies == min(n_hosts - 1, 2 if "two hosts" in name else 1)
    assert plan.sent == pytest.approx(plan.copies * max(written), rel=0.03)
    assert plan.staged == pytest.approx(max(n_bytes for n_bytes, _ in staged.values()), rel=0.03)
