"""Rates of GPUs and of the links between them: `configs/rates/devices.toml`, which has the sources."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import log
from pathlib import Path
from typing import Any

import tomli

from configs.errors import UserError

_FILE = Path(__file__).parents[2] / "configs" / "rates" / "devices.toml"


@dataclass(frozen=True)
class Link:
    """What connects GPUs."""

    bandwidth: float
    """Bytes/s of a GPU in one direction."""
    latency: float
    """Seconds of a hop."""


@dataclass(frozen=True)
class Device:
    """A kind of GPU, and how fast it is; rates are FLOP/s and bytes/s."""

    name: str
    title: str
    memory_gib: float
    peak: Mapping[str, float]
    products: float
    products_float8: float
    grouped: float
    memory: float
    collective_share: float
    """Part of the multiprocessors that a collective takes from products that run at the same time."""
    attention: Mapping[str, list[list[float]]]
    inside: Link
    """Between the GPUs of a host."""
    between: Link
    """Between hosts."""

    def attention_rates(self, kernel: str, width: int, seq_len: float) -> tuple[float, float]:
        """FLOP/s of a kernel's forward and backward pass for heads of `width` and sequences of `seq_len` tokens.

        The rows of the nearest head size count; between two lengths the rates follow the length's logarithm.
        """
        rows = sorted(self.attention[kernel], key=lambda row: row[1])
        nearest = min({row[0] for row in rows}, key=lambda size: abs(log(size / width)))
        rows = [row for row in rows if row[0] == nearest]
        below = max((row for row in rows if row[1] <= seq_len), key=lambda row: row[1], default=rows[0])
        above = min((row for row in rows if row[1] >= seq_len), key=lambda row: row[1], default=rows[-1])
        if above[1] == below[1]:
            return below[2], below[3]
        share = log(seq_len / below[1]) / log(above[1] / below[1])
        return below[2] + share * (above[2] - below[2]), below[3] + share * (above[3] - below[3])


@cache
def _table() -> dict[str, Any]:
    with _FILE.open("rb") as file:
        return tomli.load(file)


def known_devices() -> list[str]:
    """Names of the devices whose rates are known."""
    return sorted(_table()["devices"])


def device_named(name: str) -> Device:
    """The device of that name.

    Raises:
        UserError: its rates are unknown.
    """
    table = _table()
    if name not in table["devices"]:
        raise UserError(f'the rates of the device "{name}" are unknown; known are {", ".join(known_devices())}')
    values = dict(table["devices"][name])
    links = {place: Link(**table["links"][values.pop(place)]) for place in ("inside", "between")}
    return Device(name=name, **values, **links)
