"""Goodput and launches over stops, lost steps and rewinds, against sums by hand."""

import json

import pytest

from trainer.report.metrics import Kind, TimeLedger
from trainer.report.wall_clock import WallClock, end_of


class Machine:
    """A clock, and launches that each keep a ledger by it."""

    def __init__(self, metrics):
        self.metrics, self.now = metrics, 1000.0
        self.lines = {}

    def launch(self, step, goes_on=True):
        self.ledger = TimeLedger(lambda: self.now)
        self.clock = WallClock(self.ledger, {"started": self.now, "step": step, "previous": None})
        self.open(step, goes_on)

    def open(self, step, goes_on=True):
        self.clock.open(self.metrics, step, goes_on)
        self.lines = {each: line for each, line in self.lines.items() if each <= step}
        self._write()

    def spend(self, kind, seconds):
        with self.ledger.measure(kind):
            self.now += seconds

    def log(self, step):
        self.lines[step] = {"step": step, **self.clock.record(self.now)}
        self._write()
        return self.lines[step]

    def _write(self):
        self.metrics.write_text("".join(json.dumps(line) + "\n" for line in self.lines.values()))


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path / "metrics.jsonl")


def test_every_second_is_in_one_line(machine):
    machine.launch(0)
    machine.now += 3.0
    machine.spend(Kind.TRAINING, 5.0)
    first = machine.log(1)
    machine.spend(Kind.VALIDATION, 1.0)
    machine.spend(Kind.TRAINING, 1.0)
    second = machine.log(2)
    assert (first["seconds_by_kind"]["startup"], first["seconds_by_kind"]["training"]) == (3.0, 5.0)
    assert (second["seconds_by_kind"]["validation"], second["seconds_by_kind"]["training"]) == (1.0, 1.0)
    assert sum(sum(line["seconds_by_kind"].values()) for line in (first, second)) == 10.0
    assert (first["goodput"], second["goodput"]) == (5 / 8, 6 / 10)
    assert [launch["step"] for launch in first["launches"]] == [0]
    assert second["launches"] is None


def test_a_stop_and_lost_steps_lower_goodput(machine):
    machine.launch(0)
    for step in (1, 2, 3, 4):
        machine.spend(Kind.TRAINING, 10.0)
        machine.log(step)
    machine.now += 60.0  # no launch is running
    machine.launch(2)  # steps 3 and 4 are lost
    machine.spend(Kind.TRAINING, 10.0)
    line = machine.log(3)
    assert line["goodput"] == 30 / 110
    assert [launch["step"] for launch in line["launches"]] == [2]


def test_a_launch_whose_lines_were_cut_is_not_forgotten(machine):
    machine.launch(0)
    machine.spend(Kind.TRAINING, 10.0)
    machine.log(1)
    machine.launch(0)  # no checkpoint yet
    machine.spend(Kind.TRAINING, 10.0)
    line = machine.log(1)
    assert [launch["started"] for launch in line["launches"]] == [1000.0, 1010.0]
    assert line["goodput"] == 10 / 20


def test_going_back_within_a_launch_does_not_describe_it_twice(machine):
    machine.launch(0)
    for step in (1, 2, 3):
        machine.spend(Kind.TRAINING, 10.0)
        machine.log(step)
    machine.open(2)
    machine.spend(Kind.TRAINING, 10.0)
    line = machine.log(3)
    assert line["launches"] is None
    assert line["goodput"] == 30 / 40
    machine.open(0)
    machine.spend(Kind.TRAINING, 10.0)
    line = machine.log(1)
    assert [launch["started"] for launch in line["launches"]] == [1000.0]
    assert line["goodput"] == 10 / 50


def test_a_start_from_scratch_starts_the_clock(machine):
    machine.launch(0)
    machine.spend(Kind.TRAINING, 10.0)
    machine.log(1)
    machine.launch(0, goes_on=False)
    machine.spend(Kind.TRAINING, 5.0)
    line = machine.log(1)
    assert (line["goodput"], len(line["launches"])) == (1.0, 1)


def test_going_back_when_somebody_has_removed_the_metrics(machine):
    machine.launch(0)
    machine.spend(Kind.TRAINING, 10.0)
    machine.log(1)
    machine.lines = {}
    machine._write()
    machine.open(0)
    machine.spend(Kind.TRAINING, 10.0)
    assert machine.log(1)["goodput"] == 10 / 20


def test_a_clock_that_was_set_back_gives_no_goodput(machine):
    machine.launch(0)
    machine.now -= 100.0
    assert machine.log(1)["goodput"] is None


def test_lines_of_an_older_version_and_torn_ones_do_no_harm(machine):
    edited = '{"step": 1, "launches": [1, "started", {"started": "x"}], "seconds_by_kind": {"training": []}}\n'
    machine.metrics.write_text(edited + '{"step": 2, "loss": 3.0, "seconds_by_kind": {}}\n[]\n{"step": 3, "lo')
    machine.clock = WallClock(TimeLedger(lambda: machine.now), {"started": 1000.0, "step": 2})
    machine.clock.open(machine.metrics, 2, goes_on=True)
    machine.now += 1.0
    assert machine.clock.record(machine.now)["goodput"] == 0.0


def test_what_a_status_says_of_the_end():
    assert end_of({}) is None
    status = {"state": "failed", "step": 7, "reason": "no room\nat all", "time": 5.0, "pid": 3}
    assert end_of(status) == {"state": "failed", "step": 7, "reason": "no room", "time": 5.0}
