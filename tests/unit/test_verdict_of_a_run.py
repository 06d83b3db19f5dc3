"""What the report says of made runs: each sentence against what was put in, and silence where nothing can be said."""

import json
import math
import time
from pathlib import Path

import numpy as np
import pytest

from configs.errors import UserError
from scripts.page.recorded import differences, flat, read_run, read_runs
from scripts.page.verdict import comparison, verdict

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


def said(run) -> dict[str, str]:
    return {sentence.text: sentence.mood for sentence in verdict(run)}


def find(run, beginning: str) -> tuple[str, str]:
    """The one sentence that begins so, with its mood."""
    ((text, mood),) = [item for item in said(run).items() if item[0].startswith(beginning)]
    return text, mood


def noise(n, seed=0):
    return np.random.default_rng(seed).normal(4.0, 0.05, n).tolist()


def launch(started, step, ranks=1, mesh=None, previous=None):
    return {"started": started, "step": step, "ranks": ranks, "mesh": mesh or {}, "previous": previous}


def test_a_calm_run_is_told_to_be_calm(tmp_path):
    run = write_run(tmp_path / "run", noise(400), config="[training]\nsteps = 400\n")
    assert find(run, "Done") == ("Done: step 400 of 400.", "good")
    assert find(run, "After the first 20 logged steps, no loss was far above those before it (5.5 sigma, ")[1] == "good"
    assert find(run, "It neither fell nor rose clearly over the last quarter, from step 301 on")
    assert not any(mood in ("watch", "bad") for text, mood in said(run).items() if "time went" not in text), said(run)


def test_rises_are_counted_and_their_steps_named(tmp_path):
    losses = noise(400)
    losses[199], losses[299] = 9.0, 12.0
    text, mood = find(write_run(tmp_path / "run", losses, every=10), "The loss rose")
    assert text.startswith(
        "The loss rose 2 times by more than 5 sigma, at steps 2,000 (9 after 3.998, 104 sigma; back at "
    )
    assert "; 3,000 (12 after 3.983, 164 sigma" in text
    assert "back at step 2,0" in text
    assert mood == "watch"


def test_a_loss_that_stays_up_is_bad(tmp_path):
    losses = noise(400)
    losses[380:] = [loss + 2 for loss in losses[380:]]
    text, mood = find(write_run(tmp_path / "run", losses), "The loss rose once")
    assert "not back at that level" in text
    assert mood == "bad"


@pytest.mark.parametrize(("slope", "word", "mood"), [(-1e-3, "still falling", "good"), (1e-3, "rising", "bad")])
def test_the_trend_of_the_end(tmp_path, slope, word, mood):
    losses = [loss + slope * i for i, loss in enumerate(noise(400))]
    assert find(write_run(tmp_path / "run", losses), f"It was {word}")[1] == mood


def test_little_is_said_of_few_steps(tmp_path):
    run = write_run(tmp_path / "run", [5.0, 4.0, 3.0])
    assert find(run, "The loss fell from 5.0000 to 3.0000 (its first and last logged steps).")
    assert find(run, "Whether it still falls can't be said of 3 logged steps")
    assert find(run, "Rises can't be judged with 3 logged steps")
    assert said(write_run(tmp_path / "none", []))["No step with a finite loss is logged."] == "watch"


def test_steps_that_were_not_finite(tmp_path):
    losses = noise(60)
    losses[9], losses[20] = None, None
    assert find(
        write_run(tmp_path / "run", losses), "2 logged steps had a loss or gradient norm that was not finite"
    ) == (
        "2 logged steps had a loss or gradient norm that was not finite, and changed nothing: steps 10, 21.",
        "bad",
    )


def test_the_validation_loss_is_compared_with_its_lowest(tmp_path):
    measured = [None] * 60
    measured[19], measured[39], measured[59] = 3.5, 3.25, 3.75
    run = write_run(tmp_path / "worse", noise(60), validation_loss=measured)
    assert find(run, "The last validation loss") == (
        "The last validation loss is 3.7500, at step 60: 0.5000 above the lowest, 3.2500 at step 40.",
        "watch",
    )
    measured[59] = 3.0
    run = write_run(tmp_path / "better", noise(60), validation_loss=measured)
    assert find(run, "The last validation loss") == (
        "The last validation loss is 3.0000, at step 60: the lowest of 3.",
        "good",
    )


def test_stops_and_resumes(tmp_path):
    launches = [None] * 60
    launches[0] = [launch(BEGAN, 0)]
    stop = {"state": "preempted", "step": 20, "reason": "SIGTERM", "time": BEGAN + 20}
    crash = {"state": "running", "step": 45, "reason": "", "time": BEGAN + 45}
    launches[20] = [launch(BEGAN + 20, 20, 2, {"tp": 2}, stop)]
    launches[40] = [launch(BEGAN + 40, 40, 2, {"tp": 2}, crash)]
    run = write_run(tmp_path / "run", noise(60), launches=launches)
    assert find(run, "3 launches")[0] == (
        "3 launches have logged steps. Launch 2 began from step 20 on 2 ranks (tp 2), after a stop at step 20 "
        "(SIGTERM). Launch 3 began from step 40, after an end without a word at step 45 or later, so 5 steps were "
        "computed again."
    )


def test_where_the_time_went(tmp_path):
    spent = [{"training": 0.5, "data": 0.1, "checkpoint": 0.0}] * 60
    run = write_run(
        tmp_path / "run", noise(60), seconds_by_kind=spent, launches=[[launch(BEGAN - 60, 0)]] + [None] * 59
    )
    assert find(run, "25% of the 2 min 00 s since the first launch trained it (goodput)")[0].endswith(
        "; 70% stopped, or not recorded, 5% waiting for data."
    )
    assert "Where the time went was not recorded." in said(write_run(tmp_path / "old", noise(60)))


def test_speed_and_waits(tmp_path):
    n, speeds = 60, [1000.0] * 60
    steps, waits = [0.1] * n, [0.02] * n
    steps[30] = 0.5
    run = write_run(tmp_path / "run", noise(n), tokens_per_second=speeds, step_seconds=steps, data_seconds=waits)
    assert find(run, "Its median speed is 1,000 tokens/s.")
    assert find(run, "In 1 of 60 logged lines a step took over twice the median of 0.1 s.")[1] == "watch"
    assert find(run, "19% of a step is spent waiting for data")


def test_memory_that_runs_short(tmp_path):
    n = 30
    columns = {
        "memory_peak_bytes": [70 * 2**30] * n,
        "memory_reserved_peak_bytes": [78 * 2**30] * n,
        "memory_percent": [97.5] * n,
        "allocator_retries": [0] * 29 + [3],
    }
    run = write_run(tmp_path / "run", noise(n), **columns)
    assert find(run, "Memory: at most 70.0 GiB, 78.0 GiB reserved (98% of the device).")[1] == "watch"
    assert find(run, "The allocator freed memory and tried again, up to 3 times in a launch.")


def test_incidents_and_lag(tmp_path):
    incidents = [None] * 60
    incidents[10] = [{"step": 11, "what": "skip", "loss": 9.0}, {"step": 5, "what": "rewind", "spike_step": 12}]
    lag = [1.0 if i % 10 == 9 else None for i in range(60)]
    slowest = [3 if each else None for each in lag]
    columns = {"lag_seconds": lag, "slowest_rank": slowest, "step_seconds": [2.0] * 60}
    run = write_run(tmp_path / "run", noise(60), incidents=incidents, **columns)
    assert find(run, "Once a spike of the loss was skipped, at step 11.")
    assert find(run, "Once the run went back to a checkpoint from before a spike, at step 12.")
    assert find(
        run, "In 6 of 6 comparisons a rank kept the others waiting for over 10% of a step, in 6 of them rank 3."
    )


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ({"state": "failed", "reason": "no room\nat all"}, ("Failed at step 30: no room.", "bad")),
        (
            {"state": "preempted", "reason": "SIGTERM"},
            ("Stopped at step 30: SIGTERM. The same command resumes it.", "watch"),
        ),
        ({"state": "running"}, ("Running, at step 30.", "plain")),
        ({"state": "running", "time": 1e9}, ("At step 30 it last said that it was running,", "bad")),
    ],
)
def test_the_end(tmp_path, status, expected):
    run = write_run(tmp_path / "run", noise(30), status)
    text, mood = next(iter(said(run).items()))
    assert (text.startswith(expected[0]), mood) == (True, expected[1]), text


def test_runs_are_compared_where_all_have_a_loss(tmp_path):
    a = write_run(tmp_path / "a", [5.0, 4.0, 3.0], every=10)
    b = write_run(tmp_path / "b", [5.0, 3.5], every=10)
    assert comparison([a, b]) == [
        "At step 20, the last that all have logged, the loss is, from the lowest: b 3.5000, a 4.0000."
    ]


def test_lines_that_are_none_are_counted_and_a_steps_last_line_counts(tmp_path):
    run = write_run(tmp_path / "run", noise(30))
    path = run.folder / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 99.0}\nnonsense\n' + path.read_text() + '{"step": 31, "lo')
    run = read_run(run.folder, "run")
    assert run.unreadable_lines == 2
    assert run.records[0]["loss"] != 99.0
    assert find(run, "2 lines of metrics.jsonl could not be read and are left out.")


def test_a_strangers_values_are_no_numbers(tmp_path):
    values = [math.nan, 10**400, "9", True, None, [1], 2.5]
    run = write_run(tmp_path / "run", noise(7), odd=values)
    assert run.column("odd") == ([7], [2.5])
    assert verdict(run)


def test_what_is_no_run_is_one_message(tmp_path):
    with pytest.raises(UserError, match=r"is not a run folder: it has no metrics\.jsonl"):
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
