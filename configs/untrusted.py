"""Reads untrusted files and texts within bounds, and shows them without control characters.

A folder from a third party may hold a pipe in place of a file (reading it never ends), a sparse file of terabytes, JSON
nested deeper than a parser can follow, or a name with an escape sequence that redraws the reader's screen.
docs/checkpoints.md says what is bounded and what is not.
"""

import errno
import json
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import ValidationError

MAX_JSON_BYTES = 32 << 20
"""Maximum size of a JSON file; the largest in use, indexes of the largest Hugging Face models, have 10 MB."""
MAX_DEPTH = 64
"""Maximum nesting of objects and lists."""
MAX_MESSAGE_CHARACTERS = 16_384
"""Maximum length of an error message."""

_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters except newline and tab, marks that change the writing direction, and surrogates, which can't be
printed at all."""


def read_file(path: Path, max_bytes: int) -> bytes:
    """Read a regular file of at most `max_bytes`.

    Raises:
        OSError: the file can't be read, is a pipe, a device or a folder, or is larger; `strerror` fits a message.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # opening a pipe would wait for a writer
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if status.st_size > max_bytes:
            raise OSError(
                errno.EFBIG, f"its {status.st_size:,} bytes are more than the {max_bytes:,} allowed", str(path)
            )
        return file.read(status.st_size)  # read() allocates as many bytes as requested


def first_fault(error: "ValidationError", *outside: str) -> str:
    """The first thing that pydantic found wrong: its place, inside of the keys `outside`, and a message."""
    first = error.errors()[0]
    return f"{'.'.join(map(str, (*outside, *first['loc'])))}: {first['msg']}"


def link_out_of(path: Path) -> str | None:
    """What is wrong with a file that is a link out of its folder; None if it is no such link.

    A link within the folder is not, and neither is one of the Hugging Face Hub's cache, whose `models--NAME/snapshots/`
    link to `models--NAME/blobs/`.
    """
    folder = Path(os.path.realpath(path.parent))
    target = Path(os.path.realpath(path))
    caches = [parent for parent in folder.parents if parent.name.startswith("models--")]
    is_cached = any(folder.is_relative_to(cache / "snapshots") and target.parent == cache / "blobs" for cache in caches)
    if is_cached or target.is_relative_to(folder):
        return None
    return (
        f"{path} is a link to {target}, outside of the folder, which is not read; if you trust it, copy the file here"
    )


def parse_json(content: str | bytes) -> Any:
    """Parse a JSON text.

    Raises:
        ValueError: it is invalid, or nested deeper than MAX_DEPTH.
    """
    try:
        value = json.loads(content)
    except RecursionError:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels") from None
    require_shallow(value)
    return value


def require_shallow(value: Any) -> None:
    """Check that dicts and lists are not nested deeper than MAX_DEPTH.

    Raises:
        ValueError: they are.
    """
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [item for node in level for item in _items(node) if isinstance(item, (dict, list))]
        if not level:
            return
    raise ValueError(f"nested deeper than {MAX_DEPTH} levels")


def require_64_bits(value: Any) -> None:
    """Check that integers in shallow dicts and lists fit in 64 bits, as all shapes, counts and steps do.

    Python may be unable to print what it computes with larger ones, or to convert it to a float.

    Raises:
        ValueError: one does not fit.
    """
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError(f"a number in it is beyond 64 bits: {shortened(str(value))}")
    for item in _items(value):
        require_64_bits(item)


def _items(node: Any) -> Iterable[Any]:
    return node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()


def printable(text: str) -> str:
    """Escape the control characters in `text` (`\\x1b`), so that a terminal shows them instead of obeying them."""
    return _OBEYED.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def shortened(text: str, characters: int = MAX_MESSAGE_CHARACTERS) -> str:
    """Return the beginning of a text, and how much was omitted."""
    if len(text) <= characters:
        return text
    return f"{text[:characters]} ... ({len(text) - characters:,} more characters)"
