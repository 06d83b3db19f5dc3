"""The last that torchrun prints says why a rank has failed, in Keel's own sentence."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from tests.end_to_end.launch import ENVIRONMENT, REPORT, ROOT, TIMEOUT_SECONDS, TINY, finish, start
from tests.end_to_end.signals import ranks_of, signal_at_step
from trainer.lifecycle import tell_torchrun

PROGRAM = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
from trainer.progress import Progress

def fail(self, *_):
    raise ZeroDivisionError("of rank " + os.environ["RANK"])

if os.environ["RANK"] == "1":
    Progress.count = fail
import train
code = train.main()
sys.stderr.flush()
os._exit(code)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        pytest.param(
            "--checkpoint.load 7",
            "checkpoint.load = 7: no such step in run/checkpoints; steps there: none",
            marks=pytest.mark.slow,
        ),
        ("--training.stpes 7", "--training.stpes: .*did you mean training.steps.*"),  # before torch is imported
    ],
)
def test_torchrun_ends_in_our_sentence(tmp_path: Path, words: str, sentence: str):
    torchrun = [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, str(ROOT / "train.py"), "--config", str(TINY), *words.split()]
    ended = subprocess.run(
        command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
    )
    assert re.search(rf"traceback : {sentence}\n=+\s*$", ended.stderr), ended.stderr
    assert "To enable traceback" not in ended.stderr
    assert len(re.findall(sentence, ended.stderr.partition(REPORT)[0])) == 1


def test_a_cause_is_dated_before_its_consequence_in_the_same_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    failures = {}
    for rank, is_consequence in enumerate([True, False]):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / f"{rank}.json"))
        monkeypatch.setattr("time.time", lambda: 1000.9)
        tell_torchrun(f"of rank {rank}", is_consequence)
        failures[rank] = ProcessFailure(rank, pid=1, exitcode=1, error_file=str(tmp_path / f"{rank}.json"))
    assert ChildFailedError("train.py", failures).get_first_failure()[0] == 1


@pytest.mark.slow
def test_a_rank_that_fails_alone_and_a_rank_that_was_signalled(tmp_path: Path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    alone = finish(start(tmp_path, ranks=2, program=program))
    assert "ZeroDivisionError: of rank 1" in alone.root_cause, alone.err
    assert alone.root_cause.startswith("Traceback"), alone.err

    process = start(tmp_path, "--training.steps 5000 --job.output_dir signalled", ranks=2)
    signal_at_step(process, tmp_path / "signalled", 5, 0)
    os.kill(ranks_of(process)[1], signal.SIGUSR1)
    stopped = finish(process)
    assert re.match(r"Stopped by .*SIGUSR1|Stopped by a signal to another rank", stopped.root_cause), stopped.err
    assert "with everything saved." in stopped.root_cause
