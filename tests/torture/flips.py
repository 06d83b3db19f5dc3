"""One bit flipped in one gradient, found by a replay: python -m tests.torture.flips [--steps 1000] [--stretch 100]

The tiny job trains on two ranks (FSDP) and records fingerprints. First without a fault: all of its steps are replayed
by the real command, and none may differ. Then once more, with one bit flipped in each stretch between two checkpoints:
in a random step, on a random rank, in a random element of a random parameter's shard, from the lowest bit of the
mantissa to the sign, before the gradient norm is taken. Each stretch is replayed, and must name step, rank and
parameter. The exit code is 1 if anything is not as it must be.
"""

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.preloaded import FIRST, Server
from tests.torture.scene import TINY

ROOT = Path(__file__).resolve().parents[2]
FLIPS = "FLIPS"
"""Environment variable: by step, the rank, and numbers that choose parameter, element and bit, as JSON."""
PATIENCE_SECONDS = 3600


def plant() -> None:
    """Flip the bits that the environment asks for; called by each rank before `train.main`."""
    from trainer.step import Learner

    flips: dict[str, list[int]] = json.loads(os.environ[FLIPS])
    norm, done = Learner.grad_norm, [0]

    def patched(learner: Learner) -> torch.Tensor:
        done[0] += 1
        rank, which, element, bit = flips.get(str(done[0]), [None, 0, 0, 0])
        if rank is not None and os.environ["RANK"] == str(rank):
            name, bits = _bits(learner, which)
            bits[element % len(bits)] ^= 1 << bit if bit < 31 else -(1 << 31)
            with open(f"{learner.config.job.output_dir}/flips.txt", "a") as file:
                print(done[0], rank, name, bit, file=file)
        return norm(learner)

    Learner.grad_norm = patched  # type: ignore[method-assign]


def _bits(learner: Any, which: int) -> tuple[str, torch.Tensor]:
    """One of the parameters of which this rank has a part, and the bits of its gradient's."""
    parts = {name: p.grad.to_local() for name, p in learner.parameters.items()}
    filled = [name for name, part in parts.items() if part.numel()]
    name = filled[which % len(filled)]
    return name, parts[name].view(torch.int32).view(-1)


def train(server: Server, folder: Path, steps: int, stretch: int, flips: dict[int, list[int]]) -> None:
    """Train with planted flips."""
    words = (
        f"--config {TINY} --job.output_dir {folder} --training.steps {steps} --lr_schedule.total_steps {steps} "
        f"--checkpoint.interval {stretch} --metrics.interval 50 --metrics.tensorboard false --metrics.fingerprint true"
    )
    environment = {FIRST: "tests.torture.flips:plant", FLIPS: json.dumps(flips)}
    output = folder.with_suffix(".out")
    children = server.start_ranks(2, words, folder.parent, output, environment)
    codes = [child.wait(PATIENCE_SECONDS) for child in children]
    assert codes == [0, 0], output.read_text()


def keel(*words: str) -> tuple[int, str]:
    """Run the command; returns its exit code and what it printed."""
    command = [sys.executable, str(ROOT / "scripts" / "keel.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS)
    return done.returncode, done.stdout + done.stderr


def main() -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="Flip bits in gradients, and see that replays find them.")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--stretch", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    dice, steps, stretch = random.Random(options.seed), options.steps, options.stretch
    bad = 0
    with tempfile.TemporaryDirectory() as temporary, Server(Path(temporary) / "tmp") as server:
        clean, flipped = Path(temporary) / "clean", Path(temporary) / "flipped"
        train(server, clean, steps, steps, {})
        code, said = keel("replay", str(clean), "--step", str(steps))
        bad += code != 0
        print(f"no flip: {said.splitlines()[-1]}", flush=True)
        flips = {
            begin + dice.randrange(stretch) + 1: [dice.randrange(2), *(dice.randrange(1 << 20) for _ in range(2)), bit]
            for begin, bit in zip(range(0, steps, stretch), dice.sample(range(32), steps // stretch), strict=True)
        }
        train(server, flipped, steps, stretch, flips)
        for line in (flipped / "flips.txt").read_text().splitlines():
            step, rank, name, bit = line.split()
            code, said = keel("replay", str(flipped), "--step", str(-(-int(step) // stretch) * stretch))
            pattern = rf"step {step} is the first.*the gradient of {re.escape(name)}, on rank {rank}\b"
            found = code == 1 and re.search(pattern, said, re.DOTALL) is not None
            bad += not found
            print(f"step {step}, rank {rank}, {name}, bit {bit}: {'named' if found else said}", flush=True)
        bad += len((flipped / "flips.txt").read_text().splitlines()) != len(flips)
    return min(bad, 1)


if __name__ == "__main__":
    sys.exit(main())
