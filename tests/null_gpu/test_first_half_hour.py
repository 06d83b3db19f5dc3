"""What is run first on a real GPU keeps its own time, and loses no figure (tests/gpu/first_half_hour.py)."""

import json
import os
import subprocess
import sys

from tests.conftest import ROOT


def test_when_the_time_is_over_the_rest_is_named_and_earlier_figures_stay(tmp_path, null_gpus):
    kept = tmp_path / "first_half_hour.json"
    measured = {"name": "plain, CPU | plain, float32: losses", "unit": "nats", "predicted": 2e-05, "measured": 1e-06}
    kept.write_text(json.dumps([measured]))
    words = [
        "right",
        "--job",
        "plain, float32",
        "--job",
        "plain, eager",
        "--minutes",
        "1e-6",
        "--output",
        str(tmp_path),
    ]
    command = [sys.executable, "-m", "tests.gpu.first_half_hour", *words]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | null_gpus, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == [kept.name]
    first, *rest = json.loads(kept.read_text())
    assert first == measured | {"note": ""}
    assert [(each["name"], each["measured"], each["note"]) for each in rest] == [
        ("plain, eager | plain, compiled: losses", None, "not begun: the time was over")
    ]
