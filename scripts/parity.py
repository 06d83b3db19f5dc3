"""Prove that the mesh does not change a run: compare each combination with one process in eager mode.

    python scripts/parity.py [JOB] [--rows PATTERN] [--dtype float64|float32|bfloat16] [--list]

A row (`parity_rows.py`) is a number of ranks and a set of config overrides. It passes if the loss, the gradient
norm, the first step's gradient of every parameter, and the final weights agree with the reference
(`parity_reference.py`) over all steps. A combination that cannot work is a row as well: the config must refuse it.

With `--exact`, all rows but those of torch's optimizers train with `training.reduction = "exact"` and one sequence per
micro-batch. Then the digests of all bits of losses, norms and weights (the column "sha") must be equal, too, except
between different tp, cp, ep, compilation, or, compiled, activation checkpointing.

    python scripts/parity.py --random N --seed S
    python scripts/parity.py --ranks N [--table.key VALUE ...] [--evaluate-at STEP,STEP] [--move-at STEP --moved KEYS]

`--random` tries N jobs and meshes that are drawn over all keys (`parity_draw.py`), and prints for each that goes
wrong a command of the second form, which tries that one.
"""

import argparse
import shlex
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if not __package__:  # run as a file
    import keel  # noqa: F401 - Keel's packages come first

from configs.errors import ConfigError
from configs.load import find_job_file, load
from configs.reading.overrides import split_flags, words
from scripts.command import add_job_argument, end, job_of, not_negative, positive, run_command, without_overrides
from scripts.parity_draw import Draw
from scripts.parity_random import require_steps, run_one, run_random
from scripts.parity_rows import BOUNDS, DTYPES, REFUSED, Difference, Row, can_be_exact, exact, same_bits, table

if TYPE_CHECKING:
    from scripts.rank_pool import RankPool


_OPTIONS_OF_FORM = {
    "rows": ("rows", "dtype", "exact", "list"),
    "--random": ("seed",),
    "--ranks": ("evaluate_at", "move_at", "moved", "stage", "teacher"),
}
"""The options of each form of the command, which would do nothing with another."""


def run_rows(
    pool: "RankPool", config_name: str, rows: Iterable[Row], overrides: tuple[str, ...] = ()
) -> Iterator[tuple[Row, Difference]]:
    """Yield the difference of each row from its reference, which is computed once per run."""
    from scripts.parity_compare import compare

    with tempfile.TemporaryDirectory() as folder:
        references = References(pool, config_name, Path(folder))
        for row in rows:
            run = overrides + row.run_overrides
            yield row, pool.run(row.ranks, compare, config_name, run + row.overrides, references.path(run))[0]


@dataclass
class References:
    """The references of a job, each computed once, by one rank of the pool."""

    pool: "RankPool"
    config_name: str
    folder: Path
    """Where they are written."""
    _paths: dict[tuple[str, ...], str] = field(default_factory=dict)

    def path(self, run: tuple[str, ...]) -> str:
        """The file of the reference with these overrides of run keys."""
        from scripts.parity_reference import reference

        if run not in self._paths:
            path = str(self.folder / f"reference-{len(self._paths)}.pt")
            self.pool.run(1, reference, self.config_name, run, path)
            self._paths[run] = path
        return self._paths[run]


def dtype_overrides(dtype: str) -> tuple[str, ...]:
    """Return overrides for the three types; with bfloat16, parameters and reductions stay float32."""
    state = "float32" if dtype == "bfloat16" else dtype
    return words({"training.dtype": state, "training.compute_dtype": dtype, "training.reduce_dtype": state})


def refusals(config_name: str, rows: Mapping[str, tuple[int, dict[str, object], str]]) -> Iterator[tuple[str, str]]:
    """Yield the name of each combination that cannot work, and the config's reason, "" if it accepts it."""
    for name, (ranks, overrides, part) in rows.items():
        try:
            load(config_name, words(overrides), world_size=ranks)
            yield name, ""
        except ConfigError as error:
            reason = " ".join(str(error).split())
            yield name, reason if part in reason else ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the selected rows and print a line for each; returns 1 if any failed, otherwise 0."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add_job_argument(parser, "parity.toml")
    parser.add_argument("--rows", default="*", help='shell pattern of row names, e.g. "TP 2*compiled*"')
    parser.add_argument("--dtype", choices=DTYPES, default="float64", help="type to compute in (default: %(default)s)")
    parser.add_argument("--exact", action="store_true", help="also prove that data-parallel meshes change no bit")
    parser.add_argument("--list", action="store_true", help="list the rows and their ranks, and exit")
    add = parser.add_argument_group("jobs that are drawn at random, instead of rows").add_argument
    add("--random", type=positive, metavar="N", help="try this many")
    add("--seed", type=int, default=0, help="decides what is drawn (default: %(default)s)")
    add("--ranks", type=positive, help="try one job, with further keys --table.key VALUE, on these ranks")
    add("--evaluate-at", type=_steps, default=(), metavar="STEPS", help="evaluate after these steps: 1,2")
    add("--move-at", type=not_negative, default=0, metavar="STEP", help="save and load after this step")
    add("--moved", type=_words, default=(), metavar="KEYS", help="machine keys after that, as one word")
    add("--teacher", type=_words, default=(), metavar="KEYS", help="of a job whose initial weights teach, as one word")
    add("--stage", action="append", default=[], metavar="TABLE", help="a table of [[stages]], in TOML")
    own, keys = without_overrides(sys.argv[1:] if arguments is None else arguments)
    options = parser.parse_args(own)
    if keys and not options.ranks:
        parser.error(f"unknown options: {shlex.join(keys)} (keys of a job need --ranks)")
    if idle := _idle_options(parser, options):
        parser.error(idle)
    return run_command(lambda _: _try(options, keys), "stopped")


def _idle_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> str:
    """The message about an option that does nothing in the form of the command that is asked for; "" if all do."""
    if options.ranks and options.random is not None:
        return "--random draws ranks and keys itself; leave it or --ranks out"
    form = "--ranks" if options.ranks else "rows" if options.random is None else "--random"
    for of, names in _OPTIONS_OF_FORM.items():
        for name in names if of != form else ():
            if getattr(options, name) != parser.get_default(name):
                flag = f"--{name.replace('_', '-')}"
                return f"{flag} goes with {of}" if of != "rows" else f"{flag} does not go with {form}"
    return ""


def _try(options: argparse.Namespace, keys: Sequence[str]) -> int:
    """Try what the command line asks for."""
    job = job_of(options)
    find_job_file(job)
    if options.ranks:
        moved = _by_key(options.moved)
        stages = tuple(options.stage)
        teacher = _by_key(options.teacher)
        drawn = Draw(options.ranks, _by_key(keys), options.evaluate_at, options.move_at, moved, stages, teacher)
        require_steps(job, drawn)
        return run_one(job, drawn)
    if options.random is not None:
        return run_random(job, options.random, options.seed)
    rows = [row for row in table() if fnmatchcase(row.name, options.rows)]
    rows = [exact(row) for row in rows if can_be_exact(row)] if options.exact else rows
    refused = {name: row for name, row in REFUSED.items() if fnmatchcase(name, options.rows)}
    if options.list or not (rows or refused):
        lines = [f"{row.name} ({row.ranks} ranks)" for row in rows] + [f"{name} (refused)" for name in refused]
        print("\n".join(lines) or f"no row matches {options.rows!r}")
        return 0 if lines else 1
    rows = _that_can_run(rows, options.dtype)
    if not (rows or refused):
        return 1
    failed = _print_table(rows, job, options.dtype, options.exact) if rows else 0
    return max(failed, _print_refusals(job, refused))


def _steps(text: str) -> tuple[int, ...]:
    """The type of an option that lists steps."""
    return tuple(map(not_negative, text.split(",")))


def _words(text: str) -> list[str]:
    """The type of an option that has several words in one."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from None


def _by_key(overrides: Sequence[str]) -> dict[str, object]:
    """Command-line words by key."""
    return {key.removeprefix("--"): value for key, value in split_flags(overrides)}


def _that_can_run(rows: list[Row], dtype: str) -> list[Row]:
    """The rows, without those of float8 matmuls if these cannot run; says so."""
    in_8_bits = [row for row in rows if "--float8.recipe" in row.run_overrides]
    reason = "" if find_spec("torchao") else "they need the package torchao (pip install 'torchao>=0.18')"
    if dtype != "float64":  # rounding to 8 bits magnifies the last bit of a wider type
        reason = "the reference rounds the same values only in float64"
    if not (in_8_bits and reason):
        return rows
    print(f"{len(in_8_bits)} rows of float8 matmuls are left out: {reason}")
    return [row for row in rows if row not in in_8_bits]


def _print_table(rows: list[Row], config_name: str, dtype: str, is_exact: bool) -> int:
    from scripts.rank_pool import RankPool

    failed = 0
    shas: dict[tuple[str, ...], str] = {}
    started = time.perf_counter()
    print(f"Largest relative difference from one process in eager mode, {dtype}")
    print(f"{'':52s} {'loss':>8s} {'norm':>8s} {'gradient':>8s} {'weights':>8s} {'sha':>12s}")
    with closing(RankPool(size=max(row.ranks for row in rows))) as pool:
        for row, difference in run_rows(pool, config_name, rows, dtype_overrides(dtype)):
            expected = shas.setdefault(same_bits(row), difference.sha) if is_exact else difference.sha
            fault = "" if difference.passes(row.bounds or dtype) else _fault(difference, row.bounds or dtype)
            if difference.sha != expected:
                fault = f"OTHER BITS than {expected[:12]}"
            failed += bool(fault)
            figures = " ".join(f"{value:8.1e}" for value in difference.values)
            print(f"{row.name:52s} {figures} {difference.sha[:12]}  {fault or 'ok'}", flush=True)
    bounds = _powers(dtype)
    what = ", with the same bits where the mesh is data-parallel" if is_exact else ""
    wider = {row.bounds for row in rows if row.bounds}
    for name in sorted(wider):
        what += f" ({name}: {_powers(name)})"
    print(f"{len(rows) - failed} of {len(rows)} rows within {bounds}{what}; {time.perf_counter() - started:.0f} s")
    return min(failed, 1)


def _fault(difference: Difference, bounds: str) -> str:
    kind, names = difference.wrong(bounds)
    return f"FAILS: {kind} of {names[0]}" if names else "FAILS"


def _powers(bounds: str) -> str:
    return ", ".join(f"{bound:.0e}" for bound in BOUNDS[bounds])


def _print_refusals(config_name: str, rows: Mapping[str, tuple[int, dict[str, object], str]]) -> int:
    failed = 0
    for name, reason in refusals(config_name, rows):
        failed += not reason
        print(f"{name:52s} {'refused: ' + reason if reason else 'NOT REFUSED'}")
    return min(failed, 1)


if __name__ == "__main__":
    end(main)
