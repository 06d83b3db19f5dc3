"""The page of `keel report` in headless Chromium: curves are really drawn, at any width and color scheme, and nothing
is loaded. Without Chromium (`apt-get install chromium`) these tests are skipped.
"""

import json
import re
import shutil
import subprocess
from base64 import b64encode
from hashlib import sha256
from html import unescape

import pytest

from scripts.page.html import page
from tests.unit.scripts.test_flags import BEGAN, launch, noise, write_run
from tests.unit.scripts.test_page import EVIL, evil_run

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
TIMEOUT_SECONDS = 300
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here (apt-get install chromium)"),
]

MEASURE = """
const canvases = [...document.querySelectorAll(".chart canvas")].map(canvas => {
  const { width, height } = canvas, pixels = canvas.getContext("2d").getImageData(0, 0, width, height).data;
  const colors = {};
  for (let i = 0; i < pixels.length; i += 4) {
    const [r, g, b, alpha] = pixels.slice(i, i + 4);
    if (alpha === 255) { const c = `rgb(${r}, ${g}, ${b})`; colors[c] = (colors[c] || 0) + 1; }
  }
  return { width: canvas.parentNode.clientWidth, colors };
});
const read = name => {
  const probe = document.body.appendChild(document.createElement("i"));
  probe.style.color = `var(${name})`;
  return getComputedStyle(probe).color;
};
const found = {
  canvases,
  runs: [read("--run-0"), read("--run-1")],
  titles: [...document.querySelectorAll(".chart h3")].map(head => head.firstChild.textContent),
  values: [...document.querySelectorAll(".chart .values")].map(values => values.textContent),
  widest: Math.max(...[...document.querySelectorAll("body *")].filter(each => !each.closest(".scroll"))
    .map(each => each.getBoundingClientRect().right)),
  back: getComputedStyle(document.body).backgroundColor,
};
const charts = () => [...document.querySelectorAll(".chart canvas")].map(canvas => canvas.toDataURL());
const pause = () => new Promise(done => setTimeout(done, 300));
const send = (kind, part) => {
  const over = document.querySelector(".u-over"), { left, top, width } = over.getBoundingClientRect();
  const at = { clientX: left + part * width, clientY: top + 20, movementX: 9, bubbles: true, button: 0 };
  (kind === "mouseup" ? document : over).dispatchEvent(new MouseEvent(kind, at));
};
const click = words => [...document.querySelectorAll("button")].find(each => each.textContent === words).click();
(async () => {
  send("mouseenter", 0.5); send("mousemove", 0.5); await pause();
  found.hovered = [...document.querySelectorAll(".chart .values")].map(values => values.lastChild.textContent);
  const whole = charts();
  send("mousedown", 0.2); send("mousemove", 0.4); await pause(); send("mouseup", 0.4); await pause();
  const zoomed = charts();
  send("dblclick", 0.5); await pause();
  const back = charts();
  click("Time"); await pause();
  const hours = charts();
  click("Last half"); await pause();
  const half = charts();
  const differ = (a, b) => a.map((each, i) => each !== b[i]);
  found.differ = { zoomed: differ(whole, zoomed), back: differ(whole, back) };
  Object.assign(found.differ, { hours: differ(back, hours), half: differ(hours, half) });
  document.body.dataset.found = JSON.stringify(found);
})();
"""

USE = """
const pause = () => new Promise(done => setTimeout(done, 300));
const send = (kind, x, y) => {
  const over = document.querySelector(".u-over"), { left, top, width, height } = over.getBoundingClientRect();
  const at = { clientX: left + x * width, clientY: top + y * height, movementX: 9, bubbles: true, button: 0 };
  (kind === "mouseup" ? document : over).dispatchEvent(new MouseEvent(kind, at));
};
const drag = async (from, to) => {
  send("mousemove", ...from); send("mousedown", ...from); send("mousemove", ...to); await pause();
  send("mouseup", ...to); await pause();
};
const values = () => [...document.querySelector(".chart .values").children].map(entry => entry.textContent);
const click = (within, words) =>
  [...document.querySelectorAll(`${within} button`)].find(each => each.textContent === words).click();
const saved = [];
URL.createObjectURL = blob => { saved.push(blob); return "blob:nothing"; };
HTMLAnchorElement.prototype.click = function () { saved[saved.length - 1].name = this.download; };
const address = () => decodeURIComponent(location.hash.replaceAll("+", " "));
(async () => {
  const found = { opened: values() };
  send("mouseenter", 0.482, 0.5); send("mousemove", 0.482, 0.5); await pause();
  found.spike = values(); // the 121st of 250 steps
  send("mouseleave", -1, 0.5);
  const slider = document.getElementById("smooth");
  slider.value = 0; slider.oninput(); await pause();
  found.unsmoothed = values();
  slider.value = 20; slider.oninput(); await pause();
  click("#runs", "second"); await pause();
  found.hidden = values();
  await drag([0.2, 0.5], [0.4, 0.5]);
  found.zoomed = { address: address(), values: values() };
  await drag([0.5, 0.2], [0.5, 0.8]);
  found.upward = address();
  click(".chart", "CSV"); click(".chart", "PNG"); await pause();
  found.csv = { name: saved[0].name, text: await saved[0].text() };
  found.png = { name: saved[1].name, type: saved[1].type, size: saved[1].size };
  const zoomed = document.querySelector(".chart canvas").toDataURL();
  location.hash = ""; await pause();
  found.whole = values();
  found.shown = { runs: document.querySelectorAll("#runs .off").length };
  document.body.dataset.found = JSON.stringify(found);
})();
"""

WATCH = """
const found = { violations: [], title: document.title };
document.addEventListener("securitypolicyviolation", event => found.violations.push(event.violatedDirective));
globalThis.run = () => { document.title = "owned"; };
addEventListener("load", () => setTimeout(() => {
  found.title = document.title;
  found.charts = document.querySelectorAll(".chart canvas").length;
  found.injected = document.querySelectorAll("img, body b[onclick]").length;
  document.body.dataset.found = JSON.stringify(found);
}, 500));
"""


def with_script(text, script, place="</body>"):
    """A page with one script more, which its policy allows."""
    allowed = f"script-src 'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'"
    return text.replace("script-src", allowed).replace(place, f"<script>{script}</script>{place}", 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A page of two runs, the second with a resume and a spike, to which a script is added that measures it."""
    folder = tmp_path_factory.mktemp("browser")
    runs = []
    for name in ("first", "second"):
        n, losses = 250, noise(250)
        launches = [[launch(BEGAN, 0)] if i == 0 else None for i in range(n)]
        if name == "second":
            losses[120], launches[100] = 9.0, [launch(BEGAN + 100, 100, 2, {"tp": 2})]
        columns = {"lr": [1e-3 * (1 - i / n) for i in range(n)], "tokens": [100 * i for i in range(n)]}
        columns |= {"launches": launches, "seconds_by_kind": [{"training": 1.0}] * n}
        runs.append(write_run(folder / name, losses, **columns))
    (folder / "page.html").write_text(with_script(page(runs), MEASURE))
    (folder / "used").mkdir()
    (folder / "used" / "page.html").write_text(with_script(page(runs), USE))
    return folder


def browse(folder, width, is_dark, address=""):
    """Open the page; returns what it has measured, and the addresses that the browser has asked for."""
    log = folder / "net.json"
    options = [
        *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"),
        *("--disable-component-update", "--disable-extensions", "--virtual-time-budget=60000", "--dump-dom"),
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # nor do the browser's own requests get anywhere
        f"--user-data-dir={folder / 'profile'}",
        f"--window-size={width},900",
        f"--blink-settings=preferredColorScheme={0 if is_dark else 1}",
        f"--log-net-log={log}",
    ]
    command = [CHROMIUM, *options, (folder / "page.html").as_uri() + address]
    for _ in range(4):  # on a busy machine, Chromium's virtual time may be over before the page has measured itself
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=True)
        found = re.search(r'data-found="(.*?)"', done.stdout)
        if found:
            break
    assert found, done.stdout[-2000:] + done.stderr
    return json.loads(unescape(found[1])), requests(log.read_text())


def requests(log):
    """The addresses that pages have asked for, by a browser's log of its network; its own updates have no origin."""
    told = [event.get("params", {}) for event in json.loads(log)["events"]]
    return {each["url"] for each in told if "url" in each and each.get("initiator", "not an origin") != "not an origin"}


@pytest.mark.parametrize(("width", "is_dark"), [(1400, False), (500, True)], ids=["wide, light", "narrow, dark"])
def test_curves_are_drawn_and_nothing_is_loaded(folder, width, is_dark):
    found, asked = browse(folder, width, is_dark)
    assert found["titles"] == ["Loss", "Gradient norm", "Learning rate"]
    assert len(found["canvases"]) == 3
    for canvas in found["canvases"]:
        drawn = {color: canvas["colors"].get(color, 0) for color in found["runs"]}
        assert drawn[found["runs"][1]] > 100, drawn  # the second run is drawn over the first
    loss = found["canvases"][0]
    assert loss["width"] > 0.8 * min(width, 1400)
    assert "first · training" in found["values"][0]
    assert found["widest"] <= width
    shade = sum(map(int, re.findall(r"\d+", found["back"])[:3])) / 3
    assert shade < 60 if is_dark else shade > 200
    assert asked == set()
    assert [text[:5] for text in found["hovered"]] == ["at 12"] * 3  # the middle of 250 steps, in all charts
    changed = {name: set(charts) for name, charts in found["differ"].items()}
    assert changed == {"zoomed": {True}, "back": {False}, "hours": {True}, "half": {True}}


def test_the_log_shows_what_a_page_asks_for(folder):
    """Else the test above could not fail: the policy allows this one what the report's forbids."""
    original = (folder / "page.html").read_text()
    policy = re.search(r'<meta http-equiv="Content-Security-Policy".*?>', original)[0]
    asking = original.replace(policy, "").replace("<main>", '<main><img src="http://127.0.0.1:9/pixel.png">')
    (folder / "asking").mkdir()
    (folder / "asking" / "page.html").write_text(asking)
    _, asked = browse(folder / "asking", 800, is_dark=False)
    assert any("127.0.0.1:9/pixel.png" in address for address in asked)
    (folder / "asking" / "page.html").write_text(asking.replace("<head>", f"<head>{policy}"))
    _, asked = browse(folder / "asking", 800, is_dark=False)
    assert asked == set()


def test_what_a_reader_does_with_the_curves(folder):
    found, _ = browse(folder / "used", 1400, is_dark=False)
    first, validation_or_second = found["opened"][:2]
    assert re.fullmatch(r"first · training\d\.\d+\(mean \d\.\d+\)", first), first
    assert validation_or_second.startswith("second · training")
    assert found["spike"][1].startswith("second · training9(mean "), found["spike"]
    assert "second: spike: 9" in found["spike"][-1]
    assert all("mean" not in text for text in found["unsmoothed"])
    assert [text.partition(" ")[0] for text in found["hidden"][:-1]] == ["first"]
    low, high = map(float, re.search(r"x=([\d.]+)~([\d.]+)", found["zoomed"]["address"]).groups())
    assert (low, high) == (pytest.approx(51, abs=2), pytest.approx(101, abs=2))
    assert "smooth=20" in found["zoomed"]["address"]
    assert "hide=second" in found["zoomed"]["address"]
    assert found["zoomed"]["values"] != found["hidden"]  # those of the last step in view
    assert re.search(r"y Loss=[\d.]+~[\d.]+", found["upward"])
    assert found["upward"].startswith(found["zoomed"]["address"])
    rows = found["csv"]["text"].splitlines()
    assert (found["csv"]["name"], rows[0], len(rows)) == ("Loss.csv", '"step","first · training"', 251)
    assert float(rows[250].split(",")[1]) == pytest.approx(noise(250)[-1], rel=1e-5)
    assert (found["png"]["name"], found["png"]["type"]) == ("Loss.png", "image/png")
    assert found["png"]["size"] > 5000
    assert len(found["whole"]) == 3
    assert found["shown"] == {"runs": 0}


def test_an_address_is_a_view(folder):
    (folder / "opened").mkdir()
    only_read = USE.partition("(async")[0] + "document.body.dataset.found = JSON.stringify({ opened: values() });"
    text = (folder / "used" / "page.html").read_text().partition(f"<script>{USE}")[0]
    (folder / "opened" / "page.html").write_text(with_script(f"{text}</body></html>", only_read))
    found, _ = browse(folder / "opened", 1400, is_dark=False, address="#x=20~60&smooth=0&hide=first&axis=constructor")
    (second, _) = found["opened"]
    assert second == f"second · training{noise(250)[59]:.5g}"


@pytest.mark.parametrize("has_policy", [True, False])
def test_nothing_from_a_run_folder_runs(tmp_path, has_policy):
    """Not even without the policy, which forbids it once more."""
    text = with_script(page([evil_run(tmp_path / "runs")]), WATCH, place="<title>")
    if not has_policy:
        text = re.sub(r"<meta http-equiv=.*?>", "", text, count=1)
    (tmp_path / "page.html").write_text(text)
    found, asked = browse(tmp_path, 1400, is_dark=False)
    assert found["title"].startswith("Keel: done")
    assert (found["violations"], found["injected"], asked) == ([], 0, set())
    assert found["charts"] > 3


def test_a_payload_that_is_not_escaped_would_be_seen(tmp_path):
    """Else the test above could not fail."""
    text = with_script(page([write_run(tmp_path / "run", noise(60))]), WATCH, place="<title>")
    text = re.sub(r"<meta http-equiv=.*?>", "", text, count=1).replace("<main>", f"<main>{EVIL}", 1)
    (tmp_path / "page.html").write_text(text)
    found, _ = browse(tmp_path, 1400, is_dark=False)
    assert found["title"] == "owned"
