"""Fingerprints of a run's steps, their chain, and what replay and certify say of a run that is not what it was."""

import io
import json
import random
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import xxhash

import scripts.replay
from checkpoint.manifest import MANIFEST_NAME, sealed
from checkpoint.safe_read import read_metadata
from configs.errors import ConfigError, UserError
from scripts.certify import certify
from scripts.replay import compute, replay
from tests.end_to_end.launch import assert_same_tensors, launch_here, snapshot, tensors
from trainer.lifecycle import StopRequest
from trainer.report.console import Console
from trainer.step import Learner

STEPS = 20
JOB = ("--metrics.fingerprint", "true", "--checkpoint.interval", "5", "--metrics.interval", "2")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Path:
    """A run of 20 steps, in two launches."""
    folder = tmp_path_factory.mktemp("recorded")
    assert launch_here(folder, *JOB, "--training.steps", "10") == 0
    assert launch_here(folder, *JOB) == 0
    return folder / "run"


@pytest.fixture
def copy(recorded, tmp_path) -> Path:
    """A copy of that run to damage."""
    return Path(shutil.copytree(recorded, tmp_path / "copy"))


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch):
    """A replay's only rank is this process, which saves starting another."""

    def run_here(program: str, words: list[str], ranks: int) -> int:
        assert ranks == 1
        try:
            return compute(Path(scripts.replay.os.environ["KEEL_REPLAY"]), ranks, StopRequest())
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    monkeypatch.setattr(scripts.replay, "run_ranks", run_here)


def said_by(action, *arguments, **named) -> tuple[bool, str]:
    out = io.StringIO()
    with Console(out=out, err=out) as console:
        holds = action(*arguments, console=console, **named)
    return holds, out.getvalue()


def test_a_step_is_computed_again_with_the_same_bits_and_nothing_in_the_run_changes(recorded):
    before = snapshot(recorded)
    holds, said = said_by(replay, recorded, 9)
    assert holds
    assert "computing steps 6 to 9 again, from" in said
    assert "equal in bits: steps 6 to 9" in said
    assert snapshot(recorded) == before


def test_from_the_initial_weights(recorded):
    holds, said = said_by(replay, recorded, 3)
    assert holds
    assert "from the initial weights" in said


@pytest.mark.parametrize("words", [(), ("--fsdp.reshard_after_forward", "always")], ids=["kept", "freed"])
def test_a_run_that_computes_with_copies_of_its_parameters(tmp_path, words):
    """On a single rank, in bfloat16: copies that are kept, and those that each pass makes anew, give the same bits."""
    mixed = ("--training.compute_dtype", "bfloat16", "--training.steps", "8")
    assert launch_here(tmp_path, *JOB, *mixed, *words) == 0
    others = [] if words else ["--fsdp.reshard_after_forward", "always"]
    for again in ((), others):
        holds, said = said_by(replay, tmp_path / "run", 7, words=again)
        assert holds, said
        assert "equal in bits: steps 6 to 7" in said


def test_no_code_that_a_job_names_is_run(recorded):
    assert said_by(replay, recorded, 3, words=("--metrics.sink", "no_such_module:Sink"))[0]


def test_what_cannot_be_replayed(recorded, copy, tmp_path):
    with pytest.raises(UserError, match=r"fingerprints\.jsonl has no fingerprint of step 21"):
        said_by(replay, recorded, 21)
    with pytest.raises(ConfigError, match=r"mesh\.tpp"):
        said_by(replay, recorded, 9, words=["--mesh.tpp", "2"])
    (copy / "fingerprints.jsonl").unlink()
    with pytest.raises(UserError, match=r"are recorded with metrics\.fingerprint = true"):
        said_by(replay, copy, 9)


def test_fingerprints_change_no_bit_of_the_run(recorded, tmp_path):
    assert launch_here(tmp_path) == 0
    assert_same_tensors(tensors(recorded), tensors(tmp_path / "run"))
    assert not (tmp_path / "run" / "fingerprints.jsonl").exists()


# --------------------------------------------------------------------------- a flipped bit


def flip(monkeypatch, step: int, name: str, bit: int, element: int = 5) -> None:
    """Flip a bit of one element of a parameter's gradient, in one step of the launches to come."""
    norm, steps = Learner.grad_norm, []

    def patched(learner: Learner) -> torch.Tensor:
        steps.append(1)
        if len(steps) == step:
            learner.parameters[name].grad.view(torch.int32).view(-1)[element] ^= 1 << bit
        return norm(learner)

    monkeypatch.setattr(Learner, "grad_norm", patched)


@pytest.mark.parametrize("bit", [0, 22, 29])
def test_a_flipped_bit_is_named_by_step_and_parameter(bit, tmp_path, monkeypatch):
    """From the lowest bit of the mantissa, in a step that nothing samples, to one of the exponent."""
    name = "layers.1.mlp.down_proj.weight"
    with monkeypatch.context() as patch:
        flip(patch, 13, name, bit)
        assert launch_here(tmp_path, *JOB) == 0
    run = tmp_path / "run"
    holds, said = said_by(certify, run, checks=0, seed=None)
    assert holds, said  # it is what was written
    holds, said = said_by(replay, run, 15)
    assert not holds
    assert "NOT EQUAL: step 13 is the first that differs from its replay" in said
    assert f"the gradient of {name}" in said


def test_random_steps_find_it(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        flip(patch, 13, "norm.weight", 3)
        assert launch_here(tmp_path, *JOB) == 0
    run = tmp_path / "run"
    seed = next(seed for seed in range(9999) if {14, 7} == set(random.Random(seed).sample(range(1, STEPS + 1), 2)))
    holds, said = said_by(certify, run, checks=2, seed=seed)
    assert not holds
    assert "the gradient of norm.weight" in said
    assert "1 of 2 replayed steps hold" in said


def test_a_flip_after_the_fingerprint_is_found_in_the_next_step(tmp_path, monkeypatch):
    """As in the memory of a weight: all that the next step computes is another's."""
    finish, steps = Learner.finish, []

    def patched(learner: Learner, skip: torch.Tensor) -> None:
        finish(learner, skip)
        steps.append(1)
        if len(steps) == 8:
            learner.parameters["layers.0.mlp.up_proj.weight"].data.view(torch.int32).view(-1)[3] ^= 1 << 24

    with monkeypatch.context() as patch:
        patch.setattr(Learner, "finish", patched)
        assert launch_here(tmp_path, *JOB) == 0
    holds, said = said_by(replay, tmp_path / "run", 10)
    assert not holds
    assert "step 9 is the first" in said
    assert "the loss, the gradient norm" in said


# --------------------------------------------------------------------------- what was changed


def edit(file: Path, number: int, change) -> None:
    """Change a line, by number from 1; None removes it."""
    lines = file.read_text().splitlines(keepends=True)
    new = change(lines[number - 1])
    lines[number - 1 : number] = [] if new is None else [new]
    file.write_text("".join(lines))


def test_an_unchanged_run_is_certified(recorded):
    before = snapshot(recorded)
    holds, said = said_by(certify, recorded, checks=3, seed=1)
    assert holds, said
    assert "the hashes of 20 steps' fingerprints, metrics.jsonl and 4 checkpoints agree" in said
    assert "3 of 3 replayed steps hold" in said
    assert snapshot(recorded) == before


def set_value(key: str, value: float):
    def change(line: str) -> str:
        old = f'"{key}": {json.loads(line)[key]!r}'
        assert old in line
        return line.replace(old, f'"{key}": {value}')

    return change


def remove(line: str) -> None:
    return None


CHANGES = {
    # case: (file, line number, change, what is said)
    "a metrics line": ("metrics.jsonl", 4, set_value("loss", 4.0), ["line 4: the line of step 6", "loss 4.0 instead"]),
    "its learning rate": ("metrics.jsonl", 4, set_value("lr", 0.5), ["line 4: the line of step 6 has been changed"]),
    "a metrics line removed": ("metrics.jsonl", 4, remove, ["line 4: before it, the lines of steps 6 are missing"]),
    "the last one removed": ("metrics.jsonl", 11, remove, ["at its end, the lines of steps 20 are missing"]),
    "a step removed": ("fingerprints.jsonl", 8, remove, ["line 8: step 7 is missing"]),
    "the last step removed": ("fingerprints.jsonl", 22, remove, ["the fingerprints of steps 20 to 20 are missing"]),
    "a step's numbers": (
        "fingerprints.jsonl",
        8,
        lambda line: line.replace('"norms": "', '"norms": "AAAA')[:-50] + line[-46:],
        ["line 8"],
    ),
    "a step's loss": (
        "fingerprints.jsonl",
        8,
        lambda line: line.replace('"loss": "0x1.', '"loss": "0x1.0'),
        ["line 8: step 7 has been changed"],
    ),
    "a launch's job": (
        "fingerprints.jsonl",
        1,
        lambda line: line.replace("lr = 0.01", "lr = 0.02"),
        ["line 1: it has been changed: it is no line of a launch"],
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_changed_record_is_named_with_its_place(case, copy):
    name, number, change, expected = CHANGES[case]
    edit(copy / name, number, change)
    holds, said = said_by(certify, copy, checks=0, seed=None)
    assert not holds
    lines = [line for line in said.splitlines() if line]
    assert all(any(part in line for line in lines) for part in expected), said
    assert len(lines) <= 2, said  # one change is not told of as many


def test_a_checkpoints_changed_and_exchanged_files_are_named(copy):
    first, second = (copy / "checkpoints" / f"step-{step:08d}" for step in (5, 10))
    tensors_of = [next(folder.glob("*.distcp")) for folder in (first, second)]
    content = bytearray(tensors_of[0].read_bytes())
    content[len(content) // 2] ^= 1
    tensors_of[0].write_bytes(content)
    holds, said = said_by(certify, copy, checks=0, seed=None)
    assert not holds
    assert f"checkpoint {first} is damaged: {tensors_of[0].name} has changed" in said
    assert said.count("\n") == 1


def test_an_exchanged_checkpoint_is_named(copy, tmp_path):
    """Of the same job with another seed, whole in itself."""
    assert launch_here(tmp_path, *JOB, "--training.seed", "7") == 0
    name = "step-00000010"
    shutil.rmtree(copy / "checkpoints" / name)
    shutil.copytree(tmp_path / "run" / "checkpoints" / name, copy / "checkpoints" / name)
    holds, said = said_by(certify, copy, checks=0, seed=None)
    assert not holds
    assert f"{copy / 'checkpoints' / name}: MANIFEST.json says that the chain of fingerprints ends in" in said
    with pytest.raises(Exception, match="is not of the run whose fingerprints"):
        said_by(replay, copy, 12)


def test_resealed_weights_are_named_by_the_next_checkpoint_and_by_a_replay(copy):
    """Someone changes a weight and all hashes of that checkpoint."""
    folder = copy / "checkpoints" / "step-00000010"
    file = next(folder.glob("*.distcp"))
    place = next(p for i, p in read_metadata(folder).storage_data.items() if i.fqn == "model.lm_head.weight")
    content = bytearray(file.read_bytes())
    content[place.offset + place.length // 2] ^= 64
    file.write_bytes(content)
    manifest = json.loads((folder / MANIFEST_NAME).read_text())
    manifest["files"][file.name]["xxh3"] = xxhash.xxh3_128_hexdigest(bytes(content))
    del manifest["seal"]
    (folder / MANIFEST_NAME).write_text(sealed(json.dumps(manifest, indent=1)))
    holds, said = said_by(certify, copy, checks=0, seed=None)
    assert not holds
    assert f"{folder} has been exchanged or changed: its manifest is not the one that step-00000015 continued" in said
    assert not said_by(replay, copy, 11)[0]
