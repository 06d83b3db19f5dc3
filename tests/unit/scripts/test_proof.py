"""Fingerprints of a run's steps, and what a replay says of a run that is not what it was."""

import io
import json
import math
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

import scripts.replay
from configs.errors import ConfigError, UserError
from scripts.proof.compare import bound_of, gaps
from scripts.proof.replay import plan
from scripts.replay import compute, random_steps, replay, temporary_folder
from tests.end_to_end.launch import TINY, assert_same_tensors, launch_here, snapshot, tensors
from trainer.data.loader import MicroBatch
from trainer.lifecycle import EXIT_PREEMPTED, StopRequest
from trainer.proof.record import Step
from trainer.report.console import Console
from trainer.step import Learner

STEPS, BATCH = 20, 8
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


def test_a_key_may_be_set_before_the_run_is_named(recorded, monkeypatch, capsys):
    monkeypatch.setattr(scripts.replay, "end_process", lambda code: code)
    scripts.replay.main(["--training.deterministic", "false", str(recorded), "--step", "3"])
    assert "equal in bits: steps 1 to 3" in capsys.readouterr().out


def test_from_the_initial_weights(recorded):
    holds, said = said_by(replay, recorded, 3)
    assert holds
    assert "from the initial weights" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [(), pytest.param(("--fsdp.reshard_after_forward", "always"), marks=pytest.mark.slow)],
    ids=["kept", "freed"],
)
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
    before = snapshot(recorded)
    for key, value in (("job.output_dir", recorded), ("training.steps", 20), ("checkpoint.load", "latest")):
        with pytest.raises(ConfigError, match=f"^--{key}: a replay sets it itself; leave it out"):
            said_by(replay, recorded, 9, words=[f"--{key}={value}"])
    for step in (3, 9):  # from the initial weights, and from a checkpoint
        with pytest.raises(
            ConfigError, match=r"only machine keys may be others; leave out:\n  training\.seed: 0 -> 7$"
        ):
            said_by(replay, recorded, step, words=["--training.seed", "7"])
    assert snapshot(recorded) == before
    (copy / "fingerprints.jsonl").unlink()
    with pytest.raises(UserError, match=r"are recorded with metrics\.fingerprint = true"):
        said_by(replay, copy, 9)


def test_what_a_run_began_with_that_has_no_first_step_is_not_known(copy, tmp_path):
    """As of a fork that has not kept its first checkpoint: it did not begin with the initial weights."""
    lines = [json.loads(line) for line in (copy / "fingerprints.jsonl").read_text().splitlines()]
    later = [line for line in lines if line["step"] >= 10]
    (copy / "fingerprints.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in later))
    shutil.rmtree(copy / "checkpoints")
    with pytest.raises(UserError, match=r"no checkpoint before step 12, and its fingerprints begin at step 11"):
        plan(copy, 12, tmp_path)


def test_a_run_that_passed_samples_over_is_replayed_from_there_on_only(copy, tmp_path):
    """Batches 11 to 13 were skipped as after a spike; from a checkpoint before, a replay would learn from them."""
    path = copy / "fingerprints.jsonl"
    path.write_text(path.read_text().replace('"next_sample": 80', '"next_sample": 104'))
    assert plan(copy, 12, tmp_path).first_sample == 104
    with pytest.raises(UserError, match=r"between step 5 and step 12, .* went back to step 10 after a spike"):
        plan(copy, 12, tmp_path, begin=5)


def test_a_run_that_went_back_to_the_border_of_a_stage_is_replayed_with_the_samples_of_that_stage(tmp_path):
    """The spike of step 13 sends it back to step 10, after which other sources are mixed."""
    sources = '[{name = "noise", kind = "synthetic"}, {name = "other", kind = "synthetic", weight = 2.0}]'
    stage = f"stages = [{{at_step = 10, data.sources = {sources}}}]"
    (tmp_path / "job.toml").write_text(f"base = {json.dumps(str(TINY))}\n{stage}\n")
    rule = ("--fault.spikes.action", "rewind", "--fault.spikes.window", "5", "--fault.spikes.rewind_interval", "10")
    gradients = Learner.gradients

    def with_spike(learner: Learner, batch: list[MicroBatch], *arguments: bool) -> tuple[torch.Tensor, torch.Tensor]:
        loss, norm = gradients(learner, batch, *arguments)
        return loss * (5.0 if batch[0].samples[0] == 12 * BATCH else 1.0), norm

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Learner, "gradients", with_spike)
        assert launch_here(tmp_path, *JOB, *rule, config=tmp_path / "job.toml") == 0
    assert plan(tmp_path / "run", 12, tmp_path).first_sample == 13 * BATCH
    holds, text = said_by(replay, tmp_path / "run", 14)
    assert holds
    assert "equal in bits: steps 11 to 14" in text


def test_a_run_that_was_resumed_with_other_sums_is_not_compared_in_bits(tmp_path):
    """The replay has the micro-batch of the last launch, and computes the steps of the first with it, too."""
    assert launch_here(tmp_path, *JOB, "--training.steps", "10") == 0
    assert launch_here(tmp_path, *JOB, "--training.micro_batch_size", "4") == 0
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    holds, text = said_by(replay, tmp_path / "run", 12)
    assert holds
    assert "because of training.micro_batch_size 2 -> 4" in text
    assert "equal within the bound: steps 1 to 12" in text


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


@pytest.mark.slow
@pytest.mark.parametrize("bit", [pytest.param(0, marks=pytest.mark.slow), 22, pytest.param(29, marks=pytest.mark.slow)])
def test_a_flipped_bit_is_named_by_step_and_parameter(bit, tmp_path, monkeypatch):
    """From the lowest bit of the mantissa, in a step that nothing samples, to one of the exponent."""
    name = "layers.1.mlp.down_proj.weight"
    with monkeypatch.context() as patch:
        flip(patch, 13, name, bit)
        assert launch_here(tmp_path, *JOB) == 0
    run = tmp_path / "run"
    holds, said = said_by(replay, run, 15)
    assert not holds
    assert "NOT EQUAL: step 13 is the first that differs from its replay" in said
    assert f"the gradient of {name}" in said


@pytest.mark.slow
def test_random_steps_find_it(tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        flip(patch, 13, "norm.weight", 3)
        assert launch_here(tmp_path, *JOB) == 0
    run = tmp_path / "run"
    seed = next(seed for seed in range(9999) if {14, 7} == set(random.Random(seed).sample(range(1, STEPS + 1), 2)))
    monkeypatch.setattr(scripts.replay, "end_process", sys.exit)
    with pytest.raises(SystemExit) as end:
        scripts.replay.main([str(run), "--random", "2", "--seed", str(seed)])
    said = capsys.readouterr().out
    assert end.value.code == 1
    assert "the gradient of norm.weight" in said
    assert "1 of 2 replayed steps hold" in said


def test_random_steps_are_those_that_can_be_replayed(recorded, copy):
    assert sorted(random_steps(recorded, 99, seed=1)) == list(range(1, STEPS + 1))
    assert random_steps(recorded, 3, seed=1) == random_steps(recorded, 3, seed=1)
    file = copy / "fingerprints.jsonl"
    file.write_text("".join(line for line in file.open() if '"step": 1,' not in line))
    assert sorted(random_steps(copy, 99, seed=1)) == list(range(6, STEPS + 1))  # from the checkpoint of step 5 on
    shutil.rmtree(copy / "checkpoints")
    with pytest.raises(UserError, match="no step can be replayed"):
        random_steps(copy, 1, seed=1)


@pytest.mark.slow
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


def change(line: str, kind: str) -> str:
    """A line of a step, changed."""
    values = json.loads(line)
    if kind == "the loss":
        return json.dumps(values | {"loss": (1.5).hex()}) + "\n"
    if kind == "fewer norms":
        return json.dumps(values | {"norms": values["norms"][:-8]}) + "\n"
    return line[: len(line) // 2] + "\n"


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("the loss", "NOT EQUAL: step 7 is the first"),
        ("fewer norms", "equal in bits"),
        ("half a line", "equal in bits"),
    ],
)
def test_a_changed_record(kind, expected, copy):
    """A number that nobody computed is found; a line that can't be read is as if the step had not been recorded."""
    file = copy / "fingerprints.jsonl"
    file.write_text("".join(change(line, kind) if '"step": 7,' in line else line for line in file.open()))
    holds, said = said_by(replay, copy, 8)
    assert holds == (kind != "the loss"), said
    assert expected in said
    if kind != "the loss":
        with pytest.raises(UserError, match="has no fingerprint of step 7"):
            said_by(replay, copy, 7)


def recorded_elsewhere(run: Path, step: int, name: str, change: Callable[[str], str]) -> None:
    """Let a run have been recorded with another torch, which computed something else of a step."""
    file = run / "fingerprints.jsonl"
    lines = [json.loads(line) for line in file.open()]
    for line in lines:
        if "environment" in line:
            line["environment"] |= {"torch": "another"}
        elif line["step"] == step:
            line[name] = change(line[name])
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_difference_in_bits_alone_has_no_size(copy):
    """Of a run on another machine, bits of gradients differ, while all that has a size is equal."""
    recorded_elsewhere(copy, 6, "digests", lambda digests: digests[8:] + digests[:8])
    holds, said = said_by(replay, copy, 7)
    assert holds, said
    assert "the bits may differ, because of torch another -> " in said
    assert "equal within the bound: steps 6 to 7; losses, norms and samples of gradients are equal" in said


def test_sums_that_are_equal_in_the_first_step_by_luck_may_differ_in_the_next(copy):
    """A norm is a single number: in another order, every second sum has the same bits."""
    recorded_elsewhere(copy, 7, "grad_norm", lambda norm: (float.fromhex(norm) * (1 + 2**-22)).hex())
    holds, said = said_by(replay, copy, 8)
    assert holds, said
    assert "in bits, step 7 is the first that differs: the gradient norm\n" in said
    assert "equal within the bound: steps 6 to 8; the difference nearest to it is 2.4e-07 of the gradient norm" in said


def test_a_gradient_that_is_zero_but_for_round_off_has_no_size():
    """A bias of keys has such a gradient, which other sums change by its whole size."""

    def step(of_keys: float, size: float) -> Step:
        norms = np.array([1.0, of_keys], dtype=np.float32) * np.float32(size)
        return Step(1, 5.0, 1.0, np.zeros(2, np.uint32), norms, norms / 2, np.zeros(1, np.uint32))

    def wrong(was: float, now: float, size: float = 1.0) -> list[str]:
        parameters = [("weight", 4), ("k.bias", 4)]
        found = gaps(step(was, size), step(now, size), parameters, bound_of(1, "float32"), "float32")
        return [gap.what for gap in found if gap.value > gap.bound]

    assert wrong(2e-11, 3e-11) == []
    assert wrong(2e-11, 3e-11, size=1e6) == []
    assert wrong(2e-11, 2e-4) == ["k.bias", "k.bias"]
    assert wrong(2e-4, 2e-11) == ["k.bias", "k.bias"]
    assert wrong(2e-4, 3e-4, size=1e-6) == ["k.bias", "k.bias"]
    assert wrong(2e-4, 3e-4) == ["k.bias", "k.bias"]
    assert "k.bias" in wrong(2e-11, math.nan)


def test_a_run_with_muon_is_replayed_with_other_sums(tmp_path):
    """Its update enlarges round-off more than AdamW's does."""
    assert launch_here(tmp_path, *JOB, "--optimizer.name", "muon", "--training.steps", "5") == 0
    holds, said = said_by(replay, tmp_path / "run", 5, words=("--training.micro_batch_size", "4"))
    assert holds, said
    assert "equal within the bound: steps 1 to 5; the difference nearest to it is" in said


@pytest.mark.slow
def test_an_exchanged_checkpoint_is_found(copy, tmp_path):
    """Of a run with the same run keys, whole in itself; with other keys, it is refused as that of another run."""
    assert launch_here(tmp_path, *JOB, "--training.steps", "5") == 0
    assert launch_here(tmp_path, *JOB, "--job.allow_run_change", "true", "--optimizer.lr", "0.02") == 0
    name = "step-00000010"
    shutil.rmtree(copy / "checkpoints" / name)
    shutil.copytree(tmp_path / "run" / "checkpoints" / name, copy / "checkpoints" / name)
    with pytest.raises(UserError, match="did not come to its end"):
        said_by(replay, copy, 12)
    holds, said = said_by(replay, copy, 12, words=("--job.allow_run_change", "true"))
    assert not holds
    assert "NOT EQUAL: step 11 is the first" in said


def test_a_replay_is_kept_in_a_folder_of_its_own(copy):
    before = sorted(copy.rglob("*"))
    with pytest.raises(UserError, match="is not empty; name a new folder with --folder"):
        said_by(replay, copy, 3, folder=copy)
    assert sorted(copy.rglob("*")) == before


def test_a_replay_that_a_signal_stops_says_so(recorded, monkeypatch, capsys):
    monkeypatch.setattr(scripts.replay, "run_ranks", lambda *_: EXIT_PREEMPTED)
    monkeypatch.setattr(scripts.replay, "end_process", sys.exit)
    with pytest.raises(SystemExit) as ended:
        scripts.replay.main([str(recorded), "--step", "3"])
    assert ended.value.code == EXIT_PREEMPTED
    assert capsys.readouterr().err.startswith("error: stopped; the same command")


def test_what_a_killed_replay_has_left_is_removed_and_what_others_compute_is_kept(recorded, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with temporary_folder("keel-replay-") as used:
        left, new = tmp_path / "keel-replay-left", tmp_path / "keel-replay-new"
        for folder in (left, new):
            (folder / "run").mkdir(parents=True)
        for folder in (left, used):
            os.utime(folder, (0, 0))
        assert said_by(replay, recorded, 3)[0]
        assert sorted(tmp_path.iterdir()) == sorted([new, used])
    assert list(tmp_path.iterdir()) == [new]
