"""Write predicted.json by torch's CUDA build and no GPU (tests/null_gpu): python -m tests.gpu.predict [JOB ...]"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.gpu.jobs import DEVICES, JOBS, PREDICTED, Job
from tests.gpu.runs import Failed, null_gpu_bytes, run_python


def prediction(job: Job, folder: Path) -> dict[str, Any]:
    """Tokens a second on each device, and bytes at the peak. Raises: Failed."""
    config, *overrides = job.split()
    speeds: dict[str, float | None] = {}
    for device in DEVICES:
        try:
            said = run_python("scripts/plan.py", config, *overrides, "--ranks", "1", "--device", device, "--json")
            speeds[device] = round(json.loads(said)["time"]["tokens_per_second_per_gpu"])
        except Failed as failure:  # such as one whose memory does not suffice
            print(f"{job.name} on {device}: {failure}")
            speeds[device] = None
    return {"tokens_per_second": speeds, "peak_bytes": null_gpu_bytes(folder / "step.json", job)}


def main(names: list[str]) -> int:
    """Predict the jobs of these names, or all; returns the exit code."""
    known = json.loads(PREDICTED.read_text()) if PREDICTED.exists() else {"jobs": {}}
    known["torch"] = torch.__version__
    with tempfile.TemporaryDirectory() as folder:
        for job in (job for jobs in JOBS.values() for job in jobs if not names or job.name in names):
            known["jobs"][job.name] = prediction(job, Path(folder))
            print(job.name, known["jobs"][job.name], flush=True)
            PREDICTED.write_text(json.dumps(known, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
