"""MANIFEST.json: what is accepted as a checkpoint, and how a folder becomes one."""

import json

import pytest
import xxhash

from checkpoint.manifest import (
    FORMAT_VERSION,
    OLDEST_VERSION,
    FileEntry,
    Manifest,
    Origin,
    RunChange,
    config_hash,
    is_fork,
    read_manifest,
    sealed,
    step_folder,
    steps_in,
)
from checkpoint.storage import FolderStorage, commit, remove_unfinished
from configs.errors import UserError

STORAGE = FolderStorage()
DRAFT = Manifest(
    step=100,
    tokens=4096,
    config={"training": {"seed": 1}},
    config_hash=config_hash({"training": {"seed": 1}}),
    mesh={"tp": 2},
    torch_version="2.13.0",
    run_id="run",
    parent=Origin("run", 50),
    run_changes=[RunChange(50, ["training.seed: 0 -> 1"])],
    files={},
)


def committed(root):
    checkpoint = step_folder(root, 100)
    unfinished = STORAGE.begin(checkpoint)
    assert unfinished.name == "step-00000100.tmp"
    (unfinished / "data").write_bytes(b"12345")
    files = {"data": FileEntry(5, xxhash.xxh3_128_hexdigest(b"12345"))}
    commit(STORAGE, unfinished, checkpoint, DRAFT, files, '{"step": 100}')
    return checkpoint


def edit(folder, **changes):
    """Change the manifest as somebody would who knows how to seal it."""
    path = folder / "MANIFEST.json"
    content = json.loads(path.read_text())
    del content["seal"]
    path.write_text(sealed(json.dumps({**content, **changes}, indent=1)))


def test_what_is_committed_is_read_back(tmp_path):
    folder = committed(tmp_path)
    manifest = read_manifest(folder)
    assert {name: entry.size for name, entry in manifest.files.items()} == {"data": 5, "trainer.json": 13}
    assert manifest.parent == DRAFT.parent
    assert manifest.run_changes == DRAFT.run_changes
    assert manifest.config == DRAFT.config
    assert manifest.format_version == FORMAT_VERSION
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000100"]
    assert steps_in(tmp_path) == [100]


def test_a_file_that_rank_0_cannot_see(tmp_path):
    checkpoint = step_folder(tmp_path, 100)
    unfinished = STORAGE.begin(checkpoint)
    with pytest.raises(UserError, match=r"data was written by another rank, .*all nodes share"):
        commit(STORAGE, unfinished, checkpoint, DRAFT, ["data"], "{}")
    assert steps_in(tmp_path) == []


def test_leftovers_are_removed_and_reported(tmp_path):
    committed(tmp_path)
    (STORAGE.begin(step_folder(tmp_path, 7)) / "data").write_bytes(b"1")
    (tmp_path / "step-00000008.tmp").write_bytes(b"no folder")
    removed, refused = [], []
    remove_unfinished(tmp_path, removed.append, refused.append)
    assert [line.split()[1] for line in removed] == [f"{tmp_path}/step-0000000{n}.tmp," for n in (7, 8)]
    assert not refused
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000100"]


def test_a_fork_is_told_by_its_first_checkpoint(tmp_path):
    assert not is_fork(tmp_path)
    folder = committed(tmp_path)
    assert not is_fork(tmp_path)
    edit(folder, parent={"run_id": "another", "step": 100})
    assert is_fork(tmp_path)
    (folder / "MANIFEST.json").write_text("{")
    assert not is_fork(tmp_path)


def test_a_folder_without_a_manifest_is_no_checkpoint(tmp_path):
    folder = committed(tmp_path)
    (folder / "MANIFEST.json").unlink()
    with pytest.raises(UserError, match=r"is not a checkpoint \(no MANIFEST"):
        read_manifest(folder)


@pytest.mark.parametrize(
    ("version", "keel"), [(FORMAT_VERSION + 1, "a newer Keel"), (OLDEST_VERSION - 1, "the Keel that wrote it")]
)
def test_another_format(tmp_path, version, keel):
    folder = committed(tmp_path)
    edit(folder, format_version=version, files="unheard of")
    formats = f"{OLDEST_VERSION} to {FORMAT_VERSION}"
    with pytest.raises(UserError, match=f"has format {version}; this Keel reads {formats}: use {keel}"):
        read_manifest(folder)


def test_an_older_format_that_is_read(tmp_path):
    folder = committed(tmp_path)
    edit(folder, format_version=OLDEST_VERSION)
    assert read_manifest(folder).format_version == OLDEST_VERSION


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "null", '{"format_version": 1}', "\x00", '"text"'])
def test_unreadable_manifest(tmp_path, text):
    folder = committed(tmp_path)
    (folder / "MANIFEST.json").write_text(text)
    with pytest.raises(UserError, match=r"step-00000100 is damaged: MANIFEST\.json .*move it away"):
        read_manifest(folder)


@pytest.mark.parametrize("field", ["files", "parent", "run_changes", "config"])
@pytest.mark.parametrize("value", [7, "text", [7], {"data": 7}])
def test_fields_of_another_form(tmp_path, field, value):
    folder = committed(tmp_path)
    edit(folder, **{field: value})
    if field == "config" and isinstance(value, dict):
        return
    with pytest.raises(UserError, match="is damaged"):
        read_manifest(folder)


@pytest.mark.parametrize("name", ["../data", "/etc/passwd", "a/b", ".."])
def test_files_outside_of_the_folder(tmp_path, name):
    folder = committed(tmp_path)
    edit(folder, files={name: {"size": 5, "xxh3": ""}})
    with pytest.raises(UserError, match="outside of the folder"):
        read_manifest(folder)
