"""`keel plan --calibrate` to its end: what is measured, written and planned with; the device's figures mean nothing."""

import json
import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from trainer.planning.devices import device_named


@pytest.mark.long
def test_calibration_measures_writes_a_row_and_plans_with_it(tmp_path, null_gpus):
    words = (
        "mixtral_8x7b.toml --ranks 8 --model.dim 256 --model.ffn_dim 512 --model.n_layers 2 --json --calibrate gpu.toml"
        ' --model.layers ["delta","full"] --attention.delta_backend torch'
    )
    command = [sys.executable, str(ROOT / "scripts" / "plan.py"), *words.split()]
    environment = os.environ | null_gpus | {"KEEL_NULL_GPUS": "2"}
    outcome = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert outcome.returncode == 0, outcome.stderr
    assert "in the table (" in outcome.stderr
    assert "as in the row h200: between, collective_share" in " ".join(outcome.stderr.split())
    device = device_named(str(tmp_path / "gpu.toml"))
    known = device_named("h200")
    assert device.between == known.between
    assert device.names == known.names
    rates = (
        device.products,
        device.products_float8,
        device.grouped,
        device.memory,
        device.host,
        device.inside.bandwidth,
    )
    assert all(rate > 0 for rate in rates)
    assert device.grouped != known.grouped
    assert device.delta["torch"] != known.delta["torch"]
    assert device.delta["fla"] == known.delta["fla"]
    assert {*device.attention} == {"flash2", "cudnn"}
    assert json.loads(outcome.stdout)["time"]["step_seconds"] > 0
