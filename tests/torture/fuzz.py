"""A stranger's files of every kind that Keel reads: python -m tests.torture.fuzz [--times 1000] [--kind K] [--seed 0]

Real files of Keel's are damaged, forged and blown up (`mutations.py`), each is then read as a run or a script would
read it (`kinds/`), in a process of its own. What is read must be whole; what is refused must be so by one
message, of bounded length and nothing in it that a terminal obeys. Any other exception, a crash, more memory or more
time than a file of that size may take is a failure, named by kind and number: `--kind K --only NUMBER` shows it again.
"""

import argparse
import json
import os
import random
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from configs.errors import KeelError
from configs.untrusted import MAX_MESSAGE_CHARACTERS, printable
from tests.torture.kinds import KINDS, Kind

MEMORY_BYTES, MEMORY_TIMES = 64 << 20, 32
"""What reading may take: so much, and so many times the file's size (small JSON values take 32 bytes a byte)."""
CPU_SECONDS = 2.0
"""What reading may take, besides a second for every MiB of the file; measured as the process's own time."""
HANGING_CPU_SECONDS, HANGING_SECONDS = 30, 600
"""After which the kernel ends the process."""
SHOWN_FAILURES = 10
ADDRESS_BYTES = 6 << 30
"""Of new address space: pyarrow and torch reserve much more than they use."""


@dataclass
class Tally:
    """What came of one kind's mutations."""

    times: int = 0
    valid: int = 0
    refused: int = 0
    seconds: float = 0.0
    """The longest, of the process's own time."""
    n_bytes: int = 0
    """The most memory."""
    failures: list[str] = field(default_factory=list)

    def row(self, name: str) -> str:
        """A line of the table."""
        worst = f"{self.seconds:>8.2f} {self.n_bytes / 2**20:>9.1f}"
        return f"{name:<20} {self.times:>9,} {self.valid:>7,} {self.refused:>8,} {worst} {len(self.failures):>9,}"


HEADER = f"{'kind':<20} {'mutations':>9} {'valid':>7} {'refused':>8} {'worst s':>8} {'worst MiB':>9} {'failures':>9}"


def torture(folder: Path, kinds: Sequence[Kind], numbers: Sequence[int], seed: int = 0) -> Iterator[tuple[str, Tally]]:
    """Try the mutations of these numbers for each kind; yields its name and tally."""
    for kind in kinds:
        place = folder / re.sub(r"\W", "-", kind.name)
        place.mkdir()
        kind.prepare(place)
        yield kind.name, _tally(kind, list(numbers), seed)


def _tally(kind: Kind, numbers: list[int], seed: int) -> Tally:
    tally = Tally()
    while tally.times < len(numbers):
        for result in _in_a_process(kind, numbers[tally.times :], seed):
            _count(tally, numbers[tally.times], result)
    return tally


def _count(tally: Tally, number: int, result: dict[str, Any]) -> None:
    tally.times += 1
    tally.seconds = max(tally.seconds, result.get("seconds", 0.0))
    tally.n_bytes = max(tally.n_bytes, result.get("n_bytes", 0))
    if result["outcome"] == "valid":
        tally.valid += 1
    elif result["outcome"] == "refused":
        tally.refused += 1
    if failure := result.get("failure"):
        tally.failures.append(f"number {number}: {failure}")


def _in_a_process(kind: Kind, numbers: list[int], seed: int) -> Iterator[dict[str, Any]]:
    """The results of these mutations, in order; the last is a failure where the process died of it."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(reading)
            _serve(kind, numbers, seed, writing)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writing)
    done = 0
    with os.fdopen(reading) as lines:
        for line in lines:
            yield json.loads(line)
            done += 1
    _, status = os.waitpid(child, 0)
    if done < len(numbers):
        code = os.waitstatus_to_exitcode(status)
        if code > 0:
            raise RuntimeError("the fuzzer itself failed, see above")
        how = signal.Signals(-code).name
        yield {"outcome": "failed", "failure": f"the process ended with {how}"}


def _serve(kind: Kind, numbers: list[int], seed: int, out: int) -> None:
    limit = _status("VmSize:") + ADDRESS_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number in numbers:
        used = int(time.process_time())
        resource.setrlimit(resource.RLIMIT_CPU, (used + HANGING_CPU_SECONDS, resource.RLIM_INFINITY))
        signal.setitimer(signal.ITIMER_REAL, HANGING_SECONDS)  # its signal ends the process, whatever it waits for
        try:
            size = kind.mutate(random.Random(f"{seed} {kind.name} {number}"))
        except Exception as error:
            raise SystemExit(f"{kind.name} {number} could not be made") from error
        result = _measured(kind, size)
        os.write(out, (json.dumps(result) + "\n").encode())


def _measured(kind: Kind, size: int) -> dict[str, Any]:
    """Read what lies there, and say how that went."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins at what is held now
    before, started = _status("VmRSS:"), time.process_time()
    outcome, failure = _outcome(kind)
    seconds, n_bytes = time.process_time() - started, _status("VmHWM:") - before
    if n_bytes > MEMORY_BYTES + MEMORY_TIMES * size:
        failure = failure or f"{n_bytes:,} bytes of memory for {size:,} bytes"
    if seconds > CPU_SECONDS + size / 2**20:
        failure = failure or f"{seconds:.1f} s for {size:,} bytes"
    return {"outcome": outcome, "failure": failure, "seconds": seconds, "n_bytes": n_bytes}


def _outcome(kind: Kind) -> tuple[str, str]:
    try:
        shown = kind.read()
        outcome = "valid"
    except KeelError as error:
        shown, outcome = str(error), "refused"
    except BaseException as error:
        places = "".join(traceback.format_tb(error.__traceback__, limit=-3))
        return "failed", f"{type(error).__name__}: {str(error)[:300]}\n{places}"
    if len(shown) > 4 * MAX_MESSAGE_CHARACTERS and outcome == "refused":
        return outcome, f"a message of {len(shown):,} characters"
    if shown != printable(shown) or "Traceback" in shown:
        return outcome, f"what is shown has control characters in it, or a traceback: {shown[:200]!r}"
    return outcome, ""


def _status(key: str) -> int:
    return int(Path("/proc/self/status").read_text().split(key)[1].split()[0]) * 1024


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Read a stranger's files of every kind.")
    parser.add_argument("--times", type=int, default=1000, help="mutations of each kind")
    parser.add_argument("--kind", action="append", help=f"one or more of: {', '.join(KINDS)}")
    parser.add_argument("--only", type=int, help="this mutation alone")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    kinds = [KINDS[name] for name in options.kind or KINDS]
    numbers = range(options.times) if options.only is None else [options.only]
    failures = 0
    print(HEADER, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name, tally in torture(Path(folder), kinds, numbers, options.seed):
            print(tally.row(name), flush=True)
            failures += len(tally.failures)
            for failure in tally.failures[:SHOWN_FAILURES]:
                print(f"  {name}, {printable(failure)}", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads do not survive a fork
    with suppress(KeyboardInterrupt):
        sys.exit(main())
