"""Runs of several nodes in a bucket of a real S3 server, handed in to a real Slurm: no two nodes share a folder.

Each node's ranks work in a folder of its own, which stands for its disk.
"""

from pathlib import Path

import pytest

from checkpoint.bucket import Bucket
from tests.bucket.ceph import Ceph
from tests.end_to_end.launch import ROOT, TINY, curve, launch
from tests.slurm.cluster import Cluster, Job
from tests.slurm.test_elastic_on_slurm import JOB, lose
from tests.slurm.test_launch_on_slurm import HERE, log

pytestmark = pytest.mark.slow

# train.py is looked for in the current folder, as are the files beside it.
PROGRAM = f"""\
import os, runpy, sys
sys.path.insert(0, {str(ROOT)!r})
disk = os.path.join({{folder!r}}, os.environ["SLURMD_NODENAME"])
os.makedirs(disk, exist_ok=True)
os.chdir(disk)
sys.argv[0] = {str(ROOT / "train.py")!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def submit(slurm: Cluster, server: Ceph, script: str, folder: Path, url: str, words: list[str]) -> Job:
    """Hand in a launch file for a run in a bucket, from a folder whose `train.py` goes to the node's disk."""
    (folder / "train.py").write_text(PROGRAM.format(folder=str(folder)))
    (folder / "scripts").symlink_to(ROOT / "scripts")
    path = f"{slurm.packages}/usr/bin:{HERE['PATH']}"
    env = HERE | server.environment | {"PATH": path, "KEEL_RUN_FOLDER": url}
    options = ["--gpus-per-node=0", f"--output={folder}/log", "--nodes=2"]
    return slurm.submit(ROOT / "scripts/launch" / script, [str(TINY), *words], options, env, cwd=folder)


def until_committed(slurm: Cluster, job: Job, url: str, folder: Path) -> None:
    """Wait until a checkpoint is in the bucket."""

    def committed() -> bool:
        assert job.show("JobState") in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"), log(folder)
        return any(key.endswith("MANIFEST.json") for key in Bucket(url).list("checkpoints/"))

    slurm.until(committed, "a checkpoint is committed")


def curve_there(url: str, folder: Path) -> list[tuple[int, float, float]]:
    """The curve of a run in a bucket."""
    (folder / "metrics.jsonl").write_bytes(Bucket(url).get("metrics.jsonl"))
    return curve(folder)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, float, float]]:
    """The curve of one process with a disk."""
    folder = tmp_path_factory.mktemp("whole")
    launch(folder, " ".join(JOB))
    return curve(folder / "run")


def test_a_run_is_requeued_after_the_advance_signal(slurm, server, whole, tmp_path):
    url = "s3://keel/slurm/requeued"
    job = submit(slurm, server, "slurm.sh", tmp_path, url, [*JOB, "--mesh.dp_shard", "2"])
    until_committed(slurm, job, url, tmp_path)
    slurm.ask("scancel", "--signal=USR1", "--batch", job.number)
    slurm.until(lambda: job.show("Restarts") == "1", f"job {job.number} is requeued: {log(tmp_path)}")
    assert job.end() == ("COMPLETED", "0:0"), log(tmp_path)
    assert curve_there(url, tmp_path) == whole


@pytest.mark.long
def test_an_elastic_run_goes_on_without_a_lost_node(slurm, server, whole, tmp_path):
    url = "s3://keel/slurm/elastic"
    job = submit(slurm, server, "slurm_elastic.sh", tmp_path, url, JOB)
    until_committed(slurm, job, url, tmp_path)
    *_, lost = job.nodes()
    try:
        lose(slurm, lost, job)
        assert job.end() == ("COMPLETED", "0:0"), log(tmp_path)
    finally:
        slurm.bring_back(lost)
    assert len(Bucket(url).list("incarnations/")) >= 2
    assert curve_there(url, tmp_path) == whole
