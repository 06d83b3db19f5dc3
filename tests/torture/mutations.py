"""What a stranger, a broken disk or a careless hand may make of a file: of its bytes, and of the JSON in it."""

import json
import random
import struct
from collections.abc import Callable
from copy import deepcopy
from typing import Any

ESCAPES = "\x1b[2J\x1b]0;owned\x07\r\u202e\x9b31m"
"""What a terminal would obey."""


# --------------------------------------------------------------------------- of bytes


def flip_bits(content: bytearray, dice: random.Random) -> None:
    """One bit to eight, anywhere."""
    for _ in range(dice.choice((1, 1, 2, 8))):
        content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)


def cut(content: bytearray, dice: random.Random) -> None:
    """The end is missing, perhaps all."""
    del content[dice.randrange(len(content)) :]


def drop(content: bytearray, dice: random.Random) -> None:
    """Something in the middle is missing."""
    start = dice.randrange(len(content))
    del content[start : start + dice.choice((1, 4, 100))]


def duplicate(content: bytearray, dice: random.Random) -> None:
    """A part stands there many times."""
    start = dice.randrange(len(content))
    part = content[start : start + dice.choice((1, 20, 500))]
    content[start:start] = part * dice.choice((1, 10, 200))


def insert(content: bytearray, dice: random.Random) -> None:
    """Something that does not belong there."""
    start = dice.randrange(len(content) + 1)
    content[start:start] = dice.choice(_INSERTED)


_INSERTED = (
    b"\0" * 8,
    b"\xff\xfe\x80\xc3(",
    ESCAPES.encode(),
    b"[" * 20_000,
    b'{"a":' * 20_000,
    b"9" * 5_000,
    b"1e999",
    b"\\ud800",
    b'"' * 3,
    b"\n" * 1_000,
    b"x" * 50_000,
    b"\xff" * 16,
)


def overwrite_number(content: bytearray, dice: random.Random) -> None:
    """A length or a count that claims very much, or less than nothing."""
    number = dice.choice((2**15, 2**31 - 1, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**64 - 1, 0))
    packed = struct.pack(dice.choice(("<Q", ">Q")), number)
    packed = packed if dice.random() < 0.5 else struct.pack("<I", number % 2**32)
    start = dice.randrange(len(content))
    content[start : start + len(packed)] = packed


def overwrite_noise(content: bytearray, dice: random.Random) -> None:
    """Random bytes over a part."""
    start = dice.randrange(len(content))
    length = min(dice.choice((1, 4, 64)), len(content) - start)
    content[start : start + length] = dice.randbytes(length)


def swap(content: bytearray, dice: random.Random) -> None:
    """Two parts change places."""
    length = min(dice.choice((1, 8, 64)), len(content) // 2)
    a = dice.randrange(len(content) - 2 * length + 1)
    b = dice.randrange(a + length, len(content) - length + 1)
    content[a : a + length], content[b : b + length] = content[b : b + length], content[a : a + length]


OF_BYTES: tuple[Callable[[bytearray, random.Random], None], ...] = (
    flip_bits,
    flip_bits,
    cut,
    drop,
    duplicate,
    insert,
    insert,
    overwrite_number,
    overwrite_noise,
    swap,
)


def mutated_bytes(content: bytes, dice: random.Random) -> bytes:
    """One mutation to three."""
    changed = bytearray(content)
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        if len(changed) > 1:
            dice.choice(OF_BYTES)(changed, dice)
    return bytes(changed)


# --------------------------------------------------------------------------- of values


def hostile(dice: random.Random) -> Any:
    """A value that nobody expects at its place."""
    value = dice.choice(_HOSTILE)
    return value(dice) if callable(value) else deepcopy(value)


def _nested(dice: random.Random) -> Any:
    value: Any = 0
    for _ in range(dice.choice((70, 500, 900))):
        value = [value] if dice.random() < 0.5 else {"a": value}
    return value


_HOSTILE: tuple[Any, ...] = (
    *(None, True, False, "", [], {}, 0, -1, 1, 0.5, -0.0),
    *(2**31, 2**63 - 1, 2**63, 2**64, 10**300, 10**8, -(2**63), 1e308, 1e-320),
    *(float("inf"), float("-inf"), float("nan")),
    *("x" * 30_000, ESCAPES, "\ud800", "\0", "../../etc/passwd", "/dev/zero", "/etc/passwd", "[" * 3000, "1e999"),
    *([[]] * 3_000, [None], [ESCAPES], {ESCAPES: ESCAPES}, {"": 1}, [0] * 3_000, {str(i): i for i in range(2_000)}),
    *([2**62, 2**62], [-1], [1.5], ["a"]),
    _nested,
    _nested,
)


def mutated_value(value: Any, dice: random.Random) -> Any:
    """A deep copy of nested dicts and lists in which one to three places are something else."""
    value = json.loads(json.dumps(value))
    for _ in range(dice.choice((1, 1, 2, 3))):
        value = _change(value, dice)
    return value


def _change(root: Any, dice: random.Random) -> Any:
    holders = list(_holders(root))
    if not holders or dice.random() < 0.02:
        return hostile(dice)
    holder, key = dice.choice(holders)
    kind = dice.randrange(6)
    if kind == 0:
        del holder[key]
    elif kind == 1:
        other, other_key = dice.choice(holders)
        holder[key], other[other_key] = json.loads(json.dumps((other[other_key], holder[key])))
    elif kind == 2 and isinstance(holder, dict):
        holder[dice.choice(("", ESCAPES, "x" * 30_000, "unknown", "\ud800"))] = holder.pop(key)
    else:
        holder[key] = hostile(dice)
    return root


def _holders(value: Any) -> Any:
    """Every dict or list with each of its keys."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in list(items):
        yield value, key
        yield from _holders(item)


def mutated_json(content: bytes, dice: random.Random) -> bytes:
    """Of its values mostly, else of its bytes."""
    if dice.random() < 0.3:
        return mutated_bytes(content, dice)
    return json.dumps(mutated_value(json.loads(content), dice), indent=dice.choice((None, 1))).encode()
