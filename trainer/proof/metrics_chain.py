"""The hashes at the end of the lines of `metrics.jsonl`, with `metrics.fingerprint`.

A step's line ends in a hash of itself, of the chain of the steps' fingerprints up to its step, and of the lines before
it, including those that have no hash, such as an evaluation's.
"""

from collections.abc import Iterable

from trainer.proof.chain import link, opened, sealed

_KEY = "fingerprint"


class MetricsChain:
    """The chain of the lines of one file."""

    def __init__(self, lines: Iterable[str]) -> None:
        """Continue the chain of these lines."""
        self._previous = ""
        for line in lines:
            found = opened_line(line)
            self._previous = found[1] if found else link(self._previous, line.removesuffix("\n"))

    def sealed(self, line: str, chain: str | None) -> str:
        """The next line as it stands in the file; `chain` is that of the fingerprints, None for a line without hash."""
        if chain is None:
            self._previous = link(self._previous, line)
            return line
        line, self._previous = sealed(line, _KEY, before(self._previous, chain))
        return line


def opened_line(line: str) -> tuple[str, str] | None:
    """A line's text and its hash, unchecked; None if it has none."""
    return opened(line.removesuffix("\n"), _KEY)


def before(previous: str, chain: str) -> str:
    """What a line's hash follows: the hash of the line before, and the chain of the fingerprints."""
    return f"{previous} {chain}"
