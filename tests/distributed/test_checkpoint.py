"""Checkpoints over ranks: any sharding to any other, one copy of everything, and one fate for all ranks."""

import errno
import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from checkpoint.manager import CheckpointManager
from checkpoint.manifest import Damaged, read_manifest, step_folder
from checkpoint.reader import Description, Log
from checkpoint.storage import FolderStorage
from configs.errors import ConfigError, UserError
from configs.schema import Checkpoint

SHAPES = {"matrix": (8, 6), "uneven": (5, 7), "small": (1, 3), "vector": (9,), "cube": (2, 4, 3)}


def reference():
    generator = torch.Generator().manual_seed(0)
    state = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    state["half"] = torch.randn(4, 4, generator=generator).bfloat16()
    state["step"] = torch.tensor(3.0)
    return state


def sharded(state, mesh_shape, dims):
    """`state` as DTensors, sharded along `dims` (None: replicated), one number a mesh dimension; scalars stay plain."""
    mesh = init_device_mesh("cpu", mesh_shape)

    def placements(tensor):
        return [Replicate() if dim is None or dim >= tensor.dim() else Shard(dim) for dim in dims]

    return {
        name: distribute_tensor(tensor, mesh, placements(tensor), src_data_rank=None)
        if tensor.dim()
        else tensor.clone()
        for name, tensor in state.items()
    }


def zeros(state):
    return {name: torch.zeros_like(tensor) for name, tensor in state.items()}


def whole(state):
    return {name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for name, tensor in state.items()}


def make_manager(folder, **settings):
    settings = Checkpoint(**{"mode": "sync", **settings})
    manager = CheckpointManager(Path(folder), settings, Description({}, {}), Log())
    manager.max_save_failures = 1
    return manager


def save(folder, mode, mesh_shape, dims):
    state = sharded(reference(), mesh_shape, dims)
    manager = make_manager(folder, mode=mode)
    manager.resume(state)
    manager.begin_lineage()
    manager.save(1, state, {"tokens": 1})
    for tensor in state.values():
        tensor.mul_(0)
    manager.close()


def load(folder, mesh_shape, dims):
    """Load into the given sharding; returns the names of the tensors that are not what was saved."""
    state = sharded(zeros(reference()), mesh_shape, dims)
    manager = make_manager(folder)
    assert manager.resume(state) == {"tokens": 1}
    manager.close()
    return [name for name, tensor in whole(state).items() if not torch.equal(tensor, reference()[name])]


@pytest.mark.parametrize(
    ("mode", "mesh_shape", "dims"),
    [("sync", (4,), (0,)), ("async", (2, 2), (None, 0)), ("async", (2, 2), (1, 0)), ("sync", (4,), (None,))],
)
def test_every_sharding_loads_into_every_other(ranks, tmp_path, mode, mesh_shape, dims):
    ranks(4, save, tmp_path, mode, mesh_shape, dims)
    assert ranks(2, load, tmp_path, (2,), (1,)) == [[], []]
    assert ranks(1, load, tmp_path, (1,), (0,)) == [[]]
    assert ranks(4, load, tmp_path, (2, 2), (0, 1)) == [[]] * 4
    manifest = read_manifest(step_folder(tmp_path, 1))
    sizes = {name: entry.size for name, entry in manifest.files.items() if name.endswith(".distcp")}
    n_bytes = sum(tensor.nbytes for tensor in reference().values())
    # One copy of all, over all ranks, whatever is replicated; torch's frame around each tensor is about 1.3 KB.
    assert len(sizes) == 4
    assert n_bytes < sum(sizes.values()) < n_bytes + 1500 * 4 * len(reference())
    assert max(sizes.values()) < sum(sizes.values()) / 2


def two_dimensional(mesh_shape):
    torch.manual_seed(dist.get_world_size())  # another model at each world size
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6))
    if mesh_shape:
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = parameter.detach() * 2
    optimizer.step()
    state = {f"model.{name}": parameter for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        state |= {f"optimizer.{name}.{key}": value for key, value in optimizer.state[parameter].items()}
    return state


def save_two_dimensional(folder):
    state = two_dimensional((2, 2))
    manager = make_manager(folder, mode="async")
    manager.resume(state)
    manager.begin_lineage()
    manager.save(1, state, {"tokens": 1})
    manager.close()
    return {name: tensor.detach().clone() for name, tensor in whole(state).items()}


def load_two_dimensional(folder, mesh_shape):
    state = two_dimensional(mesh_shape)
    manager = make_manager(folder)
    manager.resume(state)
    manager.close()
    return {name: tensor.detach() for name, tensor in whole(state).items()}


def test_fsdp_with_tensor_parallelism_and_its_optimizer(ranks, tmp_path):
    saved = ranks(4, save_two_dimensional, tmp_path)[0]
    assert len(saved) == 4 * 4
    for size, mesh_shape in ((1, None), (2, (1, 2)), (2, (2, 1))):
        loaded = ranks(size, load_two_dimensional, tmp_path, mesh_shape)[0]
        assert all(torch.equal(loaded[name], saved[name]) for name in saved)


def save_stages(folder):
    """Every rank has tensors that no other has, as pipeline stages do; returns what a foreign stage is told."""
    rank = dist.get_rank()
    state = {f"stage{rank}.weight": torch.full((3,), rank + 1.0), "step": torch.tensor(1.0)}
    manager = make_manager(folder)
    manager.resume(state)
    manager.begin_lineage()
    manager.save(1, state, {"tokens": 1})
    manager.close()
    loaded = {name: tensor.clone().zero_() for name, tensor in state.items()}
    make_manager(folder).resume(loaded)
    if rank == 1:
        loaded["stage3.weight"] = loaded.pop("stage1.weight")
    try:
        make_manager(folder).resume(loaded)
    except ConfigError as error:
        return loaded[f"stage{rank if rank == 0 else 3}.weight"].tolist(), str(error)


def test_ranks_with_tensors_of_their_own(ranks, tmp_path):
    (first, message), (second, same_message) = ranks(2, save_stages, tmp_path)
    assert (first, second) == ([1.0] * 3, [2.0] * 3)
    assert message == same_message
    assert "2 tensors differ" in message
    assert "stage1.weight: only in the checkpoint" in message
    assert "stage3.weight: not in the checkpoint" in message
    assert "stage0" not in message


def refuse_on_rank_one(folder, mode):
    """The disk of one rank is full; returns what every rank is told, and at which poll."""
    state = sharded(reference(), (2,), (0,))
    manager = make_manager(folder, mode=mode)
    manager.resume(state)
    manager.begin_lineage()
    fsync = os.fsync

    def full(descriptor):
        if dist.get_rank() == 1:
            time.sleep(0.1)
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    os.fsync = full
    step = 0
    try:
        manager.save(1, state, {"tokens": 1})
        for step in range(1000):  # noqa: B007
            dist.barrier()  # training's own collectives go on meanwhile
            manager.poll()
            time.sleep(0.005)
    except UserError as error:
        told = step, str(error)
    os.fsync = fsync
    dist.barrier()
    assert list(Path(folder).rglob("*")) == []
    dist.barrier()
    manager.save(2, state, {"tokens": 2})
    manager.close()
    return told


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_full_disk_on_one_rank_ends_all_at_the_same_step(ranks, tmp_path, mode):
    told = ranks(2, refuse_on_rank_one, tmp_path, mode)
    assert told[0] == told[1]
    step, message = told[0]
    assert (step > 0) == (mode == "async")
    assert "step-00000001 could not be written: rank 1: [Errno 28] No space left on device" in message
    assert "__1_0.distcp" in message
    assert read_manifest(step_folder(tmp_path, 2)).tokens == 2


def can_not_be_read_again(folder):
    """Rank 1 can't look at what it has put, as in an outage of a bucket; returns what every rank is told."""

    class Away(FolderStorage):
        def damage(self, checkpoint, name, entry):
            if dist.get_rank() == 1:
                raise OSError(errno.EIO, "the server does not answer in time", name)
            return super().damage(checkpoint, name, entry)

    state = sharded(reference(), (2,), (0,))
    settings = Checkpoint(mode="sync", keep_last=2, timeout_seconds=10)
    told: list[str] = []
    manager = CheckpointManager(Path(folder), settings, Description({}, {}), Log(warning=told.append), storage=Away())
    manager.resume(state)
    manager.begin_lineage()
    manager.save(1, state, {"tokens": 1})
    dist.barrier()
    return told, list(Path(folder).iterdir())


def test_a_place_that_does_not_answer_one_rank_makes_the_save_fail_on_all(ranks, tmp_path):
    (first, left), (second, _) = ranks(2, can_not_be_read_again, tmp_path)
    [warning] = first
    assert "could not be written: read again, " in warning
    assert "the server does not answer in time" in warning
    assert "failed saves in a row: 1" in warning
    assert (second, left) == ([], [])


def fall_back(folder):
    """Both ranks of a run whose newest checkpoint has two damaged files; returns what each has loaded and been told."""
    state = sharded(reference(), (2,), (0,))
    manager = make_manager(folder)
    manager.resume(state)
    manager.begin_lineage()
    for step in (1, 2):
        manager.save(step, state, {"tokens": step})
    manager.close()
    dist.barrier()
    if dist.get_rank() == 0:
        for name in ("__0_0.distcp", "__1_0.distcp"):
            path = step_folder(Path(folder), 2) / name
            path.write_bytes(path.read_bytes()[:-1] + b"?")
    dist.barrier()
    try:
        make_manager(folder, load=2).resume(state)
    except Damaged as error:
        told = str(error)
    loaded = sharded(zeros(reference()), (2,), (0,))
    trainer_state = make_manager(folder).resume(loaded)
    same = all(torch.equal(tensor, reference()[name]) for name, tensor in whole(loaded).items())
    return told, trainer_state, same


def test_every_rank_hears_of_every_damaged_file_and_falls_back(ranks, tmp_path):
    first, second = ranks(2, fall_back, tmp_path)
    assert first == second
    told, trainer_state, same = first
    assert "__0_0.distcp has changed" in told
    assert "__1_0.distcp has changed" in told
    assert (trainer_state, same) == ({"tokens": 1}, True)


def seconds_to_close(folder):
    manager = make_manager(folder)
    is_late = dist.get_rank() == 1
    time.sleep(0.5 * is_late)
    begin = time.monotonic()
    manager.close()
    return time.monotonic() - begin


def test_no_rank_leaves_the_group_before_another_has_it(ranks, tmp_path):
    """gloo: "Connection closed by peer", where a rank was still connecting to one that had nothing to save."""
    first, _ = ranks(2, seconds_to_close, str(tmp_path))
    assert first > 0.3
