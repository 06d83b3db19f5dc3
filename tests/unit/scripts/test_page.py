"""The page of `keel report`: which charts it has, that it loads nothing, and that a stranger's text stays text."""

import json
import math
import re
import signal
import time
import webbrowser
from base64 import b64encode
from dataclasses import replace
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts import report
from scripts.page.figures import _NOT_DRAWN, MOST_NAMES, MOST_POINTS, NOTES, charts, marks, spans
from scripts.page.html import page
from scripts.page.ranking import ranking
from scripts.page.recorded import read_run
from tests.forbidden import refuse_in, refuse_to_list
from tests.unit.scripts.test_flags import BEGAN, launch, noise, write_run
from tests.unit.trainer.test_metrics_page import documented


class Page(HTMLParser):
    """The tags of a page, its text by tag, and the JSON that its script draws."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.texts, self._open = [], {}, []
        self.feed(text)
        self.data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)[1])

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in ("meta", "br", "input"):
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag, f"</{tag}> closes another tag"

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, text):
        where = self._open[-1] if self._open else ""
        self.texts[where] = self.texts.get(where, "") + text


def made(*runs):
    return Page(page(runs))


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
    places = [series["place"] for series in found["Layer grad norms"]["series"]]
    assert places == [*range(len(places))]


def test_with_several_runs_a_color_is_a_run_and_the_reader_chooses_the_name(tmp_path):
    """A chart never has a color of a layer beside one of a run."""
    layers = [{str(layer): float(layer) for layer in range(3)}] * 40
    run = write_run(tmp_path / "run", noise(40), layer_grad_norms=layers)
    (chart,) = [each for each in charts([run, replace(run, name="other")]) if each["title"] == "Layer grad norms"]
    assert chart["names"] == ["0", "1", "2"]
    assert [(series["run"], series["label"]) for series in chart["series"]] == [
        (run, name) for run in (0, 1) for name in chart["names"]
    ]
    assert all("place" not in series for series in chart["series"])


def test_a_single_source_is_not_drawn_beside_the_whole_that_it_is(tmp_path):
    columns = {"validation_loss": [3.0] * 40, "validation_by_source": [{"web": {"loss": 3.0}}] * 40}
    alone = write_run(tmp_path / "run", noise(40), **columns)
    assert "Validation by source: loss" not in {chart["title"] for chart in charts([alone])}
    columns["validation_by_source"] = [{"web": {"loss": 3.0}, "code": {"loss": 3.0}}] * 40
    two = write_run(tmp_path / "two", noise(40), **columns)
    assert "Validation by source: loss" in {chart["title"] for chart in charts([alone, two])}


def test_the_load_of_each_expert_and_layer_is_drawn(tmp_path):
    loads = [{"1": [30, 10, 0, 0], "2": [10, 10, 10, 10], "3": "text", "4": [0, 0], "5": [1, "x"]}] * 40
    run = write_run(tmp_path / "run", noise(40), tokens_per_expert=loads)
    found = {chart["title"]: chart for chart in charts([run])}
    for title, of_one in (("most loaded", 3.0), ("least loaded", 0.0)):
        chart = found[f"Tokens per expert: {title}"]
        assert {series["label"]: series["y"][0] for series in chart["series"]} == {"1": of_one, "2": 1.0}
        assert "even share" in chart["note"]
    shown = made(run)
    assert "Load of each expert" in shown.texts["h2"]
    boxes = [facts for tag, facts in shown.tags if tag == "rect" and facts["class"].startswith("load-")]
    assert [(box["class"], box["x"], box["y"], box["width"]) for box in boxes] == [
        ("load-5", "0", "0", "1"),
        ("load-3", "1", "0", "1"),
        ("load-0", "2", "0", "2"),  # neighbours of one color are one box
        ("load-3", "0", "1", "4"),
    ]
    assert "layer 1: expert 0 has 3.00 of an even share, expert 2 has 0.00" in shown.texts["title"]


def test_every_chart_says_what_it_shows(tmp_path):
    pages = documented()
    known = {*pages["In every line"], *pages["In some lines"], *pages["Lines of evaluations"]} - _NOT_DRAWN
    by_name = {key: [{"1": 1.0, "2": 2.0}] * 40 for key in known & {*NOTES}}
    by_name["tokens_per_expert"] = [{"1": [1, 2]}] * 40
    numbers = {key: [1.0] * 40 for key in known - {*NOTES} - {"loss", "skipped", "fingerprint"}}
    found = charts([write_run(tmp_path / "run", noise(40), **numbers, **by_name, mine=[1.0] * 40)])
    assert len(found) > 20
    assert [chart["title"] for chart in found if not chart["note"]] == []
    assert [chart["title"] for chart in found if "metrics.jsonl" in chart["note"]] == ["Mine"]


def test_results_of_an_evaluation_join_their_steps(tmp_path):
    """They are lines of their own, which may come days after the run's last."""
    run = write_run(tmp_path / "run", noise(40))
    began = run.records[0]["time"]
    with (run.folder / "metrics.jsonl").open("a") as file:
        for step, result in (
            (20, {"a": {"acc": 0.25, "acc_stderr": 0.05}}),
            (20, {"b": {"acc": 0.5}}),
            (20, {"c": {"exact_match,strict-match": 0.125, "exact_match_stderr,strict-match": 0.0625}}),
            (99, {"a": {"acc": 0.75}}),
        ):
            file.write(json.dumps({"step": step, "evaluation": result, "time": began + 1e6}) + "\n")
    run = read_run(run.folder, "run")
    assert run.records[19]["evaluation"] == {
        "a": {"acc": 0.25, "acc_stderr": 0.05},
        "b": {"acc": 0.5},
        "c": {"exact_match,strict-match": 0.125, "exact_match_stderr,strict-match": 0.0625},
    }
    assert run.records[19]["time"] == began + 19
    (chart,) = [chart for chart in charts([run]) if chart["title"] == "Evaluation: acc"]
    assert [(series["label"], series["x"], series["y"]) for series in chart["series"]] == [
        ("a", [20, 99], [0.25, 0.75]),
        ("b", [20], [0.5]),
    ]
    assert not [chart["title"] for chart in charts([run]) if "stderr" in chart["title"]]
    cells = made(run).texts["td"]
    assert "0.7500" in cells
    assert "0.5000" in cells
    assert "0.1250 ± 0.0625" in cells


@pytest.mark.slow
def test_a_long_run_gives_a_small_page_soon_with_every_extreme(tmp_path):
    n = 100_000
    losses = np.random.default_rng(0).normal(4, 0.05, n)
    losses[[777, 50_123, 99_000]] += [5, 6, 7]
    columns = {"lr": np.linspace(1e-3, 0, n).tolist(), "tokens": [*range(n)], "tokens_per_second": noise(n, 1)}
    run = write_run(tmp_path / "run", losses.tolist(), **columns, mfu=noise(n, 2))
    began = time.process_time()
    text = page([replace(run, name=name) for name in "abc"])
    assert time.process_time() - began < 30
    assert len(text) < 1_000_000
    (loss,) = [chart for chart in Page(text).data["charts"] if chart["title"] == "Loss"]
    assert len(loss["series"]) == 3
    for curve in loss["series"]:
        assert np.median(curve["mean_y"]) == pytest.approx(4, abs=0.005)
        assert len(curve["mean_x"]) == MOST_POINTS // 2
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
        ("spike", 41),
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


def test_planned_and_measured_are_a_table(tmp_path):
    plan = {
        "step_seconds": {"planned": 0.5, "measured": 1.25},
        "memory_peak_bytes": {"planned": 2**30, "measured": 2**29},
    }
    compared = {"plan": plan | {"evil": 3}, "planned_parts": {"products": 0.25, "evil": "text"}}
    columns = {key: [None, value] for key, value in compared.items()}
    run = write_run(tmp_path / "run", [3.0, 2.0], **columns)
    text = re.sub("<[^>]+>", " ", page([run]))
    assert re.search(r"Step seconds\s+500 ms\s+1.2 s\s+150.0%\s+Memory peak bytes\s+1.00 GiB\s+512 MiB\s+-50.0%", text)
    assert re.search(r"products\s+250 ms", text)
    assert not {"Plan", "Planned parts"} & {chart["title"] for chart in charts([run])}


def test_the_page_says_what_the_runs_are(tmp_path):
    facts = {"environment": {"numpy": "9.9"}, "host": "node-a", "torch": "2.11.0", "device": "cpu"}
    launches = [[launch(BEGAN, 0, 2, {"tp": 2}) | facts] if i == 0 else None for i in range(60)]
    spent = [{"training": 0.5}] * 60
    columns = {"launches": launches, "seconds_by_kind": spent}
    a = write_run(tmp_path / "a", noise(60), config="[optimizer]\nlr = 1e-3\n", **columns)
    for step in (20, 40, 60):
        write_printed(a.folder, "samples", step, f"def f{step}():")
    b = write_run(tmp_path / "b", noise(60), config="[optimizer]\nlr = 2e-3\n")
    found = made(a, b)
    assert "2 runs" in found.texts["h1"]
    for title in (
        "Differences",
        "Curves",
        "Where the time went",
        "Stops and resumes",
        "Commands after a save",
        "Environment",
    ):
        assert title in found.texts["h2"]
    assert "optimizer.lr0.0010.002" in found.texts["code"]
    assert "def f60():" in found.texts["pre"]
    assert "2 ranks (tp 2)" in found.texts["td"]
    assert "node-a" in found.texts["span"]
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
    assert "unsafe" not in policy
    assert "@import" not in found.texts["style"]
    assert "url(" not in found.texts["style"]
    for way in ("fetch(", "XMLHttpRequest", "importScripts", "sendBeacon", "WebSocket"):
        assert way not in found.texts["script"]


def test_the_policy_allows_the_pages_own_styles_and_scripts_by_their_hashes(tmp_path):
    text = page([write_run(tmp_path / "run", noise(60))])
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="(.*?)"', text)
    inline = re.findall(r"<(style|script)>(.*?)</\1>", text, re.S)
    assert [kind for kind, _ in inline] == ["style", "script", "script"]
    rules = dict(rule.split(maxsplit=1) for rule in policy.split("; "))
    for kind, content in inline:
        assert f"'sha256-{b64encode(sha256(content.encode()).digest()).decode()}'" in rules[f"{kind}-src"]


def write_printed(folder, name, step, text):
    """What a command after a save leaves."""
    output = folder / f"after_save/{name}/step-{step:08d}"
    output.mkdir(parents=True)
    output.with_suffix(".log").write_text(text)


def test_what_a_link_out_of_the_run_names_is_not_shown(tmp_path):
    run = write_run(tmp_path / "run", noise(60))
    write_printed(run.folder, "samples", 10, "")
    (tmp_path / "secret").write_text("a secret")
    log = run.folder / "after_save/samples/step-00000010.log"
    log.unlink()
    log.symlink_to(tmp_path / "secret")
    assert "a secret" not in page([run])


EVIL = """done"'><script>run()</script><img src=x onerror="document.title='owned'"><b onclick=run()>\u202e</script>"""


def evil_run(folder, evil=EVIL):
    """A run with a payload in every text of its folder."""
    rows = [None] * 59
    facts = {"host": evil, "torch": evil, "device": evil, "incarnation": evil, "environment": {evil: evil}}
    previous = {"state": evil, "reason": evil, "step": evil, "time": evil}
    columns = {
        "incidents": [[{"step": 3, "what": evil}], *rows],
        "launches": [[launch(BEGAN, 0) | facts, launch(BEGAN + 9, 9, evil, {evil: evil}, previous) | facts], *rows],
        "seconds_by_kind": [{evil: 0.5}] * 60,
        "numbers": [{evil: 1.0, "b": 2.0}] * 60,
        "measures": [{evil: {evil: 1.0}, "b": {evil: 2.0}}] * 60,
        "evaluation": [{evil: {evil: 1.0, f"{evil}_stderr": 0.1}}] * 60,
        "slowest_rank": [evil] * 60,
        "lag_seconds": [1.0] * 60,
        "step_seconds": [1.0] * 60,
        "skipped": [evil, *rows],
        evil: [1.0] * 60,
    }
    status = {"reason": evil, "state": evil, "checkpoint": evil}
    toml = json.dumps(evil).replace("</", "<\\u002f")
    config = f"{toml} = {toml}\n[training]\nsteps = {toml}\n[job]\nname = {toml}\n"
    run = write_run(folder / evil.replace("/", "\u2215")[:80], [None, *noise(59)], status, config=config, **columns)
    for step in (10, 20):
        write_printed(run.folder, evil.replace("/", "\u2215")[:80], step, evil)
    return run


@pytest.mark.parametrize("n_runs", [1, 2, 5])
def test_a_strangers_text_stays_text(tmp_path, n_runs):
    evil = evil_run(tmp_path)
    text = page([evil, *(write_run(tmp_path / f"<b>{i}", noise(60)) for i in range(n_runs - 1))])
    found = Page(text)
    assert [tag for tag, _ in found.tags].count("script") == 3
    assert not [tag for tag, _ in found.tags if tag == "img" or tag not in KNOWN_TAGS]
    names = {name for tag, attributes in found.tags for name in attributes}
    assert not [name for name in names if name.startswith("on") or name in ("style", "src", "href")]
    assert {attributes["class"] for _, attributes in found.tags if "state" in attributes.get("class", "")} <= {
        "state ",
        "state done",
    }
    assert "\u202e" not in text + json.dumps(found.data, ensure_ascii=False)
    titles = [chart["title"] for chart in found.data["charts"]]
    assert any("<script>" in title for title in titles)
    assert text.count("onerror=&quot;") > 10  # the payload is there, as text


KNOWN_TAGS = {
    *("html", "head", "meta", "title", "style", "script", "noscript", "body", "main", "header", "section", "footer"),
    *("h1", "h2", "h3", "article", "div", "span", "p", "b", "i", "small", "ul", "li", "code", "pre", "svg", "rect"),
    *("table", "thead", "tbody", "tr", "th", "td", "details", "summary", "figure", "figcaption"),
    *("button", "label", "input", "output"),
}


ABSURD = [1e18, -1e18, 1e308, -1e308, math.nan, math.inf, -1, 0, 5e-324, 10**18, 10**400, -(10**400), "1", None, True]
PLACES = {
    "record": [*documented()["In every line"], *documented()["In some lines"], "mine"],
    "launch": documented()["Launches"],
    "previous": ["state", "step", "reason", "time"],
    "status": ["state", "step", "reason", "time"],
}


def distorted(folder, distortions):
    """A run in which (place, key, line, value) replace what was recorded."""
    record = {"seconds_by_kind": {"training": 0.5, "data": 0.1}, "tokens": 5, "tokens_per_second": 9.0, "mfu": 0.5}
    record |= {"evaluation": {"a": {"acc": 0.5, "acc_stderr": 0.1}}, "step_seconds": 1.0, "data_seconds": 0.5}
    lines = [{"step": i + 1, "loss": loss, "time": BEGAN + i, **record} for i, loss in enumerate(noise(60))]
    previous = {"state": "running", "step": 45, "reason": "", "time": BEGAN + 45}
    lines[0]["launches"], lines[30]["launches"] = [launch(BEGAN, 0)], [launch(BEGAN + 30, 30, previous=previous)]
    launches = [lines[0]["launches"][0], lines[30]["launches"][0]]
    status = {"state": "running", "step": 60, "reason": "", "time": time.time()}
    for place, key, line, value in distortions:
        {"record": lines[line], "launch": launches[line % 2], "previous": previous, "status": status}[place][key] = (
            value
        )
    run = write_run(folder / "run", [])
    (run.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run.folder / "status.json").write_text(json.dumps(status))
    return read_run(run.folder, "run")


def require_a_page(run):
    """A page of short numbers."""
    text = page([run, run])
    body = text[text.index("<main>") : text.index('<script type="application/json"')]
    assert not re.search(r"\d[\d,]{30}", body)
    Page(text)


@pytest.mark.parametrize("value", ABSURD, ids=lambda value: str(value)[:9])
def test_absurd_numbers_are_shown_and_end_nothing(tmp_path, value):
    """Under every key at once, as itself and in an object; in one line, and in all."""
    everywhere = [(place, key, 20, value) for place, keys in PLACES.items() for key in keys]
    within = [(place, key, line, {"training": value, "a": {"acc": value}}) for place, key, line, _ in everywhere]
    in_all = [("record", key, line, value) for key in PLACES["record"] if key != "step" for line in range(60)]
    for distortions in (everywhere, within, in_all, in_all[: len(in_all) // 3]):
        require_a_page(distorted(tmp_path, distortions))


@pytest.mark.parametrize("value", [10**400, {"tp": 10**400}, [10**400]], ids=["number", "table", "list"])
@pytest.mark.parametrize("key", documented()["Launches"])
def test_no_launch_shows_a_number_whole(tmp_path, key, value):
    """Each key by itself: one launch with an absurd step would be left out, and hide the others' values."""
    require_a_page(distorted(tmp_path, [("launch", key, line, value) for line in (0, 1)]))


@pytest.mark.slow
@settings(max_examples=25)
@given(st.data())
def test_any_absurd_numbers_end_nothing(data):
    places = [(place, key) for place, keys in PLACES.items() for key in keys]
    values = st.sampled_from([*ABSURD, *({"training": value, "a": {"acc": value}} for value in ABSURD)])
    drawn = data.draw(st.lists(st.tuples(st.sampled_from(places), st.integers(0, 59), values), max_size=6))
    with TemporaryDirectory() as folder:
        require_a_page(distorted(Path(folder), [(*where, line, value) for where, line, value in drawn]))


def test_a_launch_in_no_calendar(tmp_path):
    for value, words in ((1e18, "1e+18"), (-1e18, "-1e+18"), (1e308, "1e+308"), (math.nan, "nan")):
        launches = [[launch(value, 0), launch(BEGAN, 1)], *[None] * 29]
        found = made(write_run(tmp_path / "run", noise(30), launches=launches))
        assert f"not a date: {words}" in found.texts["td"]
        assert "launches.started" in found.texts["td"]
        assert any(mark["kind"] == "resume" for mark in found.data["runs"][0]["marks"]) is False


def test_the_command(tmp_path, capsys, monkeypatch):
    run = write_run(tmp_path / "run", noise(60)).folder
    monkeypatch.chdir(tmp_path)
    assert report.main(["run"]) == 0
    assert "written: report.html" in capsys.readouterr().out
    assert Page((tmp_path / "report.html").read_text()).data["runs"][0]["name"] == "run"
    assert report.main([str(run), "--output", str(tmp_path / "none" / "page.html")]) == 1
    assert "page.html can't be written: No such file or directory" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert report.main([str(tmp_path / "empty")]) == 1
    assert "is not a run folder" in capsys.readouterr().err


def test_a_folder_of_runs_with_one_that_failed_before_its_first_step(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in "abcd":
        write_run(tmp_path / "runs" / name, noise(60))
    failed = write_run(tmp_path / "runs" / "z", [], {"state": "failed", "step": 0, "reason": "no such corpus"}).folder
    (failed / "metrics.jsonl").unlink()
    opened = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    assert report.main(["runs", "--open"]) == 0
    assert re.search(r"z +failed +0 .*no such corpus", capsys.readouterr().out)
    assert opened == [(tmp_path / "report.html").as_uri()]
    text = (tmp_path / "report.html").read_text()
    found = Page(text)
    assert [run["name"] for run in found.data["runs"]] == [*"abcd", "z"]
    assert "no such corpus" in found.texts["td"]
    assert text.index('id="charts"') < text.index("<article")  # of many runs, curves come first
    assert report.main(["runs/a", "runs/b"]) == 0
    text = (tmp_path / "report.html").read_text()
    assert text.index('id="charts"') > text.index("<article")


def test_a_run_that_may_not_be_read_is_left_out_and_its_checkpoints_are_not_needed(tmp_path, capsys, monkeypatch):
    write_run(tmp_path / "runs" / "whole", [5.0, 4.0])
    write_run(tmp_path / "runs" / "hidden", [5.0, 4.0])
    (tmp_path / "runs" / "whole" / "checkpoints").mkdir()
    refuse_to_list(tmp_path / "runs" / "whole" / "checkpoints", monkeypatch)
    refuse_in(tmp_path / "runs" / "hidden", monkeypatch)
    assert report.main([str(tmp_path / "runs"), "--output", str(tmp_path / "page.html")]) == 0
    printed = capsys.readouterr()
    hidden = tmp_path / "runs" / "hidden" / "metrics.jsonl"
    assert f"{hidden} can't be read: Permission denied; this run is left out" in printed.out + printed.err
    assert "whole" in (tmp_path / "page.html").read_text()


def test_a_page_is_written_again_while_a_run_is_running(tmp_path, capsys, monkeypatch):
    """The page is a stand-in: its renewal and the run's step."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(report, "page", lambda runs, renew=0: json.dumps([renew, runs[0].step]))
    write_run(tmp_path / "run", noise(6), {"state": "running"})
    seen, slept = [], []

    def sleep(seconds):
        slept.append(seconds)
        seen.append(json.loads(Path("report.html").read_text()))
        write_run(tmp_path / "run", noise(6 + len(seen)), {"state": "running" if len(seen) < 2 else "done"})

    monkeypatch.setattr(report.time, "sleep", sleep)
    assert report.main(["run", "--watch", "7"]) == 0
    assert (slept, seen) == ([7, 7], [[7, 6], [7, 7]])
    assert json.loads(Path("report.html").read_text()) == [0, 8]

    def interrupted(seconds):
        slept.append(seconds)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(report.time, "sleep", interrupted)
    write_run(tmp_path / "run", noise(6), {"state": "running"})
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a test before may have left Keel's own
    try:
        assert report.main(["run", "--watch", "7"]) == 0
    finally:
        signal.signal(signal.SIGINT, handler)
    assert slept == [7, 7, 7]
    assert json.loads(Path("report.html").read_text()) == [0, 6]
    assert "Ctrl-C" in capsys.readouterr().out


def test_a_run_without_a_step_has_a_page(tmp_path):
    found = made(write_run(tmp_path / "run", []))
    assert found.data["charts"] == []
    assert "li" not in found.texts


def test_the_table_has_a_column_for_reasons_where_there_is_one(tmp_path: Path):
    good = write_run(tmp_path / "good", [], {"state": "done", "step": 3})
    failed = write_run(tmp_path / "bad", [], {"state": "failed", "step": 0, "reason": "no such corpus"})
    assert ranking([good])[0][-1] == "tokens/s, median"
    heads, rows = ranking([good, failed])
    assert heads[-1] == "reason"
    assert {cells[-1] for _, cells in rows} == {"", "no such corpus"}
