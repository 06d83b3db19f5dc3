"""The bytes that a save takes beside the state that it writes."""

import gc
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from checkpoint.index import read_metadata
from checkpoint.shards import shards_of
from checkpoint.storage import FolderStorage
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


def test_a_save_holds_one_copy_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        # Parts of one storage, as FSDP's shards are: each is copied, so that nothing but the part is written.
        whole = torch.randn(PARTS * ELEMENTS)
        state = {f"part {n}": part for n, part in enumerate(whole.chunk(PARTS))}
        before = held_bytes()
        held = []
        save = torch.save

        def watched(tensor, stream) -> None:
            held.append(held_bytes() - before)
            save(tensor, stream)

        monkeypatch.setattr(torch, "save", watched)
        storage = FolderStorage()
        folder = storage.begin(tmp_path / "step-00000001")
        write(storage, folder, shards_of(state), dist.group.WORLD)
        monkeypatch.undo()
        assert len(held) == PARTS
        assert max(held) <= 2 * 4 * ELEMENTS
        expected = whole.clone()
        whole.zero_()
        read(storage, folder, read_metadata(folder), shards_of(state), dist.group.WORLD)
        assert torch.equal(whole, expected)
    finally:
        dist.destroy_process_group()
