"""Damage of every kind to every file of a checkpoint: python -m tests.torture.damage --times 200 [--seed 0]

One bit is flipped, or the file cut short, lengthened, or a page of it zeroed, as disks and networks do it; then the
checkpoint is verified, and a run tries to go on from it. Both must refuse, and name the file.
"""

import argparse
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from checkpoint.manager import CheckpointManager
from checkpoint.manifest import Damaged, step_folder
from checkpoint.reader import Description, Log
from configs.schema import Checkpoint

PAGE_BYTES = 4096


def flip_a_bit(content: bytearray, dice: random.Random) -> None:
    """One bit, anywhere."""
    content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)


def cut(content: bytearray, dice: random.Random) -> None:
    """The end is missing."""
    del content[dice.randrange(len(content)) :]


def lengthen(content: bytearray, dice: random.Random) -> None:
    """Something follows."""
    content += dice.randbytes(dice.randint(1, 100))


def zero_a_page(content: bytearray, dice: random.Random) -> None:
    """A page that never reached the disk."""
    start = dice.randrange(len(content)) // PAGE_BYTES * PAGE_BYTES
    page = content[start : start + PAGE_BYTES]
    content[start : start + PAGE_BYTES] = bytes(len(page)) if any(page) else b"\1" * len(page)


Kind = Callable[[bytearray, random.Random], None]
KINDS: tuple[Kind, ...] = (flip_a_bit, flip_a_bit, flip_a_bit, cut, lengthen, zero_a_page)


def torture(folder: Path, times: int, seed: int = 0) -> Counter:
    """Damage a checkpoint `times` times, each time anew; raises AssertionError if once it goes unseen.

    Returns: how often what was done to which file, by ("flip_a_bit", "trainer.json").
    """
    dice, done = random.Random(seed), Counter[tuple[str, str]]()
    with process_group():
        checkpoint = write_checkpoint(folder)
        files = sorted(checkpoint.iterdir())
        for number in range(times):
            path, kind = files[number % len(files)], dice.choice(KINDS)
            original = path.read_bytes()
            content = bytearray(original)
            kind(content, dice)
            path.write_bytes(content)
            assert_refused(folder, path, kind.__name__)
            path.write_bytes(original)
            done[kind.__name__, path.name] += 1
        assert resume(folder) == {"tokens": 7}
    return done


def assert_refused(folder: Path, path: Path, what: str) -> None:
    """Assert that nothing goes on from the checkpoint, and that the damaged file is named."""
    try:
        resume(folder)
    except Damaged as error:
        message = str(error)
    else:
        raise AssertionError(f"{what} of {path.name} was not seen")
    assert f"is damaged: {path.name} " in message, f"{what} of {path.name}: {message}"


def state() -> dict[str, torch.Tensor]:
    """Some tensors, about 100 KB."""
    generator = torch.Generator().manual_seed(0)
    model = {f"model.layers.{n}.weight": torch.randn(50, 64, generator=generator) for n in range(4)}
    return model | {f"optimizer.{name}.exp_avg": tensor * 2 for name, tensor in model.items()}


def write_checkpoint(folder: Path) -> Path:
    """The one that is damaged."""
    manager = make_manager(folder)
    manager.resume(state())
    manager.begin_lineage()
    manager.save(1, state(), {"tokens": 7})
    manager.close()
    return step_folder(folder, 1)


def resume(folder: Path) -> dict | None:
    """Go on from the newest checkpoint; returns the trainer state."""
    return make_manager(folder).resume(state())


def make_manager(folder: Path, config: dict[str, Any] | None = None, **settings: Any) -> CheckpointManager:
    """The manager of one rank that says nothing."""
    table = Checkpoint(**{"mode": "sync", **settings})

    return CheckpointManager(folder, table, Description(config or {}, {}), Log())


@contextmanager
def process_group():
    """A process group of one, unless there is one."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Damage a checkpoint again and again.")
    parser.add_argument("--times", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        done = torture(Path(folder), options.times, options.seed)
    for (kind, name), count in sorted(done.items()):
        print(f"{kind:12} {name:14} {count:4}, all refused")
    print(f"{sum(done.values())} in all ({time.monotonic() - started:.0f} s)")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
