"""scripts/checkpoint.py: what it says, what it removes, and that a checkpoint in other files is the same checkpoint."""

import pytest
import torch.distributed as dist

from checkpoint import compare as comparison
from checkpoint import verify as verification
from checkpoint.lock import BeingRead, not_being_read
from checkpoint.manifest import read_manifest, step_folder, steps_in
from checkpoint.storage import FolderStorage
from scripts.checkpoint import main
from tests.forbidden import refuse_to_list
from tests.torture.damage import make_manager, state


@pytest.fixture(autouse=True)
def process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def run(tmp_path):
    """A run folder with the checkpoints 1 to 5; the state of step n is n times that of step 1."""
    save(tmp_path / "run", 1, 2, 3, 4, 5)
    return tmp_path / "run"


def save(run, *steps, **settings):
    manager = make_manager(run / "checkpoints", **settings)
    manager.resume(state())
    manager.begin_lineage()
    for step in steps:
        scaled = {name: tensor * step for name, tensor in state().items()}
        manager.save(step, scaled, {"tokens": step * 100}, validation_loss=abs(step - 2.5))
    manager.close()


def of(run, step):
    return step_folder(run / "checkpoints", step)


def script(*words):
    return main(list(map(str, words)))


def test_list(run, capsys):
    save(run, 4, load=3, go_back=1)
    (run / "checkpoints" / "step-00000009.tmp").mkdir()
    (of(run, 1) / "trainer.json").unlink()
    assert script("list", run) == 0
    out = capsys.readouterr().out
    assert "step-00000001: checkpoint" in out
    assert "trainer.json is missing" in out
    assert "abandoned-001: an abandoned line; steps 4, 5" in out
    assert "step-00000009.tmp: left by an interrupted save" in out
    [line] = [line for line in out.splitlines() if line.split()[:2] == ["4", "400"]]
    assert "1.5000" in line
    assert read_manifest(of(run, 4)).run_id[:8] in line


def test_a_folder_that_may_not_be_read_is_not_said_to_be_empty(run, capsys, monkeypatch):
    refuse_to_list(run / "checkpoints", monkeypatch)
    assert script("list", run) == 1
    assert f"error: {run}/checkpoints: Permission denied" in capsys.readouterr().err


def test_show(run, capsys):
    assert script("show", of(run, 3), "--tensors") == 0
    out = capsys.readouterr().out
    manifest = read_manifest(of(run, 3))
    assert f"step 2 of {manifest.run_id}" in out
    assert "12,800" not in out
    assert "12.8 K parameters of the model" in out
    assert manifest.files["__0_0.distcp"].xxh3 in out
    assert "float32 [50, 64]" in out


def test_verify(run, capsys):
    assert script("verify", run) == 0
    assert script("verify", of(run, 2)) == 0
    for name in ("trainer.json", "__0_0.distcp"):
        content = bytearray((of(run, 2) / name).read_bytes())
        content[-1] ^= 1
        (of(run, 2) / name).write_bytes(content)
    capsys.readouterr()
    assert script("verify", of(run, 1)) == 0
    assert script("verify", run) == 1
    told = capsys.readouterr()
    assert "step-00000002 is damaged: __0_0.distcp has changed" in told.err.replace("\n", " ")
    assert "; trainer.json has changed" in told.err.replace("\n", " ")
    assert told.out.count("files verified") == 5
    assert script("verify", run / "nowhere") == 1


def test_verify_beside_a_run_that_removes_checkpoints(run, capsys, monkeypatch):
    """What the run no longer keeps is not damaged, and what is being read is kept."""

    def while_the_run_saves(folder):
        if folder == of(run, 1):
            FolderStorage().remove(of(run, 4))
            of(run, 5).rename(run / "left by a rewind")
            with pytest.raises(BeingRead):
                FolderStorage().remove(folder)
        return check(folder)

    check = verification.check
    monkeypatch.setattr(verification, "check", while_the_run_saves)
    with not_being_read(of(run, 2)):  # the run is about to remove that one
        assert script("verify", run) == 0
    told = capsys.readouterr()
    assert told.err == ""
    assert told.out.count("files verified") == 2
    gone = [line.split(":")[0][-1] for line in told.out.splitlines() if "is no longer there" in line]
    assert gone == ["2", "4", "5"]


def test_verify_of_one_that_is_being_removed_is_a_failure(run):
    with not_being_read(of(run, 2)):
        assert script("verify", of(run, 2)) == 1


def test_diff_keeps_what_it_reads(run, monkeypatch):
    def while_the_run_saves(*folders):
        for folder in folders:
            with pytest.raises(BeingRead):
                FolderStorage().remove(folder)
        return iter(())

    monkeypatch.setattr(comparison, "compare", while_the_run_saves)
    assert script("diff", of(run, 2), of(run, 3)) == 1


def test_diff(run, capsys):
    assert script("diff", of(run, 2), of(run, 2)) == 0
    assert "no difference" in capsys.readouterr().out
    assert script("diff", of(run, 2), of(run, 3)) == 1
    out = capsys.readouterr().out
    assert "200 -> 300" in out
    largest = state()["model.layers.1.weight"].abs().max()
    assert f"all 3,200 values differ, at most by {largest:.3g} (largest value {2 * largest:.3g})" in " ".join(
        out.split()
    )


def test_prune(run, capsys):
    save(run, 5, load=4, go_back=1)
    assert script("prune", run, "--keep-last", 1, "--keep-best", 1, "--dry-run") == 0
    assert "would be removed" in capsys.readouterr().out
    assert steps_in(run / "checkpoints") == [1, 2, 3, 4, 5]
    assert script("prune", run, "--keep-last", 1, "--keep-every", 3, "--keep-best", 1) == 0
    assert steps_in(run / "checkpoints") == [3, 5]  # 2 and 3 are equally good: the newer counts
    assert (run / "checkpoints" / "abandoned-001").is_dir()
    assert script("prune", run, "--keep-last", 9, "--abandoned") == 0
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-00000003", "step-00000005"]
    (of(run, 5) / "trainer.json").write_text("")
    assert script("prune", run, "--keep-last", 1) == 0  # a damaged one is neither counted nor removed
    assert steps_in(run / "checkpoints") == [3, 5]


def test_prune_keeps_the_only_checkpoints_of_a_run(run, capsys):
    aside = run / "checkpoints" / "abandoned-001"
    aside.mkdir()
    for step in range(1, 6):
        of(run, step).rename(aside / of(run, step).name)
    assert script("prune", run, "--keep-last", 1, "--abandoned") == 1
    assert "has checkpoints only in abandoned lines" in capsys.readouterr().err
    assert steps_in(aside) == [1, 2, 3, 4, 5]


def test_prune_keeps_the_checkpoint_that_a_spike_returns_to(tmp_path):
    """Without it, the resumed run would skip a spike for which the undisturbed run goes back."""
    config = {"fault": {"spikes": {"action": "rewind", "rewind_interval": 2}}}
    save(tmp_path, 1, 2, 3, 4, 5, config=config)
    assert script("prune", tmp_path, "--keep-last", 1) == 0
    assert steps_in(tmp_path / "checkpoints") == [4, 5]


def test_nothing_is_pruned_for_a_damaged_newest(run):
    path = of(run, 5) / "__0_0.distcp"
    path.write_bytes(bytes(path.stat().st_size))
    assert script("prune", run, "--keep-last", 1) == 1
    assert steps_in(run / "checkpoints") == [1, 2, 3, 4, 5]
