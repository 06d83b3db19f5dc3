"""The outcomes of a proof as one HTML file that loads nothing: a table of pairs, and what came out of each row."""

from collections.abc import Mapping, Sequence
from html import escape

from configs.untrusted import printable
from scripts.page.html import whole_file
from scripts.proving.run import BOUND, Outcome, Verdict
from scripts.proving.small import SmallJob
from trainer.report.units import duration

_SIGNS: dict[Verdict, str] = {"equal": "=", "wrong": "WRONG", "refused": "refused", "not tried": "not tried"}
_STYLE = """
:root { --back: #f6f7f9; --card: #fff; --text: #1b2330; --soft: #5b6675; --line: #dfe3e9;
  --good: #1a7f4b; --bad: #c4262e; }
@media (prefers-color-scheme: dark) {
  :root { --back: #11151b; --card: #191f27; --text: #e3e8ef; --soft: #98a4b3; --line: #2b333e;
    --good: #54c98a; --bad: #ff7b78; }
}
body { margin: 0 auto; padding: 24px; max-width: 1400px; background: var(--back); color: var(--text);
  font: 15px/1.5 system-ui, sans-serif; }
table { border-collapse: collapse; background: var(--card); font-size: 13px; }
th, td { border: 1px solid var(--line); padding: 3px 7px; text-align: left; font-variant-numeric: tabular-nums; }
.scroll { overflow-x: auto; }
.equal { color: var(--good); } .wrong { color: var(--bad); font-weight: 700; }
.refused, .not { color: var(--soft); font-size: 12px; }
pre { background: var(--card); border: 1px solid var(--line); padding: 12px; overflow-x: auto; }
"""


def page(job: str, small: SmallJob, found: Sequence[Outcome], techniques: Sequence[str], seconds: float) -> str:
    """Make the page.

    Args:
        job: the job's name.
        small: the small job that ran.
        found: the outcomes, in order.
        techniques: names of all techniques, in order.
        seconds: duration of the whole proof.
    """
    tried = [name for name in techniques if any(name in outcome.techniques for outcome in found)]
    head = f"<h1>keel prove {_text(job)}</h1><p>Largest relative difference that counts as equal: {BOUND:.0e}. "
    head += f"{len(found)} rows in {duration(seconds)}.</p>"
    notes = "".join(f"<li>{_text(note)}</li>" for note in small.notes)
    body = f"""{head}<ul>{notes}</ul>
<h2>Techniques and their pairs</h2>{_pairs(found, tried)}
<h2>Rows</h2>{_rows(found)}
<h2>The small job</h2><pre>{_text(small.text)}</pre>"""
    return whole_file(f"keel prove {_text(job)}", "style-src 'unsafe-inline'; base-uri 'none'", _STYLE, body)


def _text(text: str) -> str:
    return "\n".join(escape(printable(line)) for line in text.split("\n"))


def _pairs(found: Sequence[Outcome], techniques: Sequence[str]) -> str:
    """A table of techniques against each other; each alone on the diagonal."""
    verdicts = pair_verdicts(found)
    rows = ["<tr><th></th>" + "".join(f"<th>{_text(name)}</th>" for name in techniques) + "</tr>"]
    for one in techniques:
        cells = (_sign(verdicts.get(frozenset((one, other)))) for other in techniques)
        rows.append(f"<tr><th>{_text(one)}</th>{''.join(cells)}</tr>")
    return f'<div class="scroll"><table>{"".join(rows)}</table></div>'


def pair_verdicts(found: Sequence[Outcome]) -> Mapping[frozenset[str], Verdict]:
    """The verdict on each technique and each pair: a row of several that is equal proves all of its pairs."""
    verdicts: dict[frozenset[str], Verdict] = {}
    for outcome in found:
        names = outcome.techniques
        if len(names) <= 2:
            verdicts[frozenset(names)] = outcome.verdict
        elif outcome.verdict == "equal":
            for one in names:
                verdicts |= {frozenset((one, other)): "equal" for other in names if other != one}
    return verdicts


def _sign(verdict: Verdict | None) -> str:
    return f'<td class="{verdict}">{_SIGNS[verdict]}</td>' if verdict else "<td></td>"


def _rows(found: Sequence[Outcome]) -> str:
    heads = ("row", "ranks", "", "loss", "norm", "gradients", "weights", "seconds", "")
    rows = ["<tr>" + "".join(f"<th>{head}</th>" for head in heads) + "</tr>"]
    for outcome in found:
        figures = [f"{outcome.figures[key]:.1e}" if outcome.figures else "" for key in heads[3:7]]
        seconds = f"{outcome.seconds:.1f}" if outcome.seconds else ""
        verdict = f'<td class="{outcome.verdict}">{outcome.verdict}</td>'
        cells = "".join(f"<td>{cell}</td>" for cell in (*figures, seconds, _text(outcome.reason)))
        rows.append(f"<tr><td>{_text(outcome.name)}</td><td>{outcome.ranks}</td>{verdict}{cells}</tr>")
    return f'<div class="scroll"><table>{"".join(rows)}</table></div>'
