"""Published steps beside the plan's: `rows.toml`, each row with its source and the job that stands for it.

    python -m tests.published.compare [--markdown FILE] [--rows "torchtitan*"]

It prints predicted and published tokens per second of a GPU and the error of each row, then the rank correlation
(Spearman's) of MFU and of tokens per second, the median and the largest error, by family and in all.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import median
from typing import Any

import tomli

from configs.load import load
from trainer.planning.devices import device_named
from trainer.planning.flops import flops_per_token
from trainer.planning.step_time import estimate_step

ROWS = Path(__file__).with_name("rows.toml")
_DATA = ("--data.sources", '[{name = "random", kind = "synthetic"}]')


@dataclass(frozen=True)
class Compared:
    """A published row and its prediction."""

    family: str
    name: str
    predicted: float
    """Tokens per second of a GPU."""
    published: float
    flops: float
    """Model FLOPs of a token, over the peak of the GPU."""

    @property
    def error(self) -> float:
        """How much of the published throughput the prediction is above it."""
        return self.predicted / self.published - 1


def compared(pattern: str = "*") -> Iterator[Compared]:
    """The rows whose family or name matches."""
    for row in tomli.loads(ROWS.read_text())["rows"]:
        if fnmatchcase(row["family"], pattern) or fnmatchcase(row["name"], pattern):
            yield _compare(row)


def _compare(row: dict[str, Any]) -> Compared:
    config = load(row["job"], [*row["words"].split(), *_DATA], row["ranks"]).config
    device = device_named(row["device"])
    step = estimate_step(config, row["ranks"], device, row.get("gpus_per_host", 8))
    flops = flops_per_token(config.model, config.training.seq_len).causal / step.peak
    return Compared(row["family"], row["name"], step.tokens_per_second, row["tokens_per_second"], flops)


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float:
    """Spearman's: the correlation of the places in the two orders; equal values share their mean place."""

    def places(values: Sequence[float]) -> list[float]:
        return [sum(v < x for v in values) + (sum(v == x for v in values) - 1) / 2 for x in values]

    left, right = (places(values) for values in zip(*pairs, strict=True))
    mean = (len(left) - 1) / 2
    above = sum((a - mean) * (b - mean) for a, b in zip(left, right, strict=True))
    spread = sum((a - mean) ** 2 for a in left) * sum((b - mean) ** 2 for b in right)
    return above / spread**0.5 if spread else 1.0


def summary(rows: Sequence[Compared]) -> str:
    """One line about rows."""
    speed = rank_correlation([(row.predicted, row.published) for row in rows])
    mfu = rank_correlation([(row.predicted * row.flops, row.published * row.flops) for row in rows])
    worst = max(rows, key=lambda row: abs(row.error))
    return (
        f"{len(rows)} rows: rank correlation {speed:.3f} (of MFU {mfu:.3f}), median error "
        f"{median(abs(row.error) for row in rows):.1%}, mean {sum(row.error for row in rows) / len(rows):+.1%}, "
        f"worst {worst.error:+.1%} ({worst.name})"
    )


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Published steps beside the plan's.")
    parser.add_argument("--rows", default="*", help="only rows whose family or name matches")
    parser.add_argument("--markdown", type=Path, help="write the table to this file, too")
    options = parser.parse_args()
    rows = []
    lines = ["| row | predicted, tokens/s a GPU | published | error |", "|---|---|---|---|"]
    for row in compared(options.rows):
        rows.append(row)
        lines.append(f"| {row.family}: {row.name} | {row.predicted:,.0f} | {row.published:,.0f} | {row.error:+.1%} |")
        print(lines[-1], flush=True)
    if not rows:
        print(f"error: no row matches {options.rows!r}", file=sys.stderr)
        return 1
    families = {row.family: [each for each in rows if each.family == row.family] for row in rows}
    lines += ["", *(f"{family}: {summary(each)}" for family, each in families.items()), f"all: {summary(rows)}"]
    print("\n".join(lines[len(rows) + 2 :]))
    if options.markdown:
        options.markdown.write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
