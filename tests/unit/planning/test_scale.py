"""Plans of a 405B model, for as many ranks as anybody has, take a minute or two of one core."""

import json
import resource
import subprocess
import sys

import pytest

from tests.conftest import ROOT


def planned(*words: str) -> tuple[dict, float]:
    """The plan of `llama_405b.toml` on H100s, as JSON, and the seconds of a core that the command has taken."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "scripts/plan.py", "llama_405b.toml", "--device", "h100", "--json", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return json.loads(done.stdout), after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


@pytest.mark.slow
def test_on_16384_ranks_within_a_minute():
    mesh = ("--mesh.tp", "8", "--mesh.pp", "16", "--training.micro_batch_size", "1")
    plan, seconds = planned("--ranks", "16384", *mesh)
    assert seconds < 60
    assert len(plan["memory_by_kind"]) == 3  # the first, the last, and those between them, which are alike
    assert max(kind["peak_bytes"] for kind in plan["memory_by_kind"]) < 79.1 * 2**30


@pytest.mark.long
def test_the_fastest_mesh_on_1024_ranks_within_two_minutes():
    plan, seconds = planned("--ranks", "1024", "--tune")
    assert seconds < 120
    assert len(plan["best"]) == 10
