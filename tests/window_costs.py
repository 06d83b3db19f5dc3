"""What a window of attention takes on a CPU, and what all earlier tokens take: python -m tests.window_costs

    [--tokens 8192 32768] [--windows 4096 1024 512]

Each row is a process: attention of 4 heads of 64, 2 of keys and values, in float32, forward and backward, on one core.
CPU seconds are the median of three; memory is what the passes add to the process at the peak.
"""

import argparse
import resource
import statistics
import subprocess
import sys
import time

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
TIMES = 3


def measure(tokens: int, window: int) -> tuple[float, float]:
    """CPU seconds and GiB of both passes; window 0: all earlier tokens."""
    import torch

    from models.attention import attend
    from models.documents import attend_near

    torch.set_num_threads(1)
    inputs = [torch.randn(1, heads, tokens, HEAD_DIM, requires_grad=True) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = []
    for _ in range(TIMES):
        began = time.process_time()
        out = attend_near(*inputs, None, window) if window else attend(*inputs, None)
        torch.autograd.grad(out.sum(), inputs)
        seconds.append(time.process_time() - began)
    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return statistics.median(seconds), kib / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--windows", type=int, nargs="+", default=[4096, 1024, 512])
    options = parser.parse_args()
    print(f"{'window':>8}" + "".join(f"{f'{tokens:,} tokens':>24}" for tokens in options.tokens))
    for window in (0, *options.windows):
        cells = []
        for tokens in options.tokens:
            code = f"from tests.window_costs import measure; print(*measure({tokens}, {window}))"
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
            seconds, gib = map(float, done.stdout.split())
            cells.append(f"{seconds:>12.2f} s {gib:>6.2f} GiB")
        print(f"{window or 'all':>8}" + "".join(f"{cell:>24}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
