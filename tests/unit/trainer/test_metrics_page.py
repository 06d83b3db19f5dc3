"""docs/metrics.md against what runs write, in both directions."""

import re
from dataclasses import fields

import pytest

from tests.conftest import ROOT
from tests.end_to_end.launch import launch_here, records
from trainer.report.metrics import _OPTIONAL, EvaluationMetrics, Kind, StepMetrics

JOB = (
    *("--validation.sources", '[{name = "held out", kind = "synthetic"}]', "--validation.interval", "5"),
    *("--validation.sequences", "8", "--model.n_experts", "4"),
    *("--model.experts_per_token", "2"),
)


def documented() -> dict[str, list[str]]:
    """The keys of each table of the page, by its heading."""
    tables: dict[str, list[str]] = {}
    heading = ""
    for line in (ROOT / "docs" / "metrics.md").read_text().splitlines():
        heading = line.removeprefix("## ") if line.startswith("## ") else heading
        if found := re.match(r"\| `(\w+)` \|", line):
            tables.setdefault(heading, []).append(found[1])
    return tables


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The records of a job with experts that validates, ends, and is resumed."""
    folder = tmp_path_factory.mktemp("metrics_page")
    assert launch_here(folder, *JOB, "--training.steps", "5") == 0
    assert launch_here(folder, *JOB) == 0
    return records(folder / "run")


def test_every_key_that_a_job_writes_is_on_the_page(written):
    page = documented()
    known = {*page["In every line"], *page["In some lines"]}
    assert {key for record in written for key in record} <= known
    assert {key for record in written for key in record["seconds_by_kind"]} <= {*page["Kinds of work"]}
    launches = [launch for record in written for launch in record.get("launches", [])]
    assert [launch["step"] for launch in launches] == [0, 5]
    assert all(launch.keys() <= {*page["Launches"]} for launch in launches)


def test_every_line_has_what_the_page_says_of_every_line(written):
    page = documented()
    for record in written:
        assert {*page["In every line"]} <= record.keys()
        assert {*page["Kinds of work"]} == record["seconds_by_kind"].keys()
        assert all({*page["Launches"]} == launch.keys() for launch in record.get("launches", []))
    assert [record["step"] for record in written if "validation_loss" in record] == [5, 10, 15, 20]


def test_the_page_has_every_key_that_any_job_can_write_and_no_other():
    page = documented()
    accounted = {"seconds_by_kind", "goodput"}  # None only in metrics that no job has written
    of_some = {*_OPTIONAL} - accounted
    assert {*page["In every line"]} == {field.name for field in fields(StepMetrics)} - of_some
    assert {*page["In some lines"]} == of_some | {"skipped"}
    assert page["Lines of evaluations"] == [field.name for field in fields(EvaluationMetrics)]
    assert page["Kinds of work"] == [kind.key for kind in Kind]
    assert all(len(keys) == len({*keys}) for keys in page.values())
