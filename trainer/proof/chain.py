"""Lines of JSON that are chained by hash: each ends in the hash of itself and of the line before it.

So no line can be changed, removed or inserted without a break in the chain at that place, unless all later hashes are
changed with it; and checkpoints record how the chain stood. The hash is BLAKE2b of 128 bits. It is not a signature:
anyone who can write all files of a run can replace it by another run, whose steps must then also hold when replayed.
"""

from hashlib import blake2b

_BYTES = 16


def link(previous: str, text: str) -> str:
    """The hash of a line and of what came before it, in hex; `previous` is "" before the first line."""
    return blake2b(f"{previous}\n{text}".encode(), digest_size=_BYTES).hexdigest()


def sealed(text: str, key: str, previous: str = "") -> tuple[str, str]:
    """Add the hash to a line as its last entry; returns the line and the hash.

    Args:
        text: a JSON object.
        key: name of the entry.
        previous: the hash of the line before.
    """
    value = link(previous, text)
    return f'{text.removesuffix("}")}, "{key}": "{value}"}}', value


def opened(line: str, key: str) -> tuple[str, str] | None:
    """The inverse of `sealed`: the text and its hash, unchecked; None if the line does not end in such an entry."""
    text, separator, value = line.rpartition(f', "{key}": "')
    value = value.removesuffix('"}')
    return (text + "}", value) if separator and len(value) == 2 * _BYTES and value.isalnum() else None
