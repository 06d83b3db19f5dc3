"""Draw the README's picture from the folders of two runs of debug.toml; needs matplotlib.

python docs/pictures/draw.py STRAIGHT_RUN MOVED_RUN
"""

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt

HERE = Path(__file__).parent
MOVES = {0: "1 process", 100: "FSDP, 2 ranks", 200: "FSDP 2 x TP 2, 4 ranks"}
"""Steps at which the moved run changed its mesh."""


def losses(run: str) -> dict[int, float]:
    """Step -> loss of a run's metrics."""
    records = map(json.loads, Path(run, "metrics.jsonl").read_text().splitlines())
    return {record["step"]: record["loss"] for record in records}


def draw_curve(straight: str, moved: str) -> None:
    """The loss of a run on one process, and of one that changes its mesh."""
    one, other = losses(straight), losses(moved)
    figure, axes = plt.subplots(figsize=(7.5, 3.2), layout="constrained")
    axes.plot(list(one), list(one.values()), color="0.75", linewidth=5, label="one process throughout")
    axes.plot(list(other), list(other.values()), color="tab:blue", linewidth=1.4, label="moved twice")
    for step, name in MOVES.items():
        axes.axvline(step, color="0.8", linewidth=0.8, zorder=0)
        axes.annotate(name, (step + 4, 8.2), fontsize=8, color="0.35")
    worst = max(abs(other[step] - one[step]) / one[step] for step in one.keys() & other.keys())
    axes.set(xlabel="step", ylabel="loss", title=f"Largest relative difference of the two, in float32: {worst:.0e}")
    axes.title.set_fontsize(9)
    axes.legend(frameon=False, loc="center right", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(HERE / "loss_curve.svg", metadata={"Date": None})


if __name__ == "__main__":
    draw_curve(*sys.argv[1:])
