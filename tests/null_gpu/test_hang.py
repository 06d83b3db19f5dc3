"""A device that hangs while the host waits in a launch: the other threads of the process still run."""

import ctypes
import os
import threading
import time

import torch

from configs.schema import Compile
from parallelisms.compile import compiler_options

BLOCKED_MS = 2000
TICK_SECONDS = 0.01


def ticks_during_a_launch(options: dict, factor: float) -> int:
    """On a rank: how often another thread runs while a compiled function's launch blocks.

    Args:
        options: the compiler's.
        factor: makes the function another one, since a process keeps the launchers of equal code.
    """
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    x = torch.ones(1 << 10, device="cuda")
    compiled = torch.compile(lambda x: (factor * x.sin() + 1).exp(), options=options)
    compiled(x)
    ended = threading.Event()
    ticks = []

    def tick() -> None:
        while not ended.wait(TICK_SECONDS):
            ticks.append(time.monotonic())

    thread = threading.Thread(target=tick)
    thread.start()
    library = ctypes.CDLL(os.environ["LD_PRELOAD"])
    library.null_gpu_block(BLOCKED_MS)
    began = time.monotonic()
    compiled(x)
    returned = time.monotonic()
    ended.set()
    thread.join()
    assert returned - began > 0.9 * BLOCKED_MS / 1000, "the launch did not block"
    return sum(began < each < returned for each in ticks)


def test_the_watchdog_runs_while_a_launch_blocks(null_ranks):
    (ticks,) = null_ranks(1, ticks_during_a_launch, compiler_options(Compile()), 2.0)
    (with_torchs_default,) = null_ranks(1, ticks_during_a_launch, {}, 3.0)
    assert ticks > 20
    assert with_torchs_default < 5, "torch's default launcher no longer blocks other threads: the option may go"
