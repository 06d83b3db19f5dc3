"""The sinks of a run's records: none ends or slows a run, and each has every step once, whatever happens."""

import json
import math
import os
import signal
import struct
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from configs.errors import UserError
from configs.schema import Metrics
from tests.conftest import ROOT
from tests.unit.trainer.test_metrics import metrics
from trainer.guards.outages import Outages
from trainer.report.evaluations import recorded, unrecorded, write_result
from trainer.report.metrics import EvaluationMetrics, MetricsLog
from trainer.report.sinks import worker
from trainer.report.sinks.choose import choose_sinks
from trainer.report.sinks.sink import SinkRun, curves
from trainer.report.sinks.worker import Sinks


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """A loaded machine is slow; the tests of the limits set their own."""
    monkeypatch.setattr(worker, "PATIENCE_SECONDS", 600)
    monkeypatch.setattr(worker, "CLOSING_SECONDS", 600)


class Kept:
    """A sink that keeps what it gets."""

    def __init__(self, run: SinkRun) -> None:
        self.run, self.records, self.is_closed = run, [], False
        self.history = list(run.history())

    def write(self, record):
        self.records.append(record)

    def close(self):
        self.is_closed = True


def open_log(folder, make, resumed_step=0, said=None):
    say = (said if said is not None else []).append
    return MetricsLog(folder, Outages(say, say), resumed_step, Sinks({"the sink": make}, say), "test", {"a": {"b": 1}})


def opened(kind):
    """`kind`, and a list of the sinks that it will make."""
    made = []

    def make(run):
        made.append(kind(run))
        return made[-1]

    return make, made


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


# --------------------------------------------------------------------------- the protocol


def test_a_sink_gets_what_the_file_gets_and_after_a_resume_what_was_before(tmp_path):
    make, made = opened(Kept)
    log = open_log(tmp_path, make)
    for step in (10, 20, 30):
        log.write(metrics(step))
    log.write(EvaluationMetrics(20, {"arc": {"acc": 0.25}}, 1.7e9))
    log.close()
    log = open_log(tmp_path, make, resumed_step=20)
    log.write(metrics(30, loss=9.0))
    log.close()
    first, second = made
    assert [record["step"] for record in first.records] == [10, 20, 30, 20]
    assert (first.run.first_step, first.history, first.is_closed) == (1, [], True)
    assert [record["step"] for record in second.history] == [10, 20, 20]
    assert second.history[-1]["evaluation"] == {"arc": {"acc": 0.25}}
    assert second.run.first_step == 21
    assert second.run.config == {"a": {"b": 1}}
    without_null = [{key: value for key, value in line.items() if value is not None} for line in lines(tmp_path)]
    assert second.history + second.records == without_null


def test_curves_are_named_by_tag_and_table():
    by_source = {"code": {"loss": 2.0, "bits_per_byte": None}}
    record = {"step": 3, "loss": 1.5, "validation_by_source": by_source, "evaluation": {"arc": {"acc": 0.5}}}
    assert curves(record) == {"train/loss": 1.5, "validation/code/loss": 2.0, "evaluation/arc/acc": 0.5}


class Raises(Kept):
    def write(self, record):
        super().write(record)
        raise ConnectionError("no route to host\nand more")


def test_a_sink_that_raises_is_said_once_and_gets_every_record(tmp_path):
    make, made = opened(Raises)
    said = []
    log = open_log(tmp_path, make, said=said)
    for step in (10, 20, 30):
        log.write(metrics(step))
    log.close()
    assert [record["step"] for record in made[0].records] == [10, 20, 30]
    assert said == ["the sink failed: ConnectionError: no route to host; training continues and retries it"]
    assert [line["step"] for line in lines(tmp_path)] == [10, 20, 30]


def test_a_sink_that_cannot_be_opened_is_done_without(tmp_path):
    def make(run):
        sys.exit("no server")

    said = []
    log = open_log(tmp_path, make, said=said)
    log.write(metrics(10))
    log.close()
    assert said == ["the sink can't be opened: SystemExit: no server; training continues without it"]


def test_a_sink_that_hangs_holds_up_one_save_only_and_then_catches_up(tmp_path, monkeypatch):
    monkeypatch.setattr(worker, "PATIENCE_SECONDS", 0.2)
    free = threading.Event()

    class Hangs(Kept):
        def write(self, record):
            free.wait(60)
            super().write(record)

    make, made = opened(Hangs)
    said = []
    log = open_log(tmp_path, make, said=said)
    log.write(metrics(10))
    log.flush()
    assert said == ["the sink: a logger is slow, and records wait for it; training continues"]
    monkeypatch.setattr(worker, "PATIENCE_SECONDS", 1e6)  # the next save would wait forever
    log.write(metrics(20))
    log.flush()
    free.set()
    log.write(metrics(30))
    log.close()
    assert [record["step"] for record in made[0].records] == [10, 20, 30]
    assert len(said) == 1


def test_a_sink_that_never_ends_is_left_at_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(worker, "CLOSING_SECONDS", 0.2)

    class Sleeps(Kept):
        def close(self):
            threading.Event().wait(60)

    said = []
    log = open_log(tmp_path, Sleeps, said=said)
    log.write(metrics(10))
    started = time.monotonic()
    log.close()
    assert time.monotonic() - started < 30
    assert said == ["the sink: a logger did not end in time; metrics.jsonl has all records"]


def test_a_log_that_is_closed_has_nothing_to_wait_for(tmp_path):
    """A run flushes once more when it ends, whether by an error or not."""
    said = []
    log = open_log(tmp_path, Kept, said=said)
    log.write(metrics(10))
    log.close()
    started = time.monotonic()
    log.flush()
    assert time.monotonic() - started < 30  # PATIENCE_SECONDS is 600 in these tests
    assert said == []


def test_a_sink_that_fails_leaves_the_others_alone(tmp_path):
    make, made = opened(Kept)
    broken, _ = opened(Raises)
    said = []
    sinks = Sinks({"broken": broken, "none": sys.exit, "whole": make}, said.append)
    log = MetricsLog(tmp_path, Outages(said.append, said.append), 0, sinks, "test", {})
    log.write(metrics(10))
    log.flush()
    log.close()
    assert ([record["step"] for record in made[0].records], made[0].is_closed) == ([10], True)
    assert [line.partition(":")[0] for line in said] == ["none can't be opened", "broken failed"]


def test_results_of_evaluations_are_recorded_once_and_others_left_out(tmp_path):
    first = write_result(tmp_path, 20, {"arc": {"acc": 0.25}})
    bad = ("no JSON", "[]", "{}", '{"evaluation": [1]}', '{"evaluation": {"arc": {"acc": "x"}}}')
    for number, text in enumerate(bad):
        (first.parent / f"{number}.json").write_text(text)
    (first.parent / "notes.json").write_text("{}")
    for resumed in (20, 30):
        log = open_log(tmp_path, Kept, resumed_step=resumed)
        for result in unrecorded(tmp_path, recorded(tmp_path)):
            log.write(result)
        log.close()
        assert [(line["step"], line["evaluation"]) for line in lines(tmp_path)] == [(20, {"arc": {"acc": 0.25}})]


def test_a_score_that_is_not_finite_loses_no_other_score(tmp_path):
    """As the perplexity of a model that has diverged."""
    write_result(tmp_path, 20, {"text": {"acc": 0.25, "byte_perplexity": math.inf}})
    log = open_log(tmp_path, Kept, resumed_step=20)
    for result in unrecorded(tmp_path, recorded(tmp_path)):
        log.write(result)
    log.close()
    [line] = lines(tmp_path)
    assert line["evaluation"] == {"text": {"acc": 0.25, "byte_perplexity": None}}


# --------------------------------------------------------------------------- what [metrics] asks for


def test_a_class_of_ones_own_is_found_in_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "my_sinks.py").write_text("class Mine:\n    def __init__(self, run): self.run = run\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    settings = Metrics(tensorboard=False, sink="my_sinks:Mine")
    (make,) = choose_sinks(settings, tmp_path).values()
    assert make("run").run == "run"
    assert choose_sinks(settings, tmp_path, with_own=False) == {}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:Mine", "no_such_module can't be imported .*No module named"),
        ("json:Mine", "json has no class Mine"),
        ("json:__doc__", "json has no class __doc__"),
    ],
)
def test_a_class_that_is_not_there_is_one_message(tmp_path, name, message):
    with pytest.raises(UserError, match=message):
        choose_sinks(Metrics(tensorboard=False, sink=name), tmp_path)


def test_a_package_that_is_missing_is_one_message(tmp_path, monkeypatch):
    monkeypatch.setattr("trainer.report.sinks.choose.find_spec", lambda package: None)
    with pytest.raises(UserError, match=r"metrics\.wandb = true needs the package wandb; install it: pip install"):
        choose_sinks(Metrics(tensorboard=False, wandb=True), tmp_path)


def test_wandb_without_a_login_is_one_message(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="the extra wandb is not installed")
    program = (
        "import pathlib; from configs.schema import Metrics; from configs.errors import UserError;"
        "from trainer.report.sinks.choose import choose_sinks\n"
        "try: choose_sinks(Metrics(tensorboard=False, wandb=True), pathlib.Path('.'))\n"
        "except UserError as error: print(error)"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")} | {"HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert done.stdout.startswith("metrics.wandb = true: No API key configured."), done.stderr
    assert "WANDB_MODE=offline" in done.stdout


# --------------------------------------------------------------------------- the real services

LAUNCHES = """
    import os, pathlib, sys, threading
    from configs.schema import Metrics
    from tests.unit.trainer.test_metrics import metrics
    from trainer.guards.outages import Outages
    from trainer.report.metrics import EvaluationMetrics, MetricsLog
    from trainer.report.sinks.choose import choose_sinks
    from trainer.report.sinks import worker
    from trainer.report.sinks.worker import Sinks

    worker.PATIENCE_SECONDS = worker.CLOSING_SECONDS = 600  # a loaded machine is slow

    def launch(folder, name, steps, loss, resumed=0, is_killed=False):
        def refuse(text):
            raise AssertionError(text)
        own = {"wandb": {"wandb": True}, "mlflow": {"sink": "scripts.examples.mlflow_sink:MLflow"}}[name]
        sinks = Sinks(choose_sinks(Metrics(tensorboard=False, **own), folder), refuse)
        log = MetricsLog(folder, Outages(refuse, refuse), resumed, sinks, "tiny", {"job": {"name": "tiny"}})
        for step in steps:
            log.write(metrics(step, loss=loss, tokens_per_expert={1: [3, 0]}))
        log.write(EvaluationMetrics(steps[0], {"arc": {"acc": loss}}, 1.7e9))
        log.flush() if is_killed else log.close()
        if is_killed:
            os.kill(os.getpid(), 9)
"""


def launch(folder, name, *arguments, **options):
    """Write steps in a process of its own."""
    given = ", ".join([*map(repr, arguments), *(f"{key}={value!r}" for key, value in options.items())])
    program = textwrap.dedent(LAUNCHES) + f"\nlaunch(pathlib.Path(sys.argv[1]), {name!r}, {given})"
    done = subprocess.run(
        [sys.executable, "-c", program, folder],
        cwd=ROOT,
        env=os.environ | {"WANDB_MODE": "offline", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    expected = -signal.SIGKILL if options.get("is_killed") else 0
    assert done.returncode == expected, done.stdout + done.stderr


def wandb_records(file: Path):
    """The records of a W&B data file: LevelDB's log format behind a header of seven bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts = file.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            record = Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


def wandb_curve(folder, key="train/loss"):
    """(step, value) of all data files that `wandb sync` would upload."""
    files = sorted(folder.glob("wandb/offline-run-*/*.wandb"))
    assert len(files) == 1
    rows = [
        {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for record in wandb_records(files[0])
        if record.WhichOneof("record_type") == "history"
    ]
    return [(row["step"], row[key]) for row in rows if key in row]


def mlflow_curve(folder, key="train/loss"):
    """(step, value) of the one MLflow run that is not deleted."""
    from mlflow import MlflowClient

    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    client = MlflowClient((folder / "mlflow").resolve().as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("tiny").experiment_id])
    return [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, key)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "curve"), [("wandb", wandb_curve), ("mlflow", mlflow_curve)])
def test_a_service_has_every_step_once_after_stops_kills_and_going_back(tmp_path, name, curve):
    pytest.importorskip(name, reason=f"{name} is not installed")
    launch(tmp_path, name, [10, 20], 8.0)
    assert curve(tmp_path) == [(10, 8.0), (20, 8.0)]
    launch(tmp_path, name, [30, 40], 4.0, resumed=20)  # goes on
    assert curve(tmp_path) == [(10, 8.0), (20, 8.0), (30, 4.0), (40, 4.0)]
    launch(tmp_path, name, [40, 50], 2.0, resumed=30, is_killed=True)  # goes back, and dies
    launch(tmp_path, name, [50], 1.0, resumed=40)
    assert curve(tmp_path) == [(10, 8.0), (20, 8.0), (30, 4.0), (40, 2.0), (50, 1.0)]
    assert curve(tmp_path, "evaluation/arc/acc") == [(10, 8.0), (30, 4.0), (40, 2.0), (50, 1.0)]


@pytest.mark.slow
def test_a_run_writes_to_all_of_them(tmp_path, monkeypatch):
    """A run of eight steps, which then goes back to step 4: everyone has each step once, with the run's own losses."""
    pytest.importorskip("wandb", reason="the extra wandb is not installed")
    from tests.end_to_end.launch import launch_here, records

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("WANDB_MODE", "offline")
    (tmp_path / "my_losses.py").write_text(
        "class Losses:\n"
        "    def __init__(self, run): self.file = open(run.folder / 'losses.txt', 'a'); self.first = run.first_step\n"
        "    def write(self, record): print(self.first, record['step'], record['loss'], file=self.file)\n"
        "    def close(self): self.file.close()\n"
    )
    words = ("--metrics.wandb", "true", "--metrics.sink", "my_losses:Losses")
    words += ("--checkpoint.interval", "4", "--training.micro_batch_size", "8")
    assert launch_here(tmp_path, *words, "--training.steps", "8") == 0
    back = ("--checkpoint.load", "4", "--checkpoint.go_back", "1", "--training.seed", "0", "--optimizer.lr", "0.5")
    allowed = ("--job.allow_run_change", "true")
    assert launch_here(tmp_path, *words, *back, *allowed, "--training.steps", "6") == 0
    expected = [(record["step"], record["loss"]) for record in records(tmp_path / "run")]
    assert [step for step, _ in expected] == [1, 2, 3, 4, 5, 6]
    assert wandb_curve(tmp_path / "run") == expected
    own = [line.split() for line in (tmp_path / "run/losses.txt").read_text().splitlines()]
    assert [(int(first), int(step)) for first, step, _ in own] == [*((1, n) for n in range(1, 9)), (5, 5), (5, 6)]
    assert [(int(step), float(loss)) for _, step, loss in [*own[:4], *own[8:]]] == expected
