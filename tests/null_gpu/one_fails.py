"""A job of two ranks on GPUs: in its second step rank 1 fails, and a launch of rank 0's does not return."""

import ctypes
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

import train
from configs.schema import Compile
from parallelisms.compile import compiler_options
from tests.null_gpu.step import weights_without_values
from trainer.step import Learner

_LONG_MS = 600_000


def main() -> int:
    """Run train.py with the mistake in it."""
    compute = Learner.gradients
    launch = torch.compile(lambda x: x.sin() + 1, options=compiler_options(Compile()))
    calls = []

    def gradients(self, *arguments):
        calls.append(None)
        launch(torch.ones(8, device="cuda"))  # the first time, it is compiled
        if len(calls) == 2 and os.environ["RANK"] == "1":
            raise RuntimeError("planted")
        if len(calls) == 2:
            ctypes.CDLL(os.environ["LD_PRELOAD"]).null_gpu_block(_LONG_MS)
            launch(torch.ones(8, device="cuda"))
        return compute(self, *arguments)

    Learner.gradients = gradients
    with weights_without_values():
        return train.main()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
