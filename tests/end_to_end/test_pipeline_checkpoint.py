"""A run moved from a pipeline to one process and back, through the command line, against the run that stayed."""

import json
import subprocess
import sys

import pytest

from tests.conftest import ROOT


def train(folder, ranks, steps, *overrides):
    """Launch up to `steps`; returns all losses so far, by step."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    job = ["train.py", "--config", "parity.toml", "--job.output_dir", str(folder), "--training.steps", str(steps)]
    settings = ["--metrics.interval", "1", "--metrics.tensorboard", "false", *overrides]
    run = subprocess.run(
        [*launcher, *job, *settings], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record["loss"] for record in records}


@pytest.mark.long
def test_a_run_moves_from_a_pipeline_to_one_process_and_back(tmp_path):
    stayed = train(tmp_path / "stayed", 1, 6)
    moved = tmp_path / "moved"
    train(moved, 4, 2, "--mesh.pp", "2", "--mesh.dp_shard", "2")
    train(moved, 1, 4)
    losses = train(moved, 2, 6, "--mesh.pp", "2", "--pipeline.schedule", "zero_bubble_v")
    assert list(losses) == list(stayed) == [1, 2, 3, 4, 5, 6]
    for step, loss in stayed.items():
        assert losses[step] == pytest.approx(loss, rel=1e-10)
