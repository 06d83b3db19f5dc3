"""`keel ladder` from the first run to the prediction, and beside a run of the job."""

import json
import shutil
import xml.etree.ElementTree as ET

import pytest

from scripts import ladder
from tests.a_against_a import launch_here
from tests.end_to_end.launch import TINY, records

HELD_OUT = '[{name = "held out", kind = "synthetic"}]'
JOB = (
    *(str(TINY), "--training.steps", "400", "--lr_schedule.total_steps", "400", "--validation.interval", "100"),
    *("--validation.sequences", "4", "--validation.sources", HELD_OUT, "--metrics.tensorboard", "false"),
    *("--metrics.interval", "100", "--model.dim", "64", "--model.ffn_dim", "128", "--model.n_heads", "8"),
    *("--model.n_kv_heads", "8", "--model.vocab_size", "32", "--compile.enable", "false"),
)
LADDER = (*JOB, "--dims", "8,16,24,32", "--seeds", "2", "--output", "ladder")


class Launches:
    """Runs commands in this process, and counts them."""

    def __init__(self):
        self.n = 0

    def __call__(self, command):
        self.n += 1
        return launch_here(command)


@pytest.mark.slow
def test_a_ladder_is_climbed_once_and_compared_with_a_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    launches = Launches()
    assert ladder.main(LADDER, launches) == 0
    assert launches.n == 8
    printed = capsys.readouterr().out
    found = json.loads((tmp_path / "ladder" / "ladder.json").read_text())
    assert [rung["dim"] for rung in found["rungs"]] == [8, 16, 24, 32]
    for rung in found["rungs"]:
        for seed, loss in enumerate(rung["losses"]):
            run = records(tmp_path / "ladder" / f"dim-{rung['dim']}" / f"seed-{seed}")
            assert (run[-1]["step"], run[-1]["validation_loss"]) == (rung["steps"], loss)
            assert [each["step"] for each in run if "validation_loss" in each] == [
                rung["steps"] * n // 20 for n in range(1, 21)
            ]
    last = found["laws"][-1]
    assert last["part"] == 1
    assert f"predicted validation loss: {last['predicted']:.4f}" in printed
    # Noise can't be learned: every model's loss ends near the entropy of its tokens, log 32.
    assert last["low"] < 3.4657 < last["high"] + 0.05
    drawn = ET.parse(tmp_path / "ladder" / "ladder.svg").getroot()
    assert len(drawn.findall(".//{http://www.w3.org/2000/svg}polyline")) == 3

    assert launch_here(["train", *JOB]) == 0
    assert ladder.main((*LADDER, "--run", "run"), launches) == 0
    assert launches.n == 8  # nothing was trained again
    compared = json.loads((tmp_path / "ladder" / "ladder.json").read_text())["run"]
    assert [each["step"] for each in compared] == [100, 200, 300, 400]
    assert [each["part"] for each in compared] == [0.25, 0.5, 0.75, 1.0]
    printed = capsys.readouterr()
    for each in compared:
        outside = "" if each["low"] <= each["loss"] <= each["high"] else "  OUTSIDE"
        line = (
            f"(step {each['step']:,}): {each['loss']:.4f}, predicted {each['low']:.4f} to {each['high']:.4f}{outside}\n"
        )
        assert line in printed.out
    assert "is not a run of this job" not in printed.out + printed.err

    (tmp_path / "early").mkdir()
    shutil.copy(tmp_path / "run" / "config.toml", tmp_path / "early")
    assert ladder.main((*LADDER, "--run", "early"), launches) == 0
    assert "early: there is no validation loss to compare yet\n" in capsys.readouterr().out

    assert launch_here(["train", *JOB, "--optimizer.lr", "2e-2", "--job.output_dir", "other"]) == 0
    assert ladder.main((*LADDER, "--run", "other"), launches) == 0
    printed = capsys.readouterr()
    assert "other is not a run of this job:\n  optimizer.lr: 0.01 -> 0.02" in printed.out + printed.err
    assert launches.n == 8

    metrics = tmp_path / "ladder" / "dim-8" / "seed-0" / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    lines[-1]["validation_loss"] = None  # as of a run that has diverged
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert ladder.main(LADDER, launches) == 1
    assert "ladder/dim-8/seed-0: the validation at step" in capsys.readouterr().err


@pytest.mark.slow
def test_a_stop_ends_the_ladder_and_the_same_command_continues(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    launches = Launches()

    def stopped_at_third(command):
        return 75 if launches.n == 2 else launches(command)

    words = (*LADDER, "--seeds", "1")
    assert ladder.main(words, stopped_at_third) == 75
    assert "dim-24/seed-0 was stopped; the same command continues there" in capsys.readouterr().err
    assert not (tmp_path / "ladder" / "ladder.json").exists()
    assert ladder.main(words, launches) == 0
    assert launches.n == 4
