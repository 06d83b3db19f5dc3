"""Rates of GPUs, of links between them, of loaders and storage: `configs/rates/devices.toml`, which has the sources."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from math import ceil, log
from pathlib import Path
from typing import Any, NamedTuple

import tomli

from configs.errors import UserError
from configs.places import is_url

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
    """A kind of GPU, or a rank's part of a CPU, and how fast it is; rates are FLOP/s and bytes/s."""

    name: str
    title: str
    names: list[str]
    """What `torch.cuda.get_device_name` calls it; empty if it shares its name with a slower kind."""
    type: str
    """Where tensors are: "cuda" or "cpu"."""
    compute_dtype: str
    """The type that rates of products and attention are of."""
    launch: float
    """Seconds in which the host launches a kernel."""
    memory_gib: float
    peak: Mapping[str, float]
    products: float
    products_float8: float
    grouped: float
    memory: float
    host: float
    """Bytes/s of a copy to pinned memory of the host."""
    collective_share: float
    """Part of the multiprocessors that a collective takes from products that run at the same time."""
    attention: Mapping[str, list[list[float]]]
    delta: Mapping[str, list[float]]
    """Rates of the recurrence of Gated DeltaNet, forward and backward, by `attention.delta_backend`."""
    inside: Link
    """The link between the GPUs of a host."""
    between: Link
    """The link between hosts."""

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


class Transfer(NamedTuple):
    """A collective in seconds: both kinds of links work at the same time, and messages wait for hops."""

    inside: float
    """Seconds on the links inside of a host."""
    between: float
    """Seconds on those between hosts."""
    latency: float

    @property
    def seconds(self) -> float:
        return max(self.inside, self.between) + self.latency


@dataclass(frozen=True)
class Network:
    """Which link a group of ranks uses: neighbors in the mesh's order share hosts."""

    device: Device
    gpus_per_host: int

    def seconds(self, op: str, n_bytes: float, ranks: int, stride: int) -> float:
        """Time of a collective; as for `transfer`."""
        return self.transfer(op, n_bytes, ranks, stride).seconds

    def transfer(self, op: str, n_bytes: float, ranks: int, stride: int) -> Transfer:
        """What a collective over `ranks` ranks that are `stride` apart takes.

        A ring passes each host with as many network cards as the group has ranks on it. Of `n_bytes`, the whole, each
        rank sends all but its own part, twice in an all-reduce; in an all-to-all, what goes to other hosts
        leaves by the rank's own card. A send, to the next rank, takes what the slowest of the group's takes.
        """
        if ranks == 1:
            return Transfer(0.0, 0.0, 0.0)
        here = min(ranks, max(1, self.gpus_per_host // stride))
        hosts = ceil(ranks / here)
        inside = self.device.inside
        between = self.device.between
        hops = (here - 1) * inside.latency + (hosts - 1) * between.latency
        if op == "send":
            if hosts == 1:
                return Transfer(n_bytes / inside.bandwidth, 0.0, inside.latency)
            return Transfer(0.0, n_bytes / between.bandwidth, between.latency)
        if op == "all_to_all":
            by_network = n_bytes * (ranks - here) / ranks / between.bandwidth
            in_host = n_bytes * (here - 1) / ranks / inside.bandwidth
            latency = inside.latency * (here > 1) + between.latency * (hosts > 1)
            return Transfer(in_host, by_network, latency)
        times = 2 if op == "all_reduce" else 1
        sent = times * n_bytes * (ranks - 1) / ranks
        by_network = sent / (here * between.bandwidth) if hosts > 1 else 0.0
        in_host = sent / inside.bandwidth if here > 1 else 0.0
        return Transfer(in_host, by_network, 2 * min(hops, 20 * between.latency) if op == "all_reduce" else hops)


class Pace(NamedTuple):
    """What a rank's loader takes to prepare samples, in seconds."""

    window: float
    token: float


def loader_pace(kind: str) -> Pace | None:
    """The pace of a kind of source; None if it is unknown, as of a class of the user's own."""
    pace = _table()["loader"].get(kind)
    return Pace(**pace) if pace else None


def storage(name: str | None) -> Link:
    """The link of a host to its disk, or of one request to a bucket, by the name of a place there."""
    return Link(**_table()["storage"]["bucket" if is_url(name) else "disk"])


@cache
def _table() -> dict[str, Any]:
    with _FILE.open("rb") as file:
        return tomli.load(file)


def known_devices() -> list[str]:
    """Names of the devices whose rates are known."""
    return sorted(_table()["devices"])


def device_called(torch_name: str) -> Device | None:
    """The device that `torch.cuda.get_device_name` calls so; None if its rates are unknown."""
    found = [name for name in known_devices() if torch_name in _table()["devices"][name]["names"]]
    return device_named(found[0]) if found else None


def device_named(name: str) -> Device:
    """The device of that name, or of the file that `keel plan --calibrate` wrote.

    Raises:
        UserError: its rates are unknown, or the file is no such file.
    """
    if name.endswith(".toml"):
        return _device_of(Path(name))
    table = _table()
    if name not in table["devices"]:
        known = ", ".join(known_devices())
        raise UserError(
            f'the rates of the device "{name}" are unknown; known are {known}, and keel plan --calibrate FILE.toml '
            "measures one's own, for --device FILE.toml"
        )
    return _device(name, table)


_ABOVE_ZERO = ("memory_gib", "products", "grouped", "memory", "host")
"""Rates by which the estimate divides."""


def _device_of(file: Path) -> Device:
    try:
        table = tomli.loads(file.read_text())
        (name,) = table["devices"]
        if missing := [each.name for each in fields(Device) if each.name not in {"name", *table["devices"][name]}]:
            raise UserError(f"--device {file} lacks {', '.join(missing)}; write it again by keel plan --calibrate")
        for rate in _ABOVE_ZERO:
            value = table["devices"][name][rate]
            if not isinstance(value, int | float) or not value > 0:
                raise UserError(f"--device {file}: {rate} must be a number above 0, got {value!r}")
        return _device(name, table)
    except OSError as error:
        raise UserError(f"--device {file} can't be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"--device {file} is no file that keel plan --calibrate has written: {error}") from None


def _device(name: str, table: dict[str, Any]) -> Device:
    values: dict[str, Any] = dict(table["devices"][name])
    for place in ("inside", "between"):
        values[place] = Link(**table["links"][values[place]])
    return Device(name=name, **values)
