"""Which of several runs is ahead: their losses at the last step that all have logged, as a table.

No claim is made that a difference is more than noise (`keel compare` tests that).
"""

from collections.abc import Sequence
from statistics import median

from scripts.page.recorded import Recorded
from trainer.report.units import count, fixed

_RANKED_BY = {"validation_loss": "validation loss", "loss": "loss"}


def ranking(runs: Sequence[Recorded]) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """Rank runs from the lowest validation loss, or the lowest loss if none has validated.

    Returns:
        The heads of the columns after the run's name, and for each run, best first, its place among `runs` and its
        cells. Runs without that loss come last.
    """
    heads: list[str] = []
    columns: list[dict[int, float]] = []
    for key, name in _RANKED_BY.items():
        curves = {number: dict(zip(*run.column(key), strict=True)) for number, run in enumerate(runs)}
        curves = {number: curve for number, curve in curves.items() if curve}
        common = set.intersection(*map(set, curves.values())) if curves else set()
        if common:
            heads.append(f"{name} at step {max(common):,}")
            columns.append({number: curve[max(common)] for number, curve in curves.items()})
    keys = [[column.get(number, float("inf")) for column in columns] for number in range(len(runs))]
    order = sorted(range(len(runs)), key=keys.__getitem__)
    rows = [(number, _cells(runs[number], [column.get(number) for column in columns])) for number in order]
    names = ["state", "step", *heads, "tokens/s, median", "reason"]
    if not any(cells[-1] for _, cells in rows):  # an empty column would take width from the others
        return names[:-1], [(number, cells[:-1]) for number, cells in rows]
    return names, rows


def _cells(run: Recorded, losses: Sequence[float | None]) -> list[str]:
    speeds = run.column("tokens_per_second")[1]
    told = ["-" if loss is None else fixed(loss) for loss in losses]
    why = run.reason if run.state in ("failed", "preempted") else ""
    return [run.state, f"{run.step:,}", *told, count(median(speeds)) if speeds else "-", why]
