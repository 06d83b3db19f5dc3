"""The launch files for Slurm as they are shipped, handed in to a real Slurm whose nodes are on this machine.

The command line overrides #SBATCH values that this machine lacks (GPUs). The losses of all launches are compared bit
for bit with those of the run that nothing has interrupted.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.end_to_end.launch import ROOT, TINY, curve, status
from tests.slurm.cluster import Cluster, Job

pytestmark = pytest.mark.slow

STEPS = 150
JOB = (
    f"--training.steps {STEPS} --lr_schedule.total_steps {STEPS} --checkpoint.interval 20 --checkpoint.keep_last 2 "
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
    assert (job.show("Restarts"), len(job.nodes())) == ("0", 2)
    assert "the run is done (torchrun's exit code: 0)" in log(folder)
    said = status(folder / "run")
    assert (said["state"], said["step"]) == ("done", STEPS)
    return curve(folder / "run")


def test_a_run_on_two_nodes_is_done(whole):
    assert [step for step, _, _ in whole] == list(range(1, STEPS + 1))


def preempt(slurm: Cluster, job: Job, folder: Path, step: int) -> int:
    """Send the signal once a step is logged, as #SBATCH --signal=B:USR1@120 does; returns the step that was saved."""
    until_step(slurm, job, folder, step)
    restarts = int(job.show("Restarts"))
    slurm.ask("scancel", "--signal=USR1", "--batch", job.number)
    slurm.until(lambda: int(job.show("Restarts")) > restarts, f"job {job.number} is requeued")
    said = status(folder / "run")
    assert (said["state"], said["reason"]) == ("preempted", "SIGUSR1"), log(folder)
    return said["step"]


def test_one_host_saves_at_the_advance_signal_is_requeued_and_the_curve_keeps_its_bits(slurm, whole, tmp_path):
    job = submit(slurm, "slurm_one_host.sh", tmp_path, JOB)
    assert preempt(slurm, job, tmp_path, 5) < STEPS
    assert job.end() == ("COMPLETED", "0:0"), log(tmp_path)
    assert (job.show("Restarts"), status(tmp_path / "run")["state"]) == ("1", "done")
    assert curve(tmp_path / "run") == whole


@pytest.mark.long
def test_two_hosts_save_at_the_advance_signal_and_move_from_a_drained_node_with_the_bits_of_the_curve(
    slurm, whole, tmp_path
):
    """Two signals: the script signals srun's step by its number, which begins again with each launch."""
    job = submit(slurm, "slurm.sh", tmp_path, JOB)
    first = preempt(slurm, job, tmp_path, 5)
    until_step(slurm, job, tmp_path, first + 2)
    *_, drained = job.nodes()
    try:
        slurm.set_node(drained, "drain")
        second = preempt(slurm, job, tmp_path, first + 5)  # a drained node keeps its job until then
        assert first + 5 <= second < STEPS
        assert job.end() == ("COMPLETED", "0:0"), log(tmp_path)
    finally:
        slurm.bring_back(drained)
    assert job.show("Restarts") == "2", log(tmp_path)
    assert job.nodes() == [name for name in slurm.names if name != drained]
    assert log(tmp_path).count("the run is preempted") == 2
    assert status(tmp_path / "run")["state"] == "done"
    assert curve(tmp_path / "run") == whole


@pytest.mark.long
def test_slurm_requeues_a_run_whose_node_is_down_and_it_goes_on_elsewhere(slurm, whole, tmp_path):
    job = submit(slurm, "slurm.sh", tmp_path, JOB)
    until_step(slurm, job, tmp_path, 25)  # after the first checkpoint
    *_, lost = job.nodes()
    try:
        slurm.set_node(lost, "down")
        slurm.until(lambda: job.show("Restarts") == "1", f"job {job.number} is requeued")
        assert job.end() == ("COMPLETED", "0:0"), log(tmp_path)
        assert job.nodes() == [name for name in slurm.names if name != lost]
    finally:
        slurm.bring_back(lost)
    assert status(tmp_path / "run")["state"] == "done"
    assert curve(tmp_path / "run") == whole
