"""The launch files: what they say of Keel, and the shell scripts run.

Here `srun`, `scontrol` and `scancel` are stand-ins; tests/slurm hands the same files in to a real Slurm, and
tests/launchers/published_forms.py has the files in the forms of their launchers.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from checkpoint.bucket import Bucket
from configs.command_line import parse_command_line
from configs.load import load
from scripts.launch import state
from scripts.prepare_data import prepare_parser
from tests.conftest import ROOT
from trainer.lifecycle import read_status

LAUNCH = ROOT / "scripts" / "launch"
KEEL = """
trap 'echo USR1 > signalled; exit 75' USR1
echo "$@" > started
[ -n "${CODE:-}" ] && exit "$CODE"
while true; do sleep 0.05; done
"""
RUN = """
mkdir -p run
write() { printf '{"state": "%s", "step": 1, "reason": "", "time": %s}' "$1" "$(date +%s.%N)" > run/status.json; }
trap 'echo USR1 > signalled; write preempted; exit 1' USR1
echo "$KEEL_SECRET" > secret
env | grep -E "^KEEL_(RENDEZVOUS|JOB|HOSTS)=" | sort -r > told
echo "$@" > started
echo $$ > srun.pid
if [ -n "${CODE:-}" ]; then [ -n "${STATE:-}" ] && write "$STATE"; exit "$CODE"; fi
while true; do sleep 0.05; done
"""
HOLD_LOCK = """
import pathlib, sys
from checkpoint.lock import lock
lock(pathlib.Path(sys.argv[1]), print)
print("held", flush=True)
sys.stdin.read()
"""
EARLIER = {"state": "preempted", "step": 1, "reason": "", "time": 1.5}


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
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")  # the files are handed in from the checkout
    for name, text in commands.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    for name, value in {
        "PATH": f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
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


@pytest.mark.slow
def test_the_hosts_of_an_elastic_run_meet_in_a_store_on_the_first_one(cluster):
    """Nobody listens on host-1 here, so the store ends at once, and the script ends the hosts."""
    process = begun(cluster, "slurm_elastic.sh", SLURM_RESTART_COUNT="2")
    assert process.wait(60) != 0
    assert "scripts/launch/elastic.sh debug --job.name a b" in (cluster / "started").read_text()
    told = "KEEL_RENDEZVOUS=host-1:29517\nKEEL_JOB=17-2\nKEEL_HOSTS=1:2\n"
    assert (cluster / "told").read_text() == told
    assert re.fullmatch("[0-9a-f]{64}\n", (cluster / "secret").read_text())
    assert not (cluster / "requeued").exists()


def test_the_state_of_a_run_in_a_folder_and_in_a_bucket(cluster, capsys, monkeypatch):
    """What the launch files decide by."""
    (cluster / "run").mkdir()
    state.main([str(cluster / "run")])
    (cluster / "run" / "status.json").write_text(json.dumps(EARLIER))
    state.main([str(cluster / "run")])
    buckets = {"s3://bucket/run": EARLIER, "s3://bucket/other": None}

    def get(bucket, key):
        assert key == "status.json"
        if buckets[bucket.url] is None:
            raise FileNotFoundError(key)
        return json.dumps(buckets[bucket.url]).encode()

    monkeypatch.setattr(Bucket, "__init__", lambda bucket, url, *_: setattr(bucket, "url", url))
    monkeypatch.setattr(Bucket, "get", get)
    for url in buckets:
        state.main([url])
    assert capsys.readouterr().out.splitlines() == ["none 0", "preempted 1.5", "preempted 1.5", "none 0"]


FAILED = {"state": "failed", "step": 7, "reason": "rank 1 was killed", "time": 1.5}


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (FAILED, "SIGTERM, after: rank 1 was killed"),
        (FAILED | {"state": "running", "reason": "starting"}, "SIGTERM, after: starting"),
        (FAILED | {"state": "preempted", "reason": "SIGUSR1"}, "SIGUSR1"),
    ],
)
def test_a_stop_that_no_rank_was_left_to_write_is_written(tmp_path, capsys, said, reason):
    """As when a lost rank was being replaced."""
    (tmp_path / "status.json").write_text(json.dumps(said))
    state.main([str(tmp_path), "SIGTERM"])
    found = read_status(tmp_path)
    assert (found["state"], found["step"], found["reason"]) == ("preempted", 7, reason)
    assert capsys.readouterr().out.startswith("preempted ")


def test_a_stop_is_left_to_the_launch_that_has_the_run(tmp_path, capsys):
    """It may be that of other hosts, which go on."""
    (tmp_path / "status.json").write_text(json.dumps(FAILED))
    holder = subprocess.Popen([sys.executable, "-c", HOLD_LOCK, tmp_path], cwd=ROOT, stdin=-1, stdout=-1)
    assert holder.stdout
    assert holder.stdout.readline() == b"held\n"
    state.main([str(tmp_path), "SIGTERM"])
    holder.communicate()
    assert read_status(tmp_path) == FAILED
    assert capsys.readouterr().out == "failed 1.5\n"


def test_what_an_earlier_launch_has_said_requeues_nothing(cluster):
    """Else a job that fails before it writes its own status, such as in torchrun, is requeued forever."""
    (cluster / "run").mkdir()
    (cluster / "run" / "status.json").write_text(json.dumps(EARLIER))
    assert begun(cluster, "slurm.sh", CODE="1").wait(60) == 1
    assert (cluster / "started").exists()
    assert not (cluster / "requeued").exists()


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


def pod_of(job):
    """The pod of a JobSet, or of the runtime of a TrainJob."""
    spec = job["spec"]["template"]["spec"] if job["kind"] == "TrainingRuntime" else job["spec"]
    [replicated] = spec["replicatedJobs"]
    assert replicated["template"]["spec"]["backoffLimit"] == 0  # what fails is made anew with all others
    assert spec["failurePolicy"]["maxRestarts"] == 20
    return replicated["template"]["spec"]["template"]["spec"]


@pytest.mark.parametrize("name", ["jobset.yaml", "trainjob.yaml"])
def test_jobset_and_trainer_start_a_valid_job_with_its_secret_and_leave_it_time_to_save(name):
    job, *others, policy = yaml.safe_load_all((LAUNCH / name).read_text())
    pod = pod_of(job)
    [container] = pod["containers"]
    started = others[0]["spec"]["trainer"] if others else container
    assert_a_job(started["args"])
    grace = int(started["args"][started["args"].index("--job.grace_seconds") + 1])
    assert started["command"][:3] == ["torchrun", "--shutdown-timeout", str(grace)]
    assert grace < pod["terminationGracePeriodSeconds"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert started["env"] == [{"name": "KEEL_SECRET", "valueFrom": {"secretKeyRef": {"name": "keel", "key": "secret"}}}]
    own = {"podSelector": {"matchLabels": {"jobset.sigs.k8s.io/jobset-name": "keel"}}}
    assert policy["spec"] == own | {"policyTypes": ["Ingress"], "ingress": [{"from": [own]}]}


def test_the_hosts_of_a_jobset_find_the_first_by_the_name_that_jobset_gives_it():
    job = the_yaml("jobset.yaml")
    [replicated] = job["spec"]["replicatedJobs"]
    [container] = pod_of(job)["containers"]
    command = container["command"]
    name = job["metadata"]["name"]
    assert command[command.index("--master-addr") + 1] == f"{name}-{replicated['name']}-0-0.{name}"
    hosts = replicated["template"]["spec"]
    assert hosts["completionMode"] == "Indexed"  # which JOB_COMPLETION_INDEX needs
    assert command[command.index("--nnodes") + 1] == str(hosts["parallelism"]) == str(hosts["completions"])
    assert command[command.index("--nproc-per-node") + 1] == str(container["resources"]["limits"]["nvidia.com/gpu"])


def test_the_pods_of_the_preparation_make_all_shards_and_the_second_job_puts_them_together():
    shards, finish = yaml.safe_load_all((LAUNCH / "kubernetes_prepare.yaml").read_text())
    words = []
    for job in (shards, finish):
        pod = job["spec"]["template"]["spec"]
        [container] = pod["containers"]
        assert container["volumeMounts"][0]["name"] == pod["volumes"][0]["name"]
        assert pod["restartPolicy"] == "Never"
        words.append(container["args"])
        assert f"-l step={job['metadata']['labels']['step']}" in (LAUNCH / "kubernetes_prepare.yaml").read_text()
    assert shards["spec"]["completionMode"] == "Indexed"  # which JOB_COMPLETION_INDEX needs
    n = shards["spec"]["completions"]
    last = words[0][-1].replace("$(JOB_COMPLETION_INDEX)", str(n - 1))
    options = prepare_parser().parse_args([*words[0][1:-1], last])
    assert options.shard == (n - 1, n)
    assert options.processes == shards["spec"]["template"]["spec"]["containers"][0]["resources"]["requests"]["cpu"]
    assert [*words[0][:-2], "--finish"] == words[1]
    assert words[0][0] == "prepare"
    assert prepare_parser().parse_args(words[1][1:]).finish


@pytest.mark.parametrize(
    ("environment", "last"),
    [
        ({"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_MAX": "7"}, "--shard 3/8 --processes 5"),
        ({"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_MAX": "4", "KEEL_SHARDS": "64"}, "--shard 3/64 --processes 5"),
        ({}, "--finish --processes 5"),
    ],
)
def test_a_task_of_an_array_makes_its_shard_and_another_job_puts_them_together(cluster, environment, last):
    process = begun(cluster, "slurm_prepare.sh", CODE="0", SLURM_CPUS_PER_TASK="5", **environment)
    assert process.wait(60) == 0
    assert (cluster / "started").read_text() == f"prepare debug --job.name a b {last}\n"


def test_the_trainers_container_is_the_one_that_it_looks_for():
    runtime, job, _ = yaml.safe_load_all((LAUNCH / "trainjob.yaml").read_text())
    assert job["spec"]["runtimeRef"] == {"kind": runtime["kind"], "name": runtime["metadata"]["name"]}
    [replicated] = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    labels = replicated["template"]["metadata"]["labels"]
    assert labels == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert [container["name"] for container in pod_of(runtime)["containers"]] == ["node"]


def test_the_skypilot_task_starts_a_valid_job_and_is_recovered_when_it_was_stopped():
    task = the_yaml("skypilot.yaml")
    assert_a_job(["--config", task["envs"]["JOB"], "--job.output_dir", task["envs"]["RUN"]])
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [75]


def test_the_citation_has_the_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == __import__("scripts.keel", fromlist=["VERSION"]).VERSION
    assert "license" not in citation  # the owner's to choose


def test_the_index_lists_every_page():
    index = (ROOT / "docs" / "README.md").read_text()
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert {page for page in pages if f"]({page})" not in index} == set()
