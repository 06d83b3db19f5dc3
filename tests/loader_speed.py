"""How many tokens a second a rank's loader prepares of a job's sources: python -m tests.loader_speed [JOB]

Nothing trains beside it, so this is the most that steps can take from it. Words after the job override its config, such
as --data.sources for another kind of source. Token files and the tokenizer are there after a first start of the job.
"""

import sys
import time
from contextlib import closing

from configs.load import load
from trainer.data.loader import build_loader

SECONDS = 5.0


def main(job: str = "debug.toml", *overrides: str) -> None:
    config = load(job, overrides, 1).config
    tokens = 0
    with closing(build_loader(config, 0, 1, 0)) as loader:
        next(loader)  # which starts the thread
        began = time.perf_counter()
        while time.perf_counter() - began < SECONDS:
            tokens += sum(micro_batch.tokens.numel() for micro_batch in next(loader))
        seconds = time.perf_counter() - began
    print(f"{tokens / seconds / 1e6:.2f} million tokens/s in windows of {config.training.seq_len:,}")


if __name__ == "__main__":
    main(*sys.argv[1:])
