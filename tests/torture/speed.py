"""Saving and loading against a plain write of the same bytes: python -m tests.torture.speed --megabytes 400

The plain write puts the same tensors one after the other into one file and syncs it. All three are done in turn,
several times, since disks and busy machines vary by more than what is to be seen; the best of each counts, and the
table shows every round.
"""

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch

from checkpoint.manager import CheckpointManager
from tests.torture.damage import make_manager, process_group

TENSOR_BYTES = 8 << 20


def measure(root: Path, megabytes: int) -> dict[str, float]:
    """Seconds of each way to put `megabytes` to a disk and to get them back, in one round."""
    state = {f"model.{n}": torch.randn(TENSOR_BYTES // 4) for n in range(max(1, (megabytes << 20) // TENSOR_BYTES))}
    seconds = {"plain write": timed(partial(plain_write, root / "plain", state))}
    for mode in ("sync", "async"):
        manager = begun(root / mode, mode)
        manager.save(1, state, {"tokens": 1})  # makes the staging memory
        manager.wait()
        seconds[f"stall, {mode}"] = timed(partial(manager.save, 2, state, {"tokens": 2}))
        seconds[f"save, {mode}"] = seconds[f"stall, {mode}"] + timed(manager.wait)
        manager.close()
    for verify in ("size", "hash"):
        manager = make_manager(root / "sync", verify=verify)
        seconds[f"load, {verify}"] = timed(partial(manager.resume, state))
    return seconds


def plain_write(path: Path, state: Mapping[str, torch.Tensor]) -> None:
    """The tensors' bytes, in a file that is on the disk afterwards."""
    with path.open("wb") as file:
        for tensor in state.values():
            file.write(tensor.numpy().data)
        file.flush()
        os.fsync(file.fileno())


def begun(folder: Path, mode: str) -> CheckpointManager:
    """A manager that is ready to save."""
    manager = make_manager(folder, mode=mode)
    manager.resume({})
    manager.begin_lineage()
    return manager


def timed(action: Callable[[], object]) -> float:
    """Seconds that it takes."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Time saving and loading.")
    parser.add_argument("--megabytes", type=int, default=400)
    parser.add_argument("--folder", type=Path, help="on the disk to be timed (default: that of temporary files)")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    rounds = []
    with process_group():
        for _ in range(options.rounds):
            root = Path(tempfile.mkdtemp(dir=options.folder))
            rounds.append(measure(root, options.megabytes))
            shutil.rmtree(root)
    best = {what: min(each[what] for each in rounds) for what in rounds[0]}
    for what, seconds in best.items():
        every = " ".join(f"{each[what]:.3f}" for each in rounds)
        speed = (
            f"{options.megabytes * 1.048576 / seconds:7.0f} MB/s, {best['plain write'] / seconds:5.2f} of plain write"
        )
        print(f"{what:12} {seconds:7.3f} s {speed}   all: {every}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
