"""The short forms of the torture scripts; the long ones are run by hand, each says how."""

import os
import subprocess
import sys

import pytest

from tests.torture import damage, full_disk


def test_kill(tmp_path):
    """In a process of its own: the ranks are forked off, and this one has threads."""
    command = [sys.executable, "-m", "tests.torture.kill", "--kills", "6", "--steps", "40"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
    assert "bit for bit like the undisturbed one" in process.stdout


def test_damage(tmp_path):
    done = damage.torture(tmp_path, times=80, seed=1)
    assert done.total() == 80


def test_full_disk():
    try:
        pages, inodes = full_disk.torture(stride=5)
    except PermissionError as error:
        pytest.skip(f"this process may not mount a disk: {error}")
    assert pages > 5
    assert inodes > 3
