"""The page of `keel plan --html`: bars add up to the whole, a part has one color, and nothing is loaded."""

import re

import pytest

from scripts import plan
from scripts.page import planned
from scripts.page.planned import planned_page
from tests.unit.planning.test_step_time import H100, job
from trainer.planning.step_time import estimate_step, slowest_rank
from trainer.planning.timeline import timeline

MEMORY = {0: {"parameters": 2**30, "loss": 2**29}, 3: {"parameters": 2**29, "gradients": 2**29}}
STEPS = {
    0: {"optimizer": 0.1, "tp": 0.2, "products": 0.5},
    3: {"products": 0.5, "pipeline bubble": 0.3, "tp": 0.2},
}


def bars(text):
    """Each bar as (name, class, percent) from left to right."""
    found = []
    for bar in re.findall(r'<svg class="bar".*?</svg>', text):
        boxes = re.findall(r'<rect class="([^"]+)" x="([^"]+)" width="([^"]+)".*?<title>(.*?): ', bar)
        left = 0.0
        for _, x, width, _ in boxes:
            assert float(x) == pytest.approx(left, abs=0.01)
            left += float(width)
        assert left == pytest.approx(100, abs=0.01)
        found.append([(name, color, float(width)) for color, _, width, name in boxes])
    return found


def test_bars_show_the_parts_of_each_rank():
    text = planned_page("a job", {"The job": [("fits", "yes & <no>")]}, MEMORY, 2**31, STEPS)
    first, second, step, last = bars(text)
    assert [(name, width) for name, _, width in first] == [("parameters", 50), ("loss", 25), ("free", 25)]
    assert [(name, width) for name, _, width in second] == [("parameters", 25), ("gradients", 25), ("free", 50)]
    assert [name for name, _, _ in step] == [
        "products",
        "tensor parallelism, exposed",
        "optimizer",
        "waiting for the slowest rank",
    ]
    assert step[-1][2] == pytest.approx(20)
    assert last[-2][0] == "pipeline bubble"
    for one, other in ((first, second), (step, last)):
        shared = {name for name, _, _ in one} & {name for name, _, _ in other}
        assert {each[:2] for each in one if each[0] in shared} == {each[:2] for each in other if each[0] in shared}
    assert "yes &amp; &lt;no&gt;" in text
    assert not re.search(r"(src|href)=|<script|url\(", text)
    assert "default-src 'none'" in text


def test_memory_beyond_a_gpus_fills_the_bar():
    (bar, _) = bars(planned_page("a job", {}, MEMORY, 2**20, {}))
    assert bar[-1] == ("free", "kind-none", 0.0)


def test_the_slowest_kind_of_rank_is_the_planned_step():
    config = job("llama_7b.toml", 8, "--mesh.pp 4")
    step = estimate_step(config, 8, H100)
    slowest = slowest_rank(config, 8, H100, 8)
    assert len(step.by_kind) > 1
    assert step.by_kind[slowest.place].parts == slowest.step() == step.parts
    assert max(rank.seconds for rank in step.by_kind.values()) == step.seconds


def test_the_command_writes_the_page(tmp_path, capsys):
    file = tmp_path / "plan.html"
    assert plan.main(["llama_1b.toml", "--ranks", "2", "--device", "h100", "--html", str(file)]) == 0
    assert f"wrote {file}" in capsys.readouterr().out
    memory, step = bars(file.read_text())
    assert memory[-1][0] == "free"
    assert step[0][0] == "products"
    assert ">update: " in file.read_text()


@pytest.mark.parametrize("ranks", [4, 8])
def test_a_timeline_shows_each_pass_where_and_as_long_as_it_is(ranks):
    config = job("llama_8b.toml", ranks, "--mesh.pp 4 --pipeline.schedule 1f1b --training.global_batch_size 16")
    lines = timeline(config, ranks, H100)
    until = max(line.passes[-1].end for line in lines)
    text = planned_page("a job", {}, MEMORY, 2**31, {}, lines=lines)
    drawn = re.findall(r'<svg class="(?:passes|beside)".*?</svg>', text)
    rows = [row for line in lines for row in (line.passes, line.fsdp) if row]
    assert len(drawn) == len(rows) == (4 + 4 if ranks > 4 else 4)
    colors = {}
    for line, row in zip(drawn, rows, strict=True):
        boxes = re.findall(r'<rect class="run-(\d)[^"]*" x="([^"]+)" width="([^"]+)".*?<title>(.*?): ', line)
        assert len(boxes) == len(row)
        for (color, x, width, words), each in zip(boxes, row, strict=True):
            where = f" of micro-batch {each.work.micro_batch}, stage {each.work.stage}"
            assert words == each.work.kind + (where if each.work.kind != "update" else "")
            assert float(x) == pytest.approx(100 * each.start / until, abs=1e-3)
            assert float(width) == pytest.approx(100 * each.seconds / until, abs=1e-3)
            assert colors.setdefault(each.work.kind, color) == color
    assert len({*colors.values()}) == len(colors) == (5 if ranks > 4 else 3)
    assert ("FSDP in a thin line below" in text) == (ranks > 4)


def test_a_long_timeline_is_cut(monkeypatch):
    monkeypatch.setattr(planned, "_MOST_PASSES", 20)
    lines = timeline(job("llama_8b.toml", 4, "--mesh.pp 4 --training.global_batch_size 8"), 4, H100)
    text = planned_page("a job", {}, MEMORY, 2**31, {}, lines=lines)
    assert len(re.findall(r"<title>(?:forward|backward) of", text)) == 20
    assert "the first 20 of 68 passes" in text
