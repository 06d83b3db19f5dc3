"""The words of a command of `checkpoint.after_save`, which is started without a shell."""

import os
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

PLACEHOLDERS = ("checkpoint", "step", "run", "output")
"""What may stand in braces in a command."""
_PLACEHOLDER = re.compile(r"\{(\w+)\}")


def words_of(command: str) -> list[str]:
    """Split a command as a shell splits it; nothing else that a shell does is done.

    Raises:
        ValueError: a quotation mark is not closed.
    """
    return shlex.split(command)


def unknown_placeholders(words: list[str]) -> list[str]:
    """The names in braces that stand for nothing."""
    return [name for word in words for name in _PLACEHOLDER.findall(word) if name not in PLACEHOLDERS]


def filled_in(words: list[str], values: Mapping[str, str]) -> list[str]:
    """Replace the placeholders. A word stays one word, and what is put in is not read again."""
    return [_PLACEHOLDER.sub(lambda found: values[found[1]], word) for word in words]


def search_path() -> str:
    """The folders in which commands are looked for: that of this Python first, which has `keel` and `lm_eval`."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
