"""Draw the pictures of the README from what the runs and the parity table print; needs matplotlib.

python docs/pictures/draw.py curve STRAIGHT_RUN MOVED_RUN     (folders of two runs of debug.toml)
python docs/pictures/draw.py parity TABLE                     (the output of scripts/parity.py)
"""

import json
import re
import sys
from pathlib import Path

import matplotlib.pyplot as plt

HERE = Path(__file__).parent
MOVES = {0: "1 process", 100: "FSDP, 2 ranks", 200: "FSDP 2 x TP 2, 4 ranks"}
"""Steps at which the moved run changed its mesh."""
PARTS = ("loss", "gradient norm", "first gradients", "final weights")
ROW = re.compile(r"^(.{52})((?: +\d\.\de[-+]\d\d){4})", re.MULTILINE)


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


def draw_parity(table: str) -> None:
    """The largest relative differences of each row, on a logarithmic axis; 0 is drawn at the bottom."""
    rows = [list(map(float, figures.split())) for _, figures in ROW.findall(Path(table).read_text())]
    figure, axes = plt.subplots(figsize=(7.5, 3.2), layout="constrained")
    for part, values in zip(PARTS, zip(*rows, strict=True), strict=True):
        axes.scatter(range(1, len(rows) + 1), [max(value, 1e-17) for value in values], s=4, label=part)
    axes.axhline(1e-10, color="tab:red", linewidth=1)
    axes.annotate("bound", (1, 1.5e-10), color="tab:red", fontsize=8)
    axes.set(yscale="log", ylim=(5e-18, 1e-8), xlabel="row of the table", ylabel="relative difference")
    axes.legend(frameon=False, ncols=4, loc="upper right", fontsize=8, markerscale=2)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(HERE / "parity.svg", metadata={"Date": None})


if __name__ == "__main__":
    {"curve": draw_curve, "parity": draw_parity}[sys.argv[1]](*sys.argv[2:])
