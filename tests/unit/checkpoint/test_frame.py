"""Tensors written as torch.save writes them, and what other threads of the process notice of it."""

import io
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch.serialization import get_crc32_options, set_crc32_options

from checkpoint import frame, store
from checkpoint.frame import TensorFile, frame_of
from checkpoint.plan import Plans
from checkpoint.shards import shards_of
from checkpoint.staging import hashes
from checkpoint.storage import FolderStorage, HashedFile

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn]


def saved_by_torch(tensor: torch.Tensor) -> bytes:
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    return buffer.getvalue()


@pytest.fixture
def without_crc32():
    before = get_crc32_options()
    set_crc32_options(False)
    yield
    set_crc32_options(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (0, 4), (1000, 7), (2, 3, 4, 5)])
def test_the_bytes_are_those_of_torch_save(dtype, shape, without_crc32):
    first = torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)
    second = torch.ones(shape).to(dtype)
    buffer = io.BytesIO()
    file = TensorFile(HashedFile(buffer))
    places = [file.write(tensor) for tensor in (first, second)]
    content = buffer.getvalue()
    for tensor, (start, length) in zip((first, second), places, strict=True):
        assert content[start : start + length] == saved_by_torch(tensor)
    assert sum(length for _, length in places) == len(content)


def test_of_a_view_only_the_view_is_written():
    whole = torch.arange(1000.0)
    parts = {"slice": whole[100:104], "transposed": whole.view(10, 100).T, "parameter": torch.nn.Parameter(whole[:3])}
    for name, part in parts.items():
        buffer = io.BytesIO()
        TensorFile(HashedFile(buffer)).write(part)
        assert buffer.tell() < part.nbytes + 2000, name
        buffer.seek(0)
        assert torch.equal(torch.load(buffer, weights_only=True), part), name


def test_a_part_of_more_than_4_gib_can_be_loaded(tmp_path):
    """The zip format has other fields from there on. The file has a hole, and nothing touches the memory."""
    tensor = torch.empty(5 << 30, dtype=torch.uint8)
    before, after = frame_of(tensor)
    with (tmp_path / "large").open("wb") as file:
        file.write(before)
        file.seek(tensor.nbytes, io.SEEK_CUR)
        file.write(after)
    loaded = torch.load(tmp_path / "large", weights_only=True, mmap=True)
    assert (loaded.shape, loaded.dtype, loaded[-1]) == (tensor.shape, tensor.dtype, 0)


def test_torchs_checksum_is_left_as_it_was(without_crc32):
    for computes in (True, False):
        set_crc32_options(computes)
        frame_of(torch.ones(3))
        assert get_crc32_options() == computes


def test_another_way_of_writing_is_an_error(monkeypatch):
    """A torch that copied the values first would have them in what is taken for the same for all tensors."""
    save = torch.save
    monkeypatch.setattr(frame.torch, "save", lambda tensor, sink: save(tensor.clone(), sink))
    with pytest.raises(RuntimeError, match=r"torch\.save of torch .* writes tensors in a way that Keel does not know"):
        frame_of(torch.ones(3))


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_save_makes_few_python_calls_for_a_tensor(tmp_path, one_rank):
    """Beside Python work, each launch of a step may wait 5 ms for the interpreter's lock. By torch.save: 820 calls."""
    calls = []

    def calls_of_a_save(n_tensors: int) -> int:
        shards = shards_of({f"layers.{number}": torch.ones(4) for number in range(n_tensors)})
        plans = Plans()
        for name in ("planned", "counted"):
            (folder := tmp_path / f"{n_tensors} {name}").mkdir()
            calls.clear()
            sys.setprofile(lambda *event: calls.append(event[1]))
            try:
                store.write(FolderStorage(), folder, shards, one_rank, plans)
            finally:
                sys.setprofile(None)
        return len(calls)

    few, many = calls_of_a_save(100), calls_of_a_save(300)
    assert (many - few) / 200 < 100


@pytest.mark.parametrize("work", ["hashes", "finite", "write"])
def test_other_threads_run_while_a_large_tensor_is_saved(work, tmp_path, one_rank):
    """The interpreter takes its lock from no thread here; so they run only if the lock is given."""
    shards = shards_of({"large": torch.zeros(64 << 20)})
    ended = threading.Event()
    ticks = []

    def tick() -> None:
        while not ended.wait(0.001):
            ticks.append(time.monotonic())

    def save() -> None:
        if work == "hashes":
            hashes(shards)
        elif work == "finite":
            store.require_finite(shards, "step", None, one_rank)
        else:
            with FolderStorage().put(tmp_path / "file") as file:
                TensorFile(file).write(shards["large"].local)

    thread = threading.Thread(target=tick)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    thread.start()
    try:
        began = time.monotonic()
        save()
        returned = time.monotonic()
    finally:
        sys.setswitchinterval(interval)
        ended.set()
        thread.join()
    assert sum(began < each < returned for each in ticks) > 1
