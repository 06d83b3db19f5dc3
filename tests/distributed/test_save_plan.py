"""An index per rank and plans that are kept: what is read, what torch's tools open, how damage is named."""

import json
import pickle
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from checkpoint import index, manifest, plan, store
from checkpoint.compare import compare
from checkpoint.index import METADATA_NAME, Places, index_of, index_text, read_metadata
from checkpoint.manifest import INDEX_NAME, MANIFEST_NAME, content_damage, read_manifest, sealed, step_folder
from checkpoint.plan import Plans
from checkpoint.shards import shards_of
from checkpoint.storage import FolderStorage
from checkpoint.tensor_stream import read_tensor
from configs.errors import UserError
from scripts.checkpoint import main
from tests.distributed.test_checkpoint import load, make_manager, reference, save, sharded, zeros

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def saved(ranks, tmp_path):
    """A checkpoint of four ranks, two copies of two shards, with a count that all have."""
    ranks(4, save, tmp_path, "async", (2, 2), (None, 0))
    return step_folder(tmp_path, 1)


def save_with_most_parts(folder, most):
    with patch.object(store, "MOST_PARTS", most):
        save(folder, "sync", (2, 2), (None, 0))


def rewrite(checkpoint, name, content):
    """Replace, add or (None) remove a file, as if the checkpoint had been committed so."""
    told = json.loads((checkpoint / MANIFEST_NAME).read_text())
    told.pop("seal")
    told["files"].pop(name, None)
    (checkpoint / name).unlink(missing_ok=True)
    if content is not None:
        entry = manifest.FileEntry(len(content), manifest.xxhash.xxh3_128_hexdigest(content))
        (checkpoint / name).write_bytes(content)
        told["files"][name] = {"size": entry.size, "xxh3": entry.xxh3}
    (checkpoint / MANIFEST_NAME).write_text(sealed(json.dumps(told, indent=1)))


def test_each_rank_has_an_index_and_torchs_own_says_the_same(saved):
    files = read_manifest(saved).files
    for rank in range(4):
        places = json.loads((saved / f"__{rank}_0.json").read_text())["places"]
        assert sum(length for _, length in places.values()) == files[f"__{rank}_0.distcp"].size
    found = read_metadata(saved)
    theirs = pickle.loads((saved / METADATA_NAME).read_bytes())
    assert found.state_dict_metadata == theirs.state_dict_metadata
    assert dict(found.storage_data) == theirs.storage_data
    assert len(found.storage_data) == len(theirs.storage_data)


def test_torchs_own_tools_open_it(saved, tmp_path):
    loaded = zeros(reference())
    dcp.load(loaded, checkpoint_id=saved)
    dcp_to_torch_save(saved, tmp_path / "whole.pt")
    for found in (loaded, torch.load(tmp_path / "whole.pt", weights_only=True)):
        assert found.keys() == reference().keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in reference().items())


def test_with_many_parts_a_command_makes_torchs_index(ranks, tmp_path, capsys):
    runs = tmp_path / "run/checkpoints"
    runs.mkdir(parents=True)
    ranks(4, save_with_most_parts, runs, 5)
    checkpoint = step_folder(runs, 1)
    assert not (checkpoint / METADATA_NAME).exists()
    assert ranks(2, load, runs, (2,), (1,)) == [[], []]
    assert main(["metadata", str(tmp_path / "run"), str(tmp_path / "dcp")]) == 0
    assert "parts in" in capsys.readouterr().out
    loaded = zeros(reference())
    dcp.load(loaded, checkpoint_id=tmp_path / "dcp")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in reference().items())
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "whole.pt")
    assert main(["verify", str(checkpoint)]) == 0
    assert main(["show", "--tensors", str(checkpoint)]) == 0
    assert main(["metadata", str(checkpoint), str(tmp_path / "dcp")]) == 1
    assert "exists" in capsys.readouterr().err


def save_alone(folder):
    save(folder, "sync", (1,), (0,))


def test_one_process_reads_tensor_by_tensor(ranks, saved, tmp_path):
    (tmp_path / "alone").mkdir()
    ranks(1, save_alone, tmp_path / "alone")
    assert not list(compare(saved, step_folder(tmp_path / "alone", 1)))
    metadata = read_metadata(saved)
    for name, tensor in reference().items():
        assert torch.equal(read_tensor(saved, metadata, name), tensor)


def old_format(checkpoint):
    """Make a checkpoint one of format 2: one index that has all parts."""
    whole_index = read_metadata(checkpoint)
    whole_index.storage_data = dict(whole_index.storage_data)
    text = index_text(whole_index)
    for path in sorted(checkpoint.glob("__*_0.json")):
        rewrite(checkpoint, path.name, None)
    rewrite(checkpoint, INDEX_NAME, text)
    told = json.loads((checkpoint / MANIFEST_NAME).read_text())
    told.pop("seal")
    told["format_version"] = 2
    (checkpoint / MANIFEST_NAME).write_text(sealed(json.dumps(told, indent=1)))


def test_a_checkpoint_of_format_2_still_loads(ranks, saved):
    old_format(saved)
    assert not isinstance(read_metadata(saved).storage_data, Places)
    assert ranks(4, load, saved.parent, (2, 2), (0, 1)) == [[]] * 4
    assert ranks(1, load, saved.parent, (1,), (0,)) == [[]]


# --------------------------------------------------------------------------- what is read


def files_read(folder, mesh_shape, dims):
    """The indexes of ranks that this rank reads while it loads."""
    read = []
    original = Places._places_in

    def places_in(places, file):
        read.append(index_of(file))
        return original(places, file)

    with patch.object(Places, "_places_in", places_in):
        assert load(folder, mesh_shape, dims) == []
    return sorted(read)


def save_rows(folder):
    save(folder, "sync", (4,), (0,))


def test_a_resume_on_the_same_mesh_reads_a_ranks_own_index(ranks, tmp_path):
    ranks(4, save_rows, tmp_path)
    by_rank = ranks(4, files_read, tmp_path, (4,), (0,))
    # Beside its own, the one of the count that all ranks have.
    assert all(f"__{rank}_0.json" in read for rank, read in enumerate(by_rank[:2]))
    assert all(len(read) <= 2 for read in by_rank)
    assert ranks(2, files_read, tmp_path, (2,), (0,))[0] == ["__0_0.json", "__1_0.json"]


def needless(folder):
    """Parts of `matrix` in the index that is given to DCP, on this rank of four that hold rows."""
    state = sharded(zeros(reference()), (4,), (0,))
    return len(store.needed(read_metadata(folder), shards_of(state)).state_dict_metadata["matrix"].chunks)


def test_dcp_sees_only_the_parts_that_a_rank_needs(ranks, tmp_path):
    ranks(4, save_rows, tmp_path)
    assert ranks(4, needless, step_folder(tmp_path, 1)) == [1] * 4


# --------------------------------------------------------------------------- plans that are kept


def save_again(folder):
    """Save three times; before the third, one rank has one more tensor. Returns how many plans each made."""
    state = sharded(reference(), (2, 2), (None, 0))
    plans, made = Plans(), []
    for number in range(3):
        if number == 2 and dist.get_rank() == 3:
            state["another"] = torch.ones(3)
        storage = FolderStorage()
        path = Path(folder) / f"step-0000000{number}"
        if dist.get_rank() == 0:
            path.mkdir()
        dist.barrier()
        with patch.object(plan, "planned", side_effect=plan.planned) as planned:
            store.write(storage, path, shards_of(state), dist.group.WORLD, plans)
        made.append(planned.call_count)
        for tensor in state.values():
            tensor.add_(1)
    return made, set(read_metadata(path).state_dict_metadata)


def test_a_plan_serves_until_a_rank_has_other_tensors(ranks, tmp_path):
    for made, names in ranks(4, save_again, tmp_path):
        assert made == [1, 0, 1]
        assert names == {*reference(), "another"}
    first, second = ((tmp_path / f"step-0000000{n}" / INDEX_NAME).read_bytes() for n in (0, 1))
    assert first == second


def plans_of_a_manager(folder):
    state = sharded(reference(), (2,), (0,))
    manager = make_manager(folder, mode="async")
    manager.resume(state)
    manager.begin_lineage()
    with patch.object(plan, "planned", side_effect=plan.planned) as planned:
        for step in (1, 2, 3):
            manager.save(step, state, {"tokens": step})
        manager.close()
    return planned.call_count


def test_a_run_plans_once(ranks, tmp_path):
    assert ranks(2, plans_of_a_manager, tmp_path) == [1, 1]


# --------------------------------------------------------------------------- damage


def told_of(folder):
    state = sharded(zeros(reference()), (2,), (0,))
    try:
        make_manager(folder, load=1).resume(state)
    except UserError as error:
        return str(error)


@pytest.mark.parametrize("name", ["__1_0.json", "__2_0.json", INDEX_NAME])
def test_a_bit_in_an_index_is_found_and_named(ranks, saved, name):
    content = bytearray((saved / name).read_bytes())
    content[len(content) // 2] ^= 1
    (saved / name).write_bytes(content)
    first, second = ranks(2, told_of, saved.parent)
    assert first == second
    assert name in first
    assert "damaged" in first


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda places: places.pop("matrix"), "it has no part of matrix"),
        (lambda places: places.update(matrix=[0, 1]), "a part of matrix is larger than its place in __0_0.distcp"),
        (lambda places: places.update(matrix=[0, 1 << 40]), "__0_0.distcp is shorter than its tensors"),
        (lambda places: places.update(matrix=[-1, 5]), "greater than or equal to 0"),
        (lambda places: places.update(matrix="all"), "valid array"),
        (lambda places: places.update(matrix=places["cube"]), "can't be read at matrix|mismatch"),
    ],
)
def test_what_a_forged_index_of_a_rank_may_not_say(ranks, tmp_path, change, said):
    ranks(2, save, tmp_path, "sync", (2,), (0,))
    checkpoint = step_folder(tmp_path, 1)
    told = json.loads((checkpoint / "__0_0.json").read_text())
    change(told["places"])
    rewrite(checkpoint, "__0_0.json", json.dumps(told).encode())
    with pytest.raises(UserError, match=said):
        read_tensor(checkpoint, read_metadata(checkpoint), "matrix")
    first, second = ranks(2, told_of, tmp_path)
    assert first == second
    assert "is damaged: rank 0: " in first


GROUP = {"names": ["a"], "dtype": "float32", "shape": [4], "parts": [[[0], [2], 0], [[2], [2], 1]]}
FILES = ["__0_0.distcp", "__1_0.distcp"]


@pytest.mark.parametrize(
    ("changes", "files", "said"),
    [
        ({"parts": [[[0], [2], 0]]}, FILES, "parts of a are missing or duplicated"),
        ({"parts": [[[0], [2], 0], [[0], [2], 1]]}, FILES, "parts of a are missing or duplicated"),
        ({"parts": [[[0], [2], 0], [[3], [2], 1]]}, FILES, "a part of a is outside of it"),
        ({"parts": [[[0], [2], 0], [[2], [2], 2]]}, FILES, "a part of a is in no file"),
        ({"parts": [[[0, 0], [2, 1], 0]]}, FILES, "a part of a has other dimensions"),
        ({"names": ["a", "a"]}, FILES, "a is there twice"),
        ({"names": 5}, FILES, "valid array"),
        ({"dtype": "Tensor"}, FILES, "a has an unknown type"),
        ({}, ["../x", "y"], "../x is not a file of the checkpoint's folder"),
        ({}, 7, "valid array"),
    ],
)
def test_what_a_directory_may_not_say(tmp_path, changes, files, said):
    (tmp_path / INDEX_NAME).write_text(json.dumps({"groups": [GROUP | changes], "files": files}))
    with pytest.raises(UserError, match=said):
        read_metadata(tmp_path)


def test_a_directory_of_many_names_and_parts_is_read_in_proportion_to_its_size(tmp_path):
    """Names times parts, 10^8, are never listed."""
    parts = [[[n], [1], 0] for n in range(10_000)]
    group = {"names": [f"t{n}" for n in range(10_000)], "dtype": "float32", "shape": [10_000], "parts": parts}
    (tmp_path / INDEX_NAME).write_text(json.dumps({"groups": [group], "files": ["__0_0.distcp"]}))
    metadata = read_metadata(tmp_path)
    assert len(metadata.storage_data) == 10**8
    assert len(metadata.state_dict_metadata["t7"].chunks) == 10_000


def test_a_rank_that_cannot_put_its_index(ranks, tmp_path):
    told = ranks(2, refuse_the_index, tmp_path)
    assert told[0] == told[1]
    assert "rank 1: [Errno 28] No space left on device" in told[0]
    assert "__1_0.json" in told[0]
    assert not list(tmp_path.iterdir())


def refuse_the_index(folder):
    def full(places):
        raise OSError(28, "No space left on device", "__1_0.json")

    state = sharded(reference(), (2,), (0,))
    manager = make_manager(folder)
    manager.resume(state)
    manager.begin_lineage()
    try:
        with patch.object(store, "places_text", full if dist.get_rank() == 1 else index.places_text):
            manager.save(1, state, {"tokens": 1})
    except UserError as error:
        return str(error)


def test_the_content_of_every_file_is_hashed(saved):
    entries = read_manifest(saved).files
    assert {f"__{rank}_0.json" for rank in range(4)} <= entries.keys()
    assert not [name for name, entry in entries.items() if content_damage(saved, name, entry)]
