"""Runs the rows of a proof: each technique alone, then rows that hold their pairs, and what is wrong in those."""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from configs.errors import ConfigError
from configs.load import load
from scripts.parity import References
from scripts.parity_rows import BOUNDS, Difference, Row
from scripts.proving.techniques import Combination, Search, Technique, name_of, row_of

if TYPE_CHECKING:
    from scripts.rank_pool import RankPool

Verdict = Literal["equal", "wrong", "refused", "not tried"]
BOUND = BOUNDS["float64"][0]
FLOAT32 = "to the round-off of float32"
"""How the reason of an outcome begins that is equal by the bounds of a model that casts to float32 itself."""


@dataclass(frozen=True)
class Outcome:
    """What came out of a row."""

    name: str
    techniques: tuple[str, ...]
    ranks: int
    verdict: Verdict
    reason: str = ""
    """Why it was refused or not tried, or what is wrong, in words."""
    figures: dict[str, float] = field(default_factory=dict)
    """Largest relative differences of loss, norm, gradients, and weights with buffers."""
    wrong: tuple[str, ...] = ()
    """Names of the first that is wrong: initial values, gradients (in the order of the backward pass), or buffers and
    weights after the last step."""
    block: str = ""
    """The first block whose activations differ; empty if none does."""
    seconds: float = 0.0


_MARGIN = 10
"""Times the effect of one change by float32's round-off: a model computes in float32 many times."""
_WIDEST = (1e-2, 5e-1, 1e-2, 1e-1)
"""The widest bounds of a model that amplifies round-off, which grows from step to step: the norm of Gemma 4's fourth
step moves by 0.2. The first gradients decide: they name a fault."""


def call(function: Callable, *arguments: Any) -> Any:
    """Call a function, as a rank does it; a test of a mistake calls it in a process that has the mistake."""
    return function(*arguments)


class Prover:
    """Compares combinations of techniques with one process."""

    def __init__(self, pool: "RankPool", job: str, folder: Path, on_ranks: Callable = call) -> None:
        """
        Args:
            pool: the ranks.
            job: the small job's file.
            folder: for the references.
            on_ranks: calls a function on each rank, in place of `call`.
        """
        self._pool = pool
        self._job = job
        self._references = References(pool, job, folder)
        self.on_ranks = on_ranks
        self._config = load(job, world_size=1).config
        self._expected: dict[tuple[str, ...], Any] = {}
        self._refusals: dict[Combination, str] = {}
        self._own_float32: str | None = None
        self._effects: dict[tuple[str, ...], tuple[float, ...]] = {}

    def row(self, techniques: Combination) -> Row:
        """The row of a combination."""
        training = self._config.training
        return row_of(techniques, training.global_batch_size, 1 if training.reduction == "exact" else None)

    def refusal(self, techniques: Combination) -> str:
        """The job's reason to refuse a combination, in one line; "" if it accepts it."""
        if techniques not in self._refusals:
            from trainer.planning.unknown_names import require_known_names

            row = self.row(techniques)
            try:
                require_known_names(load(self._job, row.run_overrides + row.overrides, world_size=row.ranks))
                self._refusals[techniques] = ""
            except ConfigError as error:
                place = rf"\S*{re.escape(Path(self._job).name)}:\d+: "  # of a file that nobody has seen
                self._refusals[techniques] = " ".join(re.sub(place, "", str(error)).split())
        return self._refusals[techniques]

    def outcome(self, techniques: Combination) -> Outcome:
        """Train with a combination and compare."""
        row = self.row(techniques)
        what = (row.name, tuple(each.name for each in techniques), row.ranks)
        if reason := self.refusal(techniques):
            return Outcome(*what, "refused", reason)
        started = time.perf_counter()
        try:
            difference = self.difference(row)
        except RuntimeError as error:  # of a rank, with its traceback
            is_refusal, reason = error_in(str(error))
            return Outcome(*what, "refused" if is_refusal else "wrong", reason, seconds=time.perf_counter() - started)
        figures = dict(zip(("loss", "norm", "gradients", "weights"), difference.values, strict=True))
        if difference.passes("float64"):
            return Outcome(*what, "equal", figures=figures, seconds=time.perf_counter() - started)
        is_usual = difference.passes("own float32")
        if (place := self.own_float32()) and (is_usual or difference.is_within(self._wider_bounds(row.run_overrides))):
            reason = f"{FLOAT32}, in which the model itself computes {place}"
            if not is_usual:
                reason += f", and which moves its gradients by {self._effects[row.run_overrides][2]:.0e}"
            return Outcome(*what, "equal", reason, figures, seconds=time.perf_counter() - started)
        kind, wrong = difference.wrong()
        block = self._first_block_apart(row)
        reason = _in_words(difference, kind, wrong, block)
        return Outcome(*what, "wrong", reason, figures, tuple(wrong), block, time.perf_counter() - started)

    def _wider_bounds(self, run: tuple[str, ...]) -> list[float]:
        """The bounds of a model that computes in float32 itself, as wide as a change of its last bits moves it."""
        if run not in self._effects:
            from scripts.proving.own_types import effect_of_round_off

            path = self._references.path(run)
            self._effects[run] = self._pool.run(1, effect_of_round_off, self._job, run, path)[0]
        figures = zip(BOUNDS["own float32"], self._effects[run], _WIDEST, strict=True)
        return [max(bound, min(_MARGIN * effect, widest)) for bound, effect, widest in figures]

    def own_float32(self) -> str:
        """The module in which the model casts to float32; "" if it computes in the type that it is given."""
        if self._own_float32 is None:
            from scripts.proving.own_types import own_float32

            self._own_float32 = self._pool.run(1, own_float32, self._job, ())[0]
        return self._own_float32

    def difference(self, row: Row) -> Difference:
        """Train a row, and evaluate a batch on the way; returns the difference from one process."""
        from scripts.parity_compare import Detour, compare

        path = self._references.path(row.run_overrides)
        words = row.run_overrides + row.overrides
        detour = Detour(evaluate_at=(1,))
        found: Difference = self._pool.run(row.ranks, self.on_ranks, compare, self._job, words, path, detour)[0]
        return found

    def _first_block_apart(self, row: Row) -> str:
        from scripts.proving.activations import activations, first_block_apart

        if row.run_overrides not in self._expected:
            self._expected[row.run_overrides] = self._pool.run(1, activations, self._job, row.run_overrides)[0]
        overrides = row.run_overrides + row.overrides
        found = self._pool.run(row.ranks, self.on_ranks, activations, self._job, overrides)[0]
        return first_block_apart(found, self._expected[row.run_overrides], BOUND)


def prove_all(prover: Prover, techniques: Sequence[Technique], ranks: int, every_pair: bool) -> Iterator[Outcome]:
    """Yield the outcomes of one process, of each technique alone, and of rows that hold their pairs.

    A technique that is wrong alone is not tried with others. Of a row that is wrong, techniques are left out as long as
    it stays wrong.
    """
    yield prover.outcome(())
    right: list[Technique] = []
    for technique in techniques:
        if technique.ranks > ranks:
            yield not_tried((technique,), f"needs {technique.ranks} ranks: --ranks {technique.ranks}")
            continue
        outcome = prover.outcome((technique,))
        right += [technique] if outcome.verdict == "equal" else []
        yield outcome
    search = Search(right, ranks, prover.refusal, every_pair)
    pairs = search.pairs()
    for pair, reason in pairs.refused.items():
        yield Outcome(name_of(pair), tuple(each.name for each in pair), prover.row(pair).ranks, "refused", reason)
    for pair, needed in pairs.too_large.items():
        yield not_tried(pair, f"needs {needed} ranks: --ranks {needed}")
    known_wrong: list[Combination] = []
    for combination in search.rows(pairs.possible):
        if any(set(wrong) <= set(combination) for wrong in known_wrong):
            continue
        outcome = prover.outcome(combination)
        yield outcome
        if outcome.verdict == "wrong":
            for technique in combination:  # one after the other is left out, for good if the rest is wrong
                smaller = tuple(each for each in combination if each is not technique)
                if len(smaller) > 1:
                    outcome = prover.outcome(smaller)
                    yield outcome
                    if outcome.verdict == "wrong":
                        combination = smaller
            known_wrong.append(combination)


def not_tried(techniques: Combination, reason: str) -> Outcome:
    """The outcome of a row that does not run."""
    ranks = row_of(techniques, batch=1).ranks
    return Outcome(name_of(techniques), tuple(each.name for each in techniques), ranks, "not tried", reason)


def error_in(trace: str) -> tuple[bool, str]:
    """Whether a rank's traceback ends in a refusal of Keel's, and its reason, or what failed.

    The line that names the error may be followed by advice.
    """
    lines = trace.strip().splitlines()
    last = next(
        (line for line in reversed(lines) if re.match(r"[\w.]+(Error|Exception|Unsupported)\b", line)), lines[-1]
    )
    if last.startswith("configs.errors."):
        return True, last.partition(": ")[2]
    return False, f"a rank failed: {last}"


def _in_words(difference: Difference, kind: str, wrong: Sequence[str], block: str) -> str:
    """What is wrong: tensors, values, and where it begins."""
    count = f", the first of {len(wrong)}" if len(wrong) > 1 else ""
    parts = [f"{kind} of {wrong[0]}{count}"] if kind in ("initial value", "gradient", "buffer", "weight") else []
    scalars = {"loss": difference.loss, "norm": difference.norm}
    parts += [f"{name} {value:.1e} off" for name, value in scalars.items() if not value <= BOUND]
    parts += ["the first loss is right"] * (difference.first_loss <= BOUND)
    parts += ["the ranks hold different losses or norms"] * bool(difference.stopped)
    parts.append(f"activations part in {block}" if block else "activations of all blocks agree")
    return "; ".join(parts)
