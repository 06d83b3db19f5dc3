"""A job whose device hangs in its fourth step, and how soon that is reported: python tests/gpu/hang.py WORDS"""

import ctypes
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # when it is run as a file

from tests.gpu.runs import train

HUNG_SECONDS = 40
STEP = 4


def hang() -> None:
    """Keep the device busy; on the null GPU, the launch itself."""
    import torch

    if "KEEL_NULL_GPUS" in os.environ:
        ctypes.CDLL(os.environ["LD_PRELOAD"]).null_gpu_block(1000 * HUNG_SECONDS)
        torch.ones(1, device="cuda")
    else:
        torch.cuda._sleep(int(1.8e9 * HUNG_SECONDS))  # in cycles


def main() -> int:
    """Train, with a step in which the device hangs; returns the exit code."""
    import train

    def hang_in_a_step() -> None:
        from trainer.step import Learner

        gradients, calls = Learner.gradients, [0]

        def hanging(self: Learner, *arguments: Any) -> Any:
            calls[0] += 1
            if calls[0] == STEP:
                hang()
            return gradients(self, *arguments)

        Learner.gradients = hanging  # type: ignore[method-assign]

    let_segments_grow = train.let_segments_grow

    def after_the_checks(environment: Any) -> None:
        let_segments_grow(environment)  # which must come before torch
        hang_in_a_step()

    train.let_segments_grow = after_the_checks
    if "KEEL_NULL_GPUS" not in os.environ:
        return train.main()
    from tests.null_gpu.step import weights_without_values

    with weights_without_values():
        return train.main()


def seconds_until_reported(folder: Path, timeout_seconds: int) -> float:
    """Train the small job into a hang; seconds after which run.log speaks of it. Raises: Failed, LookupError."""
    shutil.rmtree(folder, ignore_errors=True)
    words = f"--training.steps {STEP + 1} --job.timeout_seconds {timeout_seconds}"
    train(folder, words, program="tests/gpu/hang.py")
    text = (folder / "run.log").read_text()
    reported = re.search(r"has not ended for (\d+) s", text)
    if reported is None or not list((folder / "hangs").rglob("rank-*.txt")):
        raise LookupError("run.log says nothing of a hang, or no rank has written its stacks")
    return float(reported[1])


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
