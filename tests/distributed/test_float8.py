"""8-bit products on meshes: rows of the parity table, and weights that move between meshes in full precision."""

import pytest

from scripts.parity import run_rows
from scripts.parity_rows import BOUNDS, float8_rows

pytest.importorskip("torchao", reason="needs the package torchao")

ROWS = {row.name: row for row in float8_rows()}
CHOSEN = [
    "float8 tensorwise, FSDP 2, selective, eager",
    "float8 tensorwise, HSDP 2x2, gathered in 8 bits, eager",
    "float8 tensorwise, ZeRO 1, gathered in 8 bits, eager",
    "float8 tensorwise, PP 2, gathered in 8 bits, eager",
    "float8 tensorwise, owner 2, eager",
    "float8 tensorwise, FSDP 2 x TP 2, gathered in 8 bits, eager",
    "float8 tensorwise, FSDP 2, gathered in 8 bits, compiled",
    "float8 tensorwise, TP 2, compiled",
    "float8 rowwise, FSDP 2, selective, eager",
    "float8 rowwise, FSDP 2 x TP 2, eager",
    "float8 rowwise_with_gw_hp, FSDP 2, 2 at once, eager",
    "float8 rowwise_with_gw_hp, CP 2, eager",
]


@pytest.mark.parametrize("name", CHOSEN)
def test_chosen_rows(ranks, name):
    class Pool:
        run = staticmethod(ranks)

    for row, difference in run_rows(Pool(), "parity.toml", [ROWS[name]], ("--training.steps", "3")):
        bounds = row.bounds or "float64"
        assert difference.passes(bounds), (row.name, difference, BOUNDS[bounds])
