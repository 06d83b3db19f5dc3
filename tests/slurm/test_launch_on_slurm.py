"""The launch files for Slurm as they are shipped, handed in to a real Slurm whose nodes are on this machine.

The command line overrides #SBATCH values that this machine lacks (GPUs). The losses of all launches are compared bit for
bit with those of the run that nothing has interrupted.
"""

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.end_to_end.launch import ROOT, TINY, curve, records, status
from tests.slurm.cluster import Cluster, Job

pytestmark = pytest.mark.slow

STEPS = 600
JOB = (
    f"--training.steps {STEPS} --lr_schedule.total_steps {STEPS} --checkpoint.interval 50 --checkpoint.keep_last 2 "
    "--metrics.tensorboard false --mesh.dp_shard 2"
).split()
HERE = {
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "KEEL_RANKS_PER_HOST": "1",
    "KEEL_RANKS": "2",
}


def submit(slurm: Cluster, script: str, folder: Path, words: list[str], options: tuple[str, ...] = ()) -> Job:
    """Hand in a launch file for a run in `folder`/run, from the repository as a user does."""
    folder.mkdir(exist_ok=True)
    path = f"{slurm.packages}/usr/bin:{HERE['PATH']}"
    env: Mapping[str, str] = HERE | {"PATH": path, "KEEL_RUN_FOLDER": str(folder / "run")}
    everything = ["--gpus-per-node=0", f"--output={folder}/log", *options]
    if script == "slurm_one_host.sh":
        words = [*words, "--job.output_dir", str(folder / "run")]
    return slurm.submit(ROOT / "scripts/launch" / script, [str(TINY), *words], everything, env, cwd=ROOT)


def log(folder: Path) -> str:
    return (folder / "log").read_text() if (folder / "log").exists() else ""


def until_step(slurm: Cluster, job: Job, folder: Path, step: int) -> None:
    """Wait until a step is logged, by a job that goes on."""
    metrics = folder / "run" / "metrics.jsonl"

    def logged() -> bool:
        state = job.show("JobState")
        assert state in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"), f"{state}\n{log(folder)}"
        return metrics.exists() and metrics.read_text().count("\n") >= step

    slurm.until(logged, f"step {step} is logged")


@pytest.fixture(scope="module")
def whole(slurm: Cluster, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, float, float]]:
    """The curve of a run on two nodes that nothing has interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    job = submit(slurm, "slurm.sh", folder, JOB)
    assert job.end() == ("COMPLETED", "0:0"), log(folder)
    assert (job.show("Restarts"), job.show("NodeList")) == ("0", "node[1-2]")
    assert "the run is done (torchrun's exit code: 0)" in log(folder)
    said = status(folder / "run")
    assert (said["state"], said["step"]) == ("done", STEPS)
    return curve(folder / "run")


def test_a_run_on_two_nodes_is_done(whole):
    assert [step for step, _, _ in whole] == list(range(1, STEPS + 1))


@pytest.mark.parametrize("script", ["slurm.sh", "slurm_one_host.sh"])
def test_the_advance_signal_saves_and_requeues_and_the_curve_keeps_its_bits(slurm, whole, tmp_path, script):
    """Twice, since a requeued job begins to count its steps again, and must find its own by their number."""
    job = submit(slurm, script, tmp_path, JOB)
    for restarts, step in enumerate((20, 220)):
        until_step(slurm, job, tmp_path, step)
        slurm.ask("scancel", "--signal=USR1", "--batch", job.number)  # as #SBATCH --signal=B:USR1@120 does
        slurm.until(lambda before=restarts: int(job.show("Restarts")) > before, f"requeued\n{log(tmp_path)}")
    assert job.end() == ("COMPLETED", "0:0"), log(tmp_path)
    assert job.show("Restarts") == "2", log(tmp_path)
    assert status(tmp_path / "run")["state"] == "done"
    assert curve(tmp_path / "run") == whole
    assert len({record.get("launch") for record in records(tmp_path / "run")}) >= 1
