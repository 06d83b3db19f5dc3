"""Files of `keel plan --calibrate`: what is written is read back, and what is wrong is said in one line."""

import json
import time
from dataclasses import replace

import pytest
import torch

from configs.errors import UserError
from scripts import plan
from scripts.calibration import calibration_rows, row_text
from trainer.planning.devices import Link, device_named

H200 = device_named("h200")
MEASURED = replace(
    H200,
    name="calibrated",
    title="NVIDIA H200 (calibrated)",
    products=345e12,
    products_float8=0.0,
    memory=2.1e12,
    host=11e9,
    inside=Link(180e9, 6e-6),
    delta={backend: [rate / 2 for rate in rates] for backend, rates in H200.delta.items()},
    attention={kernel: [[128, 8192, 283e12, 248e12]] for kernel in H200.attention},
)


def run(capsys, *words):
    code = plan.main(words)
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_a_written_row_is_the_device_that_was_measured(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(row_text(MEASURED, ["grouped", "between"]))
    assert device_named(str(file)) == MEASURED
    assert "not measured as in the row h200: grouped, between" in file.read_text()


def test_measured_rates_stand_beside_the_tables(capsys):
    rows = dict(calibration_rows(MEASURED, ["grouped", "between"]))
    assert rows["products"] == "345 TFLOP/s, 690 TFLOP/s in the table (-50.0%)"
    assert rows["memory"] == "2,100 GB/s, 4,200 GB/s in the table (-50.0%)"
    assert rows["host"] == "11 GB/s, 55 GB/s in the table (-80.0%)"
    assert rows["attention by cudnn, forward"] == "283 TFLOP/s, 566 TFLOP/s in the table (-50.0%)"
    assert rows["inside a host, latency"] == "6.0 µs, 3.0 µs in the table (100.0%)"
    assert not rows.keys() & {"grouped", "products_float8"}
    taken = dict(calibration_rows(MEASURED, ["delta by fla"]))
    assert taken["delta by torch, forward"] == "2.11 TFLOP/s, 4.22 TFLOP/s in the table (-50.0%)"
    assert "delta by fla, forward" not in taken
    unknown = dict(calibration_rows(replace(MEASURED, names=["a new GPU"]), ["grouped"]))
    assert unknown["products"] == "345 TFLOP/s"
    assert unknown["not measured"] == "as in the row h100: grouped"


def test_a_job_is_planned_for_a_file_as_for_a_name(tmp_path, capsys):
    file = tmp_path / "mine.toml"
    file.write_text(row_text(replace(MEASURED, **{**vars(H200), "name": "mine"}), []))
    times = []
    for device in ("h200", str(file)):
        code, out, _ = run(capsys, "llama_1b.toml", "--ranks", "2", "--device", device)
        assert code == 0
        times.append(next(line for line in out.splitlines() if "a step  " in line))
    assert times[0] == times[1]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "can't be read: No such file"),
        ("[devices", "no file that"),
        ("[devices]\na = 1", "no file that"),
        (row_text(replace(MEASURED, memory=0.0), []), "mine.toml: memory must be a number above 0, got 0"),
        (row_text(replace(MEASURED, host="fast"), []), "mine.toml: host must be a number above 0, got 'fast'"),
        (
            row_text(MEASURED, []).partition("[devices.calibrated.delta]")[0],
            "mine.toml lacks delta; write it again by keel plan",
        ),
    ],
)
def test_a_file_that_is_no_row_is_one_message(tmp_path, text, said):
    file = tmp_path / "mine.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UserError, match=said):
        device_named(str(file))


def test_calibration_beside_a_device_or_an_older_one_is_an_error_of_the_user(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.toml").touch()
    for words, said in [
        ("--calibrate old.toml", "exists already"),
        ("--calibrate mine.toml --device h100", "plans with it"),
    ]:
        code, _, err = run(capsys, "llama_1b.toml", "--ranks", "2", *words.split())
        assert code == 1
        assert said in err
    assert not (tmp_path / "mine.toml").exists()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_cpu_is_measured_and_planned_for(tmp_path, capsys, monkeypatch, ranks):
    """The rate is that of a product of the job's shape here, up to what other work on the machine slows either by."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    file = tmp_path / "mine.toml"
    code, out, _ = run(capsys, "debug.toml", "--ranks", str(ranks), "--calibrate", str(file), "--json")
    assert code == 0
    device = device_named(str(file))
    known = device_named("cpu")
    assert (device.type, device.compute_dtype, device.names) == ("cpu", "float32", [])
    left, right = torch.randn(1024, 192), torch.randn(192, 576)
    times = []
    for _ in range(50):
        started = time.perf_counter()
        left @ right
        times.append(time.perf_counter() - started)
    fastest = 2 * 1024 * 192 * 576 / min(times)
    assert fastest / 20 < device.products < 2 * fastest
    assert device.peak["float32"] == device.products
    assert 0 < device.launch < 1e-3
    assert 0 < device.host < 200e9
    ((width, tokens, forward, backward),) = device.attention["flash2"]
    assert (width, tokens) == (32, 256)
    assert min(forward, backward) > 0
    assert (device.inside == known.inside) == (ranks == 1)
    assert device.between == known.between
    taken = f"grouped,{' inside,' * (ranks == 1)} between, collective_share, delta by torch, delta by fla"
    assert file.read_text().startswith(
        f"# Measured by keel plan --calibrate; not measured as in the row cpu: {taken}.\n"
    )
    planned = json.loads(out)
    assert planned["memory"]["fits"] == "yes"
    assert planned["time"]["parts_seconds"]["products"] > 0
