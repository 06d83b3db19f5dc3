"""The table of slow cases is up to date."""

import subprocess
import sys
from fnmatch import fnmatchcase

from tests.conftest import ROOT
from tests.slow import SLOW


def test_every_pattern_names_a_case():
    command = [sys.executable, "-m", "pytest", "--collect-only", "-n", "0", "-m", "slow"]
    files = [f"tests/{file}" for file in SLOW]
    said = subprocess.run([*command, *files], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    cases: dict[str, list[str]] = {}
    for line in said.splitlines():
        file, found, name = line.removeprefix("tests/").partition("::")
        if found:
            cases.setdefault(file, []).append(name)
    unused = [
        (file, pattern)
        for file, patterns in SLOW.items()
        for pattern in patterns
        if not any(fnmatchcase(name, pattern) for name in cases.get(file, []))
    ]
    assert not unused, said[-2000:]
