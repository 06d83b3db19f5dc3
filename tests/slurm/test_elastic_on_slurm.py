"""`slurm_elastic.sh` handed in to a real Slurm: a run that loses a node keeps the bits of one that loses none."""

import json
import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from tests.end_to_end.launch import curve, status
from tests.slurm.cluster import Cluster, Job
from tests.slurm.test_launch_on_slurm import log, preempt, submit, until_step

pytestmark = pytest.mark.slow

STEPS = 200
JOB = (
    f"--training.steps {STEPS} --lr_schedule.total_steps {STEPS} --checkpoint.interval 20 --checkpoint.keep_last 2 "
    "--metrics.tensorboard false --training.reduction exact --job.timeout_seconds 30"
).split()


def processes_on(node: str, job: Job) -> list[int]:
    """What a job runs on a node."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            variables = (place / "environ").read_bytes().split(b"\0")
        except OSError:  # it has ended
            continue
        if {f"SLURMD_NODENAME={node}".encode(), f"SLURM_JOB_ID={job.number}".encode()} <= set(variables):
            found.append(int(place.name))
    return found


def lose(slurm: Cluster, node: str, job: Job) -> None:
    """Let Slurm know that a node is down, and end all that the job runs there at once.

    In this order: the node's daemon lives here, and would tell how the batch script has ended.
    """
    slurm.set_node(node, "down")
    for process in processes_on(node, job):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def ranks_of_launches(run: Path) -> list[int]:
    return [json.loads(path.read_text())["ranks"] for path in sorted(run.glob("incarnations/*.json"))]


@pytest.fixture(scope="module")
def whole(slurm: Cluster, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, float, float]]:
    """The curve of an elastic run on two nodes that lost none."""
    folder = tmp_path_factory.mktemp("whole")
    job = submit(slurm, "slurm_elastic.sh", folder, JOB, ("--nodes=2",))
    assert job.end() == ("COMPLETED", "0:0"), log(folder)
    assert "the run is done (srun's exit code: 0)" in log(folder)
    assert ranks_of_launches(folder / "run")[-1] == 2  # a node that was late has joined
    return curve(folder / "run")


def test_a_run_goes_on_without_a_lost_node_and_keeps_the_bits_of_the_curve(slurm, whole, tmp_path):
    assert [step for step, _, _ in whole] == list(range(1, STEPS + 1))
    job = submit(slurm, "slurm_elastic.sh", tmp_path, JOB, ("--nodes=2",))
    until_step(slurm, job, tmp_path, 25)  # after the first checkpoint
    slurm.until(lambda: ranks_of_launches(tmp_path / "run")[-1] == 2, "both nodes train")
    *_, lost = job.nodes()
    try:
        lose(slurm, lost, job)
        assert job.end() == ("COMPLETED", "0:0"), log(tmp_path)
    finally:
        slurm.bring_back(lost)
    assert job.show("Restarts") == "0"
    assert status(tmp_path / "run")["state"] == "done"
    assert ranks_of_launches(tmp_path / "run")[-2:] == [2, 1]
    assert curve(tmp_path / "run") == whole


@pytest.mark.long
def test_it_saves_at_the_advance_signal_and_goes_on_elsewhere_when_it_is_requeued(slurm, whole, tmp_path):
    job = submit(slurm, "slurm_elastic.sh", tmp_path, JOB, ("--nodes=2",))
    until_step(slurm, job, tmp_path, 2)
    *_, drained = job.nodes()
    try:
        slurm.set_node(drained, "drain")
        assert preempt(slurm, job, tmp_path, 5) < STEPS
        assert job.end() == ("COMPLETED", "0:0"), log(tmp_path)
    finally:
        slurm.bring_back(drained)
    assert job.show("Restarts") == "1"
    assert job.nodes() == [name for name in slurm.names if name != drained]
    assert curve(tmp_path / "run") == whole


@pytest.mark.long
def test_a_mistake_in_the_job_ends_it_on_all_nodes(slurm, tmp_path):
    job = submit(slurm, "slurm_elastic.sh", tmp_path, [*JOB, "--checkpoint.init_from", "nowhere"], ("--nodes=2",))
    assert job.end() == ("FAILED", "78:0"), log(tmp_path)
    _, _, end = log(tmp_path).partition("the job has a mistake, and is not started again")
    assert 'checkpoint.init_from is "nowhere": no such folder' in end
    assert "the run is failed (srun's exit code: 78)" in end


@pytest.mark.long
def test_a_job_whose_first_node_is_lost_is_handed_in_again(slurm, whole, tmp_path):
    """The script and the store in which the hosts meet are lost with the node."""
    job = submit(slurm, "slurm_elastic.sh", tmp_path, JOB, ("--nodes=2",))
    until_step(slurm, job, tmp_path, 25)
    lost, *_ = job.nodes()
    try:
        lose(slurm, lost, job)
        assert job.end()[0] == "FAILED", log(tmp_path)
        again = submit(slurm, "slurm_elastic.sh", tmp_path, JOB, ("--nodes=2",))
        assert again.end() == ("COMPLETED", "0:0"), log(tmp_path)
    finally:
        slurm.bring_back(lost)
    assert curve(tmp_path / "run") == whole
