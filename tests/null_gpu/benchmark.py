"""scripts/benchmark.py as it is, in a process with the device: only weights are not drawn, as in train.py here."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts import benchmark
from tests.null_gpu.step import weights_without_values

if __name__ == "__main__":
    with weights_without_values():
        code = benchmark.main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # NCCL's threads wait for a device that never answers
