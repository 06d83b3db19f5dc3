"""A rank's report when a step does not end, and what follows from all reports.

`hangs/step-N/rank-R.txt` has a rank's Python stacks and its last collectives, and on GPUs `nccl_trace_rank_R` all that
torch's flight recorder has of them: `torchfrtrace` compares the ranks' (`docs/faults.md`). Torch numbers the
collectives of each process group, so the rank that the others wait for is the one with the lowest number.
"""

import faulthandler
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from configs.files import open_plain, replacing
from parallelisms.nccl import TRACE
from parallelisms.torch_internals import collectives_issued, last_collectives, recorded_by_nccl
from trainer.guards.peers import Beat

SHOWN_COLLECTIVES = 50


def hang_folder(run_folder: Path, step: int) -> Path:
    """Where the ranks write their reports of a hang after `step` steps."""
    return run_folder / "hangs" / f"step-{step:08d}"


def write_report(path: Path, beat: Beat, told: str) -> dict[str, int]:
    """Append this rank's report to `path`; returns how many collectives it has issued, by group.

    Raises:
        OSError: the file cannot be written.
    """
    issued = collectives_issued()
    path.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(open_plain(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "a", encoding="utf-8") as file:
        file.write(
            f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {told}\n"
            f"{beat}: {beat.doing} after step {beat.step}, for {time.time() - beat.since:.0f} s\n\n"
            "Python stacks:\n"
        )
        file.flush()  # faulthandler writes to the file descriptor, bypassing Python's buffer
        faulthandler.dump_traceback(file, all_threads=True)
        counts = "".join(f"  {group}: {count}\n" for group, count in issued.items())
        lines = "".join(f"  {line}\n" for line in last_collectives(SHOWN_COLLECTIVES))
        file.write(f"\nCollectives issued, by group:\n{counts}\nThe last ones, oldest first:\n{lines}\n")
    if recorded := recorded_by_nccl():
        with replacing(path.with_name(f"{TRACE}{beat.rank}")) as trace:
            trace.write(recorded)
    return issued


def late(issued: Mapping[int, Mapping[str, int]]) -> dict[int, str]:
    """The ranks that others wait for, each with the reason, given what each rank has issued."""
    furthest: dict[str, int] = {}
    for counts in issued.values():
        for group, count in counts.items():
            furthest[group] = max(count, furthest.get(group, 0))
    return {
        rank: f"has not arrived at collective {furthest[group]} of {group}"
        for rank, counts in issued.items()
        for group, count in counts.items()
        if count < furthest[group]
    }


def line_of_hang(told: Mapping[str, Any], reasons: str, folder: Path) -> str:
    """The one-line report of a hang."""
    return (
        f"step {told['step'] + 1} ({told['doing']}) has not ended for {told['seconds']:.0f} s: "
        f"{reasons or 'all ranks have issued the same collectives'}. Each rank's stacks are in {folder}"
    )
