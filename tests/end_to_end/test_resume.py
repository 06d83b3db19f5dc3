"""A run that was stopped and taken up again lies bit for bit on the one that was not."""

import shutil
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from checkpoint.manager import CheckpointManager
from configs.errors import UserError
from tests.end_to_end.launch import (
    assert_same_tensors,
    curve,
    finish,
    launch,
    launch_here,
    records,
    start,
    status,
    tensors,
)
from tests.end_to_end.signals import signal_at_step
from tests.marked import marked

EXPERTS = """--model.n_experts 8 --model.router.load_balance bias_and_auxiliary_loss --model.router.bias_update_rate 0.1
    --model.router.auxiliary_loss_over global_batch --model.router.auxiliary_loss_weight 0.1"""
CASES = {  # the whole matrix, without the command line: `python -m tests.torture.resume`
    "FSDP 2, eager, sync": (2, "--checkpoint.mode sync", (7, 13)),
    "FSDP 2, compiled, async": (2, "--checkpoint.mode async --compile.enable true", (9,)),
    "FSDP 2 x TP 2, eager, async": (4, "--checkpoint.mode async --mesh.tp 2", (7, 13)),
    "FSDP 2, experts with a balance that is kept": (2, f"--checkpoint.mode async {EXPERTS}", (9,)),
}
FIRST, *OTHERS = CASES
VALIDATION = """ --validation.interval 3 --validation.sequences 12 --validation.sources '[
    {name = "noise", kind = "synthetic"}, {name = "other noise", kind = "synthetic", weight = 0.5}]'"""


@pytest.mark.parametrize("case", marked(CASES, slow=[FIRST], long=OTHERS))
def test_stops_leave_no_trace_in_losses_and_weights(tmp_path: Path, case: str):
    ranks, words, stops = CASES[case]
    words += f" --training.micro_batch_size 4 {VALIDATION}"
    launch(tmp_path, f"{words} --job.output_dir straight", ranks)
    for steps in (*stops, 20):
        launch(tmp_path, f"{words} --job.output_dir stopped --training.steps {steps}", ranks)
        assert [step for step, *_ in curve(tmp_path / "stopped")] == list(range(1, steps + 1))
        assert status(tmp_path / "stopped") | {"state": "done", "step": steps} == status(tmp_path / "stopped")
    assert curve(tmp_path / "stopped") == curve(tmp_path / "straight")
    assert validations(tmp_path / "stopped") == validations(tmp_path / "straight")
    assert_same_tensors(tensors(tmp_path / "stopped"), tensors(tmp_path / "straight"))


def validations(run: Path) -> dict[int, dict[str, Any]]:
    """What the validations found, by step; each must have found something of each source."""
    found = {
        record["step"]: {key: value for key, value in record.items() if key.startswith("validation_")}
        for record in records(run)
        if "validation_loss" in record
    }
    assert list(found) == [3, 6, 9, 12, 15, 18]
    assert all(list(values["validation_by_source"]) == ["noise", "other noise"] for values in found.values())
    return found


@pytest.mark.long
def test_a_resume_leaves_no_trace_compiled_on_a_mesh_of_two_dimensions(tmp_path: Path):
    """Four ranks that compile take long to start: the straight run itself saves what the other goes on from."""
    words = "--training.micro_batch_size 4 --mesh.tp 2 --compile.enable true"
    launch(tmp_path, f"{words} --job.output_dir straight --checkpoint.interval 9 --checkpoint.mode async", ranks=4)
    checkpoint = "straight/checkpoints/step-00000009"
    launch(tmp_path, f"{words} --job.output_dir resumed --checkpoint.load {checkpoint}", ranks=4)
    assert curve(tmp_path / "resumed") == curve(tmp_path / "straight")[9:]
    assert_same_tensors(tensors(tmp_path / "resumed"), tensors(tmp_path / "straight"))


@pytest.mark.long
def test_another_mesh_and_world_size_go_on_with_the_same_curve(tmp_path: Path):
    words = "--training.dtype float64 --training.compute_dtype float64 --training.reduce_dtype float64"
    launch(tmp_path, f"{words} --job.output_dir straight")
    for steps, ranks, mesh in ((7, 2, ""), (13, 0, ""), (20, 2, "--mesh.tp 2")):
        launch(tmp_path, f"{words} {mesh} --job.output_dir moved --training.steps {steps}", ranks)
    moved, straight = curve(tmp_path / "moved"), curve(tmp_path / "straight")
    assert [step for step, *_ in moved] == list(range(1, 21))
    assert moved == [pytest.approx(point, rel=1e-10) for point in straight]
    ours, theirs = tensors(tmp_path / "moved"), tensors(tmp_path / "straight")
    for name, tensor in theirs.items():
        assert (ours[name] - tensor).norm() <= 1e-10 * tensor.norm(), name


@pytest.mark.slow
def test_a_checkpoint_before_the_end_cuts_the_metrics_back(tmp_path: Path):
    """Steps 11 to 14 were logged and lost, as after a kill: they are trained anew and stand there once."""
    run = tmp_path / "run"
    launch(tmp_path, "--training.steps 14 --checkpoint.interval 5")
    before = curve(run)
    later = run / "checkpoints" / "step-00000014"
    later.rename(tmp_path / "lost")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 15, "loss"')  # a kill in the middle of a line
    outcome = launch(tmp_path, "--checkpoint.interval 5")
    assert [step for step, *_ in curve(run)] == list(range(1, 21))
    assert curve(run)[:14] == before
    assert "resuming from run/checkpoints/step-00000010" in outcome.out
    assert "1 unreadable line" in outcome.err
    launch(tmp_path, "--job.output_dir straight")
    assert curve(run) == curve(tmp_path / "straight")
    assert_same_tensors(tensors(run), tensors(tmp_path / "straight"))

    done = records(run)
    assert "Done: step 20 reached" in launch(tmp_path).out  # once more, with nothing left to do
    assert records(run) == done


@pytest.mark.slow
def test_the_command_that_began_from_a_folder_goes_on_when_it_is_repeated(tmp_path: Path, capsys):
    """And with the word it goes back, once, with its records."""
    run, checkpoints = tmp_path / "run", tmp_path / "run" / "checkpoints"
    base = tmp_path / "base"
    assert launch_here(tmp_path, "--training.steps", "5") == 0
    run.rename(base)
    began = ("--checkpoint.load", str(base / "checkpoints" / "step-00000005"))
    for steps in (8, 11):
        assert launch_here(tmp_path, *began, "--training.steps", str(steps)) == 0
        assert [step for step, *_ in curve(run)] == list(range(6, steps + 1))
    said = "but this run has its own checkpoints from that step on; to go back to it, set checkpoint.go_back = 1"
    assert said in " ".join(capsys.readouterr().out.split())
    straight = curve(run)
    for steps in (9, 12):
        words = (*began, "--checkpoint.go_back", "1", "--training.steps", str(steps))
        assert launch_here(tmp_path, *words) == 0
        assert [step for step, *_ in curve(run)] == list(range(6, steps + 1))
    assert curve(run)[:6] == straight
    assert status(run)["step"] == 12
    names = ["abandoned-001", "step-00000009", "step-00000012"]
    assert sorted(path.name for path in checkpoints.iterdir()) == names
    aside = checkpoints / "abandoned-001"
    assert sorted(path.name for path in aside.iterdir()) == ["metrics.jsonl", "step-00000008", "step-00000011"]


def test_a_run_that_goes_back_to_before_its_balance_of_experts_begins_even_again(tmp_path, monkeypatch):
    short = ("--model.n_experts", "4", "--checkpoint.interval", "4", "--training.steps")
    assert launch_here(tmp_path, *short, "4") == 0
    rewind = CheckpointManager.rewind
    found = []

    def watched(manager, step, state):
        before = {name: kept.clone() for name, kept in state.items() if name.endswith(("mlp.router", "router.bias"))}
        saved = rewind(manager, step, state)
        found.append((step, before, {name: state[name].clone() for name in before}))
        return saved

    monkeypatch.setattr(CheckpointManager, "rewind", watched)
    balance = "{load_balance = 'bias_and_auxiliary_loss', auxiliary_loss_over = 'global_batch'}"
    spikes = "{action = 'rewind', window = 2, threshold = 1e-9, rewind_interval = 4}"
    added = (
        "--model.router",
        balance,
        "--fault.spikes",
        spikes,
        "--job.allow_run_change",
        "true",
        "--optimizer.lr",
        "1",
    )
    with suppress(UserError):  # it goes back too often
        launch_here(tmp_path, *short, "8", *added)
    step, before, after = found[0]
    assert step == 4
    assert len(after) == 4
    for name, kept in after.items():
        assert len(before[name].unique()) > 1
        assert kept.unique().tolist() == [float(name.startswith("load."))]


def test_a_balance_of_experts_may_be_added_and_begins_even(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The first step after it reads and computes what it would have without; only a loss over sequences is missing."""
    short = ("--checkpoint.interval", "4", "--training.steps")
    assert launch_here(tmp_path, "--model.n_experts", "4", *short, "4") == 0
    (tmp_path / "run").rename(tmp_path / "before")
    added = (
        "--model.router.load_balance",
        "bias_and_auxiliary_loss",
        "--model.router.auxiliary_loss_over",
        "global_batch",
    )
    first = {}
    for name, words in {"without": (), "with": ("--job.allow_run_change", "true", *added)}.items():
        shutil.copytree(tmp_path / "before", tmp_path / "run")
        assert launch_here(tmp_path, "--model.n_experts", "4", *short, "6", *words) == 0
        first[name] = curve(tmp_path / "run")[4]
        (tmp_path / "run").rename(tmp_path / name)
    assert first["with"][:2] == first["without"][:2]
    assert first["with"][2] != first["without"][2]
    shutil.copytree(tmp_path / "with", tmp_path / "run")
    dropped = ("--job.allow_run_change", "true", *added[:2])  # the loss is over sequences again
    assert launch_here(tmp_path, "--model.n_experts", "4", *short, "7", *dropped) == 0
    assert not any(name.startswith("load.") for name in tensors(tmp_path / "run", 7))
    shutil.rmtree(tmp_path / "run")
    begun = ("--checkpoint.init_from", str(tmp_path / "before"), *added)
    assert launch_here(tmp_path, "--model.n_experts", "4", *short, "1", *begun) == 0
    assert "computes something else" not in capsys.readouterr().out
    (tmp_path / "run").rename(tmp_path / "begun")
    assert (
        launch_here(tmp_path, "--model.n_experts", "4", *short, "1", "--checkpoint.init_from", f"{tmp_path}/begun")
        == 78
    )
    assert "router.bias: [4] in the checkpoint, no such tensor here" in capsys.readouterr().err


def test_sigterm_and_the_same_command_again(tmp_path: Path):
    """The signal comes when it will: whichever step it stops, the curve is the same."""
    words = "--training.steps 150 --lr_schedule.total_steps 150 --training.micro_batch_size 8"
    launch(tmp_path, f"{words} --job.output_dir straight")
    process = start(tmp_path, words)
    signal_at_step(process, tmp_path / "run", 3, signal.SIGTERM)
    outcome = finish(process)
    assert outcome.code == 75
    stopped = status(tmp_path / "run")
    assert stopped["state"] == "preempted"
    assert stopped["reason"] == "SIGTERM"
    assert 3 <= stopped["step"] < 150
    assert f"Stopped by SIGTERM after step {stopped['step']}, with everything saved" in outcome.out
    assert (tmp_path / "run" / "checkpoints" / f"step-{stopped['step']:08d}").is_dir()
    launch(tmp_path, words)
    assert curve(tmp_path / "run") == curve(tmp_path / "straight")
    assert_same_tensors(tensors(tmp_path / "run", 150), tensors(tmp_path / "straight", 150))
