"""Processes that prepare text: what ends them ends the preparation with the right reason."""

import os
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from configs.errors import OutageError
from trainer.data.text.workers import do_all


@dataclass(frozen=True)
class Part:
    signalled: Path
    n_bytes: int = 1


def end(part):
    part.signalled.touch()
    os.kill(os.getpid(), signal.SIGTERM)


class Stopped(Exception):
    pass


@pytest.mark.parametrize("is_stopped", [True, False])
def test_a_process_that_is_killed(tmp_path, is_stopped):
    """A signal to the whole process group stops this one, too; without one, the same command may succeed."""
    signalled = tmp_path / "signalled"

    def progress(done, total, message):
        if is_stopped and signalled.exists():
            raise Stopped

    with pytest.raises(Stopped if is_stopped else OutageError):
        do_all(end, [Part(signalled), Part(signalled)], 2, progress)
