"""Stochastic rounding to bfloat16 that no mesh changes.

Moments in bfloat16 (8 significant bits) must be rounded stochastically, and so must weights and an average of them: a
step changes them by less than half of their last bit, and rounded to the nearest they would stay where they are. A
value is rounded up with the probability of its distance from the value below, so that the mean over roundings is exact
(Gupta et al. 2015, "Deep learning with limited numerical precision", section 3.1).

Random numbers from a stream would depend on which rank draws them. Here each is a hash of (seed, parameter's name,
update, number of the element in the whole parameter), so any rank draws the same for an element. One hash of 32 bits
serves both moments: its low half the first, its high half the second. Weights take 16 bits of its mix. `adamw.py`
computes the same in Triton.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor

from parallelisms.part import Part

GOLDEN = 0x9E3779B9
"""2^32 over the golden ratio: multiples of it are spread evenly."""
FACTORS = 0x7FEB352D, 0x846CA68B
"""Factors of the integer mix "lowbias32" (C. Wellons, nullprogram.com/blog/2018/07/31): each bit of the input changes
each bit of the output with a probability of one half, to 0.2%."""
_BLOCK_ON_CPU = 1 << 18
_BLOCK = 1 << 24
_LOW = 0xFFFFFFFF
_INFINITE = 0x7F800000
"""Bits of the float32 infinity."""


@dataclass(frozen=True)
class Key:
    """The key of the random numbers for a parameter's elements; they depend on the update as well."""

    word: int
    """The key's 64 bits."""
    part: Part
    """The elements that this rank has."""


def key_of(seed: int, name: str, part: Part, use: str = "moments") -> Key:
    """The key of the parameter `name` in a run with this seed; each use has random numbers of its own."""
    return Key(xxhash.xxh3_64_intdigest(f"{seed}/{name}/{use}".encode()), part)


def blocks(n: int, device: torch.device) -> Iterator[slice]:
    """Cut n elements into blocks: on a CPU, one fits into the cache; elsewhere, what is computed of it into memory."""
    size = _BLOCK_ON_CPU if device.type == "cpu" else _BLOCK
    for start in range(0, n, size):
        yield slice(start, min(start + size, n))


def mixed(word: int) -> int:
    """The mix of a word of 32 bits."""
    word ^= word >> 16
    word = word * FACTORS[0] & _LOW
    word ^= word >> 15
    word = word * FACTORS[1] & _LOW
    return word ^ word >> 16


def salts(word: int, update: int) -> tuple[int, int]:
    """The start of an update's hashes of a parameter: two words of 32 bits."""
    first = mixed((word & _LOW) ^ (update * GOLDEN & _LOW))
    return first, mixed(word >> 32 ^ first)


def random_bits(key: Key, update: int, start: int, stop: int, device: torch.device) -> Tensor:
    """The 32 bits for each of the part's elements `start` to `stop` in an update (counted from 1); int32."""
    first, second = map(_signed, salts(key.word, update))
    words, high = _halves(key.part, start, stop, device)
    words ^= first
    _multiply(_fold(words))
    # To fold twice changes nothing, so that of two mixes in a row, the last step and the first nearly cancel.
    words ^= _fold(high * _signed(GOLDEN) + second)
    return _fold(_multiply(words))


def further_bits(bits: Tensor) -> Tensor:
    """32 more bits for each element, from its first; int32."""
    return _fold(_multiply(_fold(bits + _signed(GOLDEN))))


def rounded(values: Tensor, bits: Tensor) -> Tensor:
    """Round float32 values to bfloat16, up (away from zero) if their last 16 bits plus the random ones carry.

    Args:
        values: float32; infinite values and NaN stay what they are.
        bits: int32 in [0, 2^16).
    """
    pattern = values.view(torch.int32)
    is_finite = (pattern & 0x7FFFFFFF).lt_(
        _INFINITE
    )  # 1 or 0: on a CPU, operations on booleans take four times as long
    return torch.addcmul(pattern, bits, is_finite).bitwise_and_(-0x10000).view(torch.float32).bfloat16()


def round_into(weight: Tensor, values: Tensor, key: Key, update: int) -> None:
    """Write float32 values into a weight in bfloat16, this rank's part, rounded stochastically."""
    narrow = weight.view(-1)
    wide = values.view(-1)
    for at in blocks(len(narrow), narrow.device):
        bits = further_bits(random_bits(key, update, at.start, at.stop, narrow.device))
        narrow[at] = rounded(wide[at], bits & 0xFFFF)


def _halves(part: Part, start: int, stop: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Low and high 32 bits of the numbers of a part's elements, int32; (stop - start,) and, if all are equal, ()."""
    begin = part.first + start
    end = part.first + stop
    if part.levels > 1 or begin >> 32 != (end - 1) >> 32:
        numbers = part.numbers(start, stop, device)
        return numbers.to(torch.int32), (numbers >> 32).to(torch.int32)
    low = torch.arange(stop - start, dtype=torch.int32, device=device).add_(_signed(begin & _LOW))
    return low, torch.full((), begin >> 32, dtype=torch.int32, device=device)


def _fold(words: Tensor) -> Tensor:
    """The first step of the mix of int32 words, and the last, in place."""
    words ^= _shifted(words, 16)
    return words


def _multiply(words: Tensor) -> Tensor:
    """The steps of the mix in the middle, in place; products wrap."""
    words *= FACTORS[0]
    words ^= _shifted(words, 15)
    words *= _signed(FACTORS[1])
    return words


def _shifted(words: Tensor, by: int) -> Tensor:
    """Shifted right, with zeros from the left."""
    return (words >> by).bitwise_and_((1 << (32 - by)) - 1)


def _signed(word: int) -> int:
    """The int32 with the same bits."""
    return word - (word >> 31 << 32)
