"""Files and texts that a stranger may have written: read within bounds, shown without what a terminal would obey.

A folder that somebody hands on may hold a pipe under the name of a file (reading it never ends), a file of terabytes
that takes no room on a disk, JSON nested deeper than a parser can follow, or a name with an escape sequence in it that
redraws the screen of whoever looks at it. docs/security.md says what is bounded, and what is not.
"""

import errno
import json
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

MAX_JSON_BYTES = 32 << 20
"""Of a JSON file that describes something; the largest in use, indexes of Hugging Face's largest models, have 10 MB."""
MAX_DEPTH = 64
"""Of objects and lists in one another."""
MAX_MESSAGE_CHARACTERS = 16_384
"""Of an error's text."""

_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters but for the line's end and the tab; marks that turn the direction of writing; halves of
characters, which can't be printed at all."""


def read_file(path: Path, max_bytes: int) -> bytes:
    """The content of a regular file of at most `max_bytes`.

    Raises: OSError, whose `strerror` is fit for a message, also for a pipe, a device, a folder and a larger file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # to open a pipe would wait for a writer
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if status.st_size > max_bytes:
            raise OSError(
                errno.EFBIG, f"its {status.st_size:,} bytes are more than the {max_bytes:,} allowed", str(path)
            )
        return file.read(status.st_size)  # a larger number would be allocated as it is


def parse_json(content: str | bytes) -> Any:
    """The value of a JSON text. Raises: ValueError, also for one that is nested deeper than MAX_DEPTH."""
    try:
        value = json.loads(content)
    except RecursionError:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels") from None
    require_shallow(value)
    return value


def require_shallow(value: Any) -> None:
    """Raise ValueError if dicts and lists are nested in one another deeper than MAX_DEPTH."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [item for node in level for item in _items(node) if isinstance(item, (dict, list))]
        if not level:
            return
    raise ValueError(f"nested deeper than {MAX_DEPTH} levels")


def require_64_bits(value: Any) -> None:
    """Raise ValueError if a number in shallow dicts and lists is beyond 64 bits: no shape, count or step is, and what
    Python computes with it may be no number that it can print, or turn into a float."""
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError("a number in it is beyond 64 bits")
    for item in _items(value):
        require_64_bits(item)


def _items(node: Any) -> Iterable[Any]:
    return node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()


def printable(text: str) -> str:
    """`text` with its control characters spelled out (`\\x1b`), so that a terminal shows and does not obey them."""
    return _OBEYED.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def shortened(text: str, characters: int = MAX_MESSAGE_CHARACTERS) -> str:
    """The beginning of a text, and how much was left out."""
    if len(text) <= characters:
        return text
    return f"{text[:characters]} ... ({len(text) - characters:,} more characters)"
