"""Look at a run's data, which its order tells without an index: scripts/data.py COMMAND RUN ...

  step RUN STEP          show the documents that a step trains on
  find RUN TEXT          list the steps that train on a text; --document N instead of a text, --source NAME
  ledger RUN             per source, how many tokens the run has trained on, and how often; --step STEP

RUN is a run folder. `find` and `step` also tell of steps that are still to come, up to training.steps. `find` decodes
all token files to find a text, which takes about 0.1 s per megabyte; a document's number is found at once, at any size
of the corpus.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

if not __package__:  # run as a file
    import keel  # noqa: F401 - Keel's packages come first

from checkpoint.find import require_run
from configs.errors import UserError
from scripts.command import end, not_negative, parser_of, place_argument, positive, run_command
from trainer.report.console import Console
from trainer.report.units import count

if TYPE_CHECKING:
    import numpy as np

    from scripts.microscope.documents import Document
    from scripts.microscope.run_data import Reading, RunData, Use
    from trainer.data.token_file import TokenFolder

_EXCERPT = 60  # characters


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    options = _parser().parse_args(arguments)

    def work(console: Console) -> None:
        require_run(options.run)  # a wrong path costs no import of numpy
        options.command(options, console)

    return run_command(work, "stopped")


# --------------------------------------------------------------------------- commands


def step(options: argparse.Namespace, console: Console) -> None:
    """Print each sample of a step, and the documents in it."""
    from scripts.microscope.run_data import RunData

    run = RunData(options.run)
    if options.step < 1:
        raise UserError(f"step {options.step}: steps are numbered from 1")
    readings = list(run.readings(options.step))
    if options.json:
        for reading in readings:
            console.line(json.dumps(asdict(reading) | {"documents": [*_parts(run, reading, None)]}))
        return
    console.line(
        f"step {options.step} of {run.config.job.name}{_when(run, options.step)}: samples {readings[0].sample} to "
        f"{readings[-1].sample}, {run.view_of(options.step).seq_len} tokens each"
    )
    for reading in readings:
        epoch = "" if reading.epoch is None else f", epoch {reading.epoch}"
        window = "".join(f", tokens {start} to {stop - 1}" for start, stop in reading.pieces)
        console.line(f"sample {reading.sample}: {reading.source}{epoch}{window}")
        for part in _parts(run, reading, None if options.full else _EXCERPT):
            whole = "whole" if part["tokens"] == part["of"] else f"{part['tokens']} of {part['of']} tokens"
            loss = f", {part['with_loss']} with loss" if "with_loss" in part else ""
            console.line(f"  document {part['document']} ({whole}{loss}, {part['file']}): {part['text']}")


def find(options: argparse.Namespace, console: Console) -> None:
    """Print the documents that hold a text, and the steps that train on it."""
    from scripts.microscope.run_data import RunData

    run = RunData(options.run)
    if bool(options.text) == (options.document is not None):
        raise UserError("name either a text or --document N")
    places = islice(_places(run, options), options.most + 1)
    n_found = 0
    for source, document, start, stop in places:
        n_found += 1
        if n_found > options.most:
            console.line(f"and more: --most shows more than {options.most}")
            break
        uses = run.uses(source, start, stop)
        with_loss = _with_loss(run.tokens_of(source).folder, start, stop)
        if options.json:
            place = {"source": source, "document": document.number, "tokens": [start, stop]} | with_loss
            console.line(json.dumps(place | {"uses": [asdict(use) for use in uses]}))
            continue
        loss = f", {with_loss['with_loss']} of {stop - start} with loss" if with_loss else ""
        console.line(f"{source}: document {document.number}, tokens {start} to {stop - 1}{loss} ({document.file})")
        for line in _use_lines(run, uses, run.history.last_step if options.step is None else options.step):
            console.line(f"  {line}")
    if not n_found:
        console.line("found nowhere in the run's token files")


def ledger(options: argparse.Namespace, console: Console) -> None:
    """Print what the run has trained on, per source."""
    from scripts.microscope.run_data import RunData

    run = RunData(options.run)
    at = run.history.last_step if options.step is None else options.step
    rows = run.ledger(at)
    if options.json:
        for row in rows:
            console.line(json.dumps(asdict(row)))
        return
    total = sum(row.tokens for row in rows) or 1
    described = []
    for row in rows:
        epochs = "" if row.epochs is None else f", {row.epochs:.3f} epochs"
        passed_over = f", {row.passed_over} samples passed over after spikes" if row.passed_over else ""
        tokens = f"{count(row.tokens)} tokens ({row.tokens / total:.2%})"
        described.append((row.source, f"{tokens} in {row.samples:,} samples{epochs}{passed_over}"))
    console.table(f"{run.config.job.name} up to step {at:,}{_when(run, at)}", described)


# --------------------------------------------------------------------------- helpers


def _when(run: "RunData", step: int) -> str:
    newest = run.history.last_step
    last = run.config.training.steps
    if step > max(newest, last):
        return f" (never trained: the run ends at training.steps = {last})"
    return "" if step <= newest else f" (not yet trained; the newest checkpoint is of step {newest})"


def _parts(run: "RunData", reading: "Reading", excerpt: int | None) -> Iterator[dict[str, object]]:
    """The documents of a window: number, file, tokens in the window and in all, and text, cut to `excerpt`."""
    from scripts.microscope.documents import Documents

    if not reading.pieces:
        return
    folder = run.tokens_of(reading.source).folder
    found = [(document, piece) for piece in reading.pieces for document in Documents(folder).between(*piece)]
    for document, piece in found:
        start = max(document.start, piece[0])
        stop = min(document.stop, piece[1])
        shown = stop if excerpt is None else min(stop, start + 4 * excerpt)  # tokens of no text may come first
        text = _text(run, *folder.read_with_mask(start, shown - start))
        if excerpt is not None:
            text = repr(text[:excerpt]) + ("..." if len(text) > excerpt or shown < stop else "")
        yield {
            "document": document.number,
            "file": Path(document.file).name,
            "tokens": stop - start,
            "of": document.stop - document.start,
            "text": text,
        } | _with_loss(folder, start, stop)


def _text(run: "RunData", ids: "np.ndarray", gives_none: "np.ndarray | None") -> str:
    """The text of tokens; what gives no loss is in brackets."""
    tokens = ids.tolist()
    mask = [False] * len(tokens) if gives_none is None else gives_none.tolist()
    text = ""
    for is_masked, part in groupby(zip(mask, tokens, strict=True), key=itemgetter(0)):
        words = [token for _, token in part]
        decoded = run.tokenizer.decode(words) if run.tokenizer else " ".join(map(str, words))
        text += f"[no loss: {decoded}]" if is_masked else decoded
    return text


def _with_loss(folder: "TokenFolder", start: int, stop: int) -> dict[str, int]:
    """How many of some tokens give loss, under the key `with_loss`; nothing if the folder has no loss mask."""
    if not folder.has_mask:
        return {}
    _, gives_none = folder.read_with_mask(start, stop - start)
    return {} if gives_none is None else {"with_loss": int((~gives_none).sum())}


def _places(run: "RunData", options: argparse.Namespace) -> Iterator[tuple[str, "Document", int, int]]:
    """The request: source, document, and tokens [start, stop)."""
    from scripts.microscope.documents import Documents, occurrences

    names = [name for name, source in run.sources.items() if source.kind == "tokens"]
    if options.source is not None:
        run.tokens_of(options.source)
        names = [options.source]
    if not names:
        raise UserError('the run has no source of token files (kind = "tokens"), and only these can be searched')
    if options.document is not None:
        if len(names) > 1:
            raise UserError(f"--document needs --source, as the run has several: {', '.join(names)}")
        documents = Documents(run.tokens_of(names[0]).folder)
        if not 0 <= options.document < len(documents):
            raise UserError(f"{names[0]} has {len(documents):,} documents, numbered from 0; no {options.document}")
        document = documents[options.document]
        yield names[0], document, document.start, document.stop
        return
    if run.tokenizer is None:
        raise UserError("the job has no tokenizer.path, so that its token files can't be decoded; use --document")
    for name in names:
        for place in occurrences(options.text, Documents(run.tokens_of(name).folder), run.tokenizer):
            yield name, *place


def _use_lines(run: "RunData", uses: Iterator["Use"], at: int) -> Iterator[str]:
    """A line for each epoch: the steps, and whether the checkpoint of step `at` has seen them."""
    by_epoch: dict[int, list[int | None]] = {}
    for use in uses:
        by_epoch.setdefault(use.epoch, []).append(use.step)
    for epoch, found in by_epoch.items():
        steps = sorted({step for step in found if step is not None})
        yield f"epoch {epoch}: {_steps_said(steps, at)}"
        if passed_over := found.count(None):
            yield f"epoch {epoch}: {passed_over} samples passed over after a spike of the loss"
    if not by_epoch:
        yield f"not trained on within training.steps = {run.config.training.steps}"


def _steps_said(steps: list[int], at: int) -> str:
    if not steps:
        return "no step"
    said = f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps from {steps[0]} to {steps[-1]}"
    after = sum(step > at for step in steps)
    return said + (f", {'all' if after == len(steps) else after} after step {at}" if after else "")


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__, keeps_lines=True)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (step, find, ledger):
        one = commands.add_parser(command.__name__, description=command.__doc__)
        one.set_defaults(command=command)
        one.add_argument("run", type=place_argument, metavar="RUN", help="run folder")
        one.add_argument("--json", action="store_true", help="print a JSON object per line")
        if command is step:
            one.add_argument("step", type=not_negative, metavar="STEP", help="step, numbered from 1")
            one.add_argument("--full", action="store_true", help="print the whole text of each document's part")
        elif command is find:
            one.add_argument("text", nargs="?", metavar="TEXT", help="text to look for")
            one.add_argument("--document", type=int, metavar="N", help="number of a document, as `step` shows it")
            one.add_argument("--source", metavar="NAME", help="search only this source")
            one.add_argument(
                "--step", type=not_negative, metavar="STEP", help="the checkpoint to say it of (default: the newest)"
            )
            one.add_argument(
                "--most", type=positive, default=10, metavar="N", help="places to show (default: %(default)s)"
            )
        else:
            one.add_argument(
                "--step", type=not_negative, metavar="STEP", help="up to this step (default: newest checkpoint's)"
            )
    return parser


if __name__ == "__main__":
    end(main)
