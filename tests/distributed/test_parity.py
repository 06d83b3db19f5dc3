"""A part of the parity table (all of it: `python scripts/parity.py`), and what the table does not hold."""

import pytest

from scripts.parity import BOUNDS, Row, dtype_overrides, run_rows, table

CONFIG = "parity.toml"
ROWS = {row.name: row for row in table()}
CHOSEN = [
    "1 process, none, eager, accumulation 1",
    "DDP 2, full, eager, accumulation 2",
    "FSDP 2, selective, eager, accumulation 1",
    "FSDP 4, none, eager, accumulation 2",
    "HSDP 2x2, full, eager, accumulation 1",
    "TP 2, selective, eager, accumulation 2",
    "FSDP 2 x TP 2, none, eager, accumulation 1",
    "1 process, selective, compiled, accumulation 2",
    "FSDP 2, full, compiled, accumulation 2",
    "HSDP 2x2, none, compiled, accumulation 1",
    "TP 2, none, compiled, accumulation 1",
    "FSDP 2 x TP 2, selective, compiled, accumulation 2",
]
MORE = [
    # Widths that the ranks do not divide: FSDP pads, and some ranks own nothing of the norms.
    Row("uneven shards", 4, ("--model.dim", "68", "--model.head_dim", "10", "--model.ffn_dim", "130")),
    Row("always reshard, prefetch 3", 2, ("--fsdp.reshard_after_forward", "always", "--fsdp.prefetch_depth", "3")),
    Row("never reshard", 2, ("--fsdp.reshard_after_forward", "never")),
    Row("CPU offload", 2, ("--fsdp.cpu_offload", "true")),
    Row(
        "half of the layers checkpointed",
        2,
        ("--activation_checkpoint.mode", "full", "--activation_checkpoint.every_nth_layer", "2"),
    ),
    Row("tied embedding, FSDP 2 x TP 2", 4, ("--mesh.tp", "2", "--model.tie_embeddings", "true")),
    Row("tied embedding, compiled", 2, ("--compile.enable", "true", "--model.tie_embeddings", "true")),
    Row("inf norm, FSDP 2 x TP 2", 4, ("--mesh.tp", "2", "--training.norm_type", "inf", "--training.max_norm", "0.01")),
]


def assert_parity(ranks, rows, dtype="float64", overrides=()):
    class Pool:
        run = staticmethod(ranks)

    for row, difference in run_rows(Pool(), CONFIG, rows, dtype_overrides(dtype) + overrides):
        assert difference.passes(dtype), (row.name, difference, BOUNDS[dtype])


def test_the_table_is_whole():
    assert len(ROWS) == 7 * 3 * 2 * 2


def test_chosen_rows_in_float64(ranks):
    assert_parity(ranks, [ROWS[name] for name in CHOSEN])


def test_the_same_in_float32(ranks):
    names = [
        "FSDP 4, selective, eager, accumulation 2",
        "FSDP 2 x TP 2, full, eager, accumulation 1",
        "FSDP 2, none, compiled, accumulation 1",
    ]
    assert_parity(ranks, [ROWS[name] for name in names], "float32")


@pytest.mark.parametrize("row", MORE, ids=lambda row: row.name)
def test_other_options(ranks, row):
    run_keys = tuple(
        w for pair in zip(row.overrides[::2], row.overrides[1::2], strict=True) if _is_run(pair) for w in pair
    )
    assert_parity(ranks, [row], overrides=run_keys)


def _is_run(pair):
    return pair[0].startswith(("--model", "--training"))
