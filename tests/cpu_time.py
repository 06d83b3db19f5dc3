"""The CPU time of a case, over which one must be marked as slow.

The clock on the wall says how busy the machine is; CPU time says what the case costs, in whatever process it is spent.
"""

import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from math import inf
from pathlib import Path

import pytest

LIMIT_SECONDS = 3.0
"""What a case without a mark may take (CONTRIBUTING.md)."""
TOLERANCE = 12.0
"""A case fails above `LIMIT_SECONDS` times this: on cores that several processes share, a case takes two to four times
its CPU time, on some machines twice that, and the first case of a process imports, compiles and traces for those after
it."""

UNLIMITED = "KEEL_TESTS_UNLIMITED"
"""The environment variable that turns the limit off: marks are decided with the newest torch, not with the oldest."""
WHOLE_PROGRAMS = ("end_to_end", "null_gpu", "torture")
"""Folders of tests that start whole programs, each of which imports torch for seconds: the limit is not for them."""

_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
_HERE = 0


def spent_by_process() -> dict[int, float]:
    """CPU seconds so far of this process and each of its descendants that live, with the children each has waited for.

    Only Linux lists descendants; elsewhere this process and its ended children are counted.
    """
    ended = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    seconds = {_HERE: sum(usage.ru_utime + usage.ru_stime for usage in ended)}
    for process in _descendants(os.getpid()):
        try:
            # Fields 14 to 17 of proc(5): in user mode and in the kernel, and the same of children it has waited for.
            _, _, rest = Path(f"/proc/{process}/stat").read_text().rpartition(")")
        except OSError:  # it has just ended
            continue
        seconds[process] = sum(map(int, rest.split()[11:15])) / _TICKS_A_SECOND
    return seconds


def spent_between(before: dict[int, float], after: dict[int, float]) -> float:
    """CPU seconds between two calls of `spent_by_process`.

    A process that began in between and goes on serves later cases as well (a pool of ranks), and its start is not this
    case's. What a process that has ended took is in its parent's time.
    """
    return sum(seconds for process, seconds in after.items() if process in before) - sum(before.values())


def takes_a_second_at_most(command: Callable[[], object], tries: int = 3) -> bool:
    """Whether a command that starts processes takes a second of their CPU time in one of some tries.

    On a slow core it may take half of what importing torch takes there and then: three seconds (CONTRIBUTING.md), and
    more where other tests share the core.
    """
    fastest = inf
    for _ in range(tries):
        fastest = min(fastest, _seconds_of_children(command))
        if fastest <= 1:
            return True
    import_torch = [sys.executable, "-c", "import torch"]
    return fastest <= _seconds_of_children(lambda: subprocess.run(import_torch, check=True)) / 2


def _seconds_of_children(command: Callable[[], object]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _descendants(process: int) -> Iterator[int]:
    for file in Path(f"/proc/{process}/task").glob("*/children"):
        try:
            children = file.read_text().split()
        except OSError:  # the thread has just ended
            continue
        for child in map(int, children):
            yield child
            yield from _descendants(child)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fail a case that takes longer than one without a mark may."""
    before = spent_by_process()
    result = yield
    spent = spent_between(before, spent_by_process())
    is_marked = any(item.get_closest_marker(name) for name in ("slow", "long", "gpu"))
    is_limited = not is_marked and not set(WHOLE_PROGRAMS) & set(item.path.parts) and UNLIMITED not in os.environ
    if is_limited and spent > LIMIT_SECONDS * TOLERANCE:
        pytest.fail(
            f"{spent:.1f} s of CPU time, and a case without a mark may take {LIMIT_SECONDS:g}: make it cheaper, or "
            "mark it pytest.mark.slow (CONTRIBUTING.md)",
            pytrace=False,
        )
    return result
