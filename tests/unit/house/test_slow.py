"""The tables of slow and long cases are up to date."""

import subprocess
import sys
from fnmatch import fnmatchcase

from tests.conftest import ROOT
from tests.slow import LONG, SLOW


def test_every_pattern_names_a_case():
    command = [sys.executable, "-m", "pytest", "--collect-only", "-n", "0", "-m", "slow or long"]
    files = [f"tests/{file}" for file in SLOW | LONG]
    said = subprocess.run([*command, *files], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    cases: dict[str, list[str]] = {}
    for line in said.splitlines():
        file, found, name = line.removeprefix("tests/").partition("::")
        if found:
            cases.setdefault(file, []).append(name)
    unused = []
    for table, others in ((LONG, {}), (SLOW, LONG)):
        for file, patterns in table.items():
            names = [
                name for name in cases.get(file, []) if not any(fnmatchcase(name, p) for p in others.get(file, ()))
            ]
            unused += [(file, p) for p in patterns if not any(fnmatchcase(name, p) for name in names)]
    assert unused == [], said[-2000:]
