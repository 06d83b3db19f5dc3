"""A checkpoint records what decides the bits of its run, and a resume under other conditions says so."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from checkpoint.manifest import MANIFEST_NAME, read_manifest, sealed
from scripts import checkpoint as script
from tests.end_to_end.launch import curve, launch_here
from tests.removed_keys import add_removed_keys
from trainer.guards.environment import code_hash


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def said(folder: Path) -> list[str]:
    """What the last launch, with which the log is then empty, has said of bits."""
    log = folder / "run" / "run.log"
    lines = [line for line in log.read_text().splitlines() if "the bits of this run" in line]
    log.write_text("")
    return lines


def manifest_of(folder: Path, step: int) -> Path:
    return folder / "run" / "checkpoints" / f"step-{step:08d}" / MANIFEST_NAME


def test_other_conditions_are_recorded_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    def go_to(step: int, *words: str) -> list[str]:
        assert launch_here(tmp_path, "--training.steps", str(step), *words) == 0
        return said(tmp_path)

    assert go_to(2) == []
    assert go_to(3) == []
    environment = read_manifest(manifest_of(tmp_path, 3).parent).environment
    assert environment["threads (OMP_NUM_THREADS)"] == "1"
    assert environment["device"] == "cpu"
    assert environment["CPU instructions"] == torch.backends.cpu.get_cpu_capability()
    assert environment["Keel's code"] == code_hash()

    torch.set_num_threads(2)
    monkeypatch.setitem(os.environ, "ONEDNN_MAX_CPU_ISA", "AVX2")
    (line,) = go_to(4, "--training.micro_batch_size", "4", "--fsdp.zero_stage", "2")
    assert line.endswith(
        "warning: from here on, the bits of this run will differ from those of an uninterrupted one: "
        "threads (OMP_NUM_THREADS) 1 -> 2; variable ONEDNN_MAX_CPU_ISA not set -> AVX2; "
        "training.micro_batch_size 2 -> 4"
    )
    assert go_to(5, "--training.micro_batch_size", "4") == []

    (line,) = go_to(6, "--fsdp.accumulate", "reduce_last")  # changed on purpose: no warning
    assert "warning" not in line
    assert line.endswith("training.micro_batch_size 4 -> 2; fsdp.accumulate reduce_every -> reduce_last")

    assert script.main(["show", str(manifest_of(tmp_path, 6).parent)]) == 0
    assert "threads (OMP_NUM_THREADS): 2" in capsys.readouterr().out


@pytest.mark.slow
def test_exact_reductions_have_the_same_bits_elsewhere(tmp_path: Path):
    def go_to(step: int, *words: str) -> list[str]:
        assert launch_here(tmp_path, "--training.steps", str(step), "--training.reduction", "exact", *words) == 0
        return said(tmp_path)

    assert go_to(2) == []
    assert go_to(3, "--fsdp.partition", "owner", "--mesh.dp_shard", "1") == []
    torch.set_num_threads(2)
    (line,) = go_to(4)
    assert line.endswith("threads (OMP_NUM_THREADS) 1 -> 2")


def rewrite(manifest: Path, **changes: object) -> None:
    """Change a manifest's entries; None leaves one out, as a Keel that does not know it would."""
    entries = {**json.loads(manifest.read_text()), **changes}
    left_out = {"seal", *(name for name, value in changes.items() if value is None)}
    entries = {name: value for name, value in entries.items() if name not in left_out}
    manifest.write_text(sealed(json.dumps(entries, indent=1)))


@pytest.mark.slow
def test_a_checkpoint_of_before_and_one_of_another_code_or_mesh(tmp_path: Path):
    assert launch_here(tmp_path, "--training.steps", "2") == 0
    manifest = manifest_of(tmp_path, 2)
    found = read_manifest(manifest.parent)
    said(tmp_path)

    rewrite(manifest, environment=None)
    assert read_manifest(manifest.parent).environment == {}
    assert launch_here(tmp_path, "--training.steps", "2") == 0
    assert said(tmp_path) == []

    rewrite(manifest, environment={**found.environment, "Keel's code": "0" * 16})
    assert launch_here(tmp_path, "--training.steps", "2") == 0
    (line,) = said(tmp_path)
    assert f"the bits of this run may differ from those of an uninterrupted one: Keel's code {'0' * 16} -> " in line

    rewrite(manifest, environment=found.environment, mesh={**found.mesh, "dp_shard": 2}, torch_version="2.12.0")
    assert launch_here(tmp_path, "--training.steps", "2") == 0
    (line,) = said(tmp_path)
    assert line.endswith(
        f"will differ from those of an uninterrupted one: torch 2.12.0 -> {torch.__version__}; mesh.dp_shard 2 -> 1"
    )


def test_a_run_of_an_earlier_version_is_resumed(tmp_path: Path):
    """Its checkpoint and its config.toml have the keys that were removed since, with their defaults."""
    assert launch_here(tmp_path, "--training.steps", "1") == 0
    manifest = manifest_of(tmp_path, 1)
    content = json.loads(manifest.read_text())
    add_removed_keys(content["config"])
    manifest.write_text(sealed(json.dumps(content, indent=1)))
    said(tmp_path)
    assert launch_here(tmp_path, "--training.steps", "2") == 0
    assert said(tmp_path) == []
    assert [step for step, *_ in curve(tmp_path / "run")] == [1, 2]
