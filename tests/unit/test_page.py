"""The page of `keel report`: which charts it has, that it loads nothing, and that a stranger's text stays text."""

import json
import re
import time
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest

from scripts import report
from scripts.page.figures import MOST_NAMES, MOST_POINTS, charts, marks, spans
from scripts.page.html import page
from scripts.page.recorded import read_run
from tests.unit.test_verdict_of_a_run import BEGAN, launch, noise, write_run


class Page(HTMLParser):
    """The tags of a page, its text by tag, and the JSON that its script draws."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.texts, self._open = [], {}, []
        self.feed(text)
        self.data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)[1])

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in ("meta", "br"):
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag, f"</{tag}> closes another tag"

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, text):
        where = self._open[-1] if self._open else ""
        self.texts[where] = self.texts.get(where, "") + text


def made(*runs):
    return Page(page(runs, "1.2.3"))


def test_known_keys_have_their_charts_and_other_numbers_get_one(tmp_path):
    n = 40
    columns = {
        "lr": [1e-3] * n,
        "noise_scale": [float(i) for i in range(n)],
        "allocator_retries": [0] * n,
        "mfu": [None] * n,
        "words": ["text"] * n,
    }
    found = {chart["title"]: chart for chart in charts([write_run(tmp_path / "run", noise(n), **columns)])}
    assert list(found) == ["Loss", "Gradient norm", "Learning rate", "Noise scale"]
    assert found["Noise scale"]["series"][0]["y"] == columns["noise_scale"]
    assert found["Loss"]["series"][0]["x"] == [*range(1, n + 1)]


def test_numbers_by_name_are_one_chart_with_a_line_each(tmp_path):
    sources = [{"web": {"loss": 3.0 + i, "bits": 1.0}, "code": {"loss": 2.0}, "kind": "text"} for i in range(40)]
    by_source = [each if i % 10 == 0 else None for i, each in enumerate(sources)]
    layers = [{str(layer): 1.0 for layer in range(200)}] * 40
    columns = {"validation_by_source": by_source, "layer_grad_norms": layers}
    run = write_run(tmp_path / "run", noise(40), **columns)
    found = {chart["title"]: chart for chart in charts([run])}
    lines = {series["label"]: series for series in found["Validation by source: loss"]["series"]}
    assert lines.keys() == {"web", "code"}
    assert (lines["web"]["x"], lines["web"]["y"]) == ([1, 11, 21, 31], [3.0, 13.0, 23.0, 33.0])
    assert [series["label"] for series in found["Validation by source: bits"]["series"]] == ["web"]
    assert len(found["Layer grad norms"]["series"]) <= MOST_NAMES + 2
    assert found["Layer grad norms"]["note"].endswith("of 200 names")
    both = charts([run, replace(run, name="other")])
    (shared,) = [chart for chart in both if chart["title"] == "Validation by source: loss"]
    assert [series["label"] for series in shared["series"]] == [
        "run · web",
        "run · code",
        "other · web",
        "other · code",
    ]
    assert [chart["note"].partition(",")[0] for chart in both if chart["title"] == "Layer grad norms"] == [
        "run",
        "other",
    ]


def test_results_of_an_evaluation_join_their_steps(tmp_path):
    """They are lines of their own, which may come days after the run's last."""
    run = write_run(tmp_path / "run", noise(40))
    began = run.records[0]["time"]
    with (run.folder / "metrics.jsonl").open("a") as file:
        for step, result in (
            (20, {"a": {"acc": 0.25, "acc_stderr": 0.05}}),
            (20, {"b": {"acc": 0.5}}),
            (99, {"a": {"acc": 0.75}}),
        ):
            file.write(json.dumps({"step": step, "evaluation": result, "time": began + 1e6}) + "\n")
    run = read_run(run.folder, "run")
    assert run.records[19]["evaluation"] == {"a": {"acc": 0.25, "acc_stderr": 0.05}, "b": {"acc": 0.5}}
    assert run.records[19]["time"] == began + 19
    (chart,) = [chart for chart in charts([run]) if chart["title"] == "Evaluation: acc"]
    assert [(series["label"], series["x"], series["y"]) for series in chart["series"]] == [
        ("a", [20, 99], [0.25, 0.75]),
        ("b", [20], [0.5]),
    ]
    cells = made(run).texts["td"]
    assert "0.7500" in cells
    assert "0.5000" in cells


def test_a_long_run_gives_a_small_page_soon_with_every_extreme(tmp_path):
    n = 100_000
    losses = np.random.default_rng(0).normal(4, 0.05, n)
    losses[[777, 50_123, 99_000]] += [5, 6, 7]
    columns = {"lr": np.linspace(1e-3, 0, n).tolist(), "tokens": [*range(n)], "tokens_per_second": noise(n, 1)}
    run = write_run(tmp_path / "run", losses.tolist(), **columns, mfu=noise(n, 2))
    began = time.process_time()
    text = page([replace(run, name=name) for name in "abc"], "")
    assert time.process_time() - began < 30
    assert len(text) < 1_000_000
    (loss,) = [chart for chart in Page(text).data["charts"] if chart["title"] == "Loss"]
    curves = [series for series in loss["series"] if series["faint"]]
    assert len(curves) == 3
    for curve in curves:
        assert len(curve["x"]) <= MOST_POINTS + 2
        assert {778, 50_124, 99_001} <= set(curve["x"])
        assert max(curve["y"]) == float(f"{losses.max():.6g}")


def test_marks_are_what_happened(tmp_path):
    launches, incidents = [None] * 60, [None] * 60
    launches[0], launches[30] = [launch(BEGAN, 0)], [launch(BEGAN + 30, 30, 2, {"tp": 2}, None)]
    incidents[10] = [{"step": 11, "what": "skip"}]
    losses = noise(60)
    losses[40], losses[50] = 9.0, None
    found = marks(write_run(tmp_path / "run", losses, launches=launches, incidents=incidents))
    assert {(mark["kind"], mark["step"]) for mark in found} == {
        ("resume", 30),
        ("rise", 41),
        ("incident", 11),
        ("not finite", 51),
    }


def test_time_by_kind_over_the_wall_clock(tmp_path):
    """Forty seconds, then twenty without a launch, then forty, in ten parts."""
    times = [BEGAN + i + 1 + (20 if i >= 40 else 0) for i in range(80)]
    spent = [{"training": 0.75, "data": 0.25}] * 80
    launches = [[launch(BEGAN, 0)] if i == 0 else None for i in range(80)]
    found = spans(write_run(tmp_path / "run", noise(80), time=times, seconds_by_kind=spent, launches=launches), 10)
    for part, shares in enumerate(found):
        expected = {} if part in (4, 5) else {"training": pytest.approx(0.75), "data": pytest.approx(0.25)}
        assert {kind: value for kind, value in shares.items() if value > 1e-9} == expected


def test_the_page_says_what_the_runs_are(tmp_path):
    samples = [[{"prompt": "def ", "text": f"f{i}():"}] if i % 20 == 19 else None for i in range(60)]
    facts = {"environment": {"numpy": "9.9"}, "host": "node-a", "torch": "2.11.0", "device": "cpu"}
    launches = [[launch(BEGAN, 0, 2, {"tp": 2}) | facts] if i == 0 else None for i in range(60)]
    spent = [{"training": 0.5}] * 60
    columns = {"samples": samples, "launches": launches, "seconds_by_kind": spent}
    a = write_run(tmp_path / "a", noise(60), config="[optimizer]\nlr = 1e-3\n", **columns)
    b = write_run(tmp_path / "b", noise(60), config="[optimizer]\nlr = 2e-3\n")
    found = made(a, b)
    assert "2 runs" in found.texts["h1"]
    for title in ("Differences", "Curves", "Where the time went", "Stops and resumes", "Samples", "Environment"):
        assert title in found.texts["h2"]
    assert "optimizer.lr0.0010.002" in found.texts["code"]
    assert "f59():" in found.texts["pre"]
    assert "2 ranks (tp 2)" in found.texts["td"]
    assert "node-a" in found.texts["span"]
    assert "Done: step 60." in found.texts["li"]
    assert any(tag == "rect" for tag, _ in found.tags)


def test_nothing_is_loaded_and_the_policy_forbids_it(tmp_path):
    found = made(write_run(tmp_path / "run", noise(400)))
    assert not [each for each in found.tags if each[0] in ("link", "img", "iframe", "object", "base", "form", "a")]
    assert not [
        (tag, name) for tag, attributes in found.tags for name in attributes if name in ("src", "href", "srcset")
    ]
    (policy,) = [each["content"] for tag, each in found.tags if each.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none';")
    assert "http" not in policy
    assert "@import" not in found.texts["style"]
    assert "url(" not in found.texts["style"]
    for way in ("fetch(", "XMLHttpRequest", "importScripts", "sendBeacon", "WebSocket"):
        assert way not in found.texts["script"]


def test_a_strangers_text_stays_text(tmp_path):
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\u202e"
    status = {"reason": evil, "state": "failed"}
    columns = {
        "samples": [[{"prompt": evil, "text": evil}]] + [None] * 59,
        "incidents": [[{"step": 3, "what": evil}]] + [None] * 59,
        "launches": [[launch(BEGAN, 0) | {"host": evil, "environment": {evil: evil}}]] + [None] * 59,
        "seconds_by_kind": [{evil: 1.0}] * 60,
        "numbers": [{evil: 1.0}] * 60,
    }
    run = write_run(
        tmp_path / "run", noise(60), status, config=f"x = {json.dumps('<script>' + evil[:-1])}\n", **columns
    )
    text = page([run, write_run(tmp_path / "<b>", noise(60))], "<i>")
    found = Page(text)
    assert [tag for tag, _ in found.tags].count("script") == 3
    assert not any(tag in ("img", "i") and "onerror" in attributes for tag, attributes in found.tags)
    assert "\u202e" not in text
    assert found.data["charts"][-1]["series"][0]["label"].startswith("</script>")


def test_the_command(tmp_path, capsys, monkeypatch):
    run = write_run(tmp_path / "run", noise(60)).folder
    monkeypatch.chdir(tmp_path)
    assert report.main(["run"]) == 0
    assert "written: report.html" in capsys.readouterr().out
    assert Page((tmp_path / "report.html").read_text()).data["runs"][0]["name"] == "run"
    assert report.main([str(run), "--output", str(tmp_path / "none" / "page.html")]) == 1
    assert "page.html can't be written: No such file or directory" in capsys.readouterr().err
    assert report.main([str(tmp_path)]) == 1
    assert "is not a run folder" in capsys.readouterr().err


def test_a_run_without_a_step_has_a_page(tmp_path):
    found = made(write_run(tmp_path / "run", []))
    assert found.data["charts"] == []
    assert "No step with a finite loss is logged." in found.texts["li"]
