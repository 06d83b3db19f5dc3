"""The index of a stranger's checkpoint: no code in it runs, and nothing in it leads out of the folder."""

import os
import pickle
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, BytesStorageMetadata, StorageMeta

from checkpoint.safe_read import read_metadata
from configs.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Exploit:
    """A pickle that makes a file when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.fixture
def folder(tmp_path):
    state = {"weight": torch.randn(4, 4), "half": torch.zeros(2, dtype=torch.bfloat16), "step": torch.tensor(3.0)}
    writer = dcp.FileSystemWriter(tmp_path / "checkpoint")
    writer.storage_meta = StorageMeta
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(state, storage_writer=writer, planner=planner, no_dist=True)
    return tmp_path / "checkpoint"


def rewrite(folder, change):
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def test_an_honest_index_is_read(folder):
    assert read_metadata(folder) == pickle.loads((folder / ".metadata").read_bytes())


def test_an_index_of_the_first_releases_of_python_3_11_is_read(folder):
    """They write a member of an enumeration as an attribute of it."""
    expected = read_metadata(folder)
    with patch.object(_MEM_FORMAT_ENCODING, "__reduce_ex__", lambda own, _: (getattr, (type(own), own.name))):
        rewrite(folder, lambda metadata: None)
    assert b"getattr" in (folder / ".metadata").read_bytes()
    assert read_metadata(folder) == expected


@pytest.mark.parametrize(("of", "name"), [(os, "mkdir"), (torch.Size, "numel"), (_MEM_FORMAT_ENCODING, "__class__")])
def test_no_other_attribute_is_taken(folder, of, name):
    if of is os:  # modules can't be pickled
        content = b"\x80\x04\x8c\x08builtins\x8c\x07getattr\x93\x8c\x02os\x8c\x05mkdir\x86R."
        (folder / ".metadata").write_bytes(content)
    else:
        with patch.object(_MEM_FORMAT_ENCODING, "__reduce_ex__", lambda *_: (getattr, (of, name))):
            rewrite(folder, lambda metadata: None)
    with pytest.raises(UserError, match="it takes an attribute of something"):
        read_metadata(folder)


@pytest.mark.parametrize("place", ["whole", "planner", "entry"])
def test_code_does_not_run(folder, tmp_path, place):
    exploit = Exploit(tmp_path / "exploited")
    if place == "whole":
        (folder / ".metadata").write_bytes(pickle.dumps(exploit))
    elif place == "planner":
        rewrite(folder, lambda metadata: setattr(metadata, "planner_data", exploit))
    else:
        rewrite(folder, lambda metadata: metadata.state_dict_metadata.update(weight=exploit))
    with pytest.raises(UserError, match="mkdir, which has no place in a checkpoint"):
        read_metadata(folder)
    assert not exploit.path.exists()
    pickle.loads((folder / ".metadata").read_bytes())
    assert exploit.path.exists()  # so the exploit is one


@pytest.mark.parametrize("name", ["../other", "/etc/passwd", "sub/file", Path("data"), ".."])
def test_paths_stay_in_the_folder(folder, name):
    def change(metadata):
        for index, place in metadata.storage_data.items():
            metadata.storage_data[index] = _StorageInfo(name, place.offset, place.length)

    rewrite(folder, change)
    with pytest.raises(UserError, match=r"damaged: \.metadata can't be read"):
        read_metadata(folder)


def test_pickled_objects_are_refused(folder):
    rewrite(folder, lambda metadata: metadata.state_dict_metadata.update(weight=BytesStorageMetadata()))
    with pytest.raises(UserError, match="BytesStorageMetadata"):
        read_metadata(folder)


def test_missing_parts_are_seen(folder):
    """DCP itself would leave that part of the tensor as it was, without a word."""
    rewrite(folder, lambda metadata: metadata.state_dict_metadata["weight"].chunks.clear())
    with pytest.raises(UserError, match="parts of weight are missing"):
        read_metadata(folder)


def test_encodings_are_refused(folder):
    def change(metadata):
        for place in metadata.storage_data.values():
            place.transform_descriptors = ["zstd"]

    rewrite(folder, change)
    with pytest.raises(UserError, match="encoded"):
        read_metadata(folder)


def test_cut_at_any_byte(folder):
    content = (folder / ".metadata").read_bytes()
    for length in range(0, len(content), 7):
        (folder / ".metadata").write_bytes(content[:length])
        with pytest.raises(UserError, match="damaged"):
            read_metadata(folder)
