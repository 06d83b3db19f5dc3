"""The index of a checkpoint: what torch's own tools have, without a pickle; and what a stranger's may not say."""

import json
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from checkpoint.index import METADATA_NAME, read_metadata
from checkpoint.manifest import INDEX_NAME
from checkpoint.storage import FolderStorage
from checkpoint.tensor_stream import write_tensors
from configs.errors import UserError
from tests.torture.damage import process_group, state, write_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def folder(tmp_path):
    """As an import writes it, with tensors of several types and dimensions."""
    tensors = {"weight": torch.randn(4, 4), "half": torch.zeros(2, dtype=torch.bfloat16), "step": torch.tensor(3.0)}
    (tmp_path / "checkpoint").mkdir()
    write_tensors(FolderStorage(), tmp_path / "checkpoint", tensors.items())
    return tmp_path / "checkpoint"


def change(folder, name="weight", **changes):
    index = json.loads((folder / INDEX_NAME).read_text())
    index["tensors"][name] |= changes
    (folder / INDEX_NAME).write_text(json.dumps(index))


def part(**changes):
    """The part that "weight" has, changed."""
    usual = {"offsets": [0, 0], "sizes": [4, 4], "file": "__0_0.distcp", "first": 0, "length": 1000}
    return [[*(usual | changes).values()]]


def test_it_says_what_torchs_own_says(folder):
    found, theirs = read_metadata(folder), pickle.loads((folder / METADATA_NAME).read_bytes())
    assert found.state_dict_metadata == theirs.state_dict_metadata
    assert found.storage_data == theirs.storage_data


def test_a_save_of_a_run_opens_in_torchs_own_tools(tmp_path):
    with process_group():
        checkpoint = write_checkpoint(tmp_path / "checkpoints")
        loaded = {name: torch.zeros_like(tensor) for name, tensor in state().items()}
        dcp.load(loaded, checkpoint_id=checkpoint)
    dcp_to_torch_save(checkpoint, tmp_path / "whole.pt")
    saved = torch.load(tmp_path / "whole.pt", weights_only=True)
    found, theirs = read_metadata(checkpoint), pickle.loads((checkpoint / METADATA_NAME).read_bytes())
    assert found.storage_data == theirs.storage_data
    assert loaded.keys() == saved.keys()
    for name in loaded:
        torch.testing.assert_close(loaded[name], saved[name], rtol=0, atol=0)
    assert any(tensor.any() for tensor in loaded.values())


@pytest.mark.parametrize("name", ["../other", "/etc/passwd", "sub/file", "..", ""])
def test_paths_stay_in_the_folder(folder, name):
    change(folder, parts=part(file=name))
    with pytest.raises(UserError, match=r"damaged: index\.json can't be read"):
        read_metadata(folder)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"parts": []}, "parts of weight are missing"),
        ({"parts": part(sizes=[2, 4]) * 2}, "parts of weight are missing or duplicated"),
        ({"parts": part(offsets=[2, 0])}, "a part of weight is outside of it"),
        ({"parts": part(offsets=[-1, 0])}, "greater than or equal to 0"),
        ({"parts": part(offsets=[0], sizes=[16])}, "a part of weight has other dimensions"),
        ({"parts": part(length=1)}, "a part of weight is larger than its place"),
        ({"parts": part(length=1 << 40)}, "__0_0.distcp is shorter than its tensors"),
        ({"parts": part(first=-5)}, "greater than or equal to 0"),
        ({"parts": part(file=5)}, "valid string"),
        ({"dtype": "Tensor"}, "weight has an unknown type"),
        ({"dtype": "float64", "parts": part(length=100)}, "a part of weight is larger than its place"),
        ({"shape": [2**63]}, "less than"),
        ({"shape": [2**62, 2**62]}, "parts of weight are missing"),
    ],
)
def test_what_it_may_not_say(folder, changes, said):
    change(folder, **changes)
    with pytest.raises(UserError, match=said):
        read_metadata(folder)


def test_cut_at_any_byte(folder):
    content = (folder / INDEX_NAME).read_bytes()
    for length in range(0, len(content), 7):
        (folder / INDEX_NAME).write_bytes(content[:length])
        with pytest.raises(UserError, match="damaged"):
            read_metadata(folder)


def test_a_checkpoint_without_one(folder):
    (folder / INDEX_NAME).unlink()
    with pytest.raises(UserError, match=r"index\.json can't be read: No such file"):
        read_metadata(folder)
