"""Which run of a tracking service a launch writes to, where a written step can't be taken back.

The file next to the sink's own names that run. A launch continues it only if the last launch closed it and the new one
resumes after its last step. Otherwise (after a kill, or if the run goes back) the service may have steps of a future
that is abandoned, or lack some that it was given: then a new run there gets the whole history.
"""

import json
from pathlib import Path

from configs.files import write_atomically
from configs.untrusted import MAX_JSON_BYTES, parse_json, read_file


class Line:
    """The run of a tracking service, kept in a file."""

    def __init__(self, path: Path, first_step: int) -> None:
        """Read the file; `first_step` is the first that this launch may write."""
        self._path = path
        try:
            said = parse_json(read_file(path, MAX_JSON_BYTES))
            self.before: str | None = str(said["run"])
            self.continues = said["is_closed"] is True and int(said["last_step"]) < first_step
        except (OSError, ValueError, KeyError, TypeError):
            self.before = None
            self.continues = False
        self.last_step = first_step - 1

    def begin(self, run: str) -> None:
        """Record that this launch writes to `run`."""
        self._run = run
        self._write(is_closed=False)

    def close(self) -> None:
        """Record that all steps up to `last_step` are written."""
        self._write(is_closed=True)

    def _write(self, is_closed: bool) -> None:
        self._path.parent.mkdir(exist_ok=True)
        told = {"run": self._run, "last_step": self.last_step, "is_closed": is_closed}
        write_atomically(self._path, [json.dumps(told)])
