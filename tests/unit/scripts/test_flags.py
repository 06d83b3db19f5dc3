"""What the report reads from the folders of made runs, their ranking and their flags."""

import json
import math
import os
import time
from pathlib import Path

import numpy as np
import pytest

from configs.errors import UserError
from configs.reading.keys import flat
from scripts.page.flags import flags, spikes
from scripts.page.ranking import ranking
from scripts.page.recorded import differences, read_run, read_runs, run_folders

BEGAN = 1.7e9


def write_run(folder: Path, losses, status=None, config="", every=1, **columns):
    """A run folder as a run leaves it; a loss of None is a step that was not finite."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for number, loss in enumerate(losses):
        record = {"step": (number + 1) * every, "loss": loss, "grad_norm": 1.0, "time": BEGAN + number + 1}
        record |= {key: values[number] for key, values in columns.items() if values[number] is not None}
        if loss is None:
            record["skipped"] = "loss is nan"
        lines.append(json.dumps(record) + "\n")
    (folder / "metrics.jsonl").write_text("".join(lines))
    (folder / "config.toml").write_text(config)
    state = {"state": "done", "step": len(losses) * every, "reason": "", "time": time.time()} | (status or {})
    (folder / "status.json").write_text(json.dumps(state))
    return read_run(folder, folder.name)


def flagged(run) -> dict[str, str]:
    """Kind and text of each flag; there is at most one of a kind, and eight in all."""
    found = flags(run)
    assert len({flag.kind for flag in found}) == len(found) <= 8
    return {flag.kind: str(flag) for flag in found}


def noise(n, seed=0):
    return np.random.default_rng(seed).normal(4.0, 0.05, n).tolist()


def launch(started, step, ranks=1, mesh=None, previous=None):
    return {"started": started, "step": step, "ranks": ranks, "mesh": mesh or {}, "previous": previous}


def test_a_calm_run_has_no_flag(tmp_path):
    assert flagged(write_run(tmp_path / "run", noise(400))) == {}
    assert flagged(write_run(tmp_path / "short", [5.0, 4.0, 3.0])) == {}
    assert flagged(write_run(tmp_path / "running", noise(30), {"state": "running"})) == {}
    assert flagged(write_run(tmp_path / "none", [])) == {}


@pytest.mark.parametrize(
    ("status", "text"),
    [
        ({"state": "failed", "reason": "no room\nat all"}, "step 30: failed: no room"),
        ({"state": "preempted", "reason": "SIGTERM"}, "step 30: stopped: SIGTERM; the same command resumes it"),
        ({"state": "running", "time": 1e9}, "step 30: said that it was running, over two minutes before "),
        ({"state": 7}, "step 30: how it ended is unknown"),
    ],
)
def test_how_it_ended(tmp_path, status, text):
    assert flagged(write_run(tmp_path / "run", noise(30), status))["ended"].startswith(text)


def test_steps_that_were_not_finite(tmp_path):
    losses = noise(60)
    losses[9], losses[20] = None, None
    text = "step 10: loss or gradient norm was not finite, and nothing changed (2 logged steps, the last 21)"
    assert flagged(write_run(tmp_path / "run", losses)) == {"non-finite": text}


def test_incidents(tmp_path):
    incidents = [None] * 60
    incidents[10] = [{"step": 11, "what": "skip", "loss": 9.0}, {"step": 5, "what": "rewind", "spike_step": 12}]
    incidents[20] = [{"step": 21, "what": "skip"}]
    found = flagged(write_run(tmp_path / "run", noise(60), incidents=incidents))
    assert found == {"skipped": "step 11: spikes skipped: 2, rewinds before a spike: 1"}


def test_the_highest_spike_is_named(tmp_path):
    losses = noise(400)
    losses[199], losses[299] = 9.0, 12.0
    found = flagged(write_run(tmp_path / "run", losses, every=10))
    before = np.median(losses[267:299])
    text = f"step 3,000: loss 12.0000 after a median of {before:.4f} (2 logged steps, the last 3,000)"
    assert found == {"spike": text}


@pytest.mark.parametrize("slope", [0.0, -0.01])
def test_noise_hardly_ever_has_a_spike(slope):
    trend = slope * np.arange(1000)
    assert sum(bool(spikes(noise(1000, seed) + trend)) for seed in range(100)) <= 1
    assert len(spikes(noise(100_000))) <= 3
    assert spikes([2.0] * 200 + [2.0 + 1e-6]) == []
    assert spikes([2.0] * 200 + [2.2]) == [200]


def test_a_stall(tmp_path):
    seconds = [0.1] * 60
    seconds[30], seconds[40] = 50.0, 0.2
    found = flagged(write_run(tmp_path / "run", noise(60), step_seconds=seconds))
    assert found == {"stall": "step 31: took 50 s, the median is 100 ms"}
    found = flagged(write_run(tmp_path / "small", noise(60), step_seconds=[each / 10 for each in seconds]))
    assert found == {"stall": "step 31: took 5.0 s, the median is 10 ms"}


def test_a_rank_that_lags(tmp_path):
    lag = [1.0 if i % 10 == 9 else None for i in range(60)]
    lag[29] = 1.5
    columns = {"lag_seconds": lag, "slowest_rank": [3 if each else None for each in lag], "step_seconds": [2.0] * 60}
    found = flagged(write_run(tmp_path / "run", noise(60), **columns))
    assert found == {"lag": "step 30: others waited 75% of the step for rank 3 (6 logged steps, the last 60)"}


def test_resumes(tmp_path):
    launches = [None] * 60
    launches[0] = [launch(BEGAN, 0)]
    stop = {"state": "preempted", "step": 20, "reason": "SIGTERM", "time": BEGAN + 20}
    crash = {"state": "running", "step": 45, "reason": "", "time": BEGAN + 45}
    launches[20] = [launch(BEGAN + 20, 20, 1, {}, stop)]
    launches[40] = [launch(BEGAN + 40, 40, 2, {"tp": 2}, crash)]
    found = flagged(write_run(tmp_path / "run", noise(60), launches=launches))
    assert found == {"resume": "step 40: launch 3 began on 2 ranks (tp 2); steps computed again in all: 5"}


def test_a_validation_loss_above_the_best(tmp_path):
    measured = [None] * 60
    measured[19], measured[39], measured[59] = 3.5, 3.25, 3.75
    run = write_run(tmp_path / "worse", noise(60), validation_loss=measured)
    assert flagged(run) == {"above best": "step 60: validation loss 3.7500 is 0.5000 above the best, of step 40"}
    measured[59] = 3.0
    assert flagged(write_run(tmp_path / "better", noise(60), validation_loss=measured)) == {}


def test_runs_are_ranked_at_the_last_step_where_all_have_a_loss(tmp_path):
    a = write_run(tmp_path / "a", [5.0, 4.0, 3.0], every=10, tokens_per_second=[1.0, 9.0, 2.0])
    b = write_run(tmp_path / "b", [5.0, 3.5], every=10)
    none = write_run(tmp_path / "none", [], {"state": "failed", "step": 0, "reason": "no such file\nmore"})
    heads, rows = ranking([none, a, b])
    assert heads == ["state", "step", "loss at step 20", "tokens/s, median", "reason"]
    assert rows == [
        (2, ["done", "20", "3.5000", "-", ""]),
        (1, ["done", "30", "4.0000", "2", ""]),
        (0, ["failed", "0", "-", "-", "no such file"]),
    ]


def test_validation_ranks_before_the_loss(tmp_path):
    a = write_run(tmp_path / "a", [5.0, 4.0], validation_loss=[None, 3.0])
    b = write_run(tmp_path / "b", [5.0, 3.5], validation_loss=[None, 3.5])
    heads, rows = ranking([b, a])
    assert heads[2:4] == ["validation loss at step 2", "loss at step 2"]
    assert [number for number, _ in rows] == [1, 0]


def test_the_runs_of_a_folder(tmp_path):
    for name in ("b10", "b9", "deep/a"):
        write_run(tmp_path / name, [1.0])
    (tmp_path / "b9" / "metrics.jsonl").unlink()  # it failed before its first step
    (tmp_path / "notes").mkdir()
    assert run_folders(tmp_path) == [tmp_path / "b9", tmp_path / "b10", tmp_path / "deep" / "a"]
    assert run_folders(tmp_path / "b9") == [tmp_path / "b9"]
    with pytest.raises(UserError, match="notes is not a run folder: it has no"):
        run_folders(tmp_path / "notes")
    (tmp_path / "b10" / "config.toml").write_text("[job")
    warned = []
    assert [run.name for run in read_runs(run_folders(tmp_path), warned.append)] == ["b9", "a"]
    assert "config.toml is not a job file" in warned[0]


def test_a_link_to_a_run_beside_it_is_no_further_run(tmp_path):
    write_run(tmp_path / "runs" / "b", [1.0])
    write_run(tmp_path / "elsewhere", [1.0])
    (tmp_path / "runs" / "a latest").symlink_to("b")
    (tmp_path / "runs" / "c").symlink_to("../elsewhere")
    found = run_folders(tmp_path / "runs")
    assert found == [tmp_path / "runs" / "b", tmp_path / "runs" / "c"]
    assert len(read_runs(found)) == 2


def test_metrics_that_are_a_pipe_are_not_waited_for(tmp_path):
    run = write_run(tmp_path / "run", [1.0])
    (run.folder / "metrics.jsonl").unlink()
    os.mkfifo(run.folder / "metrics.jsonl")
    with pytest.raises(UserError, match=r"metrics\.jsonl can't be read: not a regular file"):
        read_run(run.folder, "run")


def test_lines_that_are_none_are_counted_and_a_steps_last_line_counts(tmp_path):
    run = write_run(tmp_path / "run", noise(30))
    path = run.folder / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 99.0}\nnonsense\n' + path.read_text() + '{"step": 31, "lo')
    run = read_run(run.folder, "run")
    assert run.unreadable_lines == 2
    assert run.records[0]["loss"] != 99.0
    assert run.absurd == [("metrics.jsonl", "lines that can't be read", "2")]


def test_a_strangers_values_are_no_numbers(tmp_path):
    values = [math.nan, 10**400, "9", True, None, [1], 2.5]
    run = write_run(tmp_path / "run", noise(7), odd=values)
    assert run.column("odd") == ([7], [2.5])
    assert flags(run) == []


def test_what_is_no_run_is_one_message(tmp_path):
    with pytest.raises(UserError, match=r"is not a run folder: it has no metrics\.jsonl and no status\.json"):
        read_runs([tmp_path])
    run = write_run(tmp_path / "run", [1.0])
    with pytest.raises(UserError, match="given twice"):
        read_runs([run.folder, tmp_path / "run" / "." / ".." / "run"])
    (run.folder / "config.toml").write_text("[job")
    with pytest.raises(UserError, match=r"config\.toml is not a job file"):
        read_runs([run.folder])


def test_names_are_as_long_as_it_takes(tmp_path):
    for name in ("x/run", "y/run", "z/other"):
        write_run(tmp_path / name, [1.0])
    assert [run.name for run in read_runs([tmp_path / "x/run", tmp_path / "z/other"])] == ["run", "other"]
    assert [run.name for run in read_runs([tmp_path / "x/run", tmp_path / "y/run"])] == ["x/run", "y/run"]


def test_what_differs_between_configs():
    a = flat({"job": {"name": "a"}, "optimizer": {"lr": 1e-3}, "data": {"sources": [{"name": "x"}]}, "same": 1})
    b = flat({"job": {"name": "b"}, "optimizer": {"lr": 2e-3}, "data": {"sources": [{"name": "y"}]}, "same": 1})
    assert differences([a, b]) == [("data.sources.0.name", ['"x"', '"y"']), ("optimizer.lr", ["0.001", "0.002"])]
    assert differences([a, {**a, "new": True}]) == [("new", ["-", "true"])]
