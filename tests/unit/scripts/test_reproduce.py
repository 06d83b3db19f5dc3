"""One small file, from which others compute steps of a run again: equal, or what differs is named, and why."""

import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from configs.errors import UserError
from configs.load import load
from scripts.reproduce import reproduce, write_file
from tests.end_to_end.launch import launch_here
from tests.unit.scripts.test_proof import JOB, in_this_process, said_by  # noqa: F401 - a fixture
from trainer.data.text.token_writer import TokenFileWriter
from trainer.data.token_file import TokenFolder
from trainer.data.tokenizer import load_tokenizer, train_sentencepiece
from trainer.step import Learner

VOCAB = 256


def write_tokens(root: Path, name: str, ids: np.ndarray) -> None:
    (root / name).mkdir(exist_ok=True)
    tokenizer = load_tokenizer(root / "t.model")
    with TokenFileWriter(root / name / "a.tokens", VOCAB + 20, tokenizer.hash) as writer:
        writer.append(ids)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Path:
    """A folder with a run of 20 steps on two sources, and its file."""
    root = tmp_path_factory.mktemp("recorded")
    train_sentencepiece(iter([" ".join(map(str, range(3000)))]), root / "t.model", 270)
    for seed, name in enumerate(("web", "code")):
        write_tokens(root, name, np.random.default_rng(seed).integers(3, VOCAB, 4000))
    assert launch_here(root, *JOB, *data_words(root)) == 0
    _, said = said_by(write_file, root / "run", root / "run.json")
    assert "run.json: " in said
    assert "with the fingerprints of the steps 1, 2, 3, 4, 5, " in said
    assert (root / "run.json").stat().st_size <= 64 << 10
    return root


def data_words(root: Path) -> tuple[str, ...]:
    sources = ", ".join(f'{{name = "{name}", kind = "tokens", path = "{root / name}"}}' for name in ("web", "code"))
    tokenizer = ("--tokenizer.path", str(root / "t.model"), "--model.vocab_size", "276")
    return "--data.sources", f"[{sources}]", *tokenizer


def test_two_commands_that_write_one_file_at_once_both_do(recorded, tmp_path, monkeypatch):
    """Neither takes away what the other has begun."""
    fsync = os.fsync
    written = []

    def while_another_writes(descriptor):
        monkeypatch.setattr(os, "fsync", fsync)
        with monkeypatch.context() as other:
            other.setattr(os, "getpid", lambda: 1)
            written.append(said_by(write_file, recorded / "run", tmp_path / "run.json")[1])
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", while_another_writes)
    written.append(said_by(write_file, recorded / "run", tmp_path / "run.json")[1])
    assert len(written) == 2
    assert [file.name for file in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.slow
def test_the_same_mesh_is_equal_in_bits_with_the_data_in_another_place(recorded, tmp_path):
    for name in ("web", "code", "t.model"):
        (shutil.copytree if (recorded / name).is_dir() else shutil.copy)(recorded / name, tmp_path / name)
    words = [f"--data.sources.{i}.path={tmp_path / name}" for i, name in enumerate(("web", "code"))]
    words += ["--tokenizer.path", str(tmp_path / "t.model")]
    holds, said = said_by(reproduce, recorded / "run.json", words=words)
    assert holds, said
    assert said.splitlines()[-1] == "equal in bits: steps 1 to 20"


@pytest.mark.slow
def test_chosen_steps_from_a_checkpoint_that_others_need_as_well(recorded, tmp_path):
    _, said = said_by(write_file, recorded / "run", tmp_path / "f", begin=10, steps=[12, 14, 15])
    assert "the fingerprints of the steps 11, 12, 14, 15" in said
    checkpoints = recorded / "run" / "checkpoints"
    holds, said = said_by(reproduce, tmp_path / "f", checkpoint=checkpoints / "step-00000010", steps=[14])
    assert holds, said
    assert "equal in bits: steps 11 to 14" in said
    with pytest.raises(UserError, match=r"begins at the checkpoint of step 10; name it with --checkpoint"):
        said_by(reproduce, tmp_path / "f")
    with pytest.raises(UserError, match=r"step-00000005 is another checkpoint than that of step 10"):
        said_by(reproduce, tmp_path / "f", checkpoint=checkpoints / "step-00000005")
    with pytest.raises(UserError, match=r"has no step 13; it has 11, 12, 14, 15"):
        said_by(reproduce, tmp_path / "f", checkpoint=checkpoints / "step-00000010", steps=[13])


def first_steps(root: Path, source: str) -> dict[int, int]:
    """The first step that reads each token of a source, from the windows that `keel data` knows."""
    from scripts.microscope.run_data import RunData

    run = RunData(root / "run")
    found: dict[int, int] = {}
    for step in range(1, 21):
        for reading in run.readings(step):
            if reading.source == source:
                [(start, stop)] = reading.pieces
                found = dict.fromkeys(range(start, stop), step) | found
    return found


@pytest.mark.slow
def test_one_other_token_is_named_by_source_and_step(recorded, tmp_path):
    ids = TokenFolder(recorded / "code", VOCAB + 20).read(0, 4000)
    place, step = next((place, step) for place, step in first_steps(recorded, "code").items() if step > 2)
    ids[place] += 1
    shutil.copy(recorded / "t.model", tmp_path)
    write_tokens(tmp_path, "code", ids)
    words = ["--data.sources.1.path", str(tmp_path / "code")]
    holds, said = said_by(reproduce, recorded / "run.json", words=words)
    assert not holds
    assert f"NOT EQUAL: step {step} is the first that differs" in said
    assert f"data: step {step} is the first that read other tokens (code: other content)" in said
    assert "values:" not in said
    holds, said = said_by(reproduce, recorded / "run.json", words=words, steps=range(1, step))
    assert holds  # the steps before are equal, and the other content is said all the same
    assert "data: not in these steps, whose tokens are the same, but elsewhere (code: other content)" in said


def test_another_key_of_the_job_is_named(recorded):
    holds, said = said_by(reproduce, recorded / "run.json", words=["--optimizer.lr", "0.02"], steps=[2, 5])
    assert not holds
    assert "NOT EQUAL: step 2 is the first that differs" in said  # step 1 is computed before the first update
    assert "job: optimizer.lr: 0.01 -> 0.02" in said
    assert "data:" not in said


@pytest.mark.slow
def test_another_weight_is_named_as_a_value(recorded, monkeypatch):
    gradients = Learner.gradients
    seen = []

    def perturbed(learner: Learner, *arguments):
        seen.append(1)
        if len(seen) == 4:
            with torch.no_grad():
                learner.parameters["norm.weight"][3] *= 1 + 1e-6
        return gradients(learner, *arguments)

    monkeypatch.setattr(Learner, "gradients", perturbed)
    holds, said = said_by(reproduce, recorded / "run.json", steps=range(1, 9))
    assert not holds
    assert "NOT EQUAL: step 4 is the first that differs" in said
    assert "values: data, job, code and torch are the same" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("Keel's code", "0" * 16, r"code: Keel's code 0000000000000000 -> \w+, in models, trainer/gone\n"),
        ("torch", "2.0", r"torch: torch 2\.0 -> "),
    ],
)
def test_other_code_or_torch_is_named_if_values_differ_and_is_no_fault_if_they_do_not(
    recorded, tmp_path, monkeypatch, name, value, reason
):
    content = json.loads((recorded / "run.json").read_text())
    content["launch"]["environment"][name] = value
    content["launch"]["code"] |= {"models": "0" * 8, "trainer/gone": "0" * 8}
    (tmp_path / "f").write_text(json.dumps(content))
    holds, said = said_by(reproduce, tmp_path / "f", steps=[3])
    assert holds
    assert "equal in bits" in said
    with monkeypatch.context() as patch:
        norm = Learner.grad_norm
        patch.setattr(Learner, "grad_norm", lambda learner: norm(learner) * 1.01)
        holds, said = said_by(reproduce, tmp_path / "f", steps=[3])
    assert not holds
    assert "NOT EQUAL: step 1 is the first that differs by more than round-off" in said
    assert re.search(reason, f"{said}\n")


def test_a_file_of_an_earlier_version_names_no_folder(recorded, tmp_path, monkeypatch):
    content = json.loads((recorded / "run.json").read_text())
    content["launch"]["environment"]["Keel's code"] = "0" * 16
    del content["launch"]["code"]
    (tmp_path / "f").write_text(json.dumps(content))
    norm = Learner.grad_norm
    monkeypatch.setattr(Learner, "grad_norm", lambda learner: norm(learner) * 1.01)
    _, said = said_by(reproduce, tmp_path / "f", steps=[3])
    assert re.search(r"code: Keel's code 0+ -> \w{16}\n", f"{said}\n")


def test_what_is_no_such_file_is_refused(recorded, tmp_path):
    content = json.loads((recorded / "run.json").read_text())
    wrong = {
        "not JSON": "{",
        "keel_reproduce": json.dumps(content | {"keel_reproduce": 2}),
        "extra": json.dumps(content | {"extra": 1}),
        "steps": json.dumps(content | {"steps": []}),
        "its first step is 2 instead of 1": json.dumps(content | {"steps": content["steps"][1:]}),
        "job": json.dumps(content | {"launch": content["launch"] | {"job": 5}}),
        "limit": " " * (70 << 10),
    }
    for why, text in wrong.items():
        (tmp_path / "f").write_text(text)
        with pytest.raises(UserError, match="f: ") as refused:
            said_by(reproduce, tmp_path / "f")
        assert why in str(refused.value) or why in ("not JSON", "limit"), refused.value
    other_model = content["launch"]["job"].replace("n_layers = 2", "n_layers = 1")
    (tmp_path / "f").write_text(json.dumps(content | {"launch": content["launch"] | {"job": other_model}}))
    with pytest.raises(UserError, match="parameters here, but its steps have other numbers"):
        said_by(reproduce, tmp_path / "f")
    with pytest.raises(UserError, match=r"no fingerprint of step 25"):
        said_by(write_file, recorded / "run", tmp_path / "f", steps=[25])
    with pytest.raises(UserError, match=r"has no checkpoint of step 7 before step 8"):
        said_by(write_file, recorded / "run", tmp_path / "f", begin=7, steps=[8])


def test_steps_of_another_mesh_or_without_the_first_are_refused(recorded, tmp_path):
    copy = Path(shutil.copytree(recorded / "run", tmp_path / "copy"))
    launch, *steps = (copy / "fingerprints.jsonl").read_text().splitlines()
    batch = load(str(copy / "config.toml"), is_stored=True).config.training.global_batch_size
    moved = json.dumps(json.loads(launch) | {"step": 10, "next_sample": 10 * batch, "mesh": {"tp": 2}})
    (copy / "fingerprints.jsonl").write_text("\n".join([launch, *steps[:10], moved, *steps[10:]]) + "\n")
    with pytest.raises(UserError, match=r"step 1 was computed on another mesh or machine than 12"):
        said_by(write_file, copy, tmp_path / "f", steps=[12])
    said_by(write_file, copy, tmp_path / "f", steps=[2, 10])
    (copy / "fingerprints.jsonl").write_text("\n".join([launch, *steps[1:]]) + "\n")
    with pytest.raises(UserError, match=r"no checkpoint before step 3, and its fingerprints begin at step 2"):
        said_by(write_file, copy, tmp_path / "f", steps=[3])


def test_a_file_that_would_be_too_large_has_fewer_steps_or_is_refused(recorded, tmp_path, monkeypatch):
    monkeypatch.setattr("scripts.proof.reproduction.MAX_BYTES", 9000)
    _, said = said_by(write_file, recorded / "run", tmp_path / "f")
    assert (tmp_path / "f").stat().st_size <= 9000
    assert "with the fingerprints of the steps 1, 2" in said
    with pytest.raises(UserError, match=r"the most is 9,000: choose fewer --steps"):
        said_by(write_file, recorded / "run", tmp_path / "f", steps=[*range(1, 21)])
    monkeypatch.setattr("scripts.proof.reproduction.MAX_BYTES", 3000)
    with pytest.raises(UserError) as of_one:
        said_by(write_file, recorded / "run", tmp_path / "f")
    whole, each, n = re.search(
        r"have ([\d,]+) bytes, ([\d,]+) for each of (\d+) steps; .* 3,000$", str(of_one.value)
    ).groups()
    assert whole == each
    assert n == "1"
