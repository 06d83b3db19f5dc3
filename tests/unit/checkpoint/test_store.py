"""The bytes that a save takes beside the state that it writes."""

import gc
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from checkpoint.index import read_metadata
from checkpoint.plan import Plans
from checkpoint.shards import shards_of
from checkpoint.storage import FolderStorage, HashedFile
from checkpoint.store import read, write

PARTS = 4
ELEMENTS = 1 << 16


def held_bytes() -> int:
    """Bytes of all storages of tensors that live."""
    storages = {}
    for each in gc.get_objects():
        if type(each) is torch.Tensor:
            storage = each.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def test_a_save_holds_no_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        # Parts of one storage, as FSDP's shards are; of each, nothing but the part is written.
        whole = torch.randn(PARTS * ELEMENTS)
        state = {f"part {n}": part for n, part in enumerate(whole.chunk(PARTS))}
        before = held_bytes()
        held = []
        write_bytes = HashedFile.write

        def watched(file: HashedFile, data) -> int:
            if memoryview(data).nbytes == 4 * ELEMENTS:
                held.append(held_bytes() - before)
            return write_bytes(file, data)

        monkeypatch.setattr(HashedFile, "write", watched)
        storage = FolderStorage()
        folder = storage.begin(tmp_path / "step-00000001")
        write(storage, folder, shards_of(state), dist.group.WORLD, Plans())
        monkeypatch.undo()
        assert len(held) == PARTS
        assert max(held) < 4 * ELEMENTS
        assert sum(file.stat().st_size for file in folder.glob("*.distcp")) < whole.nbytes + PARTS * 2000
        expected = whole.clone()
        whole.zero_()
        read(storage, folder, read_metadata(folder), shards_of(state), dist.group.WORLD)
        assert torch.equal(whole, expected)
    finally:
        dist.destroy_process_group()
