"""The launch files in the forms that their launchers publish, keys and types of values, by the launchers' own packages.

    $(.ci/launchers) -m pytest --confcutdir tests/launchers -o addopts= tests/launchers/published_forms.py

That Python has neither torch nor Keel: the last test starts Keel by the torchrun that is on the path. What the files
say of Keel is in tests/unit/scripts/test_launch_files.py.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import kubeflow_trainer_api.models
import kubernetes.client
import pydantic
import pytest
import sky
import yaml
from kubeflow.training.api_client import ApiClient
from sky.utils import schemas

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "scripts" / "launch"
BIN = Path(sys.executable).parent
TORCHX = [str(BIN / "torchx"), "run", "--scheduler"]

# The model of each kind: a class of pydantic, or the name of one that a client of Kubernetes has.
MODELS = {
    "JobSet": kubeflow_trainer_api.models.JobsetV1alpha2JobSet,
    "TrainJob": kubeflow_trainer_api.models.TrainerV1alpha1TrainJob,
    "TrainingRuntime": kubeflow_trainer_api.models.TrainerV1alpha1TrainingRuntime,
    "PyTorchJob": "KubeflowOrgV1PyTorchJob",
    "Job": "V1Job",
    "NetworkPolicy": "V1NetworkPolicy",
}
API_VERSIONS = {
    "JobSet": "jobset.x-k8s.io/v1alpha2",
    "TrainJob": "trainer.kubeflow.org/v1alpha1",
    "TrainingRuntime": "trainer.kubeflow.org/v1alpha1",
    "PyTorchJob": "kubeflow.org/v1",
    "Job": "batch/v1",
    "NetworkPolicy": "networking.k8s.io/v1",
}
# The models call these strings; the API takes no others (their descriptions in the models).
CHOICES = {
    "cleanPodPolicy": {"Running", "All", "None"},
    "completionMode": {"Indexed", "NonIndexed"},
    "medium": {"", "Memory"},
    "policyTypes": {"Ingress", "Egress"},
    "rdzvBackend": {"c10d", "etcd", "etcd-v2"},
    "restartPolicy": {"Always", "OnFailure", "Never"},
}


def documents(name):
    """The documents of a file of Kubernetes, with quantities as text, which the API takes beside numbers."""
    read = list(yaml.safe_load_all((LAUNCH / name).read_text()))
    for place, key, holder in leaves(read):
        if ".limits" in place or ".requests" in place:
            holder[key] = str(holder[key])
    return read


def leaves(value, place=""):
    """(place, key, holder) of each value within `value` that is no mapping and no list."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        if isinstance(item, dict | list):
            yield from leaves(item, f"{place}.{key}")
        else:
            yield place, key, value


def as_published(document):
    """The document as its model reads and writes it: unknown keys are gone, and values have the model's types."""
    model = MODELS[document["kind"]]
    if isinstance(model, str):
        client = kubernetes.client.ApiClient() if hasattr(kubernetes.client, model) else ApiClient()
        read = client.deserialize(SimpleNamespace(data=json.dumps(document)), model)
        return client.sanitize_for_serialization(read)
    # The models take quantities for objects, which no API server does: those are read by the client of Kubernetes.
    document = json.loads(json.dumps(document))
    resources = []
    for holder in holders(document, "resources") + holders(document, "resourcesPerNode"):
        resources.append((holder, dict(holder)))
        holder.clear()
    written = model.model_validate(document, strict=True).to_dict()
    emptied = holders(written, "resources") + holders(written, "resourcesPerNode")
    client = kubernetes.client.ApiClient()
    for holder, (_, held) in zip(emptied, resources, strict=True):
        read = client.deserialize(SimpleNamespace(data=json.dumps(held)), "V1ResourceRequirements")
        holder.update(client.sanitize_for_serialization(read))
    return written


def holders(value, name):
    """The mappings within `value` that are under the key `name`."""
    found = []
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        if isinstance(item, dict) and key == name:
            found.append(item)
        elif isinstance(item, dict | list):
            found += holders(item, name)
    return found


FILES = {
    "jobset.yaml": ["JobSet", "NetworkPolicy"],
    "trainjob.yaml": ["TrainingRuntime", "TrainJob", "NetworkPolicy"],
    "kubernetes.yaml": ["PyTorchJob", "NetworkPolicy"],
    "kubernetes_prepare.yaml": ["Job", "Job"],
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_for_kubernetes_is_what_the_models_of_its_kinds_take(name):
    read = documents(name)
    assert [document["kind"] for document in read] == FILES[name]
    for document in read:
        assert document["apiVersion"] == API_VERSIONS[document["kind"]]
        assert as_published(document) == document
    for _, key, holder in leaves(read):
        assert key not in CHOICES or holder[key] in CHOICES[key]


def test_no_file_for_kubernetes_is_left_out():
    assert {path.name for path in LAUNCH.glob("*.yaml")} == {*FILES, "skypilot.yaml"}


def container_of(document):
    [replicated] = document["spec"]["replicatedJobs"]
    [container] = replicated["template"]["spec"]["template"]["spec"]["containers"]
    return container


def test_a_typo_a_number_as_text_and_a_list_that_is_none_are_found():
    job, _ = documents("jobset.yaml")
    mount = container_of(job)["volumeMounts"][1]
    mount["mountpath"] = "/dev/shm"
    assert "mountpath" not in container_of(as_published(job))["volumeMounts"][1]
    del mount["mountpath"]
    job["spec"]["failurePolicy"]["maxRestarts"] = "20"
    with pytest.raises(pydantic.ValidationError, match="maxRestarts"):
        as_published(job)
    policy = documents("kubernetes.yaml")[1]
    policy["spec"]["policytypes"] = policy["spec"].pop("policyTypes")
    assert as_published(policy) != policy
    old = documents("kubernetes.yaml")[0]
    old["spec"]["runPolicy"]["backoffLimit"] = "20"
    assert as_published(old) != old


def test_the_skypilot_task_is_in_its_schema_and_becomes_a_task():
    path = LAUNCH / "skypilot.yaml"
    task = yaml.safe_load(path.read_text())
    jsonschema.validate(task, schemas.get_task_schema())
    [resources] = sky.Task.from_yaml(str(path)).resources
    assert resources.accelerators == {"H100": 8}
    assert resources.use_spot
    assert resources.job_recovery["recover_on_exit_codes"] == [75]

    schema = schemas.get_resources_schema()
    recovery = schema["properties"]["job_recovery"]["anyOf"][1]
    assert recovery["additionalProperties"]  # so that the schema alone would take a typo
    recovery["additionalProperties"] = False
    jsonschema.validate(task["resources"], schema)
    task["resources"]["job_recovery"]["recover_on_exit_codes"] = ["75"]
    with pytest.raises(jsonschema.ValidationError, match="75"):
        jsonschema.validate(task["resources"], schema)


@pytest.mark.parametrize(
    ("tool", "files"),
    [
        (
            "shellcheck",
            [*LAUNCH.glob("*.sh"), *ROOT.glob("scripts/*.sh"), *ROOT.glob(".ci/*"), *ROOT.glob("tests/*/*.sh")],
        ),
        ("hadolint", [ROOT / "Dockerfile"]),
    ],
)
def test_a_linter_finds_nothing(tool, files):
    done = subprocess.run([BIN / tool, *files], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_torchx_hands_in_the_job_of_the_recipe():
    """`torchx run --scheduler slurm dist.ddp`, of docs/stopping.md: what lacks there is what the page says."""
    words = [*TORCHX, "slurm", "--dryrun", "dist.ddp", "-j", "2x8", "--script", "train.py", "--"]
    words += ["--config", "llama_7b.toml"]
    printed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True).stdout
    _, _, script = printed.partition("SBATCH_SCRIPT\n")
    assert "--nnodes 2 --nproc_per_node 8" in script
    assert "train.py --config llama_7b.toml" in script
    assert "--signal" not in script
    assert "KEEL_SECRET" not in script


def test_torchx_runs_keel_on_this_host(tmp_path):
    words = ["local_cwd", "dist.ddp", "-j", "1x2", "--script", "train.py", "--", "--config", "debug.toml"]
    words += ["--training.steps", "4", "--job.output_dir", str(tmp_path / "run")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HOME": str(tmp_path)}
    run = subprocess.run([*TORCHX, *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "done"
