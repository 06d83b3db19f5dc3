"""What a run leaves behind and says, to the letter of the contract."""

import math
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from configs.load import load
from tests.end_to_end.launch import ENVIRONMENT, ROOT, TEXT, launch, launch_here, records, status
from trainer import opening

VALIDATION_KEYS = [f"validation_{name}" for name in ("loss", "perplexity", "bits_per_byte", "by_source")]
KEYS = [
    *("step", "loss", "grad_norm", "lr", "tokens", "tokens_per_second", "step_seconds", "data_seconds"),
    *("mfu", "tflops", "memory_peak_bytes", "memory_reserved_peak_bytes", "memory_percent", "allocator_retries"),
    *("allocator_ooms", "time"),
]


def test_files(prepared: Path):
    names = {path.name for path in (prepared / "run").glob("[!.]*")}
    files = {"config.toml", "tokenizer.model", "metrics.jsonl", "status.json", "run.log"}
    assert names == files | {"tensorboard", "checkpoints"}
    assert [path.name for path in (prepared / "run" / "checkpoints").iterdir()] == ["step-00000020"]


def test_status(prepared: Path):
    found = status(prepared / "run")
    assert (found["state"], found["step"], found["reason"]) == ("done", 20, "")
    assert found["checkpoint"] == "run/checkpoints/step-00000020"


def test_config_is_resolved_and_loads_back(prepared: Path):
    saved = load(str(prepared / "run" / "config.toml"))
    assert saved.config == load(str(TEXT)).config
    assert set(saved.origins.values()) <= {"default"} | {origin for origin in saved.origins.values() if ":" in origin}
    assert "base" not in (prepared / "run" / "config.toml").read_text()


def test_metrics(prepared: Path):
    found = records(prepared / "run")
    assert [record["step"] for record in found] == list(range(1, 21))
    for record in found:
        validated = record["step"] % 10 == 0
        of_some = VALIDATION_KEYS * validated + ["launches"] * (record["step"] == 1)
        assert list(record) == [*KEYS, *of_some, "seconds_by_kind", "goodput"]
        assert 0 < record["goodput"] < 1
        assert record["mfu"] is None  # no one states the peak of this CPU
        assert record["tokens"] == record["step"] * 8 * 16
        assert record["tokens_per_second"] > 0
        assert record["step_seconds"] > record["data_seconds"] >= 0
        assert record["memory_peak_bytes"] > 100e6
        assert [record[key] for key in KEYS[-5:-1]] == [None] * 4  # a CPU has no such allocator
    assert found[0]["loss"] != round(found[0]["loss"], 6)
    assert abs(found[0]["loss"] - math.log(384)) < 0.3
    assert found[-1]["loss"] < found[0]["loss"]
    bits, loss = found[-1]["validation_bits_per_byte"], found[-1]["validation_loss"]
    assert 1 < loss / math.log(2) / bits < 4  # bytes a token
    assert found[-1]["validation_perplexity"] == math.exp(loss)
    (own,) = found[-1]["validation_by_source"].values()
    assert own == {"loss": loss, "perplexity": math.exp(loss), "bits_per_byte": bits}


def test_tensorboard_has_the_same_curve(prepared: Path):
    events = EventAccumulator(str(prepared / "run" / "tensorboard"))
    events.Reload()
    for tag, key in (("train/loss", "loss"), ("train/grad_norm", "grad_norm"), ("validation/loss", "validation_loss")):
        expected = [(record["step"], record[key]) for record in records(prepared / "run") if key in record]
        curve = [(event.step, event.value) for event in events.Scalars(tag)]
        assert [step for step, _ in curve] == [step for step, _ in expected]
        assert all(math.isclose(a, b, rel_tol=1e-6) for (_, a), (_, b) in zip(curve, expected, strict=True))


def test_run_log_has_what_was_said(prepared: Path):
    log = (prepared / "run" / "run.log").read_text()
    for line in (prepared / "stdout").read_text().splitlines():
        assert line.rstrip() in log


def test_ends_with_where_everything_is_and_commands_that_work(prepared: Path):
    _, ending = (prepared / "stdout").read_text().split("Done: step 20 reached.")
    where, what_next = ending.split("What to try next")
    for name in ("metrics.jsonl", "run.log", "checkpoints/step-00000020"):
        assert f"run/{name}" in where
    assert "tensorboard --logdir run/tensorboard" in where
    commands = re.findall(r"(?m)^    \S(?:.*\\\n)*.*", what_next)
    assert len(commands) == 4
    assert any("--training.steps 40" in command for command in commands)
    for command in commands:
        words = shlex.split(command.replace("\\\n", ""))
        train = next(index for index, word in enumerate(words) if word.endswith("train.py"))
        check = [sys.executable, str(ROOT / "train.py"), *words[train + 1 :]]
        check += [] if "--help" in words else ["--validate"]
        answer = subprocess.run(check, cwd=prepared, env=ENVIRONMENT, capture_output=True, text=True, check=False)
        assert answer.returncode == 0, answer.stderr


@pytest.mark.long
def test_a_compiled_run_writes_no_warnings(tmp_path: Path):
    words = "--training.steps 2 --compile.enable true --activation_checkpoint.mode selective --mesh.tp 2"
    outcome = launch(tmp_path, words, ranks=2)
    warnings = [line for line in outcome.err.splitlines() if line.strip()]
    assert not [line for line in warnings if "OMP_NUM_THREADS" not in line]


@pytest.mark.parametrize(("tf32", "peak"), [("false", 67e12), ("true", 494.5e12)])
def test_mfu_is_of_the_peak_of_the_products_that_are_computed(tmp_path, monkeypatch, tf32, peak):
    monkeypatch.setattr(opening, "device_name", lambda _: "NVIDIA H200")
    words = ("--training.compute_dtype", "float32", "--job.device", "auto", "--training.tf32", tf32)
    assert launch_here(tmp_path, *words, "--training.steps", "2", "--metrics.interval", "1") == 0
    last = records(tmp_path / "run")[-1]
    assert last["mfu"] == pytest.approx(last["tflops"] * 1e12 / peak)
