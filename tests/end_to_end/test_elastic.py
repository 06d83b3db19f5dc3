"""Elastic runs as processes: ranks without a place, and a launch that hangs while another one takes the run over."""

import json
import os
import signal
from pathlib import Path

import pytest

from tests.end_to_end.launch import curve, finish, launch, records, start, status
from tests.end_to_end.signals import wait_until

pytestmark = pytest.mark.slow

WORDS = "--metrics.tensorboard false --training.micro_batch_size 1"
ELASTIC = f"{WORDS} --elastic.enable true"


def incarnations(run: Path) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted((run / "incarnations").glob("*.json"))]


def test_ranks_without_a_place_wait_and_the_run_is_that_of_the_others(tmp_path: Path):
    own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # the first rank serves it, as under elastic.sh
    outcome = launch(tmp_path, ELASTIC, ranks=3, env=own_store)
    assert "2 of 3 ranks form the mesh dp_shard 2; the other 1 waits idle" in outcome.out
    (launched,) = [each for record in records(tmp_path / "run") for each in record.get("launches", [])]
    assert (launched["ranks"], launched["idle_ranks"], launched["incarnation"]) == (2, 1, 1)
    assert [each["ranks"] for each in incarnations(tmp_path / "run")] == [3]
    plain = launch(tmp_path, f"{WORDS} --job.output_dir plain --pipeline.schedule gpipe", ranks=2)
    assert curve(tmp_path / "run") == curve(tmp_path / "plain")
    assert plain.err.count("does nothing with mesh.pp = 1") == 1  # what all ranks find is said once


def test_a_launch_that_hung_and_wakes_commits_nothing(tmp_path: Path):
    """Two launches of one job that both want to go on, as after a network has split: the newer one does."""
    run, long = tmp_path / "run", f"{ELASTIC} --training.steps 4000 --checkpoint.interval 10"
    first = start(tmp_path, long)
    wait_until(first, lambda: (run / "status.json").exists() and status(run)["step"] > 25)
    os.kill(first.pid, signal.SIGSTOP)
    second = start(tmp_path, f"{ELASTIC} --training.steps 60 --checkpoint.interval 10 --job.timeout_seconds 10")
    wait_until(second, lambda: len(incarnations(run)) == 2)
    os.kill(first.pid, signal.SIGCONT)
    outcomes = finish(first), finish(second)
    assert [outcome.code for outcome in outcomes] == [1, 0], outcomes
    assert "incarnation 1 of this run was superseded by incarnation 2" in outcomes[0].err
    assert "Traceback" not in outcomes[0].err
    assert status(run)["state"] == "done"
    steps = [record["step"] for record in records(run)]
    assert steps == list(range(1, steps[-1] + 1))
    assert not list((run / "checkpoints").glob("abandoned-*"))
    launch(tmp_path, f"{WORDS} --training.steps {steps[-1]} --job.output_dir undisturbed")
    assert curve(run) == curve(tmp_path / "undisturbed")
