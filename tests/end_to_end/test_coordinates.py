"""`keel coordinates`: what grows with the width without muP and not with it, the picture, and what is refused."""

import json
import math
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from scripts import coordinates
from tests.end_to_end.launch import TINY, launch_here, records

JOB = (str(TINY), "--model.n_kv_heads", "4", "--model.head_dim", "8", "--lr_schedule.warmup_steps", "0")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run(capsys, *words):
    """Exit code, and what is printed."""
    code = coordinates.main(words)
    printed = capsys.readouterr()
    return code, printed.out + printed.err


@pytest.mark.slow
def test_activations_grow_without_mup_only(capsys, tmp_path):
    words = ("--dims", "32,64,128,256", "--steps", "2", "--model.init_std", "0.05")
    code, printed = run(capsys, *JOB, *words, "--json", "found.json", "--output", "pictures/found.svg")
    assert code == 0, printed
    growth = json.loads((tmp_path / "found.json").read_text())["growth"]
    for kind in ("attention scores", "attention", "feed-forward", "last block"):
        assert growth["without muP"][kind] > 0.9, growth
        assert abs(growth["with muP"][kind]) < 0.25, growth
    assert f"{growth['without muP']['attention']:+.2f}" in printed
    drawn = ET.parse(tmp_path / "pictures" / "found.svg").getroot()
    lines = drawn.findall(".//{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 2 * 6 * 3  # forms, kinds, and 0 to 2 steps
    assert {len(line.get("points").split()) for line in lines} == {4}


def test_scores_are_measured_of_a_job_that_clips_them(capsys, tmp_path):
    words = ("--dims", "32,64", "--steps", "1", "--json", "found.json")
    for clip in (("--optimizer.qk_clip", "1e9"), ()):  # a limit that is never reached only measures
        code, printed = run(capsys, *JOB, *words, *clip)
        assert code == 0, printed
        found = json.loads((tmp_path / "found.json").read_text())
        assert found["growth"]["without muP"]["attention scores"] > 0
        (tmp_path / "found.json").rename(tmp_path / f"{len(clip)}.json")
    assert (tmp_path / "2.json").read_text() == (tmp_path / "0.json").read_text()


@pytest.mark.slow
def test_rates_are_compared_at_each_width(capsys, tmp_path):
    words = ("--dims", "16,32", "--rates", "1e-2,1e-4", "--training.steps", "10", "--json", "found.json")
    code, printed = run(capsys, *JOB, *words)
    assert code == 0, printed
    assert "wrote runs/rates-tiny.svg" in printed
    found = json.loads((tmp_path / "found.json").read_text())
    losses = found["losses"]
    assert losses["with muP"]["32"] == losses["without muP"]["32"]  # the job's own width is the base
    assert losses["with muP"]["16"] != losses["without muP"]["16"]
    for form, by_dim in losses.items():
        assert list(by_dim["16"]) == ["0.0001", "0.01"]
        assert all(found["best"][form][dim] == float(min(each, key=each.get)) for dim, each in by_dim.items())


def test_a_width_is_trained_as_a_run_of_the_job(capsys, tmp_path):
    job = tmp_path / "job.toml"
    job.write_text(f"""
        base = "{TINY}"
        [training]
        steps = 6
        [optimizer]
        groups = [{{ pattern = "layers.*", freeze_until_step = 3 }}]
        [lr_schedule]
        warmup_steps = 0
        total_steps = "none"
        warmup_tokens = 256
        total_tokens = 1024
    """)
    assert launch_here(tmp_path, config=job) == 0
    words = (str(job), "--dims", "32,64", "--rates", "1e-2,1e-3", "--json", "found.json")
    code, printed = run(capsys, *words)
    assert code == 0, printed
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["losses"]["without muP"]["32"]["0.01"] == records(tmp_path / "run")[-1]["loss"]


def test_a_stage_that_would_be_left_out_is_refused(capsys, tmp_path):
    job = tmp_path / "job.toml"
    job.write_text(f'base = "{TINY}"\nstages = [{{ at_step = 4, optimizer.lr = 1e-3 }}]\n')
    message = "only the first of the job's [[stages]] is trained here, so take at most 4 steps"
    for words in (("--rates", "1e-2,1e-3"), ()):  # 20 steps, and 5
        code, printed = run(capsys, str(job), "--dims", "32,64", *words)
        assert code == 78
        assert message in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--dims", "16,24"),
            "at dim 24, 3/4 of the job's 32, model.n_kv_heads 2 would be 1.50; take other",
        ),
        (("--dims", "32,48", "--model.n_kv_heads", "4", "--model.ffn_dim", "63"), "model.ffn_dim 63 would be 94.50"),
        (("--dims", "16,64", "--model.embedding_scale", "sqrt_dim"), "sqrt_dim grows with dim"),
        (("--dims", "16,64", "--model.n_layers", "0"), "model.n_layers"),
    ],
)
def test_a_width_that_can_not_be_is_refused(capsys, words, message):
    code, printed = run(capsys, str(TINY), *words)
    assert code == 78
    assert message in printed


DELTA = ("--model.layers", '["delta", "full"]', "--model.delta.key_heads", "2", "--model.delta.value_heads", "2")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (DELTA, 'no published muP has layers of kind "delta"'),
        (("--optimizer.name", "torch.optim:NAdam"), "torch.optim:NAdam"),
    ],
)
def test_a_job_that_mup_refuses_is_told_that_mup_is_of_the_command(capsys, words, reason):
    code, printed = run(capsys, str(TINY), "--dims", "16,64", *words)
    assert code == 78
    assert "each width is trained with muP, too, by the key model.mup_base_dim, and this job can't be: " in printed
    assert reason in printed


@pytest.mark.slow
def test_a_training_that_leaves_the_finite_numbers_is_a_message(capsys):
    code, printed = run(capsys, *JOB, "--dims", "16,32", "--steps", "2", "--optimizer.lr", "1e30")
    assert code == 1
    assert "without muP, dim 16: within 2 steps, the loss or an activation became 0 or left" in printed


@pytest.mark.parametrize("words", [("--dims", "16"), ("--dims", "16,x"), ("--dims", "16,32", "--rates", "1e-3,-1")])
def test_a_list_is_of_two_or_more_numbers(capsys, words):
    with pytest.raises(SystemExit):
        coordinates.main((str(TINY), *words))
    assert "expected 2 or more" in capsys.readouterr().err


def test_the_best_rate_is_that_of_a_parabola_unless_it_is_the_first_or_last():
    wanted = 3e-3
    losses = {rate: 5 + math.log(rate / wanted) ** 2 for rate in (1e-3, 2e-3, 5e-3, 1e-2)}
    assert coordinates._optimum(losses) == pytest.approx(wanted, rel=1e-9)
    assert coordinates._optimum({1e-3: 1.0, 2e-3: 2.0, 4e-3: 3.0}) == 1e-3
    assert coordinates._optimum({1e-3: 2.0, 2e-3: 1.0, 4e-3: math.nan}) == 2e-3


def test_no_rate_is_the_best_where_no_loss_is_finite(capsys, monkeypatch):
    monkeypatch.setattr("scripts.widths.measure.final_loss", lambda config, mesh: math.nan)
    words = ("--dims", "32,64", "--rates", "1e-3,2e-3", "--json", "found.json")
    code, printed = run(capsys, *JOB, *words)
    assert code == 0, printed
    assert re.search(r"dim 32 +nan +nan +nan\n", printed)
    found = json.loads(Path("found.json").read_text(), parse_constant=pytest.fail)
    assert found["best"]["with muP"] == {"32": None, "64": None}
    assert found["losses"]["with muP"]["32"] == {"0.001": None, "0.002": None}
