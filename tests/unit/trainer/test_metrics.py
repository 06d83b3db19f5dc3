"""metrics.jsonl against the contract, its cut at a resume, TensorBoard's view of it, and the time ledger's sums."""

import json
import math
import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.schema import Metrics
from trainer.guards.outages import Outages
from trainer.report.metrics import Kind, MetricsLog, StepMetrics, Throughput, TimeLedger, cut_back, memory_peak_bytes
from trainer.report.sinks import worker
from trainer.report.sinks.choose import choose_sinks
from trainer.report.sinks.worker import Sinks

CONTRACT_KEYS = [
    *("step", "loss", "grad_norm", "lr", "tokens", "tokens_per_second", "step_seconds", "data_seconds", "mfu"),
    *("tflops", "memory_peak_bytes", "memory_reserved_peak_bytes", "memory_percent", "allocator_retries"),
    *("allocator_ooms", "time"),
]


def metrics(step, **changes):
    values = {
        "step": step,
        "loss": 1 / 3,
        "grad_norm": 0.1 + 0.2,
        "lr": 1e-4,
        "tokens": step * 2048,
        "tokens_per_second": 4400.5,
        "step_seconds": 0.5,
        "data_seconds": 0.01,
        "mfu": None,
        "tflops": 0.05,
        "memory_peak_bytes": 2**30,
        "memory_reserved_peak_bytes": None,
        "memory_percent": None,
        "allocator_retries": None,
        "allocator_ooms": None,
        "time": 1.7e9,
    }
    return StepMetrics(**(values | changes))


def refuse(line):
    raise AssertionError(line)


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """TensorBoard's import may take long on a loaded machine."""
    monkeypatch.setattr(worker, "PATIENCE_SECONDS", 600)
    monkeypatch.setattr(worker, "CLOSING_SECONDS", 600)


def open_log(folder, tensorboard=False, resumed_step=0, say=refuse):
    sinks = Sinks(choose_sinks(Metrics(tensorboard=tensorboard), folder), say)
    return MetricsLog(folder, Outages(say, say), resumed_step, sinks, name="test", config={})


def read(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_line_has_the_contracts_keys_in_its_order():
    assert list(json.loads(metrics(1).to_json())) == CONTRACT_KEYS
    validated = json.loads(metrics(1, validation_loss=2.0, validation_bits_per_byte=1.0).to_json())
    assert list(validated) == [*CONTRACT_KEYS, "validation_loss", "validation_bits_per_byte"]


@given(st.floats(allow_nan=False, allow_infinity=False), st.floats(min_value=0, allow_infinity=False))
def test_floats_come_back_bit_for_bit(loss, grad_norm):
    record = json.loads(metrics(1, loss=loss, grad_norm=grad_norm).to_json())
    assert record["loss"].hex() == loss.hex()
    assert record["grad_norm"].hex() == grad_norm.hex()


def test_a_value_that_is_not_finite_is_null_and_named():
    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    line = metrics(1, loss=math.nan, grad_norm=math.inf).to_json()
    record = json.loads(line, parse_constant=refuse)
    assert (record["loss"], record["grad_norm"]) == (None, None)
    assert record["skipped"] == "loss is nan, grad_norm is inf"
    assert record["lr"] == 1e-4


def test_a_value_inside_a_table_that_is_not_finite_is_null_and_named():
    by_source = {"code": {"loss": math.nan, "bits_per_byte": None}, "prose": {"loss": 2.5, "bits_per_byte": 1.25}}
    record = json.loads(
        metrics(1, validation_loss=2.5, validation_by_source=by_source).to_json(), parse_constant=refuse
    )
    assert record["validation_by_source"] == by_source | {"code": {"loss": None, "bits_per_byte": None}}
    assert record["skipped"] == "validation_by_source.code.loss is nan"


def test_a_line_reaches_the_disk_without_a_further_call(tmp_path):
    log, written = open_log(tmp_path), threading.Event()
    log.write(metrics(10), written.set)
    assert written.wait(60)
    assert [record["step"] for record in read(tmp_path)] == [10]
    log.close()


def test_a_slow_disk_holds_up_only_the_flush_before_a_save(tmp_path):
    log, disk = open_log(tmp_path), threading.Event()
    log.write(metrics(10), disk.wait)
    log.write(metrics(20))  # returns while the disk is at work on the last line
    assert [record["step"] for record in read(tmp_path)] in ([], [10])
    threading.Timer(0.1, disk.set).start()
    log.flush()
    assert disk.is_set()
    assert [record["step"] for record in read(tmp_path)] == [10, 20]
    log.close()


def test_an_error_in_the_thread_is_raised_by_the_flush(tmp_path):
    log = open_log(tmp_path)
    log.write(metrics(10), lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        log.flush()
    log.close()


def test_a_resume_goes_on_where_the_checkpoint_was(tmp_path):
    for resumed, steps in ((0, range(10, 60, 10)), (30, range(40, 80, 10))):
        log = open_log(tmp_path, resumed_step=resumed)
        for step in steps:
            log.write(metrics(step, tokens=resumed))
        log.close()
    assert [record["step"] for record in read(tmp_path)] == [10, 20, 30, 40, 50, 60, 70]
    assert [record["tokens"] for record in read(tmp_path)] == [0, 0, 0, 30, 30, 30, 30]


def test_a_new_start_in_an_old_folder_starts_an_empty_file(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(metrics(10).to_json() + "\n")
    open_log(tmp_path).close()
    assert read(tmp_path) == []


@given(st.lists(st.integers(1, 100), max_size=20, unique=True), st.integers(0, 100), st.data())
def test_a_cut_keeps_whole_lines_up_to_the_step_at_any_kill(tmp_path_factory, steps, resumed, data):
    """The file may end anywhere, as after kill -9."""
    path = tmp_path_factory.mktemp("cut") / "metrics.jsonl"
    lines = [metrics(step).to_json() + "\n" for step in sorted(steps)]
    text = "".join(lines)
    end = data.draw(st.integers(0, len(text)))
    path.write_text(text[:end])
    whole = text[:end].count("\n")
    torn = not text[:end].endswith("\n") and end > 0
    assert cut_back(path, resumed) == torn
    assert path.read_text() == "".join(line for line in lines[:whole] if json.loads(line)["step"] <= resumed)


def test_a_file_that_needs_no_cut_is_left_alone(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert cut_back(path, 5) == 0
    assert not path.exists()
    path.write_text(metrics(5).to_json() + "\n")
    inode = path.stat().st_ino
    assert cut_back(path, 5) == 0
    assert path.stat().st_ino == inode


def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for resumed, steps, loss in ((0, (10, 20, 30), 8.0), (20, (30, 40), 4.0)):
        log = open_log(tmp_path, tensorboard=True, resumed_step=resumed)
        for step in steps:
            log.write(metrics(step, loss=loss, validation_loss=7.0 if step == 40 else None))
        log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(10, 8), (20, 8), (30, 4), (40, 4)]
    assert [(e.step, e.value) for e in events.Scalars("validation/loss")] == [(40, 7)]
    assert "speed/mfu" not in events.Tags()["scalars"]


def test_experts_have_keys_and_curves_of_their_own(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = open_log(tmp_path, tensorboard=True)
    tokens = {1: [3, 0, 5], 2: [4, 4, 0]}
    log.write(
        metrics(
            1, tokens_per_expert=tokens, load_imbalance=1.875, router_entropy=0.5, router_entropies={1: 0.25, 2: 0.75}
        )
    )
    log.close()
    (record,) = read(tmp_path)
    assert list(record) == [*CONTRACT_KEYS, "tokens_per_expert", "load_imbalance", "router_entropy", "router_entropies"]
    assert record["tokens_per_expert"] == {"1": [3, 0, 5], "2": [4, 4, 0]}
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [e.value for e in events.Scalars("router/load_imbalance")] == [1.875]
    assert [e.value for e in events.Scalars("router/entropy")] == [0.5]
    assert [e.value for e in events.Scalars("router/entropy_of_layer/2")] == [0.75]
    (event,) = events.Histograms("router/tokens_per_expert/1")
    assert list(event.histogram_value.bucket) == tokens[1]


def test_metrics_need_neither_torch_nor_tensorboard_unless_asked(tmp_path):
    program = (
        "import sys, pathlib, trainer.report.metrics as m; from trainer.guards.outages import Outages;"
        "m.MetricsLog(pathlib.Path(sys.argv[1]), Outages(print, print), name='test', config={});"
        "m.memory_peak_bytes('cpu'); sys.exit('torch' in sys.modules or 'tensorboard' in sys.modules)"
    )
    root = Path(__file__).parents[3]
    assert subprocess.run([sys.executable, "-c", program, tmp_path], cwd=root).returncode == 0


class Clock:
    """Time that passes only when it is told to."""

    now = 100.0

    def __call__(self):
        return self.now


def test_every_second_is_booked_once():
    clock = Clock()
    ledger = TimeLedger(clock)
    clock.now += 3  # start-up
    with ledger.measure(Kind.PREPARATION):
        clock.now += 5
    with ledger.step():
        clock.now += 1
        with ledger.waiting_for_data():
            clock.now += 0.25
        clock.now += 2
        with ledger.measure(Kind.CHECKPOINT):
            clock.now += 7
    seconds = ledger.seconds()
    assert seconds[Kind.STARTUP] == 3
    assert seconds[Kind.PREPARATION] == 5
    assert seconds[Kind.TRAINING] == 3
    assert seconds[Kind.DATA] == 0.25
    assert seconds[Kind.CHECKPOINT] == 7
    assert sum(seconds.values()) == clock.now - 100


def test_throughput_counts_training_and_data_alone():
    clock = Clock()
    ledger = TimeLedger(clock)
    with ledger.step(compiling=True):
        with ledger.waiting_for_data():
            clock.now += 1
        clock.now += 30
    assert ledger.throughput(1000) == Throughput(None, None, None)
    for _ in range(4):
        with ledger.step():
            with ledger.waiting_for_data():
                clock.now += 0.5
            clock.now += 1.5
        with ledger.measure(Kind.VALIDATION):
            clock.now += 100
    assert ledger.throughput(1000) == Throughput(tokens_per_second=500.0, step_seconds=2.0, data_seconds=0.5)
    assert ledger.throughput(1000) == Throughput(None, None, None)
    assert ledger.seconds()[Kind.COMPILE] == 31


def test_a_failed_step_keeps_the_sum_right():
    clock = Clock()
    ledger = TimeLedger(clock)
    with suppress(ZeroDivisionError), ledger.step():
        clock.now += 2
        raise ZeroDivisionError
    clock.now += 1
    assert ledger.seconds()[Kind.TRAINING] == 2
    assert ledger.seconds()[Kind.STARTUP] == 1


def test_peak_memory_of_a_cpu_process_grows_with_what_it_holds():
    before = memory_peak_bytes("cpu")
    held = bytearray(os.urandom(1)) * (before + 2**26)
    assert memory_peak_bytes("cpu") >= before + 2**25
    assert memory_peak_bytes("cpu") < 100 * len(held)


def test_a_folder_of_curves_that_is_a_link_is_refused(tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "tensorboard").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match=r"symbolic link.*tensorboard"):
        open_log(tmp_path, tensorboard=True)
    assert list((tmp_path / "precious").iterdir()) == []


def test_curves_miss_nothing_after_an_outage(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    said = []
    log = open_log(tmp_path, tensorboard=True, say=said.append)
    log.flush()
    (events,) = (tmp_path / "tensorboard").iterdir()
    log.write(metrics(10))
    log.flush()
    aside = events.rename(tmp_path / "aside")
    events.mkdir()  # nobody can append to that
    log.write(metrics(20))
    log.write(metrics(30))
    log.flush()
    events.rmdir()
    aside.rename(events)
    log.write(metrics(40))
    log.close()
    curves = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in curves.Scalars("train/loss")] == [10, 20, 30, 40]
    assert [record["step"] for record in read(tmp_path)] == [10, 20, 30, 40]
    assert [str(events) in line for line in said] == [True, True]  # once that it fails, once that it works
