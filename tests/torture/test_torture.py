"""The short forms of the torture scripts; the long ones are run by hand, each says how."""

import os
import subprocess
import sys
from collections.abc import Iterable

import pytest

from tests.marked import marked
from tests.soak import ALLOWED, Sample, growth
from tests.torture import damage, full_disk, fuzz, hosts, resume
from tests.torture.kinds import KINDS, Kind
from trainer import opening
from trainer.step import Learner

RESUMES = {row.name: row for row in resume.table()}


@pytest.mark.long  # a third of the launches of a soak go through torchrun
@pytest.mark.parametrize("how", ["", "--torchrun"])
def test_kill(tmp_path, how):
    told = run(f"tests.torture.kill --kills 4 --steps 40 {how}", tmp_path)
    assert "bit for bit like the undisturbed one" in told


@pytest.mark.long  # .ci/run soaks for minutes
def test_soak(tmp_path):
    """A mesh of two ranks until its end, then for the rest of the time another one."""
    told = run("tests.soak --minutes 0.6 --meshes ?[SP]*2 --steps 120", tmp_path)
    assert "no difference, no growth, no problem" in told
    assert not [path for path in tmp_path.iterdir() if not path.name.startswith("torch")]


@pytest.mark.long  # test_a_resume_that_forgets_something_is_seen
def test_a_soak_sees_a_resume_that_forgets_something(tmp_path):
    environment = {"PRELOADED_FIRST": "tests.torture.test_torture:forget_the_data"}
    told = run("tests.soak --minutes 2 --meshes FSDP?2 --steps 60", tmp_path, environment, expected=1)
    assert "differs from the undisturbed run by" in told


def forget_the_data():
    """As a resume that forgets where the data stands: called on each rank of a launch."""
    forgets = opening.open_loader
    opening.open_loader = lambda config, mesh, position: forgets(config, mesh, position | {"next_sample": 0})


@pytest.mark.slow
@pytest.mark.skipif(bool(hosts.why_not()), reason=hosts.why_not())
def test_hosts_are_lost(tmp_path):
    told = run("tests.torture.hosts --kills 2 --kinds node,rank --hosts 2 --ranks 1", tmp_path)
    assert "2 of 2 recovered without a hand; nothing was committed twice" in told
    assert "bit for bit equal" in told


@pytest.mark.slow
def test_faults(tmp_path):
    told = run("tests.torture.faults --quick", tmp_path)
    assert "NOT" not in told


@pytest.mark.long  # tests/unit/scripts/test_proof.py flips bits and replays, in one process
def test_flips(tmp_path):
    told = run("tests.torture.flips --steps 20 --stretch 10", tmp_path)
    assert "no flip: equal in bits: steps 1 to 20" in told
    assert told.count(": named") == 2


def run(words, folder, environment=None, expected=0):
    """Run one of the scripts, in a process of its own; returns what it prints."""
    variables = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder)} | (environment or {})
    command = [sys.executable, "-m", *words.split()]
    process = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=600)
    assert process.returncode == expected, f"{process.stdout}\n{process.stderr}"
    return process.stdout


@pytest.mark.slow
def test_damage(tmp_path):
    done = damage.torture(tmp_path, times=80, seed=1)
    assert done.total() == 80


@pytest.mark.slow
def test_fuzz(tmp_path):
    """In a process of its own: it forks others, which read, and this one has threads."""
    command = [sys.executable, "-m", "tests.torture.fuzz", "--times", "40"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert process.returncode == 0, process.stdout + process.stderr
    rows = [line.split() for line in process.stdout.splitlines()[1:]]
    assert len(rows) == len(KINDS)
    assert all(int(row[-6]) == 40 for row in rows)


@pytest.mark.slow
def test_the_fuzzer_sees_what_is_no_message(tmp_path):
    """A reader that lets an exception of Python's out, one that takes memory, and one that shows escapes."""

    def original(folder):
        (folder / "file").write_text("1")
        return folder / "file"

    def reads(path):
        if path.exists() and path.is_file() and path.stat().st_size < 1 << 30:
            text = path.read_bytes().decode(errors="replace")
            if "\x1b" in text:
                return text
            if "[" in text:
                return str(len(bytearray(b"1" * (100 << 20))))
            return str(int(text, 16))
        return ""

    fuzz_kind = Kind("a file", original, lambda content, dice: dice.choice([b"1", b"z", b"[", b"\x1b"]), reads)
    [(_, tally)] = fuzz.torture(tmp_path, [fuzz_kind], range(16))
    failures = " ".join(tally.failures)
    assert tally.valid + tally.refused < tally.times == 16
    assert "ValueError: invalid literal" in failures
    assert "bytes of memory" in failures
    assert "control characters" in failures


@pytest.mark.slow
def test_full_disk():
    try:
        pages, inodes = full_disk.torture(stride=5)
    except PermissionError as error:
        pytest.skip(f"this process may not mount a disk: {error}")
    assert pages > 5
    assert inodes > 3


@pytest.mark.slow
def test_full_disk_under_a_whole_run():
    try:
        with full_disk.small_disk(full_disk.RUN_DISK_BYTES, 1000) as disk:
            ended = full_disk.whole_run(disk)
            assert ended.code == 1
            full_disk.assert_recorded(disk / "run", ended)
    except PermissionError as error:
        pytest.skip(f"this process may not mount a disk: {error}")


# Of those whose meshes test_moving_run.py, test_owner_training.py and a soak launch on, and of the rest, one is enough.
@pytest.mark.parametrize(
    "name", marked(RESUMES, slow=["PP 2, full, eager"], long=RESUMES.keys() - {"PP 2, full, eager"})
)
def test_resume(ranks, tmp_path, name):
    resume.torture(ranks, RESUMES[name], tmp_path)


def go_on_without_the_moments(folder, last_step, words):
    """As a resume that forgets a part of the optimizer's state."""
    state = Learner.state
    Learner.state = lambda self: {name: t for name, t in state(self).items() if not name.endswith("exp_avg")}
    try:
        resume.go_on(folder, last_step, words)
    finally:
        Learner.state = state


@pytest.mark.slow
def test_a_resume_that_forgets_something_is_seen(ranks, tmp_path, monkeypatch):
    monkeypatch.setattr(resume, "go_on", go_on_without_the_moments)
    with pytest.raises(AssertionError, match=r"FSDP 2, selective, eager: .* instead of"):
        resume.torture(ranks, RESUMES["FSDP 2, selective, eager"], tmp_path)


def test_a_command_that_often_runs_is_no_growth_and_a_child_that_stays_is():
    def samples(children: Iterable[int]) -> list[Sample]:
        return [
            Sample(step, {"MiB": 300.0, "threads": 14.0, "handles": 23.0 + 2 * n, "children": float(n)})
            for step, n in enumerate(children)
        ]

    none = dict.fromkeys(ALLOWED, 0.0)
    assert growth(samples([0, 0, 0, 1] * 15 + [0, 1, 1, 1] * 15)) == none
    assert growth(samples(step // 20 for step in range(120))) == none | {"children": 2.0, "handles": 4.0}
