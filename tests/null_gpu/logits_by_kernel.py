"""The kernel of the largest logits in Triton's interpreter, and all products: both results of some cases, as JSON.

Triton's own functions are interpreted as well, so the variable is set before it is imported, in a process of its own.
"""

import json
import os

os.environ["TRITON_INTERPRET"] = "1"

from parallelisms.attention import logits_kernel
from tests.null_gpu.brute_force import CASES, brute_force, case


def results(name: str) -> tuple[list[float], list[float]]:
    """By the kernel, and by all products."""
    given = case(name)
    return logits_kernel.largest_of_heads(*given).tolist(), brute_force(*given).tolist()


if __name__ == "__main__":
    logits_kernel.ROWS = logits_kernel.KEYS = 16  # several blocks
    print(json.dumps({name: results(name) for name in CASES}))
