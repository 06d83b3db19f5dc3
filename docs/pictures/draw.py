"""Draw the README's pictures; needs matplotlib.

python docs/pictures/draw.py curve STRAIGHT_RUN MOVED_RUN    # folders of two runs of debug.toml
python docs/pictures/draw.py samples RUN                     # a run of debug.toml that samples after its saves
python docs/pictures/draw.py proof TABLE                     # the output of scripts/parity.py
"""

import json
import re
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
    one = losses(straight)
    other = losses(moved)
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


SHOWN_SAMPLES = 4


def draw_samples(run: str) -> None:
    """How a run continues "def main(", by `keel sample` in the command `samples` of checkpoint.after_save."""
    records = map(json.loads, Path(run, "metrics.jsonl").read_text().splitlines())
    logs = Path(run, "after_save", "samples")
    sampled = [record for record in records if (logs / f"step-{record['step']:08d}").is_dir()]
    last = len(sampled) - 1
    chosen = sorted({round(i * last / (SHOWN_SAMPLES - 1)) for i in range(SHOWN_SAMPLES)})
    figure, panels = plt.subplots(1, len(chosen), figsize=(7.5, 2.2), layout="constrained", squeeze=False)
    for panel, record in zip(panels[0], (sampled[i] for i in chosen), strict=True):
        printed = (logs / f"step-{record['step']:08d}.log").read_text()
        text = printed[printed.index("def main(") :].strip().rpartition("\n")[0]  # without the line on its speed
        shown = "\n".join(line[:34] for line in text.expandtabs(4).splitlines()[:11])
        panel.set_title(f"step {record['step']}, loss {record['validation_loss']:.2f}", fontsize=8, loc="left")
        panel.text(0, 1, shown, family="monospace", fontsize=5.5, va="top", parse_math=False)
        panel.axis("off")
    figure.savefig(HERE / "samples.svg", metadata={"Date": None})


FIGURE = r"(\d\.\de[+-]\d\d)"
ROW = re.compile(rf"(.+?)\s+{FIGURE}\s+{FIGURE}\s+{FIGURE}\s+{FIGURE}\s+[0-9a-f]{{12}}\s+(ok|FAILS)")
"""A row's name, its differences of loss, gradient norm, first step's gradients and final weights, and its sha."""

FLOOR = 1e-17
"""Where a difference of 0 is drawn."""


def draw_proof(table: str) -> None:
    """The differences of all rows of the parity table from one process, beside the bound."""
    rows = [match for line in Path(table).read_text().splitlines() if (match := ROW.fullmatch(line.strip()))]
    assert rows, f"{table} has no rows"
    figure, axes = plt.subplots(figsize=(7.5, 3.2), layout="constrained")
    for column, name in enumerate(("loss", "gradient norm", "first step's gradients", "final weights"), start=2):
        values = [max(float(row[column]), FLOOR) for row in rows]
        axes.plot(values, ".", markersize=3.5, label=name)
    axes.axhline(1e-10, color="tab:red", linewidth=1)
    axes.annotate("bound of the test", (0, 1.3e-10), fontsize=8, color="tab:red")
    axes.axhspan(FLOOR / 3, 2.2e-16, color="0.93", zorder=0)
    axes.annotate("one rounding of float64", (len(rows) - 1, 1.3e-17), fontsize=8, color="0.45", ha="right")
    axes.set(yscale="log", ylim=(FLOOR / 3, 1e-8), xlabel="row of the table", ylabel="largest relative difference")
    axes.set_title(f"{len(rows)} meshes and settings beside one process in eager PyTorch, in float64", fontsize=9)
    axes.legend(frameon=False, loc="upper right", fontsize=8, ncols=4, markerscale=2, handletextpad=0)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(HERE / "proof.svg", metadata={"Date": None})


if __name__ == "__main__":
    {"curve": draw_curve, "samples": draw_samples, "proof": draw_proof}[sys.argv[1]](*sys.argv[2:])
