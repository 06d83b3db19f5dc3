"""What a path names: a run's newest checkpoint, a checkpoint, a Hugging Face folder; and the tokenizer of each."""

from pathlib import Path

import pytest

from checkpoint import manifest as manifests
from checkpoint import storage as storages
from checkpoint.find import find_checkpoint, find_model, keep_tokenizer, kept_tokenizer, require_run, tokenizer_of
from checkpoint.manifest import FileEntry, Manifest, step_folder
from checkpoint.storage import FolderStorage
from configs.errors import UserError


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def commit(folder: Path, tokenizer: str | None = None, tokenizer_hash: str | None = None) -> Path:
    """A checkpoint without tensors."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    files: dict[str, FileEntry] = {}
    config = {"tokenizer": {"path": tokenizer}}
    draft = Manifest(1, 1, config, "", {}, "", "", None, [], files, tokenizer_hash=tokenizer_hash)
    storage = FolderStorage()
    storages.commit(storage, storage.begin(folder), folder, draft, files, "{}")
    return folder


def digest(content: bytes) -> str:
    return manifests.xxhash.xxh3_128_hexdigest(content)


def test_a_run_stands_for_its_newest_checkpoint():
    steps = [commit(step_folder(Path("runs/a/checkpoints"), step)) for step in (1, 20)]
    assert find_checkpoint(Path("runs/a")) == steps[1]
    assert find_checkpoint(Path("runs/a/checkpoints")) == steps[1]
    assert find_checkpoint(Path("runs/a"), 1) == steps[0]
    assert find_checkpoint(steps[0]) == steps[0]


def test_what_is_not_found_is_told_with_its_whole_path(tmp_path):
    for name in ("runs/b", "runs/a"):
        Path(name).mkdir(parents=True)
        Path(name, "config.toml").touch()
    Path("hf").mkdir()
    Path("hf/config.json").touch()
    for find, what, message in (
        (find_model, "no", f"{tmp_path}/no: no such folder; name a run (runs/debug), a checkpoint or a Hugging Face"),
        (find_model, "hf/config.json", f"{tmp_path}/hf/config.json: not a folder"),
        (
            find_model,
            "runs",
            f"{tmp_path}/runs is not a checkpoint (no MANIFEST.json in it), nor a run, nor a Hugging ",
        ),
        (find_model, "runs", "a Hugging Face folder; the runs in it: runs/a, runs/b"),
        (find_checkpoint, "runs/a", f"{tmp_path}/runs/a has no checkpoint yet"),
        (find_checkpoint, "hf", f"{tmp_path}/hf is a Hugging Face folder, not a checkpoint; keel import makes one"),
        (require_run, "no", f"{tmp_path}/no: no such folder; name a run folder"),
        (require_run, "runs", f"{tmp_path}/runs is not a run folder: it has no config.toml; the runs in it: runs/a"),
    ):
        with pytest.raises(UserError) as caught:
            find(Path(what))
        assert message in str(caught.value)


@pytest.mark.parametrize(("given", "kept"), [("t.model", "tokenizer.model"), ("a.json", "tokenizer.json")])
def test_a_tokenizer_is_kept_once_and_found_by_its_content(tmp_path, monkeypatch, given, kept):
    Path(given).write_bytes(b"pieces")
    run = Path("run")
    checkpoint = commit(step_folder(run / "checkpoints", 1), given, digest(b"pieces"))
    assert kept_tokenizer(run) is None
    keep_tokenizer(Path(given), run)
    before = (run / kept).stat().st_ino
    keep_tokenizer(Path(given), run)  # the next launch
    assert (run / kept).stat().st_ino == before
    assert tokenizer_of(checkpoint) == tmp_path / run / kept == kept_tokenizer(run).absolute()
    Path(given).unlink()
    run.rename("moved")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert tokenizer_of(Path("../moved/checkpoints/step-00000001")) == Path(tmp_path, "elsewhere/../moved", kept)


def test_each_checkpoint_finds_its_own_tokenizer_after_a_change():
    run = Path("run")
    Path("new.json").write_bytes(b"new")
    Path("old.model").write_bytes(b"old")
    old = commit(step_folder(run / "checkpoints/abandoned-001", 1), "old.model", digest(b"old"))
    new = commit(step_folder(run / "checkpoints", 1), "new.json", digest(b"new"))
    keep_tokenizer(Path("old.model"), run)
    keep_tokenizer(Path("new.json"), run)
    assert {path.name for path in run.glob("tokenizer*")} == {"tokenizer.json", f"tokenizer-{digest(b'old')[:8]}.model"}
    assert tokenizer_of(old).read_bytes() == b"old"
    assert tokenizer_of(new).read_bytes() == b"new"
    keep_tokenizer(Path("old.model"), run)
    assert kept_tokenizer(run).read_bytes() == b"old"
    assert tokenizer_of(new).read_bytes() == b"new"


def test_a_tokenizer_of_other_content_is_passed_over():
    """An earlier Keel kept no copy, so a run that it started again left the other tokenizer there."""
    checkpoint = commit(step_folder(Path("run/checkpoints"), 1), "data/t.model", digest(b"pieces"))
    Path("run/tokenizer.model").write_bytes(b"other pieces")
    assert tokenizer_of(checkpoint) == Path("data/t.model")
    assert tokenizer_of(commit(Path("bare"))) is None
